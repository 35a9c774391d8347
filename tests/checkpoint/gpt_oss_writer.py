"""Writes random gpt-oss checkpoints in the published layout, of any size, in a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GenerationConfig, GptOssConfig

TINY: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "sliding_window": 8,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def random_tensors(config: GptOssConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors by name: random codes under scales 2^-9 to 2^-5, and random bfloat16 weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, k, n = shape  # the module keeps [E, K, N], the file [E, N, K]
            blocks = torch.randint(256, (experts, n, k // 32, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(118, 123, (experts, n, k // 32), dtype=torch.uint8, generator=generator)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            weight = torch.randn(shape, generator=generator) * 0.05 + (1.0 if "norm" in name else 0.0)
            tensors[name] = weight.to(torch.bfloat16)
    return tensors


def write_gpt_oss(folder: Path, *, shards: int = 1, seed: int = 0, **config: Any) -> dict[str, torch.Tensor]:
    """Write a checkpoint; ``config`` overrides ``TINY``. Returns its tensors by name."""
    model_config = GptOssConfig(**{**TINY, **config})
    tensors = random_tensors(model_config, seed)
    model_config.architectures = ["GptOssForCausalLM"]
    model_config.dtype = torch.bfloat16
    model_config.quantization_config = QUANTIZATION
    model_config.save_pretrained(folder)
    GenerationConfig(eos_token_id=[2, 3], pad_token_id=0, max_new_tokens=5, do_sample=False).save_pretrained(folder)
    write_tensors(folder, tensors, shards)
    return tensors


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    """Write ``model.safetensors``, or shards and their index."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        part = {name: tensors[name] for name in names if weight_map[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
