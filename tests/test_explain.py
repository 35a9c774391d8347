"""``explain``: what was found where, what runs it, why not the others; here and for other devices."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from models import pack_experts, tiny_model, token_ids

from fp4_inductor import NoBackendError, UnknownNameError, explain, quantize_


def test_on_this_machine() -> None:
    model = pack_experts(tiny_model("mixtral"), "mxfp4")
    report = explain(model, token_ids())
    text = str(report)
    assert "fp4moe on cpu: 2 of 2 MoE blocks lowered, 0 FP4 weights left behind, 1 graph" in text
    assert "transformers" in text  # the user's file: the model's own code
    assert "runs on  cpu (fp4_inductor::moe_cpu" in text
    data = json.loads(json.dumps(report.to_json()))
    assert [site["backend"] for site in data["sites"]] == ["cpu", "cpu"]
    assert data["sites"][0]["where"]["line"] > 0
    assert "layers.0" in data["sites"][0]["where"]["module"]


@pytest.mark.parametrize("device", ["sm_80", "sm_90", "sm_100"])
def test_for_a_device_that_is_not_here(device: str) -> None:
    model = pack_experts(tiny_model("gpt_oss"), "mxfp4")
    report = explain(model, token_ids(), device=device)
    assert [site.selection.chosen for site in report.sites] == ["triton_w4a16"] * 2
    assert f"({device})" in str(report)
    assert "cpu: CAPABILITY: needs a CPU" in str(report)


def test_leaves_the_model_and_its_numbers_alone() -> None:
    model, ids = pack_experts(tiny_model("mixtral"), "nvfp4"), token_ids()
    with torch.no_grad():
        before = model(ids).logits
        explain(model, ids)
        assert torch.equal(model(ids).logits, before)


def test_a_model_without_fp4_says_so() -> None:
    report = explain(tiny_model("mixtral"), token_ids())
    assert not report.sites
    assert "no FP4 weights reached a graph" in str(report)


def test_a_near_miss_names_the_reason_and_the_line() -> None:
    class Strange(torch.nn.Module):
        """Weights, then a norm of each expert's output: nothing the fused op computes."""

        def __init__(self, experts: torch.nn.Module) -> None:
            super().__init__()
            self.experts = experts

        def forward(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            w13 = self.experts.gate_up_proj[ids]
            w2 = self.experts.down_proj[ids]
            gate, up = torch.einsum("th,tkih->tki", hidden, w13).chunk(2, dim=-1)
            y = torch.einsum("tki,tkhi->tkh", torch.tanh(gate) * up.cos(), w2)
            return torch.nn.functional.layer_norm(y, y.shape[-1:]).sum(1)

    experts = pack_experts(tiny_model("mixtral"), "mxfp4").model.layers[0].mlp.experts
    hidden, ids = torch.randn(4, 128).bfloat16(), torch.randint(0, 8, (4, 2))
    report = explain(Strange(experts), hidden, ids)
    assert not report.sites
    assert len(report.near_misses) == 2
    text = str(report)
    assert "2 FP4 weights left behind" in text
    assert "test_explain.py" in text
    assert all(miss.reason and miss.packed_bytes for miss in report.near_misses)


class Ungated(torch.nn.Module):
    """Experts of two plain layers, gathered for each token."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.act = act
        self.up = torch.nn.Parameter(torch.randn(8, 96, 128).bfloat16())
        self.down = torch.nn.Parameter(torch.randn(8, 128, 96).bfloat16())

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        slots = ids.flatten()
        rows = hidden.repeat_interleave(ids.shape[1], 0).unsqueeze(-1)
        h = self.act(torch.bmm(self.up[slots], rows).squeeze(-1))
        y = torch.bmm(self.down[slots], h.unsqueeze(-1)).squeeze(-1) * weights.flatten().unsqueeze(-1)
        return y.view(*ids.shape, -1).sum(1)


@pytest.mark.parametrize(("act", "known"), [(torch.relu, True), (torch.tanh, False)])
def test_experts_without_a_gate(act: Callable[[torch.Tensor], torch.Tensor], known: bool) -> None:
    model = quantize_(Ungated(act).eval(), "mxfp4", filter=lambda name, _: True)
    report = explain(model, torch.randn(4, 128).bfloat16(), torch.randint(0, 8, (4, 2)), torch.rand(4, 2).bfloat16())
    if known:
        assert [str(site.selection.spec.activation) for site in report.sites] == ["relu"]
    else:
        assert len(report.near_misses) == 2
        assert all("tanh" in miss.reason for miss in report.near_misses)


def test_takes_a_device_of_this_machine() -> None:
    report = explain(tiny_model("mixtral", layers=1), token_ids(), device=torch.device("cpu"))
    assert str(report.device) == "cpu"


def test_unknown_device_shows_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="sm_90"):
        explain(tiny_model("mixtral"), token_ids(), device="sm_9")


def test_errors_are_our_own() -> None:
    """Not wrapped in Dynamo's, which would name a backend that the user never chose."""
    model = pack_experts(tiny_model("mixtral", layers=1), "mxfp4")
    with pytest.raises(UnknownNameError, match="did you mean 'triton_w4a16'"):
        explain(model, token_ids(), options={"fp4moe.backend": "triton"})
    with pytest.raises(NoBackendError, match="CAPABILITY"):
        explain(model, token_ids(), device="cpu", options={"fp4moe.backend": "triton_w4a16"})


def test_a_model_without_data() -> None:
    model = pack_experts(tiny_model("mixtral", layers=1), "nvfp4").to("meta")
    report = explain(model, token_ids().to("meta"), device="sm_100")
    assert [site.selection.chosen for site in report.sites] == ["triton_w4a16"]


def test_blocks_that_an_option_leaves_are_told() -> None:
    model = pack_experts(tiny_model("mixtral", layers=1), "mxfp4")
    text = str(explain(model, token_ids(), options={"fp4moe.max_sites": 0}))
    assert "max_sites=0 leaves 1 recognised blocks" in text
    assert "no FP4 weights" not in text


def test_a_graph_break_before_the_gemm_is_named() -> None:
    model = pack_experts(tiny_model("mixtral", layers=1, experts_implementation="eager"), "mxfp4")
    report = explain(model, token_ids())
    assert len(report.near_misses) == 2
    assert all("graph break" in miss.reason for miss in report.near_misses)
