"""Rows of a weight sixteen at a time, for processors whose vector lanes are rows.

A block is sixteen rows. Its codes stand in chunks of eight columns: a 32-bit word a row, whose low half holds the
columns 0, 2, 4, 6 and whose high half 1, 3, 5, 7, lowest nibble first. So one load of a chunk brings codes of every
row, and the pairs of columns that bfloat16 instructions multiply lie in the two halves of a lane. Its scales follow
block by block along K, sixteen rows each.
"""

from __future__ import annotations

import torch

ROWS = 16
COLUMNS = 8
"""Columns of a chunk; K is a multiple of it, and N of ``ROWS``."""
E4M3_FACTOR = 256.0
"""What lanes of e4m3 scales are too small by: their seven bits are read as a float16's."""
E4M3_NAN = 0xFF
E8M0_NAN = 0xFF


def to_row_blocks(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [E, N/16, K/8, 16, 4] from codes uint8 [E, N, K/2]."""
    first, second = codes[..., ::2], codes[..., 1::2]
    even = (first & 0x0F) | (second << 4)
    odd = (first >> 4) | (second & 0xF0)
    words = torch.cat((even.unflatten(-1, (-1, 2)), odd.unflatten(-1, (-1, 2))), dim=-1)
    return _in_blocks(words)


def from_row_blocks(blocks: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [E, N, K/2] from blocks: the inverse of ``to_row_blocks``."""
    words = blocks.transpose(2, 3).flatten(1, 2)
    even, odd = (half.flatten(-2) for half in words.split(2, dim=-1))
    first = (even & 0x0F) | (odd << 4)
    second = (even >> 4) | (odd & 0xF0)
    return torch.stack((first, second), dim=-1).flatten(-2)


def to_scale_blocks(scale: torch.Tensor) -> torch.Tensor:
    """[E, N/16, S, 16] from block scales [E, N, S] of any dtype."""
    return _in_blocks(scale)


def from_scale_blocks(blocks: torch.Tensor) -> torch.Tensor:
    """Block scales [E, N, S] from blocks: the inverse of ``to_scale_blocks``."""
    return blocks.transpose(2, 3).flatten(1, 2)


def clear_nan_blocks(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes [E, N, K/2], zero where the e8m0 scale, uint8 [E, N, S], is NaN.

    Its bits are taken for an infinity's by whoever shifts them into a float32, and zero times that is NaN.
    """
    keep = (scale != E8M0_NAN).to(torch.uint8) * 0xFF
    return (codes.reshape(*scale.shape, -1) & keep.unsqueeze(-1)).flatten(-2)


def e4m3_magnitudes(scale: torch.Tensor) -> torch.Tensor:
    """uint8 of the same shape from float8_e4m3fn: the bits without the sign, and 255 for NaN."""
    bits = scale.view(torch.uint8) & 0x7F
    return torch.where(bits == 0x7F, E4M3_NAN, bits)


def _in_blocks(rows: torch.Tensor) -> torch.Tensor:
    """[E, N/16, S, 16, ...] from [E, N, S, ...]."""
    blocks: torch.Tensor = rows.unflatten(1, (-1, ROWS))
    return blocks.transpose(2, 3).contiguous()
