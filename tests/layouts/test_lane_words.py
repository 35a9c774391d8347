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
    """What a kernel does to a register of two words gives weight (n, 64 g + 16 p + j) times 2**-126; padding is 0."""
    num_experts, rows, columns = shape
    codes = random_codes(*shape)
    register = to_lane_words(codes).view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    rotated = (register << 10 | register >> 22) & 0xFFFFFFFF
    plane3 = ((register << 4) & 0x81808180) | ((register >> 4) & 0x00400040)
    planes = [*(lanes & 0x81C081C0 for lanes in (register, register << 6, rotated)), plane3]
    halves = [torch.stack((plane & 0xFFFF, plane >> 16), dim=-1).flatten(-2) for plane in planes]
    lanes = torch.stack(halves, dim=-2).to(torch.int32)
    values = (lanes << 16).view(torch.float32).double() * 2.0**126  # [E, R, G, 64, 4, 16]
    dense = values.permute(0, 1, 3, 2, 4, 5).reshape(num_experts, lanes.shape[1] * 64, -1)
    expected = torch.zeros_like(dense)
    expected[:, :rows, :columns] = e2m1.decode(e2m1.unpack(codes)).double()
    assert torch.equal(dense, expected)


def test_words_are_two_bytes_for_four_codes() -> None:
    words = to_lane_words(random_codes(2, 128, 128))
    assert words.is_contiguous()
    assert words.nbytes == 2 * 128 * 128 // 2
