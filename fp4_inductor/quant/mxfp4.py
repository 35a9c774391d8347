"""MXFP4: one power of two per block of 32.

All decisions are made on the bits of float32 exponents, so they are exact.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from ..errors import UnknownNameError
from ..formats import E8M0_NAN, MXFP4
from . import e2m1
from .blocks import check_blocks

ScaleRule = Literal["even", "floor", "rceil"]
"""How a block's exponent comes from its largest magnitude, ``amax = m * 2^x`` with ``1 <= m < 2``:

- ``even``: ``x - 2``, one more where m >= 1.75, which is where m rounds up to the next power of two
  at e2m1's precision. The smallest error of the three on ordinary weights.
- ``floor``: ``x - 2``. The rule of OCP MX v1.0, section 6.3.
- ``rceil``: the smallest exponent with which amax does not saturate: ``x - 2``, one more where m > 1.5.
"""

_MANTISSA_BITS = 23
_LARGEST_FINITE = 252
"""Largest scale byte under which every code is finite in float32: 6 * 2^125."""
# Added to amax's bits, carries into the exponent exactly where the rule asks for one more.
_CARRY: dict[ScaleRule, int] = {"even": 1 << 21, "floor": 0, "rceil": (1 << 22) - 1}


def decode_e8m0(bits: torch.Tensor) -> torch.Tensor:
    """The powers of two that e8m0 bytes stand for, exact: byte 0 is 2^-127, byte 255 NaN.

    Args:
        bits: ``uint8 [...]``.

    Returns:
        ``float32 [...]``.

    Source: OCP MX v1.0, section 5.4.1.
    """
    # As a float32 exponent, byte 0 would be zero and byte 255 infinity. The top mantissa bit makes them
    # the subnormal 2^-127 and a quiet NaN.
    is_special = (bits == 0) | (bits == E8M0_NAN)
    exponent = bits.to(torch.int32) << _MANTISSA_BITS
    return (exponent | (is_special.to(torch.int32) << (_MANTISSA_BITS - 1))).view(torch.float32)


def quantize_mxfp4(weight: torch.Tensor, scale_rule: ScaleRule = "even") -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise along the last axis: e8m0 scales by ``scale_rule``, codes nearest to ``weight / scale``.

    A block of zeros gets scale byte 0 and codes that decode to zeros. Scales stay in [2^-127, 2^125], so that
    every code is finite in float32.

    Args:
        weight: ``float [..., N, K]``, K a multiple of 32; rounded to float32 if wider.
        scale_rule: see ``ScaleRule``.

    Returns:
        codes: ``uint8 [..., N, K/2]``.
        block scale: ``uint8 [..., N, K/32]``, e8m0 bits.

    Raises:
        QuantizationError: K is not a multiple of 32, or a weight is not finite.
        UnknownNameError: no such scale rule.
    """
    if scale_rule not in _CARRY:
        raise UnknownNameError("quantising to mxfp4", scale_rule, get_args(ScaleRule))
    blocks = check_blocks(weight, MXFP4)
    amax = blocks.abs().amax(dim=-1)
    exponent = (amax.view(torch.int32) + _CARRY[scale_rule]) >> _MANTISSA_BITS
    scale = (exponent - 2).clamp(0, _LARGEST_FINITE).to(torch.uint8)
    codes = e2m1.encode(blocks / decode_e8m0(scale).unsqueeze(-1))
    return e2m1.pack(codes.flatten(-2)), scale
