"""FP4 layers that every token goes through are told from experts: they run dequantised, and nothing was missed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture import capture
from fp4_inductor.patterns.linear_layers import linear_layers
from fp4_inductor.patterns.packed import packed_gemms, packed_roots
from loop_mutants import MUTANTS
from loop_spellings import DENSE, SPARSE, TOKENS, E, H, Loop, LoopMoE, Tensor
from models import pack_experts, tiny_model, token_ids
from torch import fx, nn

from fp4_inductor import Options, explain
from fp4_inductor.errors import UnmatchedError
from fp4_inductor.formats import get_format
from fp4_inductor.matching import find_matches
from fp4_inductor.modules import CarriedWeight, pack_parameter
from fp4_inductor.quant import PackedTensors, quantize


@pytest.fixture(autouse=True)
def sizes_by_data() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def pack_linears(model: nn.Module, fmt: str, chosen: Callable[[str], bool]) -> list[str]:
    """Pack the linear layers that ``chosen`` takes by name; their weights' names."""
    packed = []
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and chosen(path) and module.in_features % 32 == 0:
            quantized = quantize(module.weight.detach(), get_format(fmt))
            tensors = PackedTensors(*quantized)
            pack_parameter(module, CarriedWeight("weight", get_format(fmt)), tensors, torch.bfloat16)
            packed.append(f"{path}.weight_packed")
    return packed


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        "moe_intermediate_size": 96,
        "intermediate_size": 192,
        "shared_expert_intermediate_size": 64,
        "num_experts": 8,
    },
    "gpt_oss": {},
    "deepseek_v3": {"first_k_dense_replace": 1},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_and_shared_experts_are_no_near_misses(family: str) -> None:
    model = pack_experts(tiny_model(family, **FAMILIES[family]), "nvfp4")
    packed = pack_linears(model, "nvfp4", lambda path: not path.endswith((".gate", "router", "shared_expert_gate")))
    assert len(packed) > 8
    report = explain(model, token_ids(), options=Options(strict=True))
    assert [layer.anchor.split()[0] for layer in report.linear_layers] == packed
    assert not report.near_misses
    assert report.num_lowered == 2 - FAMILIES[family].get("first_k_dense_replace", 0)
    assert f"{len(packed)} FP4 linear layers" in str(report)
    assert "0 FP4 weights left behind" in str(report)
    assert {entry["anchor"].split()[0] for entry in report.to_json()["linear_layers"]} == set(packed)


def test_strict_raises_for_experts_beside_linear_layers() -> None:
    """The same layers, and a block that no form reads: an expert's result is scaled after the sum over slots."""
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.Linear(H, H, bias=False, dtype=torch.bfloat16)
            self.experts = LoopMoE(MUTANTS[0], storage="own", apart=True)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.experts(x + self.attention(x))  # type: ignore[no-any-return]

    model = Model().eval().requires_grad_(False)
    pack_linears(model, "mxfp4", lambda path: path == "attention")
    x = torch.randn(TOKENS, H).bfloat16()
    report = explain(model, x)
    assert [layer.anchor.split()[0] for layer in report.linear_layers] == ["attention.weight_packed"]
    assert len(report.near_misses) == 3 * (E - 1)
    with pytest.raises(UnmatchedError, match=r"every FP4 weight[\s\S]*experts\.w"):
        explain(model, x, options=Options(strict=True))


def found(gm: fx.GraphModule) -> frozenset[fx.Node]:
    """What is taken for linear layers where no form recognises a block."""
    roots = packed_roots(gm.graph)
    return linear_layers(packed_gemms(gm.graph, roots), roots, ())


def every_expert(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """A mixture of all experts: nothing is chosen."""
    scores = torch.softmax(self.gate(x), dim=-1)
    return sum(scores[:, e, None] * self.expert(e, x) for e in range(self.experts))  # type: ignore[return-value]


def averaged(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return torch.stack([self.expert(e, x) for e in range(self.experts)]).mean(0)


def on_scaled_tokens(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    scores = torch.softmax(self.gate(x), dim=-1)
    return sum(self.expert(e, x * scores[:, e, None]) for e in range(self.experts))  # type: ignore[return-value]


def one_chosen_alone(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    token, slot = torch.where(ids == 0)
    return torch.zeros_like(x).index_add(0, token, self.expert(0, x[token]) * weights[token, slot, None])


def one_masked_alone(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return (weights * (ids == 0)).sum(-1, keepdim=True) * self.expert(0, x)


def one_selected_alone(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return torch.where(weights[:, :1] > 0.5, self.expert(0, x), 0.0)


ODD = (one_selected_alone, every_expert, averaged, on_scaled_tokens, one_chosen_alone, one_masked_alone)
LOOPS = [(loop, False) for loop in (*SPARSE[:3], *DENSE, *ODD)] + [(loop, True) for loop in (*DENSE[:2], *ODD)]


@pytest.mark.parametrize(("loop", "apart"), LOOPS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_experts_are_no_linear_layers(loop: Loop, apart: bool) -> None:
    torch.manual_seed(0)
    model = LoopMoE(loop, storage="own", apart=apart).eval().requires_grad_(False)
    gm = capture(model, torch.randn(TOKENS, H).bfloat16())
    assert packed_roots(gm.graph)
    assert not found(gm)


def test_a_function_that_tells_large_values_from_small_ones_chooses_no_rows() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(H, H, bias=False, dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return F.softplus(self.gate(x)) * x

    model = Gated().eval().requires_grad_(False)
    pack_linears(model, "mxfp4", lambda path: True)
    gm = capture(model, torch.randn(TOKENS, H).bfloat16())
    assert any(node.target is torch.ops.aten.where.self for node in gm.graph.nodes)
    assert len(found(gm)) == 1


def test_experts_whose_names_alone_tell_are_no_linear_layers() -> None:
    """One expert in a graph of its own, as graph breaks leave it."""

    class Expert(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            setattr(self, name, nn.ModuleList([nn.Linear(H, H, bias=False, dtype=torch.bfloat16)]))
            self.name = name

        def forward(self, x: Tensor) -> Tensor:
            return F.silu(getattr(self, self.name)[0](x))

    for name, is_layer in (("experts", False), ("layers", True), ("shared_experts_up", True)):
        model = Expert(name).eval().requires_grad_(False)
        pack_linears(model, "mxfp4", lambda path: True)
        report = explain(model, torch.randn(TOKENS, H).bfloat16())
        assert (len(report.linear_layers), len(report.near_misses)) == (int(is_layer), int(not is_layer)), name


def test_a_weight_that_is_read_in_part_is_no_linear_layer() -> None:
    torch.manual_seed(0)
    model = LoopMoE(averaged, storage="whole").eval()
    gm = capture(model.requires_grad_(False), torch.randn(TOKENS, H).bfloat16())
    assert not found(gm)
    assert len(find_matches(gm.graph).near_misses) == 2
