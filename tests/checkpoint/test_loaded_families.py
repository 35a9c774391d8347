"""What users do, on transformers' own classes: load, compute, and be as near to float64 as float32 allows.

The reference is transformers' own loading of the decoded weights, under the names of the family's own files.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from family_models import build, missing
from fp4_values import random_fp4
from safetensors.torch import load_file, save_file

from fp4_inductor import explain
from fp4_inductor.checkpoint import load

FAMILIES = ("deepseek_v3", "ernie4_5_moe", "glm4_moe", "minimax_m2", "mixtral", "nemotron_h", "phimoe", "qwen3_next")
_PACKED = re.compile(r"experts?\.\d+\.\w+\.weight$|self_attn\.\w+_proj\.weight$|shared_expert\w*\.\w+_proj\.weight$")
"""Experts one by one, attention, and shared experts: each matrix by itself."""


def write_pair(model: Any, folder: Path) -> int:
    """ModelOpt's NVFP4 of a random checkpoint of ``model``, and what it decodes to; the number of packed weights."""
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder / "decoded")
    generator = torch.Generator().manual_seed(0)
    packed, decoded = {}, {}
    for name, value in load_file(folder / "decoded" / "model.safetensors").items():
        packed[name] = decoded[name] = value
        if value.dim() == 2 and _PACKED.search(name) and value.shape[1] % 16 == 0:
            weight = random_fp4(tuple(value.shape), generator, block=16, is_e4m3=True)
            weight.scale_bits.clamp_(64, 79)  # of a size that a model can run on
            weight.global_scale = (torch.rand((), generator=generator) * 2e-4 + 2e-4).double()
            parts = (weight.packed(), weight.scales(), weight.global_scale.float())
            packed |= dict(zip((name, f"{name}_scale", f"{name}_scale_2"), parts, strict=True))
            decoded[name] = weight.exact().float()
    save_file(decoded, folder / "decoded" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "decoded" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (folder / "packed").mkdir()
    (folder / "packed" / "config.json").write_text(json.dumps(config))
    save_file(packed, folder / "packed" / "model.safetensors")
    return sum(name.endswith("_scale_2") for name in packed)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_decoded_weights(family: str, tmp_path: Path) -> None:
    if reason := missing(family):
        pytest.skip(reason)
    model: Any = build(family).float()
    assert write_pair(model, tmp_path) > 8
    how = {"attn_implementation": "eager"}
    reference = type(model).from_pretrained(tmp_path / "decoded", dtype=torch.float64, **how).eval()
    loaded: Any = load(tmp_path / "packed", dtype=torch.float32, experts_implementation="eager", **how)
    reference.set_experts_implementation("eager")
    ids = torch.randint(3, 60, (2, 9))
    with torch.no_grad():
        exact = reference(ids, use_cache=False).logits
        error = (loaded(ids, use_cache=False).logits.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(error.max()) < 1e-5


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next"])
def test_loaded_blocks_are_fused_beside_packed_layers(family: str, tmp_path: Path) -> None:
    if reason := missing(family):
        pytest.skip(reason)
    write_pair(build(family), tmp_path)
    model: Any = load(tmp_path / "packed")
    report = explain(model, torch.randint(3, 60, (2, 9)), options={"fp4moe.strict": True}, use_cache=False)
    assert (report.num_lowered, len(report.near_misses)) == (1, 0)
    assert report.linear_layers
