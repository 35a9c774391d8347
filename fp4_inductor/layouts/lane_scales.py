"""Block scales beside ``lane_words``: one byte a block that becomes a bfloat16 or float16 by one multiply-add.

A byte holds the exponent of a block scale and, for e4m3, its three mantissa bits. Both kinds are relative, and
a float32 factor a row takes the rest, so that lanes never leave the range of their type:

    e8m0  byte = exponent - largest exponent of the row + 253, at least 0   factor = 2**largest
    e4m3  byte = (exponent + 10) << 3 | mantissa, subnormals normalised     factor = global scale * 2**8

No e4m3 byte means zero or a negative scale: ``absorb_scale_signs`` moves both into the codes. Bytes are stored
as int32 words of four, in tiles of 64 rows by one 64-column group. A row has four e4m3 bytes there, one word.
It has two e8m0 bytes, so row r shares a word with row r + 8: one thread reads both in a matrix instruction.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .lane_words import GROUP, ROWS

E8M0_TOP = 253
"""Byte of the largest scale of a row: 2**126 as a bfloat16 exponent, which cancels the 2**-126 of a lane."""
E4M3_EXPONENT_BIAS = 10
E4M3_FACTOR = 256.0
"""What lanes of e4m3 formats are too small by, so that 448 * 2**126 fits bfloat16."""


def e8m0_bytes(scale: torch.Tensor) -> torch.Tensor:
    """uint8 [E, N, K/32] relative bytes from e8m0 bits; more than 253 octaves below the row's largest is 0."""
    largest = scale.amax(dim=-1, keepdim=True).to(torch.int16)
    return (scale.to(torch.int16) - largest + E8M0_TOP).clamp(min=0).to(torch.uint8)


def e8m0_rows(scale: torch.Tensor) -> torch.Tensor:
    """float32 [E, N] factors ``2**(largest - 127)`` from e8m0 bits uint8 [E, N, K/32]; infinite for byte 255."""
    largest = scale.amax(dim=-1).to(torch.int32)
    half = largest >> 1  # in two factors, since 2**-127 has no normal float32
    first, second = (half + 64) << 23, (largest - half + 63) << 23
    return first.view(torch.float32) * second.view(torch.float32)


def from_e8m0(relative: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """e8m0 bits uint8 [E, N, K/32] from bytes and row factors; blocks flushed to byte 0 come back as they can."""
    largest = rows.log2().to(torch.int16).unsqueeze(-1) + 127
    return (relative.to(torch.int16) + largest - E8M0_TOP).clamp(min=0).to(torch.uint8)


def e4m3_bytes(scale: torch.Tensor) -> torch.Tensor:
    """uint8 [E, N, K/bs] bytes from float8_e4m3fn magnitudes; 0 is 0, and NaN becomes 480."""
    bits = scale.view(torch.uint8) & 0x7F
    # Below 8 the bits are the integer s * 2**9: its float32 exponent and top mantissa bits normalise it.
    integer = bits.to(torch.float32).view(torch.int32)
    subnormal = ((integer >> 20) - ((127 - 1) << 3)).clamp(min=0).to(torch.uint8)
    return torch.where(bits < 8, subnormal, bits + ((E4M3_EXPONENT_BIAS - 7) << 3))


def from_e4m3_bytes(relative: torch.Tensor) -> torch.Tensor:
    """float32 scale magnitudes [E, N, K/bs] from bytes."""
    exponent = (relative >> 3).to(torch.int32) + 127 - E4M3_EXPONENT_BIAS
    value = (exponent << 23 | (relative & 7).to(torch.int32) << 20).view(torch.float32)
    return torch.where(relative == 0, 0, value)


def e4m3_rows(scale: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """float32 [E, N] factors from scales [E, N, K/bs] and globals [E | 1, N | 1]; NaN where a scale of the row is."""
    nan = ((scale.view(torch.uint8) & 0x7F) == 0x7F).any(dim=-1)
    return torch.where(nan, float("nan"), global_scale.to(torch.float32) * E4M3_FACTOR)


def absorb_scale_signs(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes [E, N, K/2] with the sign of negative block scales, and zero where the block scale is zero."""
    bits = scale.view(torch.uint8)
    flip = (bits >> 7) * 0x88
    keep = ((bits & 0x7F) != 0).to(torch.uint8) * 0xFF
    blocks = codes.reshape(*scale.shape, -1)
    return ((blocks ^ flip.unsqueeze(-1)) & keep.unsqueeze(-1)).flatten(-2)


def to_scale_words(relative: torch.Tensor, block_size: int) -> torch.Tensor:
    """Tiles of scale words.

    Args:
        relative: uint8 [E, N, K/block_size] bytes; block_size 16 or 32.

    Returns:
        int32 [E, ceil(N/64), ceil(K/64), 16 * bytes a group], contiguous; the lowest byte is the first scale.
    """
    group = GROUP // block_size
    relative = F.pad(relative, (0, -relative.shape[2] % group, 0, -relative.shape[1] % ROWS))
    num_experts, rows, columns = relative.shape
    rows_of_word = 4 // group
    shape = (num_experts, rows // ROWS, ROWS // 8 // rows_of_word, rows_of_word, 8, columns // group, group)
    tiles = relative.reshape(shape).permute(0, 1, 5, 2, 4, 3, 6)
    return tiles.flatten(3).contiguous().view(torch.int32)


def from_scale_words(words: torch.Tensor, rows: int, scales: int) -> torch.Tensor:
    """uint8 [E, rows, scales] bytes from tiles; the inverse of ``to_scale_words``."""
    num_experts, row_tiles, groups, size = words.shape
    group = size * 4 // ROWS
    rows_of_word = 4 // group
    shape = (num_experts, row_tiles, groups, ROWS // 8 // rows_of_word, 8, rows_of_word, group)
    relative = words.view(torch.uint8).reshape(shape).permute(0, 1, 3, 5, 4, 2, 6)
    return relative.reshape(num_experts, row_tiles * ROWS, groups * group)[:, :rows, :scales].contiguous()
