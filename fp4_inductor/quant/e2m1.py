"""e2m1 codes: encode, decode, and two of them in a byte.

Decoding is integer arithmetic and exact float32 products, without a table: a table would reach a
compiled graph as a lifted constant.
"""

from __future__ import annotations

import torch


def decode(codes: torch.Tensor) -> torch.Tensor:
    """The values of e2m1 codes, exact; code 8 is -0.0.

    Args:
        codes: ``uint8 [...]`` in 0..15.

    Returns:
        ``float32 [...]``.

    Source: OCP MX v1.0, section 5.3.3.
    """
    low = (codes & 7).to(torch.int32)
    # Twice the magnitudes, 0 1 2 3 4 6 8 12, are convex in the code: their slope doubles at 4 and at 6.
    doubled = torch.maximum(torch.maximum(low, 2 * low - 4), 4 * low - 16)
    # A product keeps the sign of zero, which compilers lose in a negation.
    half_sign = 0.5 - (codes >> 3).to(torch.float32)
    return doubled.to(torch.float32) * half_sign


def encode(values: torch.Tensor) -> torch.Tensor:
    """The nearest e2m1 codes: ties to the even code, saturating at 6, the sign kept also on zeros.

    Args:
        values: ``float32 [...]`` without NaN.

    Returns:
        ``uint8 [...]`` in 0..15.

    Source: OCP MX v1.0, section 5.3.3.
    """
    magnitude = values.abs()
    codes = torch.signbit(values).to(torch.uint8) << 3
    # A tie goes to the even code: down where the code below the midpoint is even, up where it is odd.
    for midpoint in (0.25, 1.25, 2.5, 5.0):
        codes += magnitude > midpoint
    for midpoint in (0.75, 1.75, 3.5):
        codes += magnitude >= midpoint
    return codes


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, the low nibble holding the even one.

    Args:
        codes: ``uint8 [..., K]`` in 0..15, K even.

    Returns:
        ``uint8 [..., K/2]``.
    """
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of ``pack``.

    Args:
        packed: ``uint8 [..., K/2]``.

    Returns:
        ``uint8 [..., K]`` in 0..15.
    """
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
