"""MXFP4 weights as CUTLASS's mixed-input MoE GEMM takes them on sm_90, where bfloat16 meets FP4.

A thread of a matrix instruction needs, of rows r and r + 8, a pair of bytes four columns of bytes apart. These four
bytes are one 32-bit word; its low half holds the low nibbles of all four, its high half the high nibbles, each in the
bits from which two shifts and masks make bfloat16 lanes (s sign, m magnitude, of codes 0..3):

    bit   15  14  13      12  11..10   9   8..6  5..3  2..0
    code  s0  s3  m3[0]   s1  m3[2:1]  s2  m0    m1    m2

Words stand in the order in which threads read them, over 16 rows by 64 columns. Block scales are folded so that
64 rows by 128 columns are one piece of 16 by 16 bytes.
"""

from __future__ import annotations

import torch

ROWS = 64
"""N must be a multiple of it, for the scales; the weights need 16."""
COLUMNS = 128
"""K must be a multiple of it, for the scales; the weights need 64."""
_BLOCK = 32


def to_sm90_words(codes: torch.Tensor) -> torch.Tensor:
    """Words in reading order.

    Args:
        codes: uint8 [E, N, K/2], low nibble first; N a multiple of 16 and K of 64.

    Returns:
        uint8 [E, N, K/2], a new contiguous tensor.
    """
    num_experts, rows, columns = codes.shape
    # 16 rows are half (2) by row (8); 32 bytes of columns are high, low, pair (2 each) by thread (4).
    pieces = codes.reshape(num_experts, rows // 16, 2, 8, columns // 32, 2, 2, 2, 4)
    bytes_of_word = pieces.permute(0, 1, 6, 3, 4, 5, 8, 7, 2).flatten(-2)
    halves = torch.stack((_half(bytes_of_word & 15), _half(bytes_of_word >> 4)), dim=-1)
    words: torch.Tensor = halves.view(torch.uint8).reshape(codes.shape)
    return words


def from_sm90_words(words: torch.Tensor) -> torch.Tensor:
    """Canonical codes uint8 [E, N, K/2]; the inverse of ``to_sm90_words``."""
    num_experts, rows, columns = words.shape
    halves = words.reshape(num_experts, rows // 16, 2, 8, columns // 32, 2, 4, 4).contiguous().view(torch.int16)
    low, high = (_codes(half) for half in halves.unbind(-1))
    pieces: torch.Tensor = (low | high << 4).unflatten(-1, (2, 2))
    return pieces.permute(0, 1, 8, 3, 4, 5, 2, 7, 6).reshape(words.shape)


def _half(codes: torch.Tensor) -> torch.Tensor:
    """int16 [...] halves of words from uint8 codes [..., 4]."""
    c0, c1, c2, c3 = codes.to(torch.int16).unbind(-1)
    low = (c0 & 8) << 12 | (c0 & 7) << 6 | (c1 & 8) << 9 | (c1 & 7) << 3 | (c2 & 8) << 6 | (c2 & 7)
    return low | (c3 & 8) << 11 | (c3 & 1) << 13 | (c3 & 6) << 9


def _codes(half: torch.Tensor) -> torch.Tensor:
    """uint8 codes [..., 4] from int16 halves of words; the inverse of ``_half``."""
    c0 = (half >> 12 & 8) | (half >> 6 & 7)
    c1 = (half >> 9 & 8) | (half >> 3 & 7)
    c2 = (half >> 6 & 8) | (half & 7)
    c3 = (half >> 11 & 8) | (half >> 9 & 6) | (half >> 13 & 1)
    return torch.stack((c0, c1, c2, c3), dim=-1).to(torch.uint8)


def to_sm90_scales(scale: torch.Tensor) -> torch.Tensor:
    """Folded block scales.

    Args:
        scale: uint8 [E, N, K/32] e8m0 bits; N a multiple of 64 and K of 128.

    Returns:
        uint8 [E, N/64, K/128, 16, 16], a new contiguous tensor.
    """
    num_experts, rows, columns = scale.shape
    group = COLUMNS // _BLOCK
    pieces = scale.reshape(num_experts, rows // ROWS, 4, 16, columns // group, group).permute(0, 1, 4, 3, 2, 5)
    return pieces.clone(memory_format=torch.contiguous_format).flatten(-2)


def from_sm90_scales(folded: torch.Tensor) -> torch.Tensor:
    """Block scales uint8 [E, N, K/32]; the inverse of ``to_sm90_scales``."""
    num_experts, row_tiles, column_tiles = folded.shape[:3]
    group = COLUMNS // _BLOCK
    unfolded: torch.Tensor = folded.unflatten(-1, (4, group))
    pieces = unfolded.permute(0, 1, 4, 3, 2, 5)
    shape = (num_experts, row_tiles * ROWS, column_tiles * group)
    return pieces.clone(memory_format=torch.contiguous_format).view(shape)
