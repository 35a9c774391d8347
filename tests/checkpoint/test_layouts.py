"""Every layout against an independent float64 decode: bit for bit, with the weights still packed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from exporter_decoder import decode_folder, expected_parameter
from fp4_values import e4m3_values, nearest_bfloat16
from layout_writers import LINEARS, Checkpoint, write_per_expert, write_stacked
from torchao_writer import write_torchao

from fp4_inductor.checkpoint import load
from fp4_inductor.checkpoint.weights import multiplier
from fp4_inductor.errors import CheckpointError
from fp4_inductor.modules import carried_weights


def assert_exact(model: nn.Module, made: Checkpoint) -> None:
    """FP4 parameters are packed and decode to the nearest bfloat16, all others are the file's bytes."""
    packed = {
        f"{path}.{weight.name}": getattr(module, weight.name)
        for path, module in model.named_modules()
        for weight in carried_weights(module)
    }
    assert packed.keys() == made.exact.keys()
    for name, exact in made.exact.items():
        assert torch.equal(packed[name], nearest_bfloat16(exact)), name
    state = model.state_dict()
    for name, value in made.plain.items():
        assert torch.equal(state[name], value), name
    assert not [name for name, tensor in state.items() if tensor.is_meta or tensor.requires_grad]


def assert_runs(model: Any) -> None:
    with torch.no_grad():
        logits = model(torch.randint(3, 90, (1, 12)), use_cache=False).logits
    assert logits.isfinite().all()
    assert logits.std() > 0.01


@pytest.mark.parametrize("layout", LINEARS)
def test_experts_by_themselves_and_dense_layers(layout: str, tmp_path: Path) -> None:
    made = write_per_expert(tmp_path, layout)
    model: Any = load(tmp_path)
    assert_exact(model, made)
    assert_runs(model)
    experts = model.model.layers[0].mlp.experts
    if LINEARS[layout].is_e4m3:  # gate and up have scales of their own here
        assert experts.gate_up_proj_global_scale.shape == (4, 2)
        assert experts.down_proj_global_scale.shape == (4, 1)


@pytest.mark.parametrize("layout", ["compressed-tensors mxfp4", "modelopt nvfp4"])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss", "qwen3_vl_moe", "gemma4_text", "llama4_text"])
def test_names_of_other_families(family: str, layout: str, tmp_path: Path) -> None:
    made = write_per_expert(tmp_path, layout, family, dense=False)
    model = load(tmp_path)
    assert_exact(model, made)
    assert_runs(model)


STACKED: dict[str, Callable[[Path], Checkpoint]] = {
    "gpt-oss, K first, one scalar": lambda path: write_stacked(path, "gpt_oss", k_first=True),
    "llama 4, K first, one scalar": lambda path: write_stacked(path, "llama4_text", k_first=True),
    "qwen, K last, one each": lambda path: write_stacked(path, "qwen3_moe", k_first=False, scales="each"),
    "qwen, K last, pairs": lambda path: write_stacked(path, "qwen3_moe", k_first=False, scales="pair"),
    "gpt-oss, K last, pairs": lambda path: write_stacked(path, "gpt_oss", k_first=False, scales="pair"),
    "with images, K last": lambda path: write_stacked(path, "qwen3_vl_moe", k_first=False),
    "with images, K first": lambda path: write_stacked(path, "qwen3_vl_moe", k_first=True),
    "qwen, K first": lambda path: write_stacked(path, "qwen3_moe", k_first=True, scales="each"),
    "qwen, K last, mxfp4": lambda path: write_stacked(path, "qwen3_moe", k_first=False, is_e4m3=False),
    "compressed-tensors, one each": lambda path: write_stacked(
        path, "qwen3_moe", k_first=False, scales="each", inverse=True
    ),
    "compressed-tensors, pairs": lambda path: write_stacked(
        path, "qwen3_moe", k_first=False, scales="pair", inverse=True
    ),
    "compressed-tensors, experts under one another": lambda path: write_stacked(
        path, "qwen3_moe", k_first=False, inverse=True, flat=True
    ),
    "compressed-tensors, K first": lambda path: write_stacked(path, "llama4_text", k_first=True, inverse=True),
    # 2I = H/2 makes the codes of gate_up square; only their scales say which axis is K.
    "square codes, K last": lambda path: write_stacked(
        path, "qwen3_moe", k_first=False, hidden_size=128, moe_intermediate_size=32
    ),
    "square codes, K first": lambda path: write_stacked(
        path, "qwen3_moe", k_first=True, hidden_size=128, moe_intermediate_size=32
    ),
    # H = I makes down_proj square in a class that does not say which axis is K; gate_up tells.
    "square weights": lambda path: write_stacked(path, "llama4_text", k_first=True, intermediate_size=64),
}


