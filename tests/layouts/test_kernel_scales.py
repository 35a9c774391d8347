"""Each kernel's scalars, put into what that kernel computes, give the layer in float64; gate and up may differ."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from layout_bits import assert_prepares

from fp4_inductor.layouts.exactness import InexactWeightsError
from fp4_inductor.layouts.gate_up import INTERLEAVED, UP_GATE, RowOrder, join_gate_up, split_gate_up
from fp4_inductor.layouts.global_scales import common_globals
from fp4_inductor.layouts.kernel_scales import (
    b12x_scales,
    bias_in_units,
    cutedsl_scales,
    cutlass_scales,
    in_units,
    trtllm_scales,
)

E, H, I = 3, 8, 6  # noqa: E741


class Layer:
    """Weights [E, I, H], [E, I, H], [E, H, I] short of their factors, and what the layer makes of one token."""

    def __init__(self, gated: bool = True, equal: bool = False) -> None:
        self.x = torch.randn(E, H, dtype=torch.float64)
        self.w_gate, self.w_up = torch.randn(2, E, I, H, dtype=torch.float64)
        self.w_down = torch.randn(E, H, I, dtype=torch.float64)
        self.gate, self.down, self.act1, self.act2 = torch.rand(4, E) + 0.25
        self.up = None if not gated else self.gate.clone() if equal else self.gate * (torch.rand(E) * 8 + 0.2)
        self.act2 = self.act2 * 0.1

    def factors(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.gate, self.up, self.down, self.act1, self.act2

    def middle(
        self, beta: float = 0.0, limit: float = float("inf"), bias: tuple[torch.Tensor, ...] = (0.0, 0.0)
    ) -> torch.Tensor:
        gate = mul(self.w_gate, self.x) * self.gate.double()[:, None] + bias[0]
        if self.up is None:
            return gate.relu() ** 2
        up = mul(self.w_up, self.x) * self.up.double()[:, None] + bias[1]
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * (1.702 * gate).sigmoid() * (up + beta)

    def out(self, middle: torch.Tensor) -> torch.Tensor:
        return mul(self.w_down, middle) * self.down.double()[:, None]


def mul(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.einsum("enk,ek->en", weight, x)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal but for the float32 rounding of scalars."""
    return bool(((found - expected).norm(dim=1) <= 2e-6 * expected.norm(dim=1)).all())


