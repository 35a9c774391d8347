"""Whole blocks of transformers' models are found, and described as they are."""

from __future__ import annotations

import pytest
import torch
from capture import Level, capture
from models import (
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    TOP_K,
    MoEStack,
    hidden_states,
    pack_experts,
    tiny_model,
    token_ids,
)
from moe_graphs import calls, error_of, insert_after, moe_graph

from fp4_inductor.formats import MXFP4, NVFP4
from fp4_inductor.matching import Match, find_matches
from fp4_inductor.spec import (
    RUNTIME,
    ActivationSpec,
    GateUpOrder,
    GivenRouting,
    Operand,
    RouterSpec,
    Scoring,
    TokenRange,
)

FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3", "glm4_moe")
TOLERANCE = 1.5e-2
"""Worst token of a graph that rounds every intermediate to bfloat16, against float64."""

pytest.importorskip("transformers", reason="needs transformers' models")


def check_spec(match: Match, family: str, form: str, fmt: str, *, tokens: TokenRange) -> None:
    """Every field of the spec that does not depend on the trace's dynamic scalars."""
    spec, oss = match.spec, family == "gpt_oss"
    assert match.pattern == form
    assert (spec.num_experts, spec.top_k) == (EXPERTS, TOP_K)
    assert (spec.hidden_size, spec.intermediate_size) == (HIDDEN, INTERMEDIATE)
    assert spec.weight_format == {"mxfp4": MXFP4, "nvfp4": NVFP4}[fmt]
    assert (spec.act_dtype, spec.out_dtype) == (torch.bfloat16, torch.bfloat16)
    in_float32 = family in ("mixtral", "deepseek_v3", "glm4_moe")
    assert spec.weights_dtype == (torch.float32 if in_float32 else torch.bfloat16)
    assert spec.num_tokens == tokens
    assert spec.w13_order is (GateUpOrder.INTERLEAVED if oss else GateUpOrder.GATE_UP)
    assert (spec.has_w13_bias, spec.has_w2_bias) == (oss, oss)
    assert spec.local_experts is None
    assert match.operands[Operand.TOPK_WEIGHTS].meta["val"].dtype == spec.weights_dtype
    assert match.where.module.startswith("layers.")
    assert match.where.file.endswith("moe.py")


def check_router(match: Match, family: str, *, dynamic: bool) -> None:
    assert match.grade == "full"
    router = match.spec.router
    assert isinstance(router, RouterSpec)
    grouped = family in ("deepseek_v3", "glm4_moe")
    assert router.scoring is (Scoring.SIGMOID if grouped else Scoring.SOFTMAX)
    assert router.topk_before_scoring == (family == "gpt_oss")
    assert router.renormalize == (family not in ("olmoe", "gpt_oss"))
    assert (router.has_bias, router.num_groups, router.topk_groups) == ((True, 4, 2) if grouped else (False, 1, 1))
    assert router.scaling_factor == ((RUNTIME if dynamic else 2.5) if grouped else 1.0)
    assert (Operand.ROUTER_BIAS in match.operands) == grouped
    logits = match.operands[Operand.ROUTER_LOGITS].meta["val"]
    assert logits.shape[-1] == EXPERTS


@pytest.mark.parametrize(("form", "fmt"), [("grouped_mm", "mxfp4"), ("batched_mm", "nvfp4")])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_of_a_static_graph(family: str, form: str, fmt: str) -> None:
    gm = moe_graph(family, form, fmt)
    found = find_matches(gm.graph)
    assert found.near_misses == ()
    assert len(found.matches) == 2
    for match in found.matches:
        check_spec(match, family, form, fmt, tokens=TokenRange(16, 16))
        check_router(match, family, dynamic=False)
        assert match.spec.activation == (
            ActivationSpec("silu", alpha=1.702, beta=1.0, limit=7.0) if family == "gpt_oss" else ActivationSpec("silu")
        )
        assert error_of(gm, match) < TOLERANCE


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("mixtral", "grouped_mm"),
        ("qwen3_moe", "batched_mm"),
        ("gpt_oss", "grouped_mm"),
        ("gpt_oss", "batched_mm"),
        ("deepseek_v3", "grouped_mm"),
    ],
)
def test_every_layer_of_a_dynamic_post_grad_graph(family: str, form: str) -> None:
    gm = moe_graph(family, form, "nvfp4", dynamic=True, level="post_grad")
    found = find_matches(gm.graph)
    assert found.near_misses == ()
    assert len(found.matches) == 2
    for match in found.matches:
        check_spec(match, family, form, "nvfp4", tokens=TokenRange(2, None))
        check_router(match, family, dynamic=True)
        assert match.spec.activation.alpha == (RUNTIME if family == "gpt_oss" else 1.0)
        assert (Operand.ALPHA in match.operands) == (family == "gpt_oss")
        assert error_of(gm, match) < TOLERANCE


@pytest.mark.parametrize(("form", "level"), [("grouped_mm", "post_grad"), ("batched_mm", "inner")])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_one_token(family: str, form: str, level: Level) -> None:
    gm = moe_graph(family, form, tokens=1, level=level)
    found = find_matches(gm.graph)
    assert found.near_misses == ()
    assert [match.spec.num_tokens for match in found.matches] == [TokenRange(1, 1)] * 2
    assert all(error_of(gm, match) < TOLERANCE for match in found.matches)


