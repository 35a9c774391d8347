"""A tiny whole model of every family in transformers whose experts stand under ``use_experts_implementation``.

Each is a text model with at least one layer of routed experts and random weights. Vision and audio towers are left
out: where one of them routes too, its experts are of the text model's class.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from models import COMMON, EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, VOCAB, randomize_biases
from torch import nn

from fp4_inductor.modules import transposed_experts

DECORATOR = "@use_experts_implementation"

_COMMON: dict[str, Any] = {
    **COMMON,
    "num_hidden_layers": 1,
    # Experts, by every name that families give them.
    "moe_intermediate_size": INTERMEDIATE,
    "num_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_topk": TOP_K,
    "moe_k": TOP_K,
    "top_k_experts": TOP_K,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "shared_expert_intermediate_size": 64,
    # Routing that uses its knobs, where a family has them.
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "router_scaling_factor": 2.5,
    "moe_routed_scaling_factor": 2.5,
    "route_scale": 2.5,
    # Every layer has experts.
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "moe_layer_start_index": 0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "mlp_layer_types": ["sparse"],
    # The rest is as small as it builds.
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_topk": 8,
    "index_head_dim": 32,
    "index_n_heads": 2,
    "sliding_window": 16,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "hc_sinkhorn_iters": 2,  # each is written out in the graph
}
"""What a config class has no field for is left out."""

_ALL_HEADS: dict[str, Any] = {"num_key_value_heads": 4}
"""Latent attention expands its keys to every head."""


@dataclass(frozen=True)
class Family:
    """How to build a family: its model class, and what its config needs beyond the common sizes."""

    model: str
    config: dict[str, Any] = field(default_factory=dict)
    runs_since: tuple[int, int] = (5, 0)
    """The first release of transformers that is known to run it in bfloat16."""


FAMILIES: dict[str, Family] = {
    "afmoe": Family("AfmoeForCausalLM"),
    "aria": Family("AriaTextForCausalLM"),
    "axk1": Family("AXK1ForCausalLM", _ALL_HEADS),
    "axk2": Family("AXK2ForCausalLM", _ALL_HEADS),
    "bailing_hybrid": Family("BailingHybridForCausalLM"),
    "beam": Family("BeamForCausalLM"),
    "cohere2_moe": Family("Cohere2MoeForCausalLM"),
    "deepseek_ocr2": Family("DeepseekOcr2TextModel"),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", {**_ALL_HEADS, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", _ALL_HEADS),
    "deepseek_v32": Family("DeepseekV32ForCausalLM", _ALL_HEADS),
    "deepseek_v4": Family(
        "DeepseekV4ForCausalLM", {"num_hidden_layers": 2, "mlp_layer_types": ["hash_moe", "moe"]}, runs_since=(5, 23)
    ),
    "diffusion_gemma": Family("DiffusionGemmaEncoderTextModel"),
    "dots1": Family("Dots1ForCausalLM"),
    "dots3_note": Family("Dots3NoteForCausalLM", _ALL_HEADS),
    "ernie4_5_moe": Family("Ernie4_5_MoeForCausalLM"),
    "ernie4_5_vl_moe": Family(
        "Ernie4_5_VLMoeTextModel",
        {
            "moe_intermediate_size": [INTERMEDIATE, 64],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [5, 5, 6]},
        },
    ),
    "exaone_moe": Family("ExaoneMoeForCausalLM"),
    "flex_olmo": Family("FlexOlmoForCausalLM"),
    "flint": Family("FlintForCausalLM"),
    "gemma4": Family(
        "Gemma4ForCausalLM",
        {"enable_moe_block": True, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16},
    ),
    "glm4_moe": Family("Glm4MoeForCausalLM"),
    "glm4_moe_lite": Family("Glm4MoeLiteForCausalLM", _ALL_HEADS),
    "glm4v_moe": Family(
        "Glm4vMoeTextModel",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    ),
    "glm5_next": Family("Glm5NextTextModel", {**_ALL_HEADS, "qk_rope_head_dim": 0, "index_kpool": 4}),
    "glm_moe_dsa": Family("GlmMoeDsaForCausalLM", _ALL_HEADS),
    "gpt_oss": Family("GptOssForCausalLM"),
    "granitemoe": Family("GraniteMoeForCausalLM"),
    "granitemoe_swa": Family("GraniteMoeSWAForCausalLM"),
    "granitemoehybrid": Family("GraniteMoeHybridForCausalLM", {"layer_types": ["attention"]}),
    "granitemoeshared": Family("GraniteMoeSharedForCausalLM"),
    "hunyuan_v1_moe": Family("HunYuanMoEV1ForCausalLM"),
    "hy_v3": Family("HYV3ForCausalLM"),
    "hy_v4": Family("HYV4ForCausalLM"),
    "inkling": Family("InklingForCausalLM"),
    "inkling2": Family("Inkling2ForCausalLM"),
    "jamba": Family("JambaForCausalLM", {"expert_layer_offset": 0, "attn_layer_offset": 0, "expert_layer_period": 1}),
    "kimi_linear": Family("KimiLinearForCausalLM"),
    "kolibri1": Family("Kolibri1ForCausalLM"),
    "laguna": Family("LagunaForCausalLM"),
    "lfm2_moe": Family("Lfm2MoeForCausalLM", {"layer_types": ["full_attention"]}),
    "mellum": Family("MellumForCausalLM"),
    "mimo_v2_flash": Family("MiMoV2FlashForCausalLM"),
    "minimax": Family("MiniMaxForCausalLM"),
    "minimax_m2": Family("MiniMaxM2ForCausalLM"),
    "minimax_m3_vl": Family("MiniMaxM3VLForCausalLM"),
    "mistral4": Family("Mistral4ForCausalLM", _ALL_HEADS),
    "mistral_large4": Family("MistralLarge4TextModel", _ALL_HEADS),
    "mixtral": Family("MixtralForCausalLM"),
    "muse_spark": Family("MuseSparkTextModel", {"moe_hidden_size": HIDDEN}),
    "nemotron_h": Family("NemotronHForCausalLM"),
    "olmoe": Family("OlmoeForCausalLM"),
    "openai_privacy_filter": Family("OpenAIPrivacyFilterModel"),
    "phimoe": Family("PhimoeForCausalLM"),
    "qwen2_moe": Family("Qwen2MoeForCausalLM"),
    "qwen3_5_moe": Family("Qwen3_5MoeForCausalLM"),
    "qwen3_moe": Family("Qwen3MoeForCausalLM"),
    "qwen3_next": Family("Qwen3NextForCausalLM"),
    "qwen3_omni_moe": Family("Qwen3OmniMoeThinkerTextModel"),
    "qwen3_vl_moe": Family("Qwen3VLMoeTextModel"),
    "qwen4_exp": Family("Qwen4ExpForCausalLM"),
    "solar_open": Family("SolarOpenForCausalLM"),
    "unlimited_ocr": Family("UnlimitedOcrTextModel"),
    "zaya": Family("ZayaForCausalLM", {"num_experts_per_tok": 1}),
}


def modeling_module(family: str) -> str:
    """The import path of a family's modelling file."""
    return f"transformers.models.{family}.modeling_{family}"


