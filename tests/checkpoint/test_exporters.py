"""What exporters write beside codes and scales, and under other names: bit for bit, or refused with its reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from fp4_values import nearest_bfloat16
from layout_writers import LINEARS, write_per_expert
from test_layouts import assert_exact, assert_runs

from fp4_inductor.checkpoint import load

MODULELISTS = r"\.experts\.(\d+)\.(\w+)\.", r".experts.\2.\1."
SPELLINGS: dict[str, tuple[str, str, str]] = {
    "projections hold experts": ("qwen3_moe", *MODULELISTS),
    "a wrapper's old prefix": ("qwen3_vl_moe", r"^model\.language_model\.", "language_model.model."),
    "a text model wrapped thrice": ("qwen3_vl_moe", r"^model\.(language_model\.)", r"model.\1\1\1"),
    "experts of a block": ("gemma4_text", r"\.experts\.", ".moe.experts."),
}
"""Family, and a pattern of its names with what an exporter writes in its place."""


@pytest.mark.parametrize("case", SPELLINGS)
def test_names_that_exporters_change(case: str, tmp_path: Path) -> None:
    family, pattern, replacement = SPELLINGS[case]
    made = write_per_expert(tmp_path, "modelopt nvfp4", family, dense=False)
    made.tensors = {re.sub(pattern, replacement, name): value for name, value in made.tensors.items()}
    made.rewrite()
    assert_exact(load(tmp_path), made)


def test_gate_and_up_of_an_expert_in_one_matrix(tmp_path: Path) -> None:
    """Quark keeps gpt-oss' rows in turns, one matrix and one bias an expert."""
    made = write_per_expert(tmp_path, "quark mxfp4", "gpt_oss", dense=False)
    for name in [name for name in made.exact if "gate_up" in name]:
        stem, experts = name.removesuffix(".gate_up_proj"), made.exact[name].shape[0]
        for expert in range(experts):
            for part in ("weight", "weight_scale", "bias"):
                halves = [made.tensors.pop(f"{stem}.{expert}.{half}_proj.{part}") for half in ("gate", "up")]
                rows = torch.stack(halves, dim=1).flatten(0, 1)
                made.tensors[f"{stem}.{expert}.gate_up_proj.{part}"] = rows
    made.rewrite()
    model = load(tmp_path)
    assert_exact(model, made)
    assert_runs(model)


def test_packed_embeddings_are_decoded_where_they_are_loaded(tmp_path: Path) -> None:
    made = write_per_expert(tmp_path, "compressed-tensors nvfp4", tie_word_embeddings=False)
    linear, generator = LINEARS["compressed-tensors nvfp4"], torch.Generator().manual_seed(5)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weight = linear.random(tuple(made.tensors.pop(name).shape), generator)
        made.tensors |= linear.tensors(name.removesuffix(".weight"), weight, generator)
        del made.plain[name]
        (made.plain if "embed" in name else made.exact)[name] = weight.exact()
    made.plain["model.embed_tokens.weight"] = nearest_bfloat16(made.plain["model.embed_tokens.weight"])
    made.rewrite()
    model = load(tmp_path)
    assert_exact(model, made)
    assert_runs(model)
