"""Near twins of expert activations that must be told apart or refused, and gate and up of two GEMMs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from activation_spellings import (
    GATE_UP,
    UP_GATE,
    Fn,
    I,
    Tensor,
    found,
    gpt_oss,
    name_of,
    reglu,
    softcap,
    softcapped,
    swiglu,
    traced,
)
from fp4_inductor.patterns.activation import identify_activation
from fp4_inductor.patterns.signature import Memo
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from fp4_inductor.matching import NoMatch
from fp4_inductor.spec import ActivationSpec, GateUpOrder

# --- gate and up apart


def apart(fn: Fn, *, swap: bool = False, memo: Memo | None = None) -> tuple[ActivationSpec, GateUpOrder]:
    """What ``fn(first, second)`` is, of two GEMMs that stand in the order of its arguments."""
    graph = make_fx(fn, decomposition_table=core_aten_decompositions(), tracing_mode="fake")(
        *(torch.randn(6, I, dtype=torch.bfloat16) for _ in range(2))
    )
    (result,) = next(iter(reversed(graph.graph.nodes))).args
    first, second = (node for node in graph.graph.nodes if node.op == "placeholder")
    identified = identify_activation(result, [second, first] if swap else [first, second], I, memo)
    return identified.spec, identified.order


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(
    ("fn", "spec"),
    [(lambda a, b: F.silu(a) * b, ActivationSpec("silu")),
     (lambda a, b: b.clamp(-2, 2) * F.gelu(a.clamp(max=3)), ActivationSpec("gelu", limit=3.0, up_limit=2.0))],
    ids=["swiglu", "clamped"],
)  # fmt: skip
def test_gate_and_up_apart(fn: Fn, spec: ActivationSpec, swap: bool) -> None:
    assert apart(fn, swap=swap) == (spec, UP_GATE if swap else GATE_UP)


def test_gate_and_up_apart_are_never_taken_for_one_another() -> None:
    """``silu(a) * b`` and ``silu(b) * a`` have the same nodes; a memo between them must tell them apart."""
    memo = Memo()
    for _ in range(2):
        assert apart(lambda a, b: F.silu(a) * b, memo=memo)[1] is GATE_UP
        assert apart(lambda a, b: F.silu(b) * a, memo=memo)[1] is UP_GATE
        assert apart(lambda a, b: F.silu(a) * b, swap=True, memo=memo)[1] is UP_GATE


@pytest.mark.parametrize(
    "fn",
    [lambda a, b: F.silu(a) * F.silu(b), lambda a, b: F.silu(a) * a, lambda a, b: F.silu(a + b) * b,
     lambda a, b: F.silu(a) * b.flip(0), lambda a, b: F.silu(a) * b + a, lambda a, b: F.silu(a)],
)  # fmt: skip
def test_twins_of_gate_and_up_apart_are_refused(fn: Fn) -> None:
    with pytest.raises(NoMatch):
        apart(fn)


# --- twins that must be refused


def gate_clamped_twice(x: Tensor) -> Tensor:
    return gpt_oss(x, gate_low=-7.0)


def only_gate_clamped(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=10.0)) * up


def only_up_clamped(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up.clamp(-10.0, 10.0)


def clamped_after_on_both_sides(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).clamp(-10.0, 10.0) * up.clamp(-10.0, 10.0) + 0 * gate.clamp(min=-0.1)


def clamped_product(x: Tensor) -> Tensor:
    return swiglu(x).clamp(-10.0, 10.0)


def uneven_limits(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=10.0)) * up.clamp(-9.0, 10.0)


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


def only_up_capped(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * softcap(up, 30.0)


def gate_capped_before(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(softcap(gate, 30.0)) * softcap(up, 30.0)


def capped_by_another_factor(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.tanh(gate / 4.0) * 4.001 * torch.sigmoid(gate) * softcap(up, 25.0)


def capped_and_clamped(x: Tensor) -> Tensor:
    return softcapped(x).clamp(-100.0, 100.0)


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
    [(gate_clamped_twice, "is none that is known"), (only_gate_clamped, "only the gate clamped"),
     (only_up_clamped, "only up clamped"), (clamped_after_on_both_sides, "no step of swiglu"),
     (clamped_product, "none that is known"),
     (uneven_limits, "none that is known"), (only_up_capped, "only up capped"),
     (gate_capped_before, "the gate capped before it"), (capped_by_another_factor, "none that is known"),
     (capped_and_clamped, "no step of swiglu"),
     (output_clamped_far_out, "none that is known"), (input_clamped_far_out, "no step of swiglu"),
     (small_results_dropped, "no step of swiglu"), (nan_removed, "no step of"),
     (interleaved_up_first, "interleaved, up first"),
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
