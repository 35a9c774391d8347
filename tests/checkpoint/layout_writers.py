"""Writes random checkpoints in the layouts of FP4 exporters, and says what each weight must decode to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fp4_values import Fp4, random_fp4
from gpt_oss_writer import write_tensors
from models import COMMON, CONFIGS

Tensors = dict[str, torch.Tensor]


@dataclass
class Checkpoint:
    """A written checkpoint: its tensors by name, and what the model's parameters must be."""

    folder: Path
    tensors: Tensors
    exact: Tensors = field(default_factory=dict)
    """float64 weights by the model's name."""
    plain: Tensors = field(default_factory=dict)

    def rewrite(self, shards: int = 1) -> None:
        write_tensors(self.folder, self.tensors, shards)


@dataclass(frozen=True)
class Linear:
    """How an exporter writes one matrix ``[N, K]`` of module ``X``."""

    block: int
    is_e4m3: bool
    tensors: Callable[[str, Fp4, torch.Generator], Tensors]
    config: dict[str, Any] = field(default_factory=dict)
    inverse: bool = False

    def random(self, shape: tuple[int, ...], generator: torch.Generator) -> Fp4:
        weight = random_fp4(shape, generator, block=self.block, is_e4m3=self.is_e4m3)
        if self.is_e4m3:
            stored = torch.rand(1, generator=generator) * 1e-4 + 3e-4
            if self.inverse:
                stored = torch.rand(1, generator=generator) * 2000 + 2000
            weight.global_scale = 1 / stored.double() if self.inverse else stored.double()
            weight.stored_global = stored  # type: ignore[attr-defined]
        return weight


def _modelopt(name: str, weight: Fp4, generator: torch.Generator) -> Tensors:
    parts = {f"{name}.weight": weight.packed(), f"{name}.weight_scale": weight.scales()}
    if weight.is_e4m3:
        parts[f"{name}.weight_scale_2"] = weight.stored_global.reshape(())  # type: ignore[attr-defined]
        parts[f"{name}.input_scale"] = torch.rand((), generator=generator)
    return parts


def _weight_only(name: str, weight: Fp4, generator: torch.Generator) -> Tensors:
    return {key: part for key, part in _modelopt(name, weight, generator).items() if "input_scale" not in key}


def _quark_nvfp4(name: str, weight: Fp4, generator: torch.Generator) -> Tensors:
    return {**_weight_only(name, weight, generator), f"{name}.input_scale_2": torch.rand((), generator=generator)}


def _compressed_tensors(name: str, weight: Fp4, generator: torch.Generator) -> Tensors:
    parts = {f"{name}.weight_packed": weight.packed(), f"{name}.weight_scale": weight.scales()}
    if weight.is_e4m3:
        parts[f"{name}.weight_global_scale"] = weight.stored_global  # type: ignore[attr-defined]
        parts[f"{name}.input_global_scale"] = torch.rand(1, generator=generator)
    return parts


def _compressed_weight_only(name: str, weight: Fp4, generator: torch.Generator) -> Tensors:
    return {k: part for k, part in _compressed_tensors(name, weight, generator).items() if "input_global" not in k}


def _deepseek(name: str, weight: Fp4, generator: torch.Generator) -> Tensors:
    scale = weight.scale_bits.view(torch.float8_e8m0fnu)
    return {f"{name}.weight": weight.packed().view(torch.int8), f"{name}.scale": scale}


LINEARS = {
    "modelopt nvfp4": Linear(16, True, _modelopt, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "modelopt w4a16 nvfp4": Linear(16, True, _weight_only, {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}),
    "modelopt e4m3 per 32": Linear(32, True, _modelopt, {"quant_method": "modelopt", "quant_algo": "W4A8_NVFP4_FP8"}),
    "modelopt mxfp4": Linear(32, False, _modelopt, {"quant_method": "modelopt", "quant_algo": "mxfp4"}),
    "quark mxfp4": Linear(32, False, _modelopt, {"quant_method": "quark"}),
    "quark nvfp4": Linear(16, True, _quark_nvfp4, {"quant_method": "quark"}),
    "compressed-tensors nvfp4": Linear(
        16, True, _compressed_tensors, {"quant_method": "compressed-tensors"}, inverse=True
    ),
    "compressed-tensors nvfp4a16": Linear(
        16, True, _compressed_weight_only, {"quant_method": "compressed-tensors"}, inverse=True
    ),
    "compressed-tensors mxfp4": Linear(32, False, _compressed_tensors, {"quant_method": "compressed-tensors"}),
    "auto-round nvfp4": Linear(
        16, True, _compressed_tensors, {"quant_method": "auto-round", "data_type": "nv_fp"}, inverse=True
    ),
    "deepseek": Linear(32, False, _deepseek, {"quant_method": "fp8"}),
}

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "num_experts_per_tok": 2,
    "vocab_size": 96,
}
_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 96, "intermediate_size": 160},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 96},
    "llama4_text": {
        "num_local_experts": 4,
        "intermediate_size": 96,
        "intermediate_size_mlp": 160,
        "interleave_moe_layer_step": 1,
        "num_experts_per_tok": 1,
    },
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 96, "sliding_window": 8},
    "qwen3_vl_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 96,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    },
    "deepseek_v3": {"num_key_value_heads": 4, "n_routed_experts": 8, "moe_intermediate_size": 96},
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 96,
        "intermediate_size": 160,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 16,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
