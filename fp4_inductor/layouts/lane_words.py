"""Codes as 16-bit words that a kernel turns into bfloat16 lanes with a shift and a mask.

A word holds four codes of one weight row, 16 columns apart, so one 64-column group of a row is 16 words:
word j of group g holds columns ``64 g + 16 p + j`` for plane p = 0..3. Sign and magnitude bits sit so that
planes 0, 1, 2 shifted left by 0, 3, 6 fall on bfloat16's sign bit 15 and on bits 8..6, which read as
``e2m1 * 2**-126``; plane 3 takes the four bits that are left:

    bit    15  14  13  12  11  10   9   8  7  6   5  4  3   2  1  0
    plane  s0  s3  m3  s1  m3  m3  s2   m0 m0 m0  m1 m1 m1  m2 m2 m2

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
    words = _word(planes & 15)
    high = _word(planes >> 4)
    tiles = torch.stack((words, high), dim=-1).flatten(-2)
    return tiles.transpose(2, 3).contiguous()


def _word(planes: torch.Tensor) -> torch.Tensor:
    """int16 [..., b] words from uint8 codes [..., 4, b]."""
    p0, p1, p2, p3 = planes.to(torch.int16).unbind(-2)
    low = (p0 & 8) << 12 | (p0 & 7) << 6 | (p1 & 8) << 9 | (p1 & 7) << 3
    high = (p2 & 8) << 6 | (p2 & 7) | (p3 & 8) << 11 | (p3 & 4) << 11 | (p3 & 3) << 10
    return low | high


def from_lane_words(words: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Canonical codes uint8 [E, rows, columns/2] from tiles; the inverse of ``to_lane_words``."""
    w = words.transpose(2, 3).to(torch.int32)
    planes = (
        (w >> 12 & 8) | (w >> 6 & 7),
        (w >> 9 & 8) | (w >> 3 & 7),
        (w >> 6 & 8) | (w & 7),
        (w >> 11 & 8) | (w >> 11 & 4) | (w >> 10 & 3),
    )
    codes = torch.stack(planes, dim=-2).flatten(-3).flatten(1, 2).to(torch.uint8)
    return (codes[..., ::2] | codes[..., 1::2] << 4)[:, :rows, : columns // 2].contiguous()
