"""Spellings of expert activations that must be recognised, in traces and in compiled graphs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from activation_spellings import (
    GATE_UP,
    INTERLEAVED,
    UP_GATE,
    Fn,
    I,
    Tensor,
    clamped,
    clamped_after,
    clamped_at_infinity,
    clamped_by_minimum,
    clamped_by_where,
    found,
    geglu,
    geglu_tanh,
    gelu_by_erf,
    gelu_by_polynomial,
    gpt_oss,
    name_of,
    plus_one_by_addition,
    product_in_float32,
    quick_geglu,
    reglu,
    relu_squared,
    softcapped,
    swiglu,
    swiglu_interleaved,
    swiglu_other_spelling,
    swiglu_paired,
    swiglu_sigmoid,
    swiglu_stacked,
    swiglu_up_first,
    traced,
    two_limits,
)
from capture import Level, capture
from fp4_inductor.patterns.activation import IdentifiedActivation, identify_activation
from torch import fx, nn

from fp4_inductor.reference import activate
from fp4_inductor.spec import ACTIVATION_KNOBS, RUNTIME, ActivationSpec, GateUpOrder, Operand

CATALOGUE = [
    (swiglu, ActivationSpec("silu"), GATE_UP),
    (swiglu_up_first, ActivationSpec("silu"), UP_GATE),
    (swiglu_other_spelling, ActivationSpec("silu"), GATE_UP),
    (swiglu_sigmoid, ActivationSpec("silu"), GATE_UP),
    (swiglu_interleaved, ActivationSpec("silu"), INTERLEAVED),
    (swiglu_paired, ActivationSpec("silu"), INTERLEAVED),
    (swiglu_stacked, ActivationSpec("silu"), GATE_UP),
    (geglu, ActivationSpec("gelu"), GATE_UP),
    (geglu_tanh, ActivationSpec("gelu_tanh"), GATE_UP),
    (reglu, ActivationSpec("relu"), GATE_UP),
    (gpt_oss, ActivationSpec("silu", alpha=1.702, beta=1.0, limit=7.0), INTERLEAVED),
    (clamped, ActivationSpec("silu", limit=10.0), GATE_UP),
    (clamped_after, ActivationSpec("silu", limit=10.0, bound="clamp_activated"), GATE_UP),
    (softcapped, ActivationSpec("silu", limit=4.0, up_limit=25.0, bound="softcap"), GATE_UP),
    (two_limits, ActivationSpec("silu", limit=10.0, up_limit=9.0), GATE_UP),
    (gelu_by_erf, ActivationSpec("gelu"), GATE_UP),
    (gelu_by_polynomial, ActivationSpec("gelu_tanh"), GATE_UP),
    (quick_geglu, ActivationSpec("silu", alpha=1.702), GATE_UP),
    (product_in_float32, ActivationSpec("silu"), GATE_UP),
    (plus_one_by_addition, ActivationSpec("silu", beta=1.0), GATE_UP),
    (clamped_by_minimum, ActivationSpec("silu", limit=7.0), GATE_UP),
    (clamped_by_where, ActivationSpec("silu", limit=7.0), GATE_UP),
    (clamped_at_infinity, ActivationSpec("silu"), GATE_UP),
]


@pytest.mark.parametrize("decompose", [True, False], ids=["decomposed", "as_written"])
@pytest.mark.parametrize(("fn", "spec", "order"), CATALOGUE, ids=name_of)
def test_catalogue(fn: Fn, spec: ActivationSpec, order: GateUpOrder, decompose: bool) -> None:
    assert found(fn, decompose=decompose) == (spec, order)


@pytest.mark.parametrize("kind", ["silu", "gelu", "relu", "relu2"])
def test_activations_without_a_gate(kind: Any) -> None:
    fn = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu, "relu2": relu_squared}[kind]
    assert found(fn, (6,), I) == (ActivationSpec(kind, gated=False), GATE_UP)


BOUNDED = [
    ActivationSpec("silu", limit=3.0),
    ActivationSpec("gelu", limit=3.0, up_limit=5.0),
    ActivationSpec("silu", alpha=1.7, beta=0.5, limit=3.0, bound="clamp_activated"),
    ActivationSpec("gelu", limit=3.0, up_limit=1.5, bound="clamp_activated"),
    ActivationSpec("gelu_tanh", limit=3.0, bound="softcap"),
    ActivationSpec("relu2", beta=-1.0, limit=3.0, up_limit=2.0, bound="softcap"),
    *(ActivationSpec("silu", gated=False, limit=3.0, bound=bound) for bound in ("clamp", "clamp_activated", "softcap")),
    ActivationSpec("relu2", gated=False, limit=3.0),
]


@pytest.mark.parametrize("spec", BOUNDED, ids=str)
def test_the_reference_is_recognised_as_itself(spec: ActivationSpec) -> None:
    width = 2 * I if spec.gated else I
    assert found(lambda x: activate(x, spec, INTERLEAVED), (6,), width)[0] == spec


@pytest.mark.parametrize("rows", [(1,), (4,), (4096,), (97,), (3, 5), (8, 700)], ids=str)
def test_any_number_of_rows(rows: tuple[int, ...]) -> None:
    assert found(clamped, rows) == (ActivationSpec("silu", limit=10.0), GATE_UP)
    assert found(gpt_oss, rows)[1] is INTERLEAVED


def test_views_into_tokens_and_slots() -> None:
    def fn(x: Tensor) -> Tensor:
        gate, up = x.view(1024, 4, 2 * I).chunk(2, dim=-1)
        return (F.silu(gate) * up).reshape(4096, I)

    assert found(fn, (4096,)) == (ActivationSpec("silu"), GATE_UP)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtype_makes_no_difference(dtype: torch.dtype) -> None:
    assert found(geglu_tanh, dtype=dtype)[0].kind == "gelu_tanh"


@pytest.mark.parametrize("alpha", [1.702, 1.7, 1.0, 0.5])
@pytest.mark.parametrize("limit", [7.0, 10.0, 6.5])
def test_parameters_are_read_from_the_graph(alpha: float, limit: float) -> None:
    spec, _ = found(lambda x: gpt_oss(x, alpha, limit))
    assert (spec.alpha, spec.beta, spec.limit) == (alpha, 1.0, limit)


def test_parameters_in_constant_tensors() -> None:
    def fn(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return gate * torch.sigmoid(torch.tensor(1.5) * gate) * (up + torch.full((), 0.25))

    assert found(fn)[0] == ActivationSpec("silu", alpha=1.5, beta=0.25)


def test_scalars_that_the_graph_takes_at_run_time() -> None:
    def fn(x: Tensor, limit: Tensor, alpha: Tensor) -> Tensor:
        gate, up = x[..., ::2], x[..., 1::2]
        gate, up = torch.minimum(gate, limit), torch.maximum(torch.minimum(up, limit), -limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha.to(torch.bfloat16)))

    result, inputs = traced(fn, (6,), 2 * I, torch.tensor(7.0), torch.tensor(1.702, dtype=torch.float64))
    identified = identify_activation(result, [inputs], I)
    assert identified.spec == ActivationSpec("silu", alpha=RUNTIME, beta=1.0, limit=RUNTIME)
    _, limit, alpha = (node for node in inputs.graph.nodes if node.op == "placeholder")
    assert identified.scalars == {Operand.ALPHA: alpha, Operand.LIMIT: limit}


def test_soft_caps_that_the_graph_takes_at_run_time() -> None:
    caps = torch.tensor(4.0), torch.tensor(25.0, dtype=torch.float64)
    result, inputs = traced(softcapped, (6,), 2 * I, *caps)
    identified = identify_activation(result, [inputs], I)
    assert identified.spec == ActivationSpec("silu", limit=RUNTIME, up_limit=RUNTIME, bound="softcap")
    _, gate_cap, up_cap = (node for node in inputs.graph.nodes if node.op == "placeholder")
    assert identified.scalars == {Operand.LIMIT: gate_cap, Operand.UP_LIMIT: up_cap}
    result, inputs = traced(lambda x, cap: softcapped(x, cap, cap), (6,), 2 * I, torch.tensor(4.0))
    assert identify_activation(result, [inputs], I).spec == ActivationSpec("silu", limit=RUNTIME, bound="softcap")


# --- graphs as the passes see them


class TwoGemms(nn.Module):
    def __init__(self, fn: Fn, width: int) -> None:
        super().__init__()
        self.fn = fn
        self.first = nn.Parameter(torch.randn(5, 32, width, dtype=torch.bfloat16), requires_grad=False)
        self.second = nn.Parameter(torch.randn(5, I, 32, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(self.fn(torch.bmm(x, self.first)), self.second)


class Hf:
    """transformers' own activations, in the way their experts call them."""

    @staticmethod
    def gelu_tanh(x: Tensor) -> Tensor:
        from transformers.activations import ACT2FN

        gate, up = x.chunk(2, dim=-1)
        return ACT2FN["gelu_pytorch_tanh"](gate) * up

    @staticmethod
    def relu2(x: Tensor) -> Tensor:
        from transformers.activations import ACT2FN

        return ACT2FN["relu2"](x)

    @staticmethod
    def gpt_oss(x: Tensor) -> Tensor:
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

        experts = GptOssExperts.__new__(GptOssExperts)
        experts.alpha, experts.limit = 1.702, 7.0
        return GptOssExperts._apply_gate(experts, x)


