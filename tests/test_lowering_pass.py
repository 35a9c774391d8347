"""The whole way on real model code: each fused block against float64, and against the block as written."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from capture import Level, capture
from models import MoEStack, hidden_states, pack_experts, tiny_model
from tolerances import assert_close_per_token
from torch import fx

from fp4_inductor import DeviceInfo, NoBackendError, Options, UnmatchedError
from fp4_inductor.backends import get_backend
from fp4_inductor.lowering_pass import lower
from fp4_inductor.matching import WRITTEN, Match, find_matches
from fp4_inductor.reference import moe_reference
from fp4_inductor.spec import MoESpec, Operand

FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "olmoe", "glm4_moe")
FORMS = ("grouped_mm", "batched_mm")


def captured_stack(
    family: str, fmt: str = "mxfp4", form: str = "grouped_mm", tokens: int = 16, level: Level = "inner", **kwargs: Any
) -> fx.GraphModule:
    model = pack_experts(tiny_model(family, experts_implementation=form), fmt)
    return capture(MoEStack(model), hidden_states(tokens), level=level, **kwargs)


def random_inputs(gm: fx.GraphModule, seed: int = 0) -> list[Any]:
    """Values for every placeholder of a captured graph; scales and codes from their whole sane range."""
    rng = torch.Generator().manual_seed(seed)
    inputs: list[Any] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            inputs.append(int(value))
            continue
        shape = [int(size) for size in value.shape]
        if value.dtype is torch.uint8:
            is_scale = shape[-1] * 32 in (128, 96) and len(shape) == 3
            low, high = (115, 122) if is_scale else (0, 256)
            inputs.append(torch.randint(low, high, shape, generator=rng, dtype=torch.uint8))
        elif value.dtype is torch.float8_e4m3fn:
            bits = torch.randint(0x28, 0x48, shape, generator=rng, dtype=torch.uint8)
            inputs.append(bits.view(torch.float8_e4m3fn))
        elif len(shape) == 2 and shape[-1] == 1:  # global scales [E, 1]
            inputs.append((torch.rand(shape, generator=rng) + 0.5).to(value.dtype) * 0.02)
        else:
            inputs.append(torch.randn(shape, generator=rng).to(value.dtype) * (0.3 if len(shape) < 3 else 1.0))
    return inputs


def values_of(gm: fx.GraphModule, nodes: list[fx.Node], inputs: list[Any]) -> list[torch.Tensor]:
    """What ``nodes`` of a graph compute on ``inputs``."""
    copy = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    copy.graph_copy(gm.graph, env)
    copy.output(tuple(env[node] for node in nodes))
    return list(fx.GraphModule(gm, copy)(*inputs))


def canonical(spec: MoESpec, operand: Operand, value: torch.Tensor) -> torch.Tensor:
    if operand is Operand.HIDDEN:
        return value.reshape(-1, spec.hidden_size)
    if operand in (Operand.TOPK_IDS, Operand.TOPK_WEIGHTS):
        return value.reshape(-1, spec.top_k)
    if operand in (Operand.W13_GLOBAL, Operand.W2_GLOBAL):
        return value.reshape(-1, 1)
    return value


def reference_and_written(gm: fx.GraphModule, match: Match, inputs: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 truth [T, H] from the operands the graph computes, and the block as the graph has it."""
    names = list(match.operands)
    *operands, written = values_of(gm, [*match.operands.values(), match.output], inputs)
    given = {name: canonical(match.spec, name, value) for name, value in zip(names, operands, strict=True)}
    return moe_reference(match.spec, given), written.reshape(-1, match.spec.hidden_size)


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    return float((out.double() - ref).norm() / ref.norm())


def check_numbers(gm: fx.GraphModule, backend: str) -> int:
    """Lower each block alone and compare it; returns how many there are."""
    inputs = random_inputs(gm)
    matches = find_matches(gm.graph).matches
    for match in matches:
        truth, written = reference_and_written(gm, match, inputs)
        from fp4_inductor.emit import emit_plan

        plan = get_backend(backend).plan(match.spec, DeviceInfo.parse("cpu"))
        emitted = emit_plan(gm.graph, match, plan, backend)
        (fused,) = values_of(gm, [emitted.result], inputs)
        fused = fused.reshape(-1, match.spec.hidden_size)
        assert_close_per_token(fused, truth, torch.bfloat16)
        assert relative_error(fused, truth) <= 1.25 * relative_error(written, truth)
    return len(matches)


