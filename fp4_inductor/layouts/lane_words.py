"""Codes as 16-bit words that a kernel turns into bfloat16 lanes with few shifts and masks.

A word holds four codes of one weight row, 16 columns apart, so one 64-column group of a row is 16 words:
word j of group g holds columns ``64 g + 16 p + j`` for plane p = 0..3. A kernel wants the sign of a code at
bit 15 and its magnitude at bits 8..6, bfloat16 bits that read as ``e2m1 * 2**-126``. It handles words 2j and
2j + 1 as the halves of one register, in which

    plane 0   is there already
    plane 1   comes by a shift to the left by 6
    plane 2   comes by a rotation to the left by 10
    plane 3   comes by shifts to the left by 4 (sign and exponent) and to the right by 4 (mantissa)

so that plane 2's magnitudes trade places with the neighbour's:

    bit    15  14  13  12  11  10   9   8  7  6   5  4  3   2  1  0
    plane  s0  m2' m2' m2' s3  m3  s1   m0 m0 m0  s2 e3 e3  m1 m1 m1

No four plain shifts would do: translates of {15, 8, 7, 6} do not tile 16 bits.
Words are stored in tiles of 64 rows by one group: 2 KiB in one piece. N and K are padded with zero codes to
multiples of 64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

ROWS = 64
"""Rows of a tile."""
GROUP = 64
"""Columns of a tile."""


def to_lane_words(codes: torch.Tensor) -> torch.Tensor:
    """Tiles of lane words from canonical codes.

    Args:
        codes: uint8 [E, N, K/2], low nibble first.

    Returns:
        int16 [E, ceil(N/64), ceil(K/64), 64, 16], contiguous.
    """
    num_experts, rows, columns = codes.shape
    codes = F.pad(codes, (0, -columns % (GROUP // 2), 0, -rows % ROWS))
    # 16 columns of a plane are 8 bytes.
    planes = codes.reshape(num_experts, -1, ROWS, codes.shape[2] // (GROUP // 2), 4, 8)
    even, odd = planes & 15, planes >> 4
    tiles = torch.stack((_word(even, odd), _word(odd, even)), dim=-1).flatten(-2)
    return tiles.transpose(2, 3).contiguous()


def _word(planes: torch.Tensor, neighbours: torch.Tensor) -> torch.Tensor:
    """int16 [..., b] words from uint8 codes [..., 4, b] and those of the other half of their registers."""
    p0, p1, p2, p3 = planes.to(torch.int16).unbind(-2)
    other = neighbours[..., 2, :].to(torch.int16)
    low = (p0 & 8) << 12 | (p0 & 7) << 6 | (p1 & 8) << 6 | (p1 & 7) | (p2 & 8) << 2 | (other & 7) << 12
    return low | (p3 & 8) << 8 | (p3 & 6) << 2 | (p3 & 1) << 10


def from_lane_words(words: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Canonical codes uint8 [E, rows, columns/2] from tiles; the inverse of ``to_lane_words``."""
    w = words.transpose(2, 3).to(torch.int32)
    other = w.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    planes = (
        (w >> 12 & 8) | (w >> 6 & 7),
        (w >> 6 & 8) | (w & 7),
        (w >> 2 & 8) | (other >> 12 & 7),
        (w >> 8 & 8) | (w >> 2 & 6) | (w >> 10 & 1),
    )
    codes = torch.stack(planes, dim=-2).flatten(-3).flatten(1, 2).to(torch.uint8)
    return (codes[..., ::2] | codes[..., 1::2] << 4)[:, :rows, : columns // 2].contiguous()
