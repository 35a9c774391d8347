"""The one dequantisation: the library calls it, and weight carriers trace it into graphs."""

from __future__ import annotations

import torch

from ..formats import BlockFormat
from . import e2m1
from .blocks import split_blocks
from .mxfp4 import decode_e8m0


def dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    fmt: BlockFormat,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """``e2m1 * scale * global_scale`` rounded to float32, then to ``dtype``.

    The product of code and scale is exact in float32, so NVFP4 rounds once there and MXFP4 never (it
    overflows to infinity only above 2^128). bfloat16 then holds every MXFP4 weight exactly. float16
    overflows to infinity above 65504 and flushes to zero below 2^-25, as any cast to it does.

    Traces to plain ATen ops on plain dtypes, with no constants.

    Args:
        codes: ``uint8 [..., N, K/2]``.
        scale: ``[..., N, K/bs]`` in ``fmt.scale_dtype``.
        global_scale: ``float32 [..., N]`` or ``[..., 1]``; None where the format has none.

    Returns:
        ``dtype [..., N, K]``.
    """
    factor = decode_e8m0(scale) if fmt.scale_encoding == "e8m0" else scale.to(torch.float32)
    values = split_blocks(e2m1.decode(e2m1.unpack(codes)), fmt.block_size) * factor.unsqueeze(-1)
    if global_scale is not None:
        values = values * global_scale[..., None, None]
    return values.flatten(-2).to(dtype)