def act(gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    return gate.relu() ** 2 if up is None else gate * (1.702 * gate).sigmoid() * up


def column(scale: torch.Tensor) -> torch.Tensor:
    return scale.double().expand(E)[:, None]


@pytest.mark.parametrize("order", [UP_GATE, INTERLEAVED, RowOrder(1, up_first=True)], ids=str)
def test_trtllm_with_beta_and_biases(order: RowOrder) -> None:
    layer, beta = Layer(), 1.0
    bias1, bias2 = torch.randn(E, 2 * I), torch.randn(E, H)
    scales = trtllm_scales(*layer.factors())
    unit_bias = bias_in_units(bias1, order, scales.gate_unit, scales.up_unit).double()
    gate_bias, up_bias = split_gate_up(unit_bias, order)
    quantised = layer.x / column(layer.act1)
    gate, up = mul(layer.w_gate, quantised) + gate_bias, mul(layer.w_up, quantised) + up_bias
    gate = gate * column(scales.output1_gate)
    middle = column(scales.output1) * (up + column(in_units(beta, scales.up_unit))) * gate * (1.702 * gate).sigmoid()
    expected = layer.middle(beta=beta, bias=split_gate_up(bias1.double(), order))
    assert close(middle, expected / column(layer.act2))
    out = (mul(layer.w_down, middle) + in_units(bias2, scales.output2).double()) * column(scales.output2)
    assert close(out, layer.out(expected) + bias2.double())


def test_trtllm_with_a_limit_and_equal_factors() -> None:
    layer, limit = Layer(equal=True), 2.0
    scales = trtllm_scales(*layer.factors())
    unit = common_globals(scales.gate_unit, scales.up_unit)
    bound = column(in_units(limit, unit))
    quantised = layer.x / column(layer.act1)
    gate = torch.minimum(mul(layer.w_gate, quantised), bound) * column(scales.output1_gate)
    up = torch.clamp(mul(layer.w_up, quantised), -bound, bound)
    middle = column(scales.output1) * act(gate, up)
    assert close(middle * column(layer.act2), layer.middle(limit=limit))
    different = trtllm_scales(*Layer().factors())
    with pytest.raises(InexactWeightsError, match="one global scale for gate and up"):
        common_globals(different.gate_unit, different.up_unit)


def test_trtllm_without_a_gate() -> None:
    layer = Layer(gated=False)
    scales = trtllm_scales(*layer.factors())
    gate = mul(layer.w_gate, layer.x / column(layer.act1)) * column(scales.output1_gate)
    middle = act(gate, None) * column(scales.output1)
    assert close(mul(layer.w_down, middle) * column(scales.output2), layer.out(layer.middle()))


@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize(("gated", "equal"), [(True, False), (True, True), (False, True)])
def test_cutlass(gated: bool, equal: bool, beta: float) -> None:
    layer = Layer(gated, equal)
    scales = cutlass_scales(*layer.factors())
    quantised = layer.x * column(scales.quantise1)
    gate = mul(layer.w_gate, quantised) * column(scales.alpha1)
    up = mul(layer.w_up, quantised) * column(scales.alpha1) + beta / column(scales.beta_unit) if gated else None
    again = act(gate, up) * column(scales.quantise2)
    expected = layer.middle(beta=beta)
    assert close(again, expected / column(layer.act2)), "the same block scales as without a ratio"
    assert close(mul(layer.w_down, again) * column(scales.alpha2), layer.out(expected))


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize(("gated", "equal"), [(True, False), (True, True), (False, True)])
def test_cutedsl(gated: bool, equal: bool, quantised: bool) -> None:
    layer = Layer(gated, equal)
    factors = layer.factors() if quantised else layer.factors()[:3]
    scales = cutedsl_scales(*factors)
    x = layer.x / column(layer.act1) if quantised else layer.x
    gate = mul(layer.w_gate, x) * column(scales.alpha1)
    up = mul(layer.w_up, x) * column(scales.alpha1) if gated else None
    middle = act(gate, up)
    if scales.quantise2 is not None:
        assert scales.quantise2.shape == (1,)
        middle = middle * scales.quantise2.double()
        widest = layer.middle() / column(layer.act2)
        assert (middle.abs() <= widest.abs() * (1 + 1e-6)).all(), "nothing leaves the range it was calibrated for"
    assert (scales.quantise2 is not None) == quantised
    assert close(mul(layer.w_down, middle) * column(scales.alpha2), layer.out(layer.middle()))


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(("gated", "equal"), [(True, False), (True, True), (False, True)])
def test_b12x(gated: bool, equal: bool, dynamic: bool) -> None:
    layer = Layer(gated, equal)
    if dynamic:
        layer.act1 = layer.act2 = torch.ones(())
    scales = b12x_scales(*layer.factors())
    x = layer.x / column(scales.divide1)
    alpha1 = column(scales.alpha1) * column(scales.divide1)
    gate, up = mul(layer.w_gate, x) * alpha1, mul(layer.w_up, x) * alpha1
    middle = act(gate, up if gated else None) / column(scales.divide2)
    assert close(middle, layer.middle() / column(layer.act2)), "the same block scales as without a ratio"
    assert close(mul(layer.w_down, middle) * column(scales.alpha2), layer.out(layer.middle()))


@pytest.mark.parametrize("scales", [trtllm_scales, cutlass_scales, cutedsl_scales, b12x_scales])
@pytest.mark.parametrize("gated", [True, False])
def test_every_scalar_traces_and_owns_its_memory(scales: Callable[..., tuple[torch.Tensor, ...]], gated: bool) -> None:
    gate, up, down, act1, act2 = Layer().factors()
    for acts in ((act1, act2), (act1[0], act2[0])):
        given = (gate, up, down, *acts) if gated else (gate, down, *acts)
        for field in range(3):

            def one(*args: torch.Tensor, field: int = field) -> torch.Tensor:
                return scales(*(args if gated else (args[0], None, *args[1:])))[field]

            assert_prepares(one, *(tensor.clone() for tensor in given))


def test_biases_in_units_trace_and_own_their_memory() -> None:
    bias = join_gate_up(torch.randn(E, I), torch.randn(E, I), UP_GATE)
    assert_prepares(lambda b, g, u: bias_in_units(b, UP_GATE, g, u), bias, torch.rand(E) + 1, torch.rand(E) + 1)
    assert_prepares(in_units, torch.randn(E, H), torch.rand(E) + 1)
