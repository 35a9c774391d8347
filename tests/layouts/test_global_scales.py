"""Global scales as kernels take them: exact, or refused where the values do not allow it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_bits import assert_prepares, random_bits, same_bits
from torch.fx.experimental.proxy_tensor import make_fx

from fp4_inductor.layouts.exactness import InexactWeightsError
from fp4_inductor.layouts.gate_up import GATE_UP, INTERLEAVED, UP_GATE, RowOrder, join_gate_up
from fp4_inductor.layouts.global_scales import (
    common_globals,
    expert_globals,
    fold_into_scales,
    gate_up_globals,
    linear_in_up,
    up_ratio,
)
from fp4_inductor.spec import RUNTIME, ActivationSpec

ORDERS = [GATE_UP, UP_GATE, INTERLEAVED, RowOrder(2, up_first=True)]


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 4), (3, 4)], ids=str)
def test_one_scale_an_expert(shape: tuple[int, int]) -> None:
    values = torch.rand(shape[0], 1).expand(shape).clone()
    out = assert_prepares(lambda g: expert_globals(g, 3), values)
    assert torch.equal(out, values[:, 0].expand(3))


def test_rows_that_differ_are_refused_by_expert() -> None:
    values = torch.rand(3, 1).expand(3, 4).clone()
    values[1, 2] *= 1.5
    with pytest.raises(
        InexactWeightsError, match=r"needed one global scale an expert, got other values in expert 1 of 3"
    ):
        expert_globals(values, 3)
    values[:, 0] = float("nan")
    with pytest.raises(InexactWeightsError):
        expert_globals(values, 3)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("shared", [True, False])
def test_gate_and_up_of_rows(order: RowOrder, shared: bool) -> None:
    gate, up = torch.rand(2, 1 if shared else 3, 1).expand(2, 3, 1).clone()
    rows = join_gate_up(gate.expand(3, 6).clone(), up.expand(3, 6).clone(), order)
    if shared:
        rows = rows[:1]
    found_gate, found_up = gate_up_globals(rows, order, 3)
    assert torch.equal(found_gate, gate[:, 0])
    assert torch.equal(found_up, up[:, 0])
    both = gate_up_globals(gate, order, 3)
    assert torch.equal(both[0], gate[:, 0])
    assert torch.equal(both[1], gate[:, 0])
    rows[0, 0] += 1
    with pytest.raises(InexactWeightsError):
        gate_up_globals(rows, order, 3)


def test_a_graph_keeps_the_condition() -> None:
    """Traced on values that agree, a graph refuses others; under fake tensors nothing is asked."""
    gate = torch.rand(3)
    for mode in ("real", "fake"):
        traced = make_fx(common_globals, tracing_mode=mode)(gate, gate.clone())
        assert torch.equal(traced(gate, gate.clone()), gate)
        with pytest.raises(InexactWeightsError, match="expert 2 of 3"):
            traced(gate, gate * torch.tensor([1.0, 1.0, 2.0]))


def test_common_scales() -> None:
    gate = torch.rand(3)
    assert_prepares(common_globals, gate, gate.clone())
    with pytest.raises(InexactWeightsError, match="expert 0, 1, 2 of 3"):
        common_globals(gate, gate * 1.5)


def test_ratio() -> None:
    gate, up = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([3.0, 2.0, 0.0])
    assert torch.equal(assert_prepares(up_ratio, gate, up), torch.tensor([3.0, 1.0, 1.0]))
    for wrong_gate, wrong_up in ((0.0, 1.0), (1.0, 0.0), (1e-30, 1e30), (1.0, -1.0), (1.0, float("nan"))):
        with pytest.raises(InexactWeightsError, match="positive ratio"):
            up_ratio(torch.tensor([1.0, wrong_gate]), torch.tensor([1.0, wrong_up]))


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
@pytest.mark.parametrize("beta", [0.0, 1.0, RUNTIME], ids=str)
def test_a_ratio_passes_through_what_is_linear(kind, beta) -> None:  # type: ignore[no-untyped-def]
    activation = ActivationSpec(kind, beta=beta)
    assert linear_in_up(activation, False) == (beta == 0.0)
    assert linear_in_up(activation, False, beta_by_expert=True)
    assert not linear_in_up(activation, True, beta_by_expert=True)
    for bound in ({"limit": 7.0}, {"up_limit": 7.0}, {"limit": RUNTIME}, {"limit": 7.0, "bound": "softcap"}):
        assert not linear_in_up(ActivationSpec(kind, beta=beta, **bound), False, beta_by_expert=True)


@settings(max_examples=60)
@given(exponents=st.lists(st.integers(-3, 3), min_size=2, max_size=2), target=st.floats(2.0**-20, 8, width=32))
def test_scales_take_powers_of_two_exactly_and_give_them_back(exponents: list[int], target: float) -> None:
    bits = torch.randint(0x20, 0x50, (2, 4, 3), dtype=torch.uint8)  # normal, and three octaves from either end
    scale = bits.view(torch.float8_e4m3fn)
    goal = torch.full((2,), target)
    factor = (goal * torch.tensor([2.0**e for e in exponents])).unsqueeze(1)
    folded = fold_into_scales(scale, factor, goal)
    assert torch.equal(folded.double() * goal.double()[:, None, None], scale.double() * factor.double().unsqueeze(-1))
    back = fold_into_scales(folded, goal.unsqueeze(1), factor[:, 0])
    assert same_bits(back, scale)


def test_scales_take_what_happens_to_fit() -> None:
    """A ratio of 3/2 turns 1.0 into an e4m3, and 1.125 into none."""
    fits = torch.tensor([[[1.0], [1.0]], [[1.125], [0.0]]]).to(torch.float8_e4m3fn)
    expected = torch.tensor([[[1.0], [1.5]], [[1.125], [0.0]]]).to(torch.float8_e4m3fn)
    exact = torch.tensor([[1.0, 1.5], [1.0, 1.0]])
    assert same_bits(fold_into_scales(fits, exact, torch.ones(2)), expected)
    does_not = torch.tensor([[[1.0], [1.125]], [[1.0], [1.0]]]).to(torch.float8_e4m3fn)
    with pytest.raises(InexactWeightsError, match=r"take over, got other values in expert 0 of 2"):
        fold_into_scales(does_not, exact, torch.ones(2))
    same = torch.tensor([0.7, 0.3])
    assert same_bits(fold_into_scales(does_not, same.unsqueeze(1), same), does_not)


@pytest.mark.parametrize(("value", "factor"), [(448.0, 2.0), (2.0**-9, 0.5), (1.0, 0.3)])
def test_scales_refuse_what_leaves_e4m3(value: float, factor: float) -> None:
    scale = torch.tensor([[[value]]]).to(torch.float8_e4m3fn)
    with pytest.raises(InexactWeightsError):
        fold_into_scales(scale, torch.tensor([[factor]]), torch.ones(1))


def test_folding_traces_and_owns_its_memory() -> None:
    scale = random_bits((2, 4, 3), torch.float8_e4m3fn)
    goal = torch.rand(2)
    assert_prepares(fold_into_scales, scale, goal.unsqueeze(1).clone(), goal)
