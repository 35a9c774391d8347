"""The gate/up layouts against index formulas."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_bits import assert_prepares, random_bits, same_bits

from fp4_inductor.layouts.gate_up import (
    GATE_UP,
    GRANULES,
    INTERLEAVED,
    UP_GATE,
    RowOrder,
    from_granules,
    join_gate_up,
    reorder_gate_up,
    row_order,
    split_gate_up,
    to_gate_up_halves,
    to_granules,
    to_interleaved,
)
from fp4_inductor.spec import GateUpOrder

SHAPES = [(3, 10, 7), (3, 10), (1, 2, 4), (3, 1)]
DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32]
ORDERS = [GATE_UP, UP_GATE, *(RowOrder(block, first) for block in (1, 2, 8, 64) for first in (False, True))]


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


def place(order: RowOrder, i: int, up: bool, intermediate: int) -> int:
    """The row of gate, or up, i."""
    block = order.block or intermediate
    return i // block * 2 * block + (up != order.up_first) * block + i % block


@settings(max_examples=100)
@given(
    data=st.data(),
    source=st.sampled_from(ORDERS),
    target=st.sampled_from(ORDERS),
    rest=st.lists(st.integers(1, 3), max_size=2),
    dtype=st.sampled_from(DTYPES),
)
def test_any_order_from_any_other(
    data: st.DataObject, source: RowOrder, target: RowOrder, rest: list[int], dtype: torch.dtype
) -> None:
    multiple = max(source.block or 1, target.block or 1)
    intermediate = multiple * data.draw(st.integers(1, 5 if multiple < 64 else 2))
    rows = random_bits((2, 2 * intermediate, *rest), dtype)
    out = reorder_gate_up(rows, source, target)
    of_rows = {place(source, i, up, intermediate): (i, up) for i in range(intermediate) for up in (False, True)}
    expected = torch.empty_like(rows)
    for row, (i, up) in of_rows.items():
        expected[:, place(target, i, up, intermediate)] = rows[:, row]
    assert same_bits(out, expected)
    assert same_bits(reorder_gate_up(out, target, source), rows)
    assert same_bits(join_gate_up(*split_gate_up(rows, source), source), rows)


@pytest.mark.parametrize("source", [GATE_UP, INTERLEAVED, RowOrder(64, up_first=True)], ids=str)
@pytest.mark.parametrize(
    "target", [UP_GATE, GRANULES, RowOrder(1, up_first=True), RowOrder(64, up_first=True)], ids=str
)
@pytest.mark.parametrize("shape", [(2, 256, 3), (2, 256), (3, 1)], ids=str)
def test_reordering_traces_and_owns_its_memory(shape: tuple[int, ...], target: RowOrder, source: RowOrder) -> None:
    assert_prepares(lambda rows: reorder_gate_up(rows, source, target), random_bits(shape, torch.uint8))


def test_orders_of_specs_have_their_names() -> None:
    assert [row_order(order) for order in GateUpOrder] == [GATE_UP, UP_GATE, INTERLEAVED]
    assert RowOrder(8) == GRANULES
