"""e2m1 codes against the table of the standard: every code, every midpoint, every byte."""

from __future__ import annotations

import pytest
import torch

from fp4_inductor.formats import E2M1_VALUES
from fp4_inductor.quant import e2m1

ALL = torch.arange(16, dtype=torch.uint8)


def test_decode_is_the_table() -> None:
    values = e2m1.decode(ALL)
    assert values.tolist() == [*E2M1_VALUES, *(-v for v in E2M1_VALUES)]
    assert torch.signbit(values[8])


def test_encode_inverts_decode() -> None:
    assert torch.equal(e2m1.encode(e2m1.decode(ALL)), ALL)


def test_midpoints_go_to_even_codes() -> None:
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert e2m1.decode(e2m1.encode(midpoints)).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert e2m1.decode(e2m1.encode(-midpoints)).tolist() == [0, -1, -1, -2, -2, -4, -4]


@pytest.mark.parametrize("side", [-1, 1])
def test_beside_a_midpoint_the_nearer_code_wins(side: int) -> None:
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    beside = torch.nextafter(midpoints, torch.full_like(midpoints, side * 100.0))
    lower = list(range(7))
    assert e2m1.encode(beside).tolist() == [code + (side > 0) for code in lower]


def test_saturates_and_keeps_signs() -> None:
    values = torch.tensor([6.5, 1e30, float("inf"), -7.0, 0.0, -0.0, -0.1])
    assert e2m1.encode(values).tolist() == [7, 7, 7, 15, 0, 8, 8]


def test_pack_puts_even_codes_low() -> None:
    packed = e2m1.pack(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8))
    assert packed.tolist() == [[0x21, 0x0F]]


def test_unpack_inverts_pack_on_every_byte() -> None:
    packed = torch.arange(256, dtype=torch.uint8).reshape(4, 8, 8)
    assert torch.equal(e2m1.pack(e2m1.unpack(packed)), packed)
