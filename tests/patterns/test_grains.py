"""How finely global scales differ is told by how a graph holds them, so that kernels refuse before they see values."""

from __future__ import annotations

import pytest
import torch
from capture import capture
from fp4_inductor.patterns.grains import global_grain
from fp4_inductor.patterns.packing import Axis, Globals
from fp4_inductor.patterns.weights import join_halves
from test_separate_gate_up import TOKENS, H, SeparateMoE
from torch import fx

from fp4_inductor.formats import MXFP4, NVFP4
from fp4_inductor.matching import Assembled, PackedWeight, Source, find_matches
from fp4_inductor.spec import GateUpOrder, GlobalGrain

E, N, K = 4, 6, 32
EXPERT, HALF, ROW = GlobalGrain.EXPERT, GlobalGrain.HALF, GlobalGrain.ROW


def stored(*shape: int) -> fx.Node:
    node = fx.Graph().placeholder("factor")
    node.meta["val"] = torch.ones(shape)
    return node


def weight(factor: Source | None, rows: int = N) -> PackedWeight:
    codes, scale = stored(E, rows, K // 2), stored(E, rows, K // 16)
    return PackedWeight(codes, scale, factor, NVFP4, (E, rows, K))


@pytest.mark.parametrize(
    ("shape", "grain"),
    [((), EXPERT), ((1, 1), EXPERT), ((E,), EXPERT), ((E, 1, 1), EXPERT), ((E, N), ROW), ((E, N, 1), ROW)],
)
def test_by_shape(shape: tuple[int, ...], grain: GlobalGrain) -> None:
    assert global_grain(weight(stored(*shape)), GateUpOrder.GATE_UP) is grain
    assert global_grain(weight(None)) is EXPERT


@pytest.mark.parametrize(
    ("first", "second", "grain"),
    [((E,), (E, 1), HALF), ((), (E,), HALF), ((E, N), (E,), ROW), ((), (), HALF)],
    ids=str,
)
def test_gate_and_up_apart(first: tuple[int, ...], second: tuple[int, ...], grain: GlobalGrain) -> None:
    joined = join_halves([weight(stored(*first)), weight(stored(*second))])
    assert global_grain(joined, GateUpOrder.GATE_UP) is grain
    assert global_grain(joined, GateUpOrder.UP_GATE) is grain
    assert global_grain(joined, GateUpOrder.INTERLEAVED) is ROW, "halves of another order"
    assert global_grain(joined) is ROW, "nothing is gated"


def test_what_both_read_is_shared() -> None:
    factor = stored(E)
    assert global_grain(join_halves([weight(factor), weight(factor)]), GateUpOrder.GATE_UP) is EXPERT


def test_inverted_and_interleaved() -> None:
    def spread(pairs: torch.Tensor) -> torch.Tensor:
        return (1 / pairs).repeat(1, N // 2)

    source = Assembled(spread, (stored(E, 2),))
    assert global_grain(weight(source), GateUpOrder.INTERLEAVED) is HALF
    assert global_grain(weight(source), GateUpOrder.GATE_UP) is ROW


@pytest.mark.parametrize(
    ("axes", "shape", "order", "grain"),
    [
        (("experts", "halves"), (E, 2), GateUpOrder.GATE_UP, HALF),
        (("halves", "experts"), (2, E), GateUpOrder.UP_GATE, HALF),
        (("experts", "pairs"), (E, 2), GateUpOrder.INTERLEAVED, HALF),
        (("experts", "pairs"), (E, 2), GateUpOrder.GATE_UP, ROW),
        (("halves",), (2,), GateUpOrder.GATE_UP, HALF),
        (("rows",), (N,), GateUpOrder.GATE_UP, ROW),
        (("experts",), (E,), GateUpOrder.GATE_UP, EXPERT),
    ],
    ids=str,
)
@pytest.mark.parametrize("inverse", [False, True], ids=["", "divides"])
def test_as_recognition_reads_them(
    axes: tuple[Axis, ...], shape: tuple[int, ...], order: GateUpOrder, grain: GlobalGrain, inverse: bool
) -> None:
    source = Assembled(Globals(E, N, axes, inverse), (stored(*shape),))
    assert global_grain(weight(source), order) is grain


def test_many_rows_are_not_taken_for_alike() -> None:
    """As many numbers as float32 has no room for between one half and one and a half."""
    assert global_grain(weight(stored(E, 4096), 4096), GateUpOrder.GATE_UP) is ROW


@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)
def test_of_a_match(fmt) -> None:  # type: ignore[no-untyped-def]
    gm = capture(SeparateMoE(fmt, "grouped_mm"), torch.randn(TOKENS, H).bfloat16())
    (match,) = find_matches(gm.graph).matches
    assert match.spec.w13_global is (HALF if fmt is NVFP4 else EXPERT)
    assert match.spec.w2_global is EXPERT
    assert ("w13_global/half" in str(match.spec)) is (fmt is NVFP4)
