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


EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PACKED_WORDS = {"both": (EMBEDDINGS, HEAD), "embeddings alone": (EMBEDDINGS,), "the head alone": (HEAD,)}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "apart"])
@pytest.mark.parametrize("case", PACKED_WORDS)
def test_packed_words(case: str, tied: bool, tmp_path: Path) -> None:
    """Embeddings look rows up, and the head may be tied to them: decoded where they are loaded, a head apart is not."""
    made = write_per_expert(tmp_path, "compressed-tensors nvfp4", tie_word_embeddings=tied)
    linear, generator = LINEARS["compressed-tensors nvfp4"], torch.Generator().manual_seed(5)
    for name in PACKED_WORDS[case]:
        weight = linear.random((96, 64), generator)
        made.tensors.pop(name, None)
        made.tensors |= linear.tensors(name.removesuffix(".weight"), weight, generator)
        made.plain[name] = nearest_bfloat16(weight.exact())
        if name == HEAD and not tied:
            made.exact[name] = weight.exact()
            del made.plain[name]
    if tied and case == "the head alone":
        del made.tensors[EMBEDDINGS]
        made.plain[EMBEDDINGS] = made.plain[HEAD]
    made.rewrite()
    model = load(tmp_path)
    assert_exact(model, made)
    assert_runs(model)


def fp8_scales() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Scales of a matrix [64, 320] as exporters write them, and what each element is multiplied by, float64."""
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(110, 125, (64, 10), dtype=torch.uint8, generator=generator)
    tiles, groups = torch.rand(1, 3, generator=generator) * 0.01, torch.rand(64, 5, generator=generator) * 0.01
    row = (torch.rand(64, 1, generator=generator) * 0.01).to(torch.bfloat16)
    by_tile = tiles.double().repeat_interleave(128, 1)[:, :320]
    by_bits = torch.exp2(bits.double() - 127).repeat_interleave(32, 1)
    return {
        "mxfp8": (bits, by_bits),
        "mxfp8 by its dtype": (bits.view(torch.float8_e8m0fnu), by_bits),
        "tiles": (tiles, by_tile),
        "tiles of ModelOpt": (tiles.reshape(1, 1, 3, 1), by_tile),
        "rows in bfloat16": (row, row.double()),
        "groups": (groups, groups.double().repeat_interleave(64, 1)),
    }


@pytest.mark.parametrize("name", fp8_scales())
def test_fp8_beside_fp4(name: str, tmp_path: Path) -> None:
    made = write_per_expert(tmp_path, "compressed-tensors nvfp4", dense=False, hidden_size=320, num_hidden_layers=1)
    stem = "model.layers.0.self_attn.q_proj"
    codes = torch.randn(64, 320, generator=torch.Generator().manual_seed(4)).to(torch.float8_e4m3fn)
    stored, by_element = fp8_scales()[name]
    made.tensors |= {f"{stem}.weight": codes, f"{stem}.weight_scale": stored}
    made.rewrite()
    assert torch.equal(load(tmp_path).state_dict()[f"{stem}.weight"], nearest_bfloat16(codes.double() * by_element))


BESIDE = (
    "self_attn.k_proj.k_scale",
    "self_attn.v_proj.v_scale",
    "self_attn.k_proj.k_bias",
    "self_attn.k_proj.output_scale",
    "self_attn.k_scale",
    "self_attn.q_scale",
    "self_attn.v_zero_point",
    "self_attn.k_global_scale",
    "self_attn.prob_output_scale",
    "self_attn.kv_scale",
    "self_attn.q_proj.input_scale",
    "self_attn.q_proj.input_zero_point",
    "self_attn.q_proj.input_global_scale",
    "mlp.experts.0.up_proj.activation_scale",
    "mlp.experts.gate_up_proj_input_scale",
    "self_attn.rotary_emb.inv_freq",
)


def test_numbers_for_activations_and_caches_are_not_weights(tmp_path: Path) -> None:
    made = write_per_expert(tmp_path, "modelopt nvfp4", dense=False)
    made.tensors |= {f"model.layers.0.{name}": torch.rand(1) for name in BESIDE}
    made.rewrite()
    assert_exact(load(tmp_path), made)


def test_layers_that_transformers_leaves_out(tmp_path: Path) -> None:
    """DeepSeek's multi-token prediction is layer 61, in whatever format."""
    made = write_per_expert(tmp_path, "modelopt nvfp4", "deepseek_v3", dense=False)
    layer = {name: value for name, value in made.tensors.items() if ".layers.1." in name}
    made.tensors |= {name.replace(".layers.1.", ".layers.61."): value.clone() for name, value in layer.items()}
    made.tensors |= {
        "model.layers.61.eh_proj.weight": torch.ones(64, 128),
        "model.layers.61.enorm.weight": torch.ones(64),
    }
    made.rewrite()
    assert_exact(load(tmp_path), made)
