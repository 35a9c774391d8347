"""The gate/up layouts against index formulas."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4_inductor.layouts.gate_up import from_granules, to_gate_up_halves, to_granules, to_interleaved
from fp4_inductor.spec import GateUpOrder

SHAPES = [(3, 10, 7), (3, 10), (1, 2, 4), (3, 1)]
DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    bits = torch.randint(0, 120, (*shape, dtype.itemsize), dtype=torch.uint8)
    return bits.view(dtype).squeeze(-1)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_halves_follow_the_formula_and_invert(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rows = random_bits(shape, dtype)
    halves = to_gate_up_halves(rows)
    if shape[1] > 1:
        intermediate = shape[1] // 2
        for i in range(intermediate):
            assert same_bits(halves[:, i], rows[:, 2 * i])
            assert same_bits(halves[:, intermediate + i], rows[:, 2 * i + 1])
    assert same_bits(to_interleaved(halves), rows)
    assert same_bits(to_gate_up_halves(to_interleaved(rows)), rows)


@pytest.mark.parametrize("function", [to_gate_up_halves, to_interleaved])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_result_owns_its_memory(function, shape: tuple[int, ...]) -> None:  # type: ignore[no-untyped-def]
    rows = random_bits(shape, torch.uint8)
    out = function(rows.mT if rows.dim() == 3 and rows.shape[2] % 2 == 0 else rows)
    assert out.is_contiguous()
    assert out.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr()


@settings(max_examples=60, deadline=None)
@given(
    granules=st.integers(1, 5),
    rest=st.lists(st.integers(1, 3), max_size=2),
    dtype=st.sampled_from(DTYPES),
    order=st.sampled_from(GateUpOrder),
)
def test_granules_follow_the_formula_and_invert(
    granules: int, rest: list[int], dtype: torch.dtype, order: GateUpOrder
) -> None:
    intermediate = 8 * granules
    rows = random_bits((2, 2 * intermediate, *rest), dtype)
    out = to_granules(rows, order)
    assert out.is_contiguous()
    for i in range(intermediate):
        gate, up = {
            GateUpOrder.GATE_UP: (i, intermediate + i),
            GateUpOrder.UP_GATE: (intermediate + i, i),
            GateUpOrder.INTERLEAVED: (2 * i, 2 * i + 1),
        }[order]
        row = i // 8 * 16 + i % 8
        assert same_bits(out[:, row], rows[:, gate])
        assert same_bits(out[:, row + 8], rows[:, up])
    assert same_bits(from_granules(out, order), rows)
    assert same_bits(to_granules(from_granules(rows, order), order), rows)