@pytest.mark.parametrize(
    ("family", "name", "spec"),
    [("deepseek_v4", "DeepseekV4Experts", ActivationSpec("silu", limit=10.0)),
     ("glm5_next", "Glm5NextTextExperts", ActivationSpec("silu", limit=10.0)),
     ("hy_v4", "HYV4Experts", ActivationSpec("silu", limit=10.0)),
     ("step3p7", "Step3p7Experts", ActivationSpec("silu", limit=10.0, bound="clamp_activated")),
     ("minimax_m3_vl", "MiniMaxM3VLExperts", ActivationSpec("silu", alpha=1.702, beta=1.0, limit=10.0))],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_limits_far_out_are_seen(family: str, name: str, spec: ActivationSpec) -> None:
    """Probes that never reach 10 take these for a plain swiglu."""
    path = f"transformers.models.{family}.modeling_{family}"
    module = pytest.importorskip(path, reason=f"this transformers has no {family}")
    this = SimpleNamespace(limit=10.0, swiglu_limit=10.0, swiglu_alpha=1.702, act_fn=F.silu)
    assert found(lambda x: getattr(module, name)._apply_gate(this, x)) == (spec, GATE_UP)


def between_gemms(graph: fx.GraphModule) -> tuple[fx.Node, fx.Node]:
    first, second = (node for node in graph.graph.nodes if node.target is torch.ops.aten.bmm.default)
    return second.args[0], first


def with_values(identified: IdentifiedActivation, spec: ActivationSpec) -> ActivationSpec:
    """The identified spec with those of ``spec`` for what the graph takes at run time."""
    given = {name: getattr(spec, name) for name, knob in ACTIVATION_KNOBS.items() if knob in identified.scalars}
    assert all(getattr(identified.spec, name) is RUNTIME for name in given)
    return replace(identified.spec, **given)


class WithKnobs(nn.Module):
    """An activation whose numbers are attributes, which dynamic sizes turn into inputs, buffers or constants."""

    def __init__(self, fn: Fn, as_buffers: bool, *values: float) -> None:
        super().__init__()
        self.fn, self.count = fn, len(values)
        for place, value in enumerate(values):
            if as_buffers:
                self.register_buffer(f"knob{place}", torch.tensor(value))
            else:
                setattr(self, f"knob{place}", value)

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x, *(getattr(self, f"knob{place}") for place in range(self.count)))


