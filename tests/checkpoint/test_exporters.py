"""What exporters write beside codes and scales, and under other names: bit for bit, or refused with its reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from fp4_values import nearest_bfloat16, random_fp4
from layout_writers import LINEARS, Checkpoint, save_config, write_per_expert, write_stacked
from test_layouts import assert_exact, assert_runs

from fp4_inductor.checkpoint import load
from fp4_inductor.checkpoint.files import CheckpointFiles
from fp4_inductor.checkpoint.inspection import describe
from fp4_inductor.device import DeviceInfo
from fp4_inductor.errors import CheckpointError

MODULELISTS = r"\.experts\.(\d+)\.(\w+)\.", r".experts.\2.\1."
SPELLINGS: dict[str, tuple[str, str, str]] = {
    "projections hold experts": ("qwen3_moe", *MODULELISTS),
    "projections hold experts, in the plural": ("gpt_oss", MODULELISTS[0], r".experts.\2s.\1."),
    "a router that holds a linear layer": ("gpt_oss", r"\.router\.", ".router.linear."),
    "a wrapper's old prefix": ("qwen3_vl_moe", r"^model\.language_model\.", "language_model.model."),
    "a text model wrapped thrice": ("qwen3_vl_moe", r"^model\.(language_model\.)", r"model.\1\1\1"),
    "experts of a block": ("gemma4_text", r"\.experts\.", ".moe.experts."),
}
"""Family, and a pattern of its names with what an exporter writes in its place."""


def renamed(made: Checkpoint, pattern: str, replacement: str) -> None:
    made.tensors = {re.sub(pattern, replacement, name): value for name, value in made.tensors.items()}
    made.rewrite()


@pytest.mark.parametrize("case", SPELLINGS)
def test_names_that_exporters_change(case: str, tmp_path: Path) -> None:
    family, pattern, replacement = SPELLINGS[case]
    made = write_per_expert(tmp_path, "modelopt nvfp4", family, dense=False)
    renamed(made, pattern, replacement)
    assert_exact(load(tmp_path), made)


@pytest.mark.parametrize("intermediate_size", [96, 64])
def test_blocks_along_the_other_axis_are_refused(intermediate_size: int, tmp_path: Path) -> None:
    """ModelOpt packs gpt-oss' parameters, which are [E, K, N], along N where it writes MXFP4."""
    made = write_stacked(tmp_path, "gpt_oss", k_first=True, is_e4m3=False, intermediate_size=intermediate_size)
    generator = torch.Generator().manual_seed(2)
    for name, exact in made.exact.items():
        weight = random_fp4(tuple(exact.shape), generator, block=32, is_e4m3=False)
        made.tensors |= {name: weight.packed(), f"{name}_weight_scale": weight.scale_bits}
    made.rewrite()
    with pytest.raises(CheckpointError, match=r"blocks along K[\s\S]*in gpt-oss' own layout"):
        load(tmp_path)


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


INSPECTED: dict[str, tuple[Callable[[Path], object], str]] = {
    "one by one": (lambda path: write_per_expert(path, "quark mxfp4", "mixtral"), "swiglu"),
    "stacked": (lambda path: write_stacked(path, "llama4_text", k_first=True), "swiglu"),
    "under one another": (
        lambda path: write_stacked(path, "qwen3_moe", k_first=False, inverse=True, flat=True),
        "swiglu",
    ),
    "projections hold experts": (
        lambda path: renamed(write_per_expert(path, "modelopt nvfp4"), *MODULELISTS),
        "swiglu",
    ),
    "without gates": (
        lambda path: renamed(write_per_expert(path, "modelopt nvfp4"), r"\.gate_proj\.", ".left_out."),
        "silu",
    ),
    "with another activation": (lambda path: write_per_expert(path, "modelopt nvfp4", "gemma4_text"), "geglu_tanh"),
}


@pytest.mark.parametrize("case", INSPECTED)
def test_inspect_counts_experts_under_any_name(case: str, tmp_path: Path) -> None:
    write, activation = INSPECTED[case]
    write(tmp_path)
    page = "\n".join(describe(CheckpointFiles(tmp_path), DeviceInfo.parse("sm_90")))
    assert re.search(rf"4x top-\d H=64 I=96 (nvfp4|mxfp4)×bfloat16 {activation} ", page), page


INKLING = {
    "text_config": {
        "vocab_size": 96,
        "unpadded_vocab_size": 96,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "sliding_window_size": 8,
        "d_rel": 4,
        "rel_extent": 16,
        "intermediate_size": 96,
        "moe_intermediate_size": 96,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["hybrid_sliding", "hybrid"],
        "pad_token_id": 0,
    },
    "audio_config": {"text_hidden_size": 64, "n_mel_bins": 4, "mel_vocab_size": 8},
    "vision_config": {
        "text_hidden_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "patch_size": 8,
    },
}


@pytest.mark.parametrize("by_modelopt", [True, False], ids=["scale2", "weight_global_scale"])
def test_stacked_rows_that_alternate_in_the_file_alone(by_modelopt: bool, tmp_path: Path) -> None:
    """Inkling keeps gate's and up's rows in turns; transformers' table takes them apart."""
    pytest.importorskip("transformers.models.inkling")
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.core_model_loading import revert_weight_conversion

    config = AutoConfig.for_model("inkling_mm_model", **INKLING)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    made, generator = Checkpoint(tmp_path, {}), torch.Generator().manual_seed(6)
    for name, value in revert_weight_conversion(model, dict(model.state_dict())).items():
        made.tensors[name] = value.clone()
        if not name.endswith(("experts.w13_weight", "experts.w2_weight")):
            continue
        weight = random_fp4(tuple(value.shape), generator, block=16, is_e4m3=True)
        multiplier = torch.rand(4, generator=generator) * 1e-4 + 3e-4
        weight.global_scale = multiplier.double().reshape(-1, 1, 1)
        parts = {"scale": weight.scales(), "scale2": multiplier, "input_amax": torch.ones(1)}
        if by_modelopt:
            made.tensors[name] = weight.packed()
        else:
            del made.tensors[name]
            divisor = 1 / multiplier
            weight.global_scale = 1 / divisor.double().reshape(-1, 1, 1)
            parts = {"weight_packed": weight.packed(), "weight_scale": weight.scales(), "weight_global_scale": divisor}
        made.tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        exact = weight.exact()
        in_model = name.replace("llm", "language_model").replace("w13_weight", "gate_up_proj")
        in_model = in_model.replace("w2_weight", "down_proj")
        made.exact[in_model] = torch.cat([exact[:, 0::2], exact[:, 1::2]], dim=1) if "w13" in name else exact
    save_config(tmp_path, config, {"quant_method": "modelopt" if by_modelopt else "compressed-tensors"})
    made.rewrite()
    assert_exact(load(tmp_path), made)
