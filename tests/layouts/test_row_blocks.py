"""Row blocks: every nibble where the kernel looks for it, and back."""

from __future__ import annotations

import torch

from fp4_inductor.layouts.row_blocks import (
    E4M3_FACTOR,
    clear_nan_blocks,
    e4m3_magnitudes,
    from_row_blocks,
    from_scale_blocks,
    to_row_blocks,
    to_scale_blocks,
)


def test_every_nibble_stands_where_the_formula_says() -> None:
    codes = torch.randint(0, 256, (2, 48, 20), dtype=torch.uint8)
    words = to_row_blocks(codes).view(torch.int32).squeeze(-1)
    assert words.shape == (2, 3, 5, 16)
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    for column in range(8):
        position = column // 2 + column % 2 * 4
        found = (words >> (4 * position)) & 15
        assert torch.equal(found.transpose(2, 3).flatten(1, 2), nibbles[..., column::8].int())


def test_row_blocks_are_undone() -> None:
    codes = torch.randint(0, 256, (3, 32, 24), dtype=torch.uint8)
    blocks = to_row_blocks(codes)
    assert blocks.is_contiguous()
    assert torch.equal(from_row_blocks(blocks), codes)
    assert not torch.equal(blocks.flatten(), codes.flatten())


def test_scale_blocks_are_undone() -> None:
    scale = torch.randint(0, 256, (3, 32, 7), dtype=torch.uint8)
    blocks = to_scale_blocks(scale)
    assert blocks.shape == (3, 2, 7, 16)
    assert torch.equal(blocks[1, 1, 5], scale[1, 16:, 5])
    assert torch.equal(from_scale_blocks(blocks), scale)


def test_magnitudes_are_read_as_float16_bits() -> None:
    scale = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    as_float16 = (e4m3_magnitudes(scale).to(torch.int16) << 7).view(torch.float16)
    torch.testing.assert_close(as_float16.float() * E4M3_FACTOR, scale.float().abs(), rtol=0, atol=0, equal_nan=True)


def test_codes_of_blocks_without_a_scale_are_zero() -> None:
    codes = torch.randint(1, 256, (2, 16, 32), dtype=torch.uint8)
    scale = torch.full((2, 16, 2), 254, dtype=torch.uint8)
    assert torch.equal(clear_nan_blocks(codes, scale), codes)
    scale[1, 3, 1] = 255
    cleared = clear_nan_blocks(codes, scale)
    assert not cleared[1, 3, 16:].any()
    cleared[1, 3, 16:] = codes[1, 3, 16:]
    assert torch.equal(cleared, codes)
