"""Relative scale bytes: exact over every byte of both encodings, and back."""

from __future__ import annotations

import pytest
import torch

from fp4_inductor.formats import MXFP4, NVFP4, BlockFormat
from fp4_inductor.layouts.lane_scales import (
    E4M3_FACTOR,
    absorb_scale_signs,
    e4m3_bytes,
    e4m3_rows,
    e8m0_bytes,
    e8m0_rows,
    from_e4m3_bytes,
    from_e8m0,
    from_scale_words,
    to_scale_words,
)
from fp4_inductor.quant import dequantize


def every_e4m3() -> torch.Tensor:
    """float8_e4m3fn [127]: every magnitude but NaN."""
    return torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)


def test_e4m3_bytes_hold_every_magnitude() -> None:
    scale = every_e4m3()
    assert torch.equal(from_e4m3_bytes(e4m3_bytes(scale)), scale.float())
    assert torch.equal(e4m3_bytes((-scale.float()).to(scale.dtype)), e4m3_bytes(scale))


def test_e4m3_bytes_become_lanes_by_one_multiply_add() -> None:
    """bfloat16 and float16 lanes times the scale lanes are the weights, short of ``E4M3_FACTOR``; both exact."""
    scale = every_e4m3()[1:]
    byte = e4m3_bytes(scale).to(torch.int32)
    bfloat = (byte * 0x10 + 0x7580).to(torch.int16).view(torch.bfloat16).double() * 2.0**-126
    half = (byte * 0x80 + 0x2C00).to(torch.int16).view(torch.float16).double() * 2.0**-14
    for lanes in (bfloat, half):
        assert torch.equal(lanes * E4M3_FACTOR, scale.double())


def test_e4m3_signs_and_zeros_move_into_the_codes() -> None:
    codes = torch.randint(0, 256, (2, 8, 16 * 8), dtype=torch.uint8)
    bits = torch.randint(0, 256, (2, 8, 16), dtype=torch.uint8)
    bits[(bits & 0x7F) == 0x7F] = 0x80
    scale = bits.view(torch.float8_e4m3fn)
    magnitude = (bits & 0x7F).masked_fill((bits & 0x7F) == 0, 0x08).view(torch.float8_e4m3fn)
    ones = torch.ones(2, 8)
    moved = dequantize(absorb_scale_signs(codes, scale), magnitude, ones, NVFP4, torch.float64)
    assert torch.equal(moved, dequantize(codes, scale, ones, NVFP4, torch.float64))


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (3, 10)], ids=str)
def test_e4m3_rows_broadcast_globals_and_show_nan(shape: tuple[int, int]) -> None:
    scale = torch.randint(0, 0x7F, (3, 10, 4), dtype=torch.uint8)
    scale[1, 7, 2] = 0xFF
    global_scale = torch.rand(shape)
    rows = e4m3_rows(scale.view(torch.float8_e4m3fn), global_scale)
    expected = (global_scale * E4M3_FACTOR).expand(3, 10).clone()
    expected[1, 7] = float("nan")
    assert torch.equal(rows.isnan(), expected.isnan())
    assert torch.equal(rows.nan_to_num(), expected.nan_to_num())


def test_e8m0_is_exact_over_all_bytes() -> None:
    largest = torch.arange(255, dtype=torch.uint8)
    scale = torch.stack((largest, largest // 2, largest - torch.minimum(largest, torch.tensor(200))), dim=-1)[None]
    relative, rows = e8m0_bytes(scale), e8m0_rows(scale)
    value = 2.0 ** (relative.double() - 253) * rows.double().unsqueeze(-1)
    assert torch.equal(value, 2.0 ** (scale.double() - 127))
    assert torch.equal(from_e8m0(relative, rows), scale)


def test_e8m0_nan_byte_makes_its_row_infinite() -> None:
    scale = torch.tensor([[[255, 3], [254, 3]]], dtype=torch.uint8)
    assert e8m0_rows(scale).isinf().tolist() == [[True, False]]


@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)
@pytest.mark.parametrize("shape", [(1, 64, 128), (2, 192, 192), (3, 40, 32), (2, 100, 160)], ids=str)
def test_words_round_trip(shape: tuple[int, int, int], fmt: BlockFormat) -> None:
    num_experts, rows, columns = shape
    relative = torch.randint(0, 256, (num_experts, rows, columns // fmt.block_size), dtype=torch.uint8)
    words = to_scale_words(relative, fmt.block_size)
    assert words.is_contiguous()
    assert torch.equal(from_scale_words(words, *relative.shape[1:]), relative)


def test_a_word_holds_rows_eight_apart() -> None:
    relative = torch.randint(0, 256, (1, 64, 4), dtype=torch.uint8)
    words = to_scale_words(relative, MXFP4.block_size).view(torch.uint8).reshape(2, 32, 4)
    assert torch.equal(words[1, 11], relative[0, [19, 27], 2:].flatten())
    words = to_scale_words(relative, NVFP4.block_size).view(torch.uint8).reshape(64, 4)
    assert torch.equal(words, relative[0])
