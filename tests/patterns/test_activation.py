"""Spellings of expert activations that must be recognised, and near twins that must not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture import Level, capture
from fp4_inductor.patterns.activation import identify_activation
from torch import fx, nn
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from fp4_inductor.matching import NoMatch
from fp4_inductor.spec import RUNTIME, ActivationSpec, GateUpOrder, Operand

Tensor = torch.Tensor
Fn = Callable[..., Tensor]
I = 40  # noqa: E741
GATE_UP, UP_GATE, INTERLEAVED = GateUpOrder.GATE_UP, GateUpOrder.UP_GATE, GateUpOrder.INTERLEAVED


def name_of(value: object) -> str | None:
    return getattr(value, "__name__", None) if callable(value) else None


def traced(fn: Fn, rows: tuple[int, ...] = (6,), width: int = 2 * I, *scalars: Tensor,
           dtype: torch.dtype = torch.bfloat16, decompose: bool = True) -> Any:  # fmt: skip
    """The result and the pre-activation of ``fn`` in a graph of ATen."""
    table = core_aten_decompositions() if decompose else {}
    functional = torch.func.functionalize(lambda *inputs: fn(*inputs), remove="mutations_and_views")
    graph = make_fx(functional, decomposition_table=table, tracing_mode="fake")(
        torch.randn(*rows, width, dtype=dtype), *scalars
    )
    (result,) = next(iter(reversed(graph.graph.nodes))).args
    return result, next(iter(graph.graph.nodes))


def found(fn: Fn, *args: Any, **kwargs: Any) -> tuple[ActivationSpec, GateUpOrder]:
    result, inputs = traced(fn, *args, **kwargs)
    identified = identify_activation(result, [inputs], I)
    assert not identified.scalars
    return identified.spec, identified.order


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_up_first(x: Tensor) -> Tensor:
    up, gate = x.split(I, dim=-1)
    return F.silu(gate) * up


def swiglu_other_spelling(x: Tensor) -> Tensor:
    gate, up = x[..., :I].float(), x[..., I:].float()
    return (gate / (1 + torch.exp(-gate)) * up).to(x.dtype)


def swiglu_sigmoid(x: Tensor) -> Tensor:
    gate, up = x[..., :I], x[..., I:]
    return up * gate * torch.sigmoid(gate)


def swiglu_interleaved(x: Tensor) -> Tensor:
    return F.silu(x[..., ::2]) * x[..., 1::2]


def swiglu_paired(x: Tensor) -> Tensor:
    gate, up = x.unflatten(-1, (I, 2)).unbind(-1)
    return F.silu(gate) * up


def swiglu_stacked(x: Tensor) -> Tensor:
    both = x.reshape(-1, 2, I)
    return F.silu(both[:, 0]) * both[:, 1]


def geglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate) * up


def geglu_tanh(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def reglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.where(gate > 0, gate, 0.0) * up


def gpt_oss(x: Tensor, alpha: float | Tensor = 1.702, limit: float = 7.0, gate_low: float | None = None) -> Tensor:
    gate, up = x[..., ::2], x[..., 1::2]
    gate = gate.clamp(min=gate_low, max=limit)
    up = up.clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def clamped(x: Tensor, limit: float = 10.0) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def relu_squared(x: Tensor) -> Tensor:
    return torch.square(F.relu(x))


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
]


@pytest.mark.parametrize("decompose", [True, False], ids=["decomposed", "as_written"])
@pytest.mark.parametrize(("fn", "spec", "order"), CATALOGUE, ids=name_of)
def test_catalogue(fn: Fn, spec: ActivationSpec, order: GateUpOrder, decompose: bool) -> None:
    assert found(fn, decompose=decompose) == (spec, order)


@pytest.mark.parametrize("kind", ["silu", "gelu", "relu", "relu2"])
def test_activations_without_a_gate(kind: Any) -> None:
    fn = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu, "relu2": relu_squared}[kind]
    assert found(fn, (6,), I) == (ActivationSpec(kind, gated=False), GATE_UP)


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


# --- twins that must be refused


def gate_clamped_twice(x: Tensor) -> Tensor:
    return gpt_oss(x, gate_low=-7.0)


def clamped_after(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).clamp(max=10.0) * up.clamp(-10.0, 10.0)


def only_gate_clamped(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=10.0)) * up


def two_limits(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=10.0)) * up.clamp(-9.0, 9.0)


def output_clamped_far_out(x: Tensor) -> Tensor:
    return swiglu(x).clamp(-60000.0, 60000.0)


def input_clamped_far_out(x: Tensor) -> Tensor:
    return swiglu(x.clamp(-60000.0, 60000.0))


def small_results_dropped(x: Tensor) -> Tensor:
    y = swiglu(x)
    return torch.where(y.abs() < 1e-13, 0.0, y)


def nan_removed(x: Tensor) -> Tensor:
    return torch.nan_to_num(swiglu(x))


def interleaved_up_first(x: Tensor) -> Tensor:
    return F.silu(x[..., 1::2]) * x[..., ::2]


def softcapped(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * torch.tanh(up / 30) * 30


def softcapped_far_out(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(torch.tanh(gate / 1e5) * 1e5) * up


def softcapped_by_a_small_factor(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * torch.tanh(up * 1e-6) / 1e-6


def rolled(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up.roll(1, 0)


def normalised(x: Tensor) -> Tensor:
    y = swiglu(x).float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def quantised(x: Tensor) -> Tensor:
    return swiglu(x).to(torch.float8_e4m3fn).to(x.dtype)


def rounded_to_integers(x: Tensor) -> Tensor:
    y = swiglu(x)
    return y + (y * 0).to(torch.int32)


def infinities_removed(x: Tensor) -> Tensor:
    y = reglu(x)
    return torch.where(y.isinf(), 0.0, y)


def bilinear(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return gate * up


def scaled(x: Tensor) -> Tensor:
    return swiglu(x) * 1.00001


@pytest.mark.parametrize(
    ("fn", "reason"),
    [(gate_clamped_twice, "is none that is known"), (clamped_after, "clamped after the activation"),
     (only_gate_clamped, "only the gate clamped"), (two_limits, "none that is known"),
     (output_clamped_far_out, "none that is known"), (input_clamped_far_out, "no step of swiglu"),
     (small_results_dropped, "no step of swiglu"), (nan_removed, "no step of"),
     (interleaved_up_first, "interleaved, up first"), (softcapped, "none that is known"),
     (softcapped_far_out, "no number of swiglu|none that is known"),
     (softcapped_by_a_small_factor, "no number of swiglu|none that is known"),
     (rolled, "no step of an activation"), (normalised, "no step of an activation"), (quantised, "makes torch.float8"),
     (rounded_to_integers, "makes torch.int32"), (infinities_removed, "no step of relu"),
     (bilinear, "none that is known"), (scaled, "none that is known")],
    ids=name_of,
)  # fmt: skip
def test_twins_are_refused(fn: Fn, reason: str) -> None:
    with pytest.raises(NoMatch, match=reason):
        found(fn)


def test_other_tensors_are_refused() -> None:
    result, inputs = traced(lambda x, y: swiglu(x) * y, (6,), 2 * I, torch.randn(6, 1))
    with pytest.raises(NoMatch, match="no scalar"):
        identify_activation(result, [inputs], I)


def test_scalars_without_a_part_are_refused() -> None:
    result, inputs = traced(lambda x, s: swiglu(x) * s, (6,), 2 * I, torch.tensor(2.0))
    with pytest.raises(NoMatch, match="none that is known"):
        identify_activation(result, [inputs], I)
    result, inputs = traced(lambda x, s: swiglu(x) + s * 0, (6,), 2 * I, torch.tensor(2.0))
    with pytest.raises(NoMatch, match="plays no part"):
        identify_activation(result, [inputs], I)


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


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("level", ["inner", "post_grad"])
@pytest.mark.parametrize(
    ("fn", "spec", "order"),
    [(swiglu, ActivationSpec("silu"), GATE_UP), (Hf.gelu_tanh, ActivationSpec("gelu_tanh"), GATE_UP),
     (Hf.relu2, ActivationSpec("relu2", gated=False), GATE_UP),
     (Hf.gpt_oss, ActivationSpec("silu", alpha=1.702, beta=1.0, limit=7.0), INTERLEAVED),
     (clamped, ActivationSpec("silu", limit=10.0), GATE_UP)],
    ids=name_of,
)  # fmt: skip
def test_compiled_graphs(fn: Fn, spec: ActivationSpec, order: GateUpOrder, level: Level, dynamic: bool) -> None:
    model = TwoGemms(fn, 2 * I if spec.gated else I)
    graph = capture(model, torch.randn(5, 7, 32, dtype=torch.bfloat16), level=level, dynamic=dynamic)
    identified = identify_activation(*between_gemms(graph), I)
    assert identified.order is order
    assert identified.spec == spec
