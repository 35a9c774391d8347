"""The main job on a GPU: own Triton kernels under Inductor, with CUDA graphs and dynamic batches."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from models import pack_experts, tiny_model, token_ids
from test_dynamo_backend import WHOLE, assert_same_logits, logits

from fp4_inductor import explain

pytestmark = pytest.mark.gpu
CHECKED = {**WHOLE, "fp4moe.verify": "first_call"}


def packed(family: str, fmt: str = "mxfp4", **kwargs: Any) -> torch.nn.Module:
    return pack_experts(tiny_model(family, **kwargs), fmt).cuda()


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "olmoe", "glm4_moe"])
def test_models_compile_whole_and_agree(family: str, form: str, fmt: str) -> None:
    model = packed(family, fmt, experts_implementation=form)
    compiled = torch.compile(model, backend="fp4moe", fullgraph=True, options={**CHECKED, "fp4moe.expect_matches": 2})
    for tokens in (16, 48, 1):
        ids = token_ids(tokens).cuda()
        assert_same_logits(logits(compiled, ids), logits(model, ids), tolerance=0.2)


def test_explain_names_the_triton_backend() -> None:
    report = explain(packed("gpt_oss"), token_ids().cuda())
    assert [site.selection.chosen for site in report.sites] == ["triton_w4a16"] * 2


@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs(mode: str, form: str) -> None:
    model = packed("qwen3_moe", layers=1, experts_implementation=form)
    compiled = torch.compile(model, backend="fp4moe", mode=mode)
    for seed in range(5):  # warm-up, capture, replays with other inputs
        ids = token_ids(8, seed=seed).cuda()
        assert_same_logits(logits(compiled, ids), logits(model, ids), tolerance=0.2)
    with torch.no_grad():  # a captured graph must notice new weights
        model.model.layers[0].mlp.experts.gate_up_proj_packed.bitwise_xor_(0x88)
    ids = token_ids(8, seed=9).cuda()
    assert_same_logits(logits(compiled, ids), logits(model, ids), tolerance=0.2)


def test_generation_prefills_grouped_and_decodes_gathered(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fp4_inductor")
    model = packed("qwen3_moe", layers=1, use_cache=True)
    settings: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        model.compile(backend="fp4moe", options=WHOLE)
        out = model.generate(token_ids(8).cuda(), **settings)
    assert out.shape == (1, 14)
    lowered = [message for message in caplog.messages if "→ triton_w4a16" in message]
    assert any("grouped_mm" in message for message in lowered)
    assert any("batched_mm" in message for message in lowered)


def test_memory_of_a_call_holds_no_dequantised_expert() -> None:
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 1024, "num_experts": 64, "layers": 1}
    model = packed("qwen3_moe", experts_implementation="batched_mm", **sizes)
    compiled = torch.compile(model, backend="fp4moe", options=WHOLE)
    ids = token_ids(4).cuda()
    logits(compiled, ids)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logits(compiled, ids)
    dense_expert = 3 * 1024 * 1024 * 2
    assert torch.cuda.max_memory_allocated() - before < dense_expert
