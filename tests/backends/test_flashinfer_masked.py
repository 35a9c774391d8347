"""Blocks through the masked grouped GEMM against a float64 reference; stand-ins leave rows that are not there NaN."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from flashinfer_cute_stand_in import MASKED_GEMM, MASKED_QUANTIZE
from moe_cases import EXPERTS_CASES, RUNTIME_SWIGLU, MoECase
from test_flashinfer import with_gate_and_up
from test_flashinfer_cute import calls, case, device  # noqa: F401
from tolerances import assert_close_per_token

from fp4_inductor.backends import flashinfer_masked, get_backend
from fp4_inductor.plan import KernelPlan, run_plan
from fp4_inductor.spec import ActivationSpec, GateUpOrder, Operand

BACKEND, ON = get_backend("flashinfer_cutedsl"), device("sm_100")
CALLS = [MASKED_QUANTIZE, MASKED_GEMM] * 2
ACTIVATIONS = {
    str(given["activation"]): given["activation"] for given in EXPERTS_CASES.values() if "activation" in given
}


def biased(**given: Any) -> MoECase:
    return case("cutedsl-nvfp4", **{"bias": True, **given})


def plan(made: MoECase) -> KernelPlan:
    assert BACKEND.check(made.spec, ON).ok
    chosen = BACKEND.plan(made.spec, ON)
    assert chosen.op == "fp4_inductor::moe_flashinfer_masked_nvfp4"
    assert chosen.activations == "nvfp4"
    return chosen


def check(made: MoECase) -> None:
    assert_close_per_token(run_plan(plan(made), made.operands), made.reference(), torch.bfloat16)


@pytest.mark.parametrize("order", GateUpOrder, ids=str)
def test_orders_and_padding(order: GateUpOrder, calls: list[str]) -> None:  # noqa: F811
    check(biased(w13_order=order, hidden_size=160, intermediate_size=96))
    assert calls == CALLS


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=list(ACTIVATIONS))
def test_every_activation_with_biases(activation: ActivationSpec) -> None:
    check(biased(activation=activation, amplitude=2.0))


@pytest.mark.parametrize("left_out", [Operand.W13_BIAS, Operand.W2_BIAS], ids=str)
def test_one_bias_alone(left_out: Operand) -> None:
    made = biased(bias_dtype=torch.float32)
    operands = {operand: tensor for operand, tensor in made.operands.items() if operand is not left_out}
    check(MoECase(replace(made.spec, **{f"has_{left_out}": False}), operands))


@pytest.mark.parametrize("activation", [ActivationSpec("silu", limit=0.7, beta=0.5), RUNTIME_SWIGLU], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_unequal_globals_of_gate_and_up_with_any_activation(activation: ActivationSpec, bias: bool) -> None:
    made = biased(activation=activation, bias=bias, w13_order=GateUpOrder.INTERLEAVED)
    factor = made.operands[Operand.W13_GLOBAL]
    check(with_gate_and_up(made, factor, factor * (torch.rand(5, 1) * 4 + 0.1)))


@pytest.mark.parametrize("num_tokens", [1, 127, 128, 131])
def test_token_counts(num_tokens: int) -> None:
    check(biased(num_tokens=num_tokens, outside_ids=num_tokens > 1, hidden_size=64, intermediate_size=64))


def test_all_tokens_to_one_expert() -> None:
    made = biased(num_tokens=140, top_k=1, hidden_size=64, intermediate_size=64)
    ids = torch.full_like(made.operands[Operand.TOPK_IDS], 3)
    check(MoECase(made.spec, {**made.operands, Operand.TOPK_IDS: ids}))


def test_many_tokens_go_in_pieces(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(flashinfer_masked, "MAX_ELEMENTS", 1)
    check(biased(num_tokens=300, hidden_size=64, intermediate_size=64))
    assert calls == CALLS * 3


def test_no_tokens(calls: list[str]) -> None:  # noqa: F811
    made = biased()
    first = (Operand.HIDDEN, Operand.TOPK_IDS, Operand.TOPK_WEIGHTS)
    operands = {operand: tensor[:0] if operand in first else tensor for operand, tensor in made.operands.items()}
    assert run_plan(plan(made), operands).shape == (0, 128)
    assert not calls


def test_only_for_what_the_fused_kernel_does_not_know() -> None:
    fused = case("cutedsl-nvfp4").spec
    assert BACKEND.plan(fused, ON).op == "fp4_inductor::moe_flashinfer_cutedsl_nvfp4"
    for refused in (
        replace(biased().spec, activation_format=None),
        replace(biased().spec, activation_format="mxfp8"),
        replace(biased().spec, act_dtype=torch.float16),
        case("cutedsl-mxfp8", bias=True).spec,
    ):
        assert not BACKEND.check(refused, ON).ok
    assert not BACKEND.check(biased().spec, device("sm_120")).ok


def test_what_would_allow_it_is_told() -> None:
    (reason,) = BACKEND.check(replace(biased().spec, activation_format=None), ON).reasons
    assert reason.hint == "options={'fp4moe.activation_format': 'nvfp4'} allows another kernel, which can"
    (reason,) = BACKEND.check(case("cutedsl-mxfp8", bias=True).spec, ON).reasons
    assert "activation_format" not in reason.hint


def test_layers_alike_share_recipes() -> None:
    first, second = (plan(biased()).prepared for _ in range(2))
    assert len(first) == 8
    assert all(a is b for a, b in zip(first, second, strict=True))
