"""Models whose routers are fused, on a GPU: no top-k is left in the graph, and the numbers hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import pack_experts, tiny_model, token_ids
from test_dynamo_backend import assert_same_logits, logits
from torch import fx

from fp4_inductor import explain, lowering_pass

pytestmark = pytest.mark.gpu
OPTIONS = {"fp4moe.strict": True, "fp4moe.on_unsupported": "error", "fp4moe.verify": "first_call"}
GIVEN, ROUTED = "fp4_inductor::moe_triton_w4a16", "fp4_inductor::moe_triton_w4a16_routed"
SMALL = {"intermediate_size": 96, "num_local_experts": 8}


def packed(family: str, **kwargs: Any) -> torch.nn.Module:
    return pack_experts(tiny_model(family, **kwargs), "mxfp4").cuda()


def called(graph: fx.Graph) -> list[str]:
    targets = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return [target._schema.name for target in targets]


@pytest.fixture
def compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The operations of every graph that goes to Inductor."""
    seen: list[list[str]] = []
    monkeypatch.setattr(lowering_pass, "dump_graph", lambda _, gm: seen.append(called(gm.graph)))
    return seen


@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "deepseek_v3", "mixtral", "olmoe", "glm4_moe"])
def test_models_route_in_the_kernel(family: str, form: str, compiled_graphs: list[list[str]]) -> None:
    model = packed(family, experts_implementation=form)
    compiled = torch.compile(model, backend="fp4moe", fullgraph=True, options=OPTIONS)
    for tokens in (1, 17, 48, 300):
        ids = token_ids(tokens).cuda()
        assert_same_logits(logits(compiled, ids), logits(model, ids), tolerance=0.2)
    assert compiled_graphs
    for ops in compiled_graphs:
        assert ops.count(ROUTED) == 2
        assert GIVEN not in ops
        assert "aten::topk" not in ops


def test_a_router_that_the_kernels_lack_stays_in_the_graph(compiled_graphs: list[list[str]]) -> None:
    model = packed("phimoe", **SMALL)
    assert [site.selection.plan.op for site in explain(model, token_ids().cuda()).sites if site.selection.plan] == [
        GIVEN
    ] * 2
    compiled = torch.compile(model, backend="fp4moe", options=OPTIONS)
    ids = token_ids().cuda()
    assert_same_logits(logits(compiled, ids), logits(model, ids), tolerance=0.2)
    assert any(GIVEN in ops for ops in compiled_graphs)
    assert not any(ROUTED in ops for ops in compiled_graphs)


def test_router_logits_may_be_asked_for() -> None:
    """As for the auxiliary loss of training: they are outputs of the graph, beside the fused op."""
    model = packed("qwen3_moe", layers=1)
    compiled = torch.compile(model, backend="fp4moe", options=OPTIONS)
    ids = token_ids(9).cuda()
    with torch.no_grad():
        got = compiled(ids, output_router_logits=True)
        want = model(ids, output_router_logits=True)
    assert_same_logits(got.logits.double(), want.logits.double(), tolerance=0.2)
    for mine, theirs in zip(got.router_logits, want.router_logits, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "deepseek_v3"])
def test_cuda_graphs_follow_new_routes(family: str) -> None:
    model = packed(family, layers=1)
    compiled = torch.compile(model, backend="fp4moe", mode="reduce-overhead")
    for tokens in (1, 8):
        for seed in range(5):  # warm-up, capture, replays with other inputs
            ids = token_ids(tokens, seed=seed).cuda()
            assert_same_logits(logits(compiled, ids), logits(model, ids), tolerance=0.2)