_VISION: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe": {
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    },
}
PER_EXPERT = {
    "gemma4_text": ("gate_proj", "up_proj", "down_proj"),
    "llama4_text": ("gate_proj", "up_proj", "down_proj"),
    "qwen3_vl_moe": ("gate_proj", "up_proj", "down_proj"),
    "qwen3_moe": ("gate_proj", "up_proj", "down_proj"),
    "deepseek_v3": ("gate_proj", "up_proj", "down_proj"),
    "gpt_oss": ("gate_proj", "up_proj", "down_proj"),
    "mixtral": ("w1", "w3", "w2"),
}


def model_config(family: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    settings = {**COMMON, **CONFIGS.get(family, {}), **SIZES, **_EXPERTS[family], **changes}
    if family in _VISION:
        return AutoConfig.for_model(family, text_config=settings, vision_config=_VISION[family])
    return AutoConfig.for_model(family, **settings)


def shapes_of(config: Any) -> dict[str, torch.Size]:
    """Of the parameters and buffers of the model that ``config`` describes."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto = AutoModelForImageTextToText if config.model_type in _VISION else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    tied = set(model.all_tied_weights_keys) if config.tie_word_embeddings else set()
    return {name: value.shape for name, value in model.state_dict().items() if name not in tied}


def write_per_expert(
    folder: Path, layout: str, family: str = "qwen3_moe", *, dense: bool = True, shards: int = 1, **changes: Any
) -> Checkpoint:
    """A checkpoint with every expert by itself, and with ``dense`` the attention's projections in FP4, too."""
    generator = torch.Generator().manual_seed(0)
    linear, config = LINEARS[layout], model_config(family, **changes)
    made = Checkpoint(folder, {})
    for name, shape in shapes_of(config).items():
        stem, _, last = name.rpartition(".")
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            turned = family in ("gpt_oss", "llama4_text")
            experts, n, k = (shape[0], shape[2], shape[1]) if turned else shape
            exact = _write_experts(
                made, linear, name, (experts, n, k), PER_EXPERT[family], generator, family == "gpt_oss"
            )
            made.exact[name] = exact.mT if turned else exact
        elif family == "gpt_oss" and name.endswith("_proj_bias"):
            _write_biases(made, name, shape, generator)
        elif dense and "self_attn" in name and last == "weight" and "norm" not in name:
            weight = linear.random(tuple(shape), generator)
            made.tensors |= linear.tensors(stem, weight, generator)
            made.exact[name] = weight.exact()
        else:
            _write_plain(made, name, shape, generator)
    if family == "mixtral":
        made.tensors = {key.replace(".mlp.", ".block_sparse_moe."): part for key, part in made.tensors.items()}
    save_config(folder, config, linear.config)
    made.rewrite(shards)
    return made


def _write_experts(
    made: Checkpoint,
    linear: Linear,
    name: str,
    shape: tuple[int, ...],
    parts: tuple[str, str, str],
    generator: torch.Generator,
    in_turns: bool,
) -> torch.Tensor:
    """What the experts stand for, ``[E, N, K]``, gate's rows before up's or, as in gpt-oss, in turns with them."""
    stem, _, last = name.rpartition(".")
    gate, up, down = parts
    names = (gate, up) if last == "gate_up_proj" else (down,)
    rows = shape[1] // len(names)
    exact = torch.empty(shape, dtype=torch.float64)
    for expert in range(shape[0]):
        for index, part in enumerate(names):
            weight = linear.random((rows, shape[2]), generator)
            made.tensors |= linear.tensors(f"{stem}.{expert}.{part}", weight, generator)
            of_part = slice(index, None, len(names)) if in_turns else slice(index * rows, (index + 1) * rows)
            exact[expert, of_part] = weight.exact()
    return exact


def _write_biases(made: Checkpoint, name: str, shape: torch.Size, generator: torch.Generator) -> None:
    """Biases of gpt-oss' experts, one by one, as exporters that take experts apart write them."""
    value = made.plain[name] = torch.randn(shape, generator=generator).to(torch.bfloat16)
    stem = name.rpartition(".")[0]
    for expert in range(shape[0]):
        if "gate_up" in name:
            made.tensors[f"{stem}.{expert}.gate_proj.bias"] = value[expert, 0::2].contiguous()
            made.tensors[f"{stem}.{expert}.up_proj.bias"] = value[expert, 1::2].contiguous()
        else:
            made.tensors[f"{stem}.{expert}.down_proj.bias"] = value[expert].contiguous()


def write_stacked(
    folder: Path,
    family: str,
    *,
    k_first: bool,
    scales: str = "one",
    is_e4m3: bool = True,
    inverse: bool = False,
    flat: bool = False,
    **changes: Any,
) -> Checkpoint:
    """A checkpoint with fused experts under ModelOpt's names, or with ``inverse`` under compressed-tensors'.

    Args:
        k_first: stored ``[E, K/2, N]``, else ``[E, N, K/2]``.
        flat: stored ``[E N, K/2]``, experts under one another.
        scales: "one" global scale for all, one for each expert ("each"), or a "pair" for gate and up of each.
    """
    generator = torch.Generator().manual_seed(1)
    config = model_config(family, **changes)
    made = Checkpoint(folder, {})
    for name, shape in shapes_of(config).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            _write_plain(made, name, shape, generator)
            continue
        turned = family in ("gpt_oss", "llama4_text")
        experts, n, k = (shape[0], shape[2], shape[1]) if turned else shape
        weight = random_fp4((experts, n, k), generator, block=16 if is_e4m3 else 32, is_e4m3=is_e4m3)
        codes, scale = weight.packed(), weight.scale_bits
        if k_first:
            codes, scale = codes.mT.contiguous(), scale.mT.contiguous()
        if flat:
            codes, scale = codes.flatten(0, 1), scale.flatten(0, 1)
        ends = ("_packed", "_scale", "_global_scale", "_input_global_scale")
        ends = ends if inverse else ("", "_weight_scale", "_weight_scale_2", "_input_scale")
        made.tensors[name + ends[0]] = codes
        made.tensors[name + ends[1]] = scale.view(torch.float8_e4m3fn) if is_e4m3 else scale
        if is_e4m3:
            count = 2 if scales == "pair" and "gate_up" in name else 1
            stored = torch.rand(experts, count, generator=generator) * 1e-4 + 3e-4
            stored = 1 / stored if inverse else stored
            made.tensors[name + ends[2]] = stored[0, 0] if scales == "one" else stored.squeeze(-1)
            made.tensors[name + ends[3]] = torch.rand((), generator=generator)
            by_row = _by_row(stored[:1, :1] if scales == "one" else stored, n, family).double()
            weight.global_scale = 1 / by_row if inverse else by_row
        made.exact[name] = weight.exact().mT if turned else weight.exact()
    said = {"quant_method": "modelopt", "quant_algo": "NVFP4" if is_e4m3 else "mxfp4"}
    save_config(folder, config, {"quant_method": "compressed-tensors"} if inverse else said)
    made.rewrite()
    return made


def _by_row(stored: torch.Tensor, rows: int, family: str) -> torch.Tensor:
    """Global scales ``[E, 1 or 2]`` as ``[E, N, 1]``: gpt-oss alternates gate and up, others have gate first."""
    if stored.shape[1] == 1:
        return stored.unsqueeze(-1)
    gate_rows = torch.arange(rows) % 2 == 0 if family == "gpt_oss" else torch.arange(rows) < rows // 2
    return torch.where(gate_rows, stored[:, :1], stored[:, 1:]).unsqueeze(-1)


def _write_plain(made: Checkpoint, name: str, shape: torch.Size, generator: torch.Generator) -> None:
    value = torch.randn(shape, generator=generator) * 0.05 + (1.0 if "norm" in name else 0.0)
    made.tensors[name] = made.plain[name] = value.to(torch.bfloat16)


def save_config(folder: Path, config: Any, quantization: dict[str, Any]) -> None:
    config.architectures = None
    config.dtype = torch.bfloat16
    folder.mkdir(exist_ok=True)
    content = {**json.loads(config.to_json_string(use_diff=False)), "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
