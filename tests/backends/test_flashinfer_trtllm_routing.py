"""Routers that TensorRT-LLM's kernels run: those that say the same, and no others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from flashinfer_stand_in import FP4_QUANTIZE, MXFP8_QUANTIZE, TRTLLM, TRTLLM_FROM_LOGITS, fp4_quantize, real, stand_in
from fp4_inductor.patterns.router_formulas import router_reference
from moe_cases import MoECase
from test_flashinfer import STEP, case, check, device, run
from tolerances import assert_close_per_token

from fp4_inductor.backends import get_backend
from fp4_inductor.backends.flashinfer_trtllm_routing import routes_inside
from fp4_inductor.spec import RUNTIME, GivenRouting, Operand, RouterSpec, Scoring

SOFTMAX, SIGMOID = Scoring.SOFTMAX, Scoring.SIGMOID
GROUPED = RouterSpec(SIGMOID, has_bias=True, num_groups=4, topk_groups=2, renormalize=True, scaling_factor=2.5)
INSIDE = {
    "gpt-oss": RouterSpec(SOFTMAX, topk_before_scoring=True),
    "qwen3": RouterSpec(SOFTMAX, renormalize=True),
    "qwen3 without norm_topk_prob": RouterSpec(SOFTMAX),
    "top-k, then sigmoid": RouterSpec(SIGMOID, topk_before_scoring=True),
    "sigmoid": RouterSpec(SIGMOID),
    "sigmoid, divided": RouterSpec(SIGMOID, renormalize=True, renormalize_eps=1e-20),
    "with a bias": RouterSpec(SIGMOID, has_bias=True, renormalize=True, scaling_factor=1.5, renormalize_eps=1e-20),
    "groups": GROUPED,
}
OUTSIDE = {
    "given": GivenRouting(),
    "scaled softmax": RouterSpec(SOFTMAX, scaling_factor=2.0),
    "softmax with a bias": RouterSpec(SOFTMAX, has_bias=True, renormalize=True),
    "softmax in groups": RouterSpec(SOFTMAX, num_groups=4, topk_groups=2),
    "survivors divided again": RouterSpec(SIGMOID, topk_before_scoring=True, renormalize=True),
    "bias on logits": replace(GROUPED, topk_before_scoring=True),
    "bias without division": RouterSpec(SIGMOID, has_bias=True),
    "square root of softplus": RouterSpec(Scoring.SQRT_SOFTPLUS, has_bias=True, renormalize=True),
    "sparsemixer": RouterSpec(Scoring.SPARSEMIXER, sparsity_threshold=0.2),
    "an eps that shows": RouterSpec(SIGMOID, renormalize=True, renormalize_eps=1e-6),
    "a floor that shows": RouterSpec(SOFTMAX, renormalize=True, renormalize_min=1e-3),
    "runtime factor": replace(GROUPED, scaling_factor=RUNTIME),
    "scales of experts": RouterSpec(SOFTMAX, has_expert_scale=True),
    "shared experts": RouterSpec(SIGMOID, renormalize=True, num_shared_experts=1),
    "null experts": RouterSpec(SOFTMAX, num_null_experts=2),
    "ids given": RouterSpec(SIGMOID, ids_given=True),
    "low scores": RouterSpec(SOFTMAX, renormalize=True, dtype=torch.bfloat16),
    "groups by their best": replace(GROUPED, group_score="max"),
    "left groups count as zero": replace(GROUPED, group_fill=0.0),
    "many groups left": replace(GROUPED, num_groups=8, topk_groups=5),
    "groups of one": replace(GROUPED, num_groups=16, topk_groups=4),
}


def routed(
    mode: str, router: RouterSpec, logits_dtype: torch.dtype = torch.bfloat16, **given: Any
) -> tuple[MoECase, MoECase]:
    """A case with logits alone, and with the ids and weights that the router gives."""
    made = case(mode, **{"num_experts": 16, "top_k": 3, "weights_dtype": torch.bfloat16, **given})
    spec = replace(made.spec, router=router)
    rng = torch.Generator().manual_seed(5)
    # Distinct in bfloat16, so that nobody chooses between equals.
    order = torch.rand(made.operands[Operand.HIDDEN].shape[0], 16, generator=rng).argsort(-1)
    logits = (order / 2 - 4 + torch.rand(1, generator=rng)).to(logits_dtype)
    bias = torch.rand(16, generator=rng) if router.has_bias else None
    ids, weights = router_reference(router, logits.double(), spec.top_k, None if bias is None else bias.double())
    others = {o: t for o, t in made.operands.items() if o not in (Operand.TOPK_IDS, Operand.TOPK_WEIGHTS)}
    given_logits = {Operand.ROUTER_LOGITS: logits, **({} if bias is None else {Operand.ROUTER_BIAS: bias})}
    known = {Operand.TOPK_IDS: ids, Operand.TOPK_WEIGHTS: weights.bfloat16()}
    return MoECase(spec, {**others, **given_logits}), MoECase(spec, {**others, **known})


@pytest.mark.parametrize("mode", ["trtllm-bf16", "trtllm-mxfp8", "trtllm-nvfp4"])
@pytest.mark.parametrize("name", INSIDE)
def test_they_route_as_the_graph_does(mode: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(monkeypatch)
    logits, known = routed(mode, INSIDE[name])
    assert routes_inside(logits.spec)
    assert_close_per_token(run(mode, logits), known.reference(), torch.bfloat16)
    quantiser = {"trtllm-mxfp8": [MXFP8_QUANTIZE], "trtllm-nvfp4": [FP4_QUANTIZE]}
    assert calls == [*quantiser.get(mode, []), TRTLLM_FROM_LOGITS]


@pytest.mark.parametrize("logits_dtype", [torch.float32, torch.float16], ids=str)
def test_logits_of_any_dtype(logits_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    logits, known = routed("trtllm-bf16", GROUPED, logits_dtype)
    assert_close_per_token(run("trtllm-bf16", logits), known.reference(), torch.bfloat16)


def test_many_and_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(monkeypatch)
    monkeypatch.setattr("fp4_inductor.backends.flashinfer_trtllm.MAX_TOKENS", 4)
    logits, known = routed("trtllm-nvfp4", GROUPED, num_tokens=9)
    assert_close_per_token(run("trtllm-nvfp4", logits), known.reference(), torch.bfloat16)
    assert calls.count(TRTLLM_FROM_LOGITS) == 3
    first = (Operand.HIDDEN, Operand.ROUTER_LOGITS)
    operands = {operand: tensor[:0] if operand in first else tensor for operand, tensor in logits.operands.items()}
    assert run("trtllm-nvfp4", MoECase(logits.spec, operands)).shape == (0, 128)
    assert calls.count(TRTLLM_FROM_LOGITS) == 3


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_they_would_do_otherwise_stays_in_the_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(monkeypatch)
    made = case("trtllm-bf16", num_experts=16, top_k=3, weights_dtype=torch.bfloat16)
    made = MoECase(replace(made.spec, router=OUTSIDE[name]), made.operands)
    assert not routes_inside(made.spec)
    if name != "null experts":  # these give a token one expert twice, and are refused
        check("trtllm-bf16", made)
        assert calls == [TRTLLM]


@pytest.mark.parametrize("wider", [torch.float32, torch.float16])
def test_weights_that_bfloat16_does_not_hold_stay_in_the_graph(wider: torch.dtype) -> None:
    made = case("trtllm-bf16", num_experts=16, top_k=3, weights_dtype=wider)
    assert not routes_inside(replace(made.spec, router=INSIDE["qwen3"]))


def test_of_many_experts_or_slots_groups_stay_in_the_graph() -> None:
    spec = replace(case("trtllm-bf16").spec, router=GROUPED, weights_dtype=torch.bfloat16, num_experts=128, top_k=8)
    assert routes_inside(spec)
    assert not routes_inside(replace(spec, num_experts=256)), "64 experts in a group"
    assert not routes_inside(replace(spec, top_k=23))
    assert routes_inside(replace(spec, num_experts=512, router=replace(GROUPED, num_groups=1, topk_groups=1)))
    assert not routes_inside(replace(spec, weight_on_input=True))


REFERENCES = {
    "gpt-oss": "renormalize",
    "qwen3": "renormalize_naive",
    "qwen3 without norm_topk_prob": "default",
    "groups": "ds",
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", REFERENCES)
def test_through_their_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routed by flashinfer's own references, which un-shuffle and un-tile what was prepared by themselves."""
    reference = real(f"trace.templates.moe._trtllm_fp4_block_scale_moe_{REFERENCES[name]}_routing_reference")
    monkeypatch.setattr(f"flashinfer.{TRTLLM_FROM_LOGITS}", lambda **given: [reference(**given)])
    monkeypatch.setattr("flashinfer.fp4_quantize", fp4_quantize)
    logits, known = routed("trtllm-nvfp4", INSIDE[name], activation=STEP)
    backend, blackwell = get_backend("flashinfer_trtllm"), device("sm_100")
    assert backend.check(logits.spec, blackwell).ok
    out = run("trtllm-nvfp4", logits)
    assert_close_per_token(out, known.reference(), torch.bfloat16)