@pytest.mark.parametrize(("form", "level"), [("grouped_mm", "post_grad"), ("batched_mm", "inner")])
def test_no_tokens(form: str, level: Level) -> None:
    """Nothing is computed, so nothing is found and nothing is missed."""
    found = find_matches(moe_graph("qwen3_moe", form, tokens=0, level=level).graph)
    assert (found.matches, found.near_misses) == ((), ())


@pytest.mark.slow
def test_a_whole_model_with_dynamic_tokens() -> None:
    model = pack_experts(tiny_model("gpt_oss", experts_implementation="grouped_mm"), "mxfp4")
    found = find_matches(capture(model, token_ids(16), dynamic=True).graph)
    assert found.near_misses == ()
    assert [match.where.module for match in found.matches] == [f"model.layers.{i}.mlp.experts" for i in range(2)]


def test_weights_stored_with_k_first() -> None:
    (match, _) = find_matches(moe_graph("gpt_oss", "batched_mm").graph).matches
    assert match.operands[Operand.W13].meta["val"].shape == (EXPERTS, 2 * INTERMEDIATE, HIDDEN // 2)


def test_models_in_bfloat16_are_not_mentioned() -> None:
    model = tiny_model("qwen3_moe")
    found = find_matches(capture(MoEStack(model), hidden_states()).graph)
    assert (found.matches, found.near_misses) == ((), ())


def test_equal_layers_are_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4_inductor.patterns import proof

    proofs = []
    run = proof._prove
    monkeypatch.setattr(proof, "_prove", lambda *args: proofs.append(args) or run(*args))
    found = find_matches(moe_graph("qwen3_moe", "grouped_mm", layers=4).graph)
    assert len(found.matches) == 4
    assert len(proofs) == 1


def test_the_graph_is_left_as_it_was() -> None:
    gm = moe_graph("gpt_oss", "grouped_mm", "nvfp4", dynamic=True, level="post_grad")
    before = [(node.name, node.target, node.args, dict(node.meta)) for node in gm.graph.nodes]
    find_matches(gm.graph)
    assert [(node.name, node.target, node.args, dict(node.meta)) for node in gm.graph.nodes] == before


def test_dying_nodes_hold_the_block_and_the_dequantisation_and_nothing_that_lives() -> None:
    gm = moe_graph("deepseek_v3", "grouped_mm")
    first, second = find_matches(gm.graph).matches
    assert not first.nodes & second.nodes
    for match in (first, second):
        assert match.output in match.nodes
        assert not match.nodes & set(match.operands.values())
        for node in match.nodes - {match.output}:
            assert set(node.users) <= match.nodes
        assert any(node.target is torch.ops.aten.__rshift__.Scalar for node in match.nodes)


def test_an_unknown_router_leaves_the_experts() -> None:
    gm = moe_graph("qwen3_moe", "grouped_mm")
    logits = calls(gm.graph, torch.ops.aten.mm.default)[0]
    soft = insert_after(logits, torch.ops.aten.tanh.default, logits)
    insert_after(soft, torch.ops.aten.sin.default, soft)
    topk = calls(gm.graph, torch.ops.aten.topk.default)[0]
    weights = next(user for user in topk.users if user.args[1] == 0)
    insert_after(weights, torch.ops.aten.sin.default, weights)
    first, second = find_matches(gm.graph).matches
    assert (first.grade, first.spec.router) == ("experts", GivenRouting())
    assert Operand.ROUTER_LOGITS not in first.operands
    assert second.grade == "full"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_grouped_gemm_that_transformers_falls_back_to(dtype: torch.dtype) -> None:
    model = pack_experts(tiny_model("qwen3_moe", layers=1, dtype=dtype), "nvfp4")
    gm = capture(MoEStack(model), hidden_states(dtype=dtype))
    (match,) = find_matches(gm.graph).matches
    assert (match.pattern, match.spec.act_dtype, match.spec.out_dtype) == ("grouped_mm", dtype, dtype)
    assert error_of(gm, match) < TOLERANCE


def test_experts_counted_as_integers() -> None:
    """A GPU's trace counts int32 ids."""
    gm = moe_graph("qwen3_moe", "grouped_mm")
    for histc in calls(gm.graph, torch.ops.aten.histc.default):
        cast = histc.args[0]
        cast.args = (cast.args[0], torch.int32)
        for node in (cast, histc):
            node.meta["val"] = node.meta["val"].to(torch.int32)
    assert len(find_matches(gm.graph).matches) == 2


@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
def test_no_graph_is_too_strange(form: str) -> None:
    """Every third node without its value, one at a time; whatever is found without them is silent."""
    gm = moe_graph("qwen3_moe", form, layers=1)
    for node in list(gm.graph.nodes)[::3]:
        val = node.meta.pop("val", None)
        found = find_matches(gm.graph)
        assert len(found.matches) <= 1
        if val is not None:
            node.meta["val"] = val
    assert len(find_matches(gm.graph).matches) == 1
