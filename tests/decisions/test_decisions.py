"""Decisions for well-known blocks on every device are what DECISIONS.md says, and the models have these blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decision_table import ALLOWED, ARCHITECTURES, BLOCKS, DEVICES, PATH, Block, decide, read, render, row
from family_models import FAMILIES, build, missing
from models import token_ids
from torch import nn

from fp4_inductor import Options, explain, list_backends, quantize_
from fp4_inductor.spec import MoESpec, TokenRange

PAGE = read()
BEHIND = "DECISIONS.md is behind: look at what changed, then regenerate it with `make decisions`"
blocks = pytest.mark.parametrize("block", BLOCKS.values(), ids=list(BLOCKS))


@blocks
def test_is_decided_as_the_page_says(block: Block) -> None:
    assert [row(block, arch) for arch in ARCHITECTURES] == PAGE[block.name], BEHIND


def test_the_page_is_what_is_rendered() -> None:
    assert render() == PATH.read_text(encoding="utf-8"), BEHIND


@blocks
def test_runs_on_every_device_and_each_refusal_is_told_in_full(block: Block) -> None:
    for arch, device in DEVICES.items():
        selection = decide(block, device)
        assert selection.chosen not in (None, "reference"), arch
        assert tuple(verdict.backend for verdict in selection.verdicts) == list_backends()
        for verdict in selection.verdicts:
            assert all(r.need and r.got and r.hint for r in verdict.reasons), verdict


@blocks
def test_kernels_round_activations_only_where_they_may(block: Block) -> None:
    for device in DEVICES.values():
        plan = decide(block, device).plan
        assert plan is not None
        assert plan.activations is None
        for allowed in ALLOWED[block.spec.weight_format]:
            plan = decide(block, device, Options(activation_format=allowed)).plan
            assert plan is not None
            assert plan.activations in (None, allowed)


def test_flashinfer_is_chosen_by_device() -> None:
    """TRTLLM's kernels run on the devices that they are generated for, others where they are named."""
    gpt_oss, deepseek = BLOCKS["gpt-oss-120b"], BLOCKS["DeepSeek-V3"]
    assert {
        arch: decide(gpt_oss, DEVICES[arch]).chosen for arch in ("sm_80", "sm_90", "sm_100", "sm_103", "sm_120")
    } == {
        **dict.fromkeys(("sm_80", "sm_90", "sm_103", "sm_120"), "triton_w4a16"),
        "sm_100": "flashinfer_trtllm",
    }
    rounded = Options(activation_format="nvfp4")
    assert {arch: decide(deepseek, DEVICES[arch], rounded).chosen for arch in ("sm_90", "sm_100", "sm_103")} == {
        "sm_90": "triton_w4a16",
        **dict.fromkeys(("sm_100", "sm_103"), "flashinfer_trtllm"),
    }


@pytest.mark.parametrize("family", sorted({block.family for block in BLOCKS.values()}))
def test_recognition_makes_these_blocks_of_the_models(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a backend is told but sizes and weight format, which are the checkpoint's."""
    wanted = [block for block in BLOCKS.values() if block.family == family]
    config = wanted[0].config
    assert all(block.config == config for block in wanted)
    report = explain(*_tiny(family, config, monkeypatch), device="sm_90")
    assert not report.near_misses
    found = {site.selection.spec for site in report.sites}
    for block in wanted:
        assert any(_in_sizes_of(block.spec, spec) == block.spec for spec in found), found


def _in_sizes_of(block: MoESpec, spec: MoESpec) -> MoESpec:
    sizes = ("num_experts", "top_k", "hidden_size", "intermediate_size", "weight_format")
    return replace(spec, num_tokens=TokenRange(0, None), **{name: getattr(block, name) for name in sizes})


def _tiny(family: str, config: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, torch.Tensor]:
    """A tiny model and its input."""
    if family == "llama4":
        return _tiny_llama4(), torch.randn(2, 9, 128).bfloat16()
    if reason := missing(family):
        pytest.skip(reason)
    entry = FAMILIES[family]
    monkeypatch.setitem(FAMILIES, family, replace(entry, config={**entry.config, **config}))
    return quantize_(build(family), "mxfp4"), token_ids()


def _tiny_llama4() -> nn.Module:
    """Its block alone, which transformers computes in one way only."""
    from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

    torch.manual_seed(0)
    config = Llama4TextConfig(hidden_size=128, intermediate_size=96, num_local_experts=8, num_experts_per_tok=1)
    block = Llama4TextMoe(config).bfloat16().eval().requires_grad_(False)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.1)
    return quantize_(block, "mxfp4", filter=lambda name, _: name.startswith("experts.") and "transposed")
