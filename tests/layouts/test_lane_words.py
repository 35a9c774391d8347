"""Lane words against the bit positions and the tile order they promise."""

from __future__ import annotations

import pytest
import torch

from fp4_inductor.layouts.lane_words import from_lane_words, to_lane_words
from fp4_inductor.quant import e2m1

SHAPES = [(1, 64, 64), (2, 128, 192), (3, 96, 32), (2, 5, 160)]


def random_codes(num_experts: int, rows: int, columns: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_experts, rows, columns // 2), dtype=torch.uint8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_round_trip(shape: tuple[int, int, int]) -> None:
    codes = random_codes(*shape)
    assert torch.equal(from_lane_words(to_lane_words(codes), *shape[1:]), codes)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lanes_read_as_bfloat16(shape: tuple[int, int, int]) -> None:
    """Shift and mask of plane p give weight (n, 64 g + 16 p + j) times 2**-126; padding is zero."""
    num_experts, rows, columns = shape
    codes = random_codes(*shape)
    words = to_lane_words(codes).to(torch.int32) & 0xFFFF
    plane3 = ((words << 1) & 0x8000) | ((words >> 4) & 0x00C0) | ((words >> 5) & 0x0100)
    lanes = torch.stack([*((words << shift) & 0x81C0 for shift in (0, 3, 6)), plane3], dim=-2)
    values = (lanes << 16).view(torch.float32).double() * 2.0**126  # [E, R, G, 64, 4, 16]
    dense = values.permute(0, 1, 3, 2, 4, 5).reshape(num_experts, words.shape[1] * 64, -1)
    expected = torch.zeros_like(dense)
    expected[:, :rows, :columns] = e2m1.decode(e2m1.unpack(codes)).double()
    assert torch.equal(dense, expected)


def test_words_are_two_bytes_for_four_codes() -> None:
    words = to_lane_words(random_codes(2, 128, 128))
    assert words.is_contiguous()
    assert words.nbytes == 2 * 128 * 128 // 2