@pytest.mark.parametrize("case", STACKED)
def test_stacked_experts(case: str, tmp_path: Path) -> None:
    made = STACKED[case](tmp_path)
    model = load(tmp_path)
    assert_exact(model, made)
    assert_runs(model)


FIXTURES = Path(__file__).parents[3] / "shared" / "fixtures"
EXPORTED = {
    "ct_qwen3_mxfp4a16": 12,
    "ct_qwen3_nvfp4": 12,
    "dsv4_tiny_fp4": 4,
    "gptoss_tiny_original": 4,
    "modelopt_gptoss_nvfp4_default": 12,
    "modelopt_qwen3_mxfp4_default": 12,
    "modelopt_qwen3_nvfp4_default": 12,
    "modelopt_qwen3_nvfp4_experts_only": 4,
}
"""Checkpoints by the exporters themselves, and how many of the model's parameters are packed in each."""


@pytest.mark.parametrize("name", EXPORTED)
def test_checkpoints_of_the_exporters(name: str) -> None:
    folder = FIXTURES / name
    if not folder.exists():
        pytest.skip(f"needs {folder}")
    if "dsv4" in name:
        pytest.importorskip("transformers.models.deepseek_v4")
    model: Any = load(folder)
    stored = decode_folder(folder)
    packed = {f"{path}.{w.name}": getattr(m, w.name) for path, m in model.named_modules() for w in carried_weights(m)}
    assert len(packed) == EXPORTED[name]
    for parameter, value in packed.items():
        assert torch.equal(value, nearest_bfloat16(expected_parameter(parameter, stored))), parameter


def test_linear_layers_tell_what_they_hold(tmp_path: Path) -> None:
    write_per_expert(tmp_path, "modelopt nvfp4")
    model: Any = load(tmp_path)
    assert "weight: nvfp4 [64, 64], read as bfloat16" in repr(model.model.layers[0].self_attn.q_proj)
    assert "gate_up_proj: nvfp4 [4, 192, 64]" in repr(model.model.layers[0].mlp.experts)


def test_divisors_decode_as_division_does() -> None:
    """A maximum in bfloat16 puts weights at the middle between two bfloat16, where a reciprocal's rounding shows."""
    amax = (torch.rand(3000) * 0.1 + 0.02).to(torch.bfloat16).float()
    divisor = 2688 / amax
    magnitudes = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    products = torch.outer(magnitudes, e4m3_values(torch.arange(1, 127, dtype=torch.uint8))).flatten()
    exact = nearest_bfloat16(products / divisor.double().unsqueeze(-1))
    found = multiplier(divisor)
    assert torch.equal((products.float() * found.unsqueeze(-1)).to(torch.bfloat16), exact)
    assert not torch.equal((products.float() * (1 / divisor).unsqueeze(-1)).to(torch.bfloat16), exact)
    assert ((found.double() * divisor.double() - 1).abs() < 4e-7).all()


@pytest.mark.parametrize("swizzled", [False, True], ids=["rows", "tiles"])
@pytest.mark.parametrize("is_e4m3", [True, False], ids=["nvfp4", "mxfp4"])
def test_torchao(is_e4m3: bool, swizzled: bool, tmp_path: Path) -> None:
    made = write_torchao(tmp_path, is_e4m3=is_e4m3, swizzled=swizzled)
    model = load(tmp_path)
    assert_exact(model, made)
    assert_runs(model)


def test_torchao_without_its_description_is_refused(tmp_path: Path) -> None:
    made = write_torchao(tmp_path, is_e4m3=True, swizzled=False)
    made.rewrite()
    with pytest.raises(CheckpointError, match="scales could be in rows or in tiles"):
        load(tmp_path)
