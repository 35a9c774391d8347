"""The FP4 block formats. Every number that defines one stands here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from .errors import UnknownNameError

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of an e2m1 code's low three bits; bit 3 is the sign. Source: OCP MX v1.0, table 5."""

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9
"""Smallest positive float8_e4m3fn (a subnormal)."""
E8M0_BIAS = 127
E8M0_NAN = 255


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Blocks of ``block_size`` e2m1 codes along K that share one 8-bit scale.

    ``W[n, k] = e2m1(code[n, k]) * scale[n, k // block_size] * global_scale[n]``
    (the last factor only where ``has_global_scale``). Scales multiply to dequantise.
    """

    name: str
    block_size: int
    scale_encoding: Literal["e8m0", "e4m3"]
    has_global_scale: bool

    @property
    def scale_dtype(self) -> torch.dtype:
        """Storage dtype of block scales: e8m0 travels as its bits, since Inductor cannot read the dtype."""
        return torch.uint8 if self.scale_encoding == "e8m0" else torch.float8_e4m3fn

    @property
    def bits_per_weight(self) -> float:
        return 4 + 8 / self.block_size

    def num_bytes(self, num_weights: int) -> int:
        """Bytes of codes and block scales for ``num_weights`` weights."""
        return num_weights // 2 + num_weights // self.block_size

    def __str__(self) -> str:
        return self.name


MXFP4 = BlockFormat("mxfp4", block_size=32, scale_encoding="e8m0", has_global_scale=False)
"""OCP Microscaling FP4: e2m1 codes, one e8m0 scale per 32."""
NVFP4 = BlockFormat("nvfp4", block_size=16, scale_encoding="e4m3", has_global_scale=True)
"""NVIDIA FP4: e2m1 codes, one e4m3 scale per 16, a float32 global scale per tensor, expert or row."""

FORMATS = {fmt.name: fmt for fmt in (MXFP4, NVFP4)}

ACTIVATION_FORMATS = ("mxfp8", "nvfp4", "mxfp4")
"""What kernels may round activations to where the user allows it: e4m3 with one e8m0 scale per 32, NVFP4, or MXFP4."""


def get_format(name: str | BlockFormat) -> BlockFormat:
    """The format called ``name``.

    Raises:
        UnknownNameError: no such format; the message shows the nearest name.
    """
    if isinstance(name, BlockFormat):
        return name
    try:
        return FORMATS[name]
    except (KeyError, TypeError):
        raise UnknownNameError("choosing a weight format", name, FORMATS) from None
