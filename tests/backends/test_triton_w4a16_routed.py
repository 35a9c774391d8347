"""``triton_w4a16`` where it routes from logits: which blocks, and their numbers in Triton's interpreter.

The interpreter is chosen when Triton's decorators run, so its tests run in a process of their own, which
``test_in_the_interpreter`` starts on this file.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from capture import capture
from fp4_inductor.patterns.router_formulas import router_reference
from interpreter import interpreted, run_in_interpreter, starts_the_interpreter
from models import MoEStack, hidden_states, pack_experts, tiny_model
from moe_cases import SWIGLU, MoECase, make_case
from moe_graphs import calls, moe_graph, operand_values, random_inputs, run
from tolerances import assert_close_per_token
from torch import fx

from fp4_inductor import Options, VerificationError
from fp4_inductor.backends import get_backend
from fp4_inductor.device import DeviceInfo
from fp4_inductor.formats import MXFP4, NVFP4
from fp4_inductor.lowering_pass import Lowering, lower
from fp4_inductor.matching import find_matches
from fp4_inductor.plan import prepare, run_plan
from fp4_inductor.reference import moe_reference
from fp4_inductor.spec import RUNTIME, MoESpec, Operand, RouterSpec, Scoring

BACKEND = get_backend("triton_w4a16")
H200 = dataclasses.replace(DeviceInfo.parse("sm_90"), libraries=(("triton", "3.6.0"),))
GIVEN, ROUTED = "fp4_inductor::moe_triton_w4a16", "fp4_inductor::moe_triton_w4a16_routed"
SOFTMAX = RouterSpec(Scoring.SOFTMAX)
GROUPED = RouterSpec(
    Scoring.SIGMOID,
    has_bias=True,
    num_groups=4,
    topk_groups=2,
    renormalize=True,
    renormalize_eps=1e-20,
    scaling_factor=2.5,
)
ROUTERS = {
    "qwen3": replace(SOFTMAX, renormalize=True),
    "gpt_oss": replace(SOFTMAX, topk_before_scoring=True),
    "deepseek": GROUPED,
    "runtime_scale": replace(GROUPED, num_groups=1, topk_groups=1, scaling_factor=RUNTIME),
    "expert_scale": replace(SOFTMAX, renormalize=True, has_expert_scale=True),
}
UNKNOWN = {
    "low": replace(SOFTMAX, dtype=torch.bfloat16),
    "wide": replace(SOFTMAX, dtype=torch.float64),
    "ids_given": replace(SOFTMAX, ids_given=True),
    "shared": replace(SOFTMAX, num_shared_experts=1, renormalize=True),
    "null": replace(SOFTMAX, num_null_experts=1),
    "sparsemixer": RouterSpec(Scoring.SPARSEMIXER, sparsity_threshold=0.02),
}


@starts_the_interpreter
def test_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    run_in_interpreter(__file__)


def spec_with(router: RouterSpec, **changes: Any) -> MoESpec:
    return MoESpec(8, 2, 128, 96, MXFP4, SWIGLU, router=router, **changes)


@pytest.mark.parametrize("name", ROUTERS)
def test_known_routers_are_fused(name: str) -> None:
    plan = BACKEND.plan(spec_with(ROUTERS[name]), H200)
    assert plan.op == ROUTED
    assert Operand.ROUTER_LOGITS in plan.operands
    assert not {Operand.TOPK_IDS, Operand.TOPK_WEIGHTS} & set(plan.operands)


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_routers_stay_in_the_graph(name: str) -> None:
    spec = spec_with(UNKNOWN[name])
    assert BACKEND.check(spec, H200).ok
    plan = BACKEND.plan(spec, H200)
    assert plan.op == GIVEN
    assert plan == BACKEND.plan(MoESpec(8, 2, 128, 96, MXFP4, SWIGLU), H200)


def test_weights_on_the_input_stay_in_the_graph() -> None:
    assert BACKEND.plan(spec_with(SOFTMAX, weight_on_input=True), H200).op == GIVEN


def routed_case(router: RouterSpec, fmt: Any = MXFP4, *, tokens: int = 5, logits_dtype: Any = torch.float32) -> MoECase:
    """A random block with random logits, and the ids and weights that follow from them."""
    case = make_case(fmt, num_tokens=tokens, num_experts=8, top_k=2, idle_expert=False)
    rng = torch.Generator().manual_seed(1)
    operands = dict(case.operands)
    operands[Operand.ROUTER_LOGITS] = (torch.randn(tokens, 8, generator=rng) * 2).to(logits_dtype)
    if router.has_bias:
        operands[Operand.ROUTER_BIAS] = torch.randn(8, generator=rng) * 0.2
    if router.has_expert_scale:
        operands[Operand.ROUTER_EXPERT_SCALE] = torch.rand(8, generator=rng) + 0.5
    if router.scaling_factor is RUNTIME:
        operands[Operand.ROUTER_SCALE] = torch.tensor(1.7, dtype=torch.float64)
    bias, expert_scale = operands.get(Operand.ROUTER_BIAS), operands.get(Operand.ROUTER_EXPERT_SCALE)
    logits = operands[Operand.ROUTER_LOGITS].double()
    ids, weights = router_reference(router, logits, 2, bias, 1.7, expert_scale=expert_scale)
    operands |= {Operand.TOPK_IDS: ids, Operand.TOPK_WEIGHTS: weights.float()}
    return MoECase(replace(case.spec, router=router), operands)


@interpreted
@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)
@pytest.mark.parametrize("name", ROUTERS)
def test_matches_the_reference(name: str, fmt: Any) -> None:
    case = routed_case(ROUTERS[name], fmt)
    plan = BACKEND.plan(case.spec, H200)
    needed = {operand: case.operands[operand] for operand in plan.operands}
    torch.full((1 << 20,), float("nan"))  # memory that is handed out next
    out = run_plan(plan, needed, prepare(plan, needed))
    assert_close_per_token(out, case.reference(), torch.bfloat16)


@interpreted
@pytest.mark.parametrize("tokens", [0, 1, 70])
def test_any_number_of_tokens(tokens: int) -> None:
    case = routed_case(ROUTERS["qwen3"], tokens=tokens, logits_dtype=torch.float16)
    out = run_plan(BACKEND.plan(case.spec, H200), case.operands)
    assert out.shape == (tokens, 128)
    assert_close_per_token(out, case.reference(), torch.bfloat16)


@interpreted
def test_weights_are_rounded_as_the_graph_rounds_them() -> None:
    case = routed_case(ROUTERS["qwen3"])
    weights = case.operands[Operand.TOPK_WEIGHTS].bfloat16()
    spec = replace(case.spec, weights_dtype=torch.bfloat16)
    given = replace(spec, router=MoESpec.__dataclass_fields__["router"].default)
    operands = {**case.operands, Operand.TOPK_WEIGHTS: weights}
    assert torch.equal(run_plan(BACKEND.plan(spec, H200), operands), run_plan(BACKEND.plan(given, H200), operands))


def lowered(gm: fx.GraphModule, **options: Any) -> Lowering:
    return lower(gm.graph, Options(backend="triton_w4a16", **options), H200)


def check_graph(gm: fx.GraphModule, op: str) -> None:
    """Lower the one block of ``gm`` and hold it to float64."""
    inputs = random_inputs(gm)
    (match,) = find_matches(gm.graph).matches
    want = moe_reference(match.spec, operand_values(match, run(gm, inputs)))
    lowered(gm)
    fused = calls(gm.graph, getattr(torch.ops.fp4_inductor, op.partition("::")[2]).default)
    assert len(fused) == 1
    assert bool(calls(gm.graph, torch.ops.aten.topk.default)) == (op == GIVEN)
    got = run(gm, inputs)[fused[0]]
    assert_close_per_token(got, want, match.spec.act_dtype)


@interpreted
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "deepseek_v3", "mixtral"])
def test_models_route_in_the_kernel(family: str, dynamic: bool) -> None:
    check_graph(moe_graph(family, "batched_mm", tokens=5, layers=1, dynamic=dynamic), ROUTED)


@interpreted
def test_a_router_that_the_kernels_lack_stays_in_the_graph() -> None:
    sizes = {"intermediate_size": 96, "num_local_experts": 8}
    model = pack_experts(tiny_model("phimoe", layers=1, experts_implementation="batched_mm", **sizes), "mxfp4")
    gm = capture(MoEStack(model), hidden_states(5), level="inner")
    (match,) = find_matches(gm.graph).matches
    assert match.grade == "full"
    inputs = random_inputs(gm)
    want = moe_reference(match.spec, operand_values(match, run(gm, inputs)))
    lowered(gm)
    (fused,) = calls(gm.graph, torch.ops.fp4_inductor.moe_triton_w4a16.default)
    assert_close_per_token(run(gm, inputs)[fused], want, match.spec.act_dtype)


@interpreted
def test_ids_that_something_else_reads_stay() -> None:
    gm = moe_graph("qwen3_moe", "batched_mm", tokens=5, layers=1)
    inputs = random_inputs(gm)
    (match,) = find_matches(gm.graph).matches
    ids, logits = match.node(Operand.TOPK_IDS), match.node(Operand.ROUTER_LOGITS)
    output = gm.graph.output_node()
    output.args = ((*output.args[0], ids, logits),)
    before = run(gm, inputs)
    want = moe_reference(match.spec, operand_values(match, before))
    lowered(gm)
    after = run(gm, inputs)
    (fused,) = calls(gm.graph, torch.ops.fp4_inductor.moe_triton_w4a16_routed.default)
    assert_close_per_token(after[fused], want, torch.bfloat16)
    assert torch.equal(after[ids], before[ids])
    assert torch.equal(after[logits], before[logits])


def choose_others(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """Go to other experts than is right: their ids differ in ``bits``."""
    from fp4_inductor.kernels import w4a16_routing

    route = w4a16_routing.route_from_logits

    def changed(logits: torch.Tensor, router: Any, ids: torch.Tensor, weights: torch.Tensor, config: Any) -> None:
        route(logits, router, ids, weights, config)
        ids ^= bits

    monkeypatch.setattr(w4a16_routing, "route_from_logits", changed)


@pytest.fixture
def tied() -> tuple[fx.GraphModule, list[Any]]:
    """A block, with inputs for which every token has experts of equal scores."""
    gm = moe_graph("gpt_oss", "batched_mm", tokens=12, layers=1)
    inputs = random_inputs(gm)
    places = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    for root in [node for node in places if node.meta["val"].shape in ((8, 128), (8,))]:
        value = inputs[places[root]]
        inputs[places[root]] = value[torch.tensor([7, 7, 7, 7, 0, 0, 0, 0])]
    return gm, inputs


@interpreted
def test_verification_knows_a_tie(
    tied: tuple[fx.GraphModule, list[Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Experts of equal scores are equally right."""
    gm, inputs = tied
    verify = lowered(gm, verify="first_call").verification
    assert verify is not None
    choose_others(monkeypatch, 2)
    caplog.set_level(logging.WARNING, logger="fp4_inductor")
    verify(inputs)
    assert "12 of 12 tokens have experts with equal scores" in caplog.text


@interpreted
def test_verification_finds_wrong_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = moe_graph("qwen3_moe", "batched_mm", tokens=5, layers=1)
    inputs = random_inputs(gm)
    verify = lowered(gm, verify="first_call").verification
    assert verify is not None
    verify(inputs)
    choose_others(monkeypatch, 1)
    with pytest.raises(VerificationError):
        verify(inputs)