def with_alpha_and_limit(x: Tensor, alpha: float | Tensor, limit: float | Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    if isinstance(limit, Tensor):
        gate, up = torch.minimum(gate, limit.to(x.dtype)), torch.clamp(up, -limit.to(x.dtype), limit.to(x.dtype))
    else:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * up


@pytest.mark.parametrize("as_buffers", [False, True], ids=["floats", "tensors"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("fn", "values", "spec"),
    [(with_alpha_and_limit, (1.702, 7.0), ActivationSpec("silu", alpha=1.702, limit=7.0)),
     (softcapped, (4.0, 25.0), ActivationSpec("silu", limit=4.0, up_limit=25.0, bound="softcap"))],
    ids=["clamp", "softcap"],
)  # fmt: skip
def test_knobs_of_compiled_graphs(
    fn: Fn, values: tuple[float, ...], spec: ActivationSpec, dynamic: bool, as_buffers: bool
) -> None:
    """Whatever is an input of the graph is an operand; whatever is not has the value that it was written with."""
    model = TwoGemms(WithKnobs(fn, as_buffers, *values), 2 * I)
    graph = capture(model, torch.randn(5, 7, 32, dtype=torch.bfloat16), dynamic=dynamic)
    result, first = between_gemms(graph)
    identified = identify_activation(result, [first], I)
    assert all(node.op == "placeholder" for node in identified.scalars.values())
    if as_buffers:
        assert len(identified.scalars) == len(values)
    assert with_values(identified, spec) == spec


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("level", ["inner", "post_grad"])
@pytest.mark.parametrize(
    ("fn", "spec", "order"),
    [(swiglu, ActivationSpec("silu"), GATE_UP), (Hf.gelu_tanh, ActivationSpec("gelu_tanh"), GATE_UP),
     (Hf.relu2, ActivationSpec("relu2", gated=False), GATE_UP),
     (Hf.gpt_oss, ActivationSpec("silu", alpha=1.702, beta=1.0, limit=7.0), INTERLEAVED),
     (clamped, ActivationSpec("silu", limit=10.0), GATE_UP),
     (clamped_after, ActivationSpec("silu", limit=10.0, bound="clamp_activated"), GATE_UP),
     (softcapped, ActivationSpec("silu", limit=4.0, up_limit=25.0, bound="softcap"), GATE_UP)],
    ids=name_of,
)  # fmt: skip
def test_compiled_graphs(fn: Fn, spec: ActivationSpec, order: GateUpOrder, level: Level, dynamic: bool) -> None:
    model = TwoGemms(fn, 2 * I if spec.gated else I)
    graph = capture(model, torch.randn(5, 7, 32, dtype=torch.bfloat16), level=level, dynamic=dynamic)
    result, first = between_gemms(graph)
    identified = identify_activation(result, [first], I)
    assert identified.order is order
    assert with_values(identified, spec) == spec
    assert dynamic or not identified.scalars