@pytest.mark.parametrize(("family", "fmt", "form"), list(itertools.product(FAMILIES, ("mxfp4", "nvfp4"), FORMS)))
def test_every_layer_is_lowered_to_the_right_numbers(family: str, fmt: str, form: str) -> None:
    gm = captured_stack(family, fmt, form)
    assert check_numbers(gm, "cpu") == 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_dynamic_token_counts(family: str, form: str) -> None:
    gm = captured_stack(family, form=form, dynamic=True)
    assert check_numbers(gm, "cpu") == 2


@pytest.mark.parametrize("form", FORMS)
def test_post_grad_level(form: str) -> None:
    gm = captured_stack("gpt_oss", form=form, level="post_grad")
    assert check_numbers(gm, "cpu") == 2


def test_single_token() -> None:
    for form in FORMS:
        assert check_numbers(captured_stack("qwen3_moe", form=form, tokens=1), "cpu") == 2


def fused_calls(gm: fx.GraphModule) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=torch.ops.fp4_inductor.moe_cpu.default))


def test_the_region_leaves_the_graph() -> None:
    gm = captured_stack("mixtral")
    before = len(gm.graph.nodes)
    report = lower(gm.graph, Options()).report
    gm.graph.lint()
    assert fused_calls(gm) == report.num_lowered == 2
    assert not gm.graph.find_nodes(op="call_function", target=torch.ops.aten._grouped_mm.default)
    assert sum(WRITTEN not in node.meta for node in gm.graph.nodes) < before / 2
    site = report.sites[0]
    assert site.nodes_replaced > 20
    assert site.bytes_before * 3.5 < site.bytes_dense


def test_max_sites_bisects() -> None:
    gm = captured_stack("mixtral")
    report = lower(gm.graph, Options(max_sites=1)).report
    assert fused_calls(gm) == 1
    assert report.notes == ["fp4moe.max_sites=1 leaves 1 recognised blocks as written"]


def test_a_lowered_graph_is_done() -> None:
    """A second door finds nothing left to do, and nothing to warn of."""
    gm = captured_stack("mixtral")
    lower(gm.graph, Options())
    again = lower(gm.graph, Options(strict=True)).report
    assert (again.sites, again.near_misses) == ([], [])


def test_expect_matches() -> None:
    gm = captured_stack("mixtral")
    with pytest.raises(UnmatchedError, match="needed 3 MoE blocks"):
        lower(gm.graph, Options(expect_matches=3))
    assert fused_calls(gm) == 0
    lower(gm.graph, Options(expect_matches=2))
    assert fused_calls(gm) == 2


def test_unsupported_block_is_kept_or_an_error() -> None:
    gm = captured_stack("mixtral")
    sm_50 = DeviceInfo("cuda", (5, 0), "an old card")
    report = lower(gm.graph, Options(), device=sm_50).report
    assert report.num_lowered == 0
    assert len(report.sites) == 2
    assert fused_calls(gm) == 0
    with pytest.raises(NoBackendError, match="CAPABILITY"):
        lower(gm.graph, Options(on_unsupported="error"), device=sm_50)


def test_blocks_that_feed_each_other_directly() -> None:
    class Chain(torch.nn.Module):
        def __init__(self, stack: MoEStack) -> None:
            super().__init__()
            self.layers = stack.layers

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                hidden = layer(hidden)
            return hidden

    model = pack_experts(tiny_model("mixtral"), "mxfp4")
    gm = capture(Chain(MoEStack(model)), hidden_states())
    lower(gm.graph, Options())
    assert fused_calls(gm) == 2
    assert not gm.graph.find_nodes(op="call_function", target=torch.ops.aten._grouped_mm.default)
