"""Quantise, pack, unpack and dequantise FP4 block formats in pure torch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..formats import MXFP4, BlockFormat
from .dequantize import dequantize
from .mxfp4 import quantize_mxfp4
from .nvfp4 import quantize_nvfp4

__all__ = ["PackedTensors", "dequantize", "quantize", "quantize_mxfp4", "quantize_nvfp4"]


class PackedTensors(NamedTuple):
    """Canonical weights: codes ``[..., N, K/2]``, scale ``[..., N, K/bs]``, global scale ``[..., 1]`` or None."""

    codes: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None


def quantize(weight: torch.Tensor, fmt: BlockFormat) -> PackedTensors:
    """Quantise ``[..., N, K]`` along K by the format's default rule.

    Raises:
        QuantizationError: K is not a multiple of the block size, or a weight is not finite.
    """
    if fmt == MXFP4:
        return PackedTensors(*quantize_mxfp4(weight), None)
    return PackedTensors(*quantize_nvfp4(weight))