def missing(family: str) -> str:
    """Why the installed transformers cannot run this family; empty if it can."""
    version = importlib.metadata.version("transformers")
    try:
        found = importlib.util.find_spec(modeling_module(family))
    except ModuleNotFoundError:
        found = None
    if found is None or found.origin is None:
        return f"transformers {version} has no {family}"
    if DECORATOR not in Path(found.origin).read_text():
        return f"transformers {version} computes the experts of {family} in one way only"
    runs = tuple(map(int, version.split(".")[:2])) >= FAMILIES[family].runs_since
    return "" if runs else f"transformers {version} does not run {family} in bfloat16"


@torch.no_grad()
def build(family: str, seed: int = 0) -> nn.Module:
    """A random bfloat16 model of ``family`` in evaluation mode, its router biases and scales random too."""
    entry = FAMILIES[family]
    model_class = getattr(importlib.import_module(modeling_module(family)), entry.model)
    torch.manual_seed(seed)
    model: nn.Module = model_class._from_config(_config(model_class.config_class, entry), dtype=torch.bfloat16).eval()
    _restore_float32(model)
    randomize_biases(model)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("per_expert_scale"):
            nn.init.uniform_(value, 0.5, 1.5)
        if name.endswith("tid2eid"):  # experts by token id
            value.copy_(torch.rand(len(value), EXPERTS).topk(TOP_K).indices)
    for module in model.modules():
        if transposed_experts(module) is not None:
            _enliven(module)
    return model.requires_grad_(False)


def _config(config_class: Any, entry: Family) -> Any:
    known = {f.name for f in dataclasses.fields(config_class)}
    settings = {name: value for name, value in _COMMON.items() if name in known}
    if "intermediate_size" in known:
        settings["intermediate_size"] = 2 * INTERMEDIATE if "moe_intermediate_size" in known else INTERMEDIATE
    return config_class(**{**settings, **entry.config})


def _restore_float32(model: nn.Module) -> None:
    """Keep in float32 what loading a checkpoint keeps in float32."""
    kept = [f".{name}." for name in getattr(model, "_keep_in_fp32_modules_strict", None) or ()]
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if value.is_floating_point() and any(part in f".{name}." for part in kept):
            value.data = value.data.float()


def _enliven(experts: nn.Module) -> None:
    """Weights that take gates well beyond any limit: what transformers starts with stays in the linear part."""
    for parameter in experts.parameters(recurse=False):
        if parameter.dim() == 3:
            k_axis = -2 if transposed_experts(experts) else -1
            nn.init.normal_(parameter, std=4 / math.sqrt(parameter.shape[k_axis]))
