"""Spellings of expert activations, as graphs of ATen."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from fp4_inductor.patterns.activation import identify_activation
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from fp4_inductor.spec import ActivationSpec, GateUpOrder

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


def clamped_after(x: Tensor, limit: float = 10.0) -> Tensor:
    """As step3p7 does."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def softcap(x: Tensor, limit: float | Tensor) -> Tensor:
    return torch.tanh(x / limit) * limit


def softcapped(x: Tensor, gate_cap: float | Tensor = 4.0, up_cap: float | Tensor = 25.0) -> Tensor:
    """As inkling2 does: the sigmoid sees the raw gate."""
    gate, up = x.float().chunk(2, dim=-1)
    return (softcap(gate, gate_cap) * torch.sigmoid(gate) * softcap(up, up_cap)).to(x.dtype)


def two_limits(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=10.0)) * up.clamp(-9.0, 9.0)


def gelu_by_erf(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return up * (gate * 0.5 * (1.0 + torch.erf(gate / math.sqrt(2.0))))


def gelu_by_polynomial(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    inner = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * torch.pow(gate, 3.0))
    return 0.5 * gate * (1.0 + torch.tanh(inner)) * up


def quick_geglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return gate * torch.sigmoid(1.702 * gate) * up


def product_in_float32(x: Tensor) -> Tensor:
    """As beam does."""
    gate, up = x.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(x.dtype)


def plus_one_by_addition(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    glu = F.silu(gate)
    return glu * up + glu


def clamped_by_minimum(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    limit = torch.tensor(7.0, dtype=x.dtype)
    return F.silu(torch.minimum(gate, limit)) * torch.maximum(torch.minimum(up, limit), -limit)


def clamped_by_where(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    gate = torch.where(gate > 7.0, 7.0, gate)
    up = up.masked_fill(up > 7.0, 7.0)
    return F.silu(gate) * torch.where(up < -7.0, -7.0, up)


def clamped_at_infinity(x: Tensor) -> Tensor:
    """As step3p7 does in layers without a limit."""
    return clamped_after(x, float("inf"))


def relu_squared(x: Tensor) -> Tensor:
    return torch.square(F.relu(x))
