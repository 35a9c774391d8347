"""Writes random checkpoints as torchao serialises its tensors, scales in rows or in tiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from fp4_values import Fp4, random_fp4
from layout_writers import Checkpoint, Tensors, model_config, save_config, shapes_of
from safetensors.torch import save_file


def in_tiles(bits: torch.Tensor) -> torch.Tensor:
    """Scales ``[rows, columns]`` in tiles of 128 rows by four, byte by byte: row r, scale s of a tile at
    16 (r % 32) + 4 (r // 32) + s."""
    rows, columns = bits.shape
    high, wide = -(-rows // 128), -(-columns // 4)
    tiles = torch.zeros(high, wide, 512, dtype=torch.uint8)
    for row in range(rows):
        for column in range(columns):
            inside = row % 128
            tiles[row // 128, column // 4, 16 * (inside % 32) + 4 * (inside // 32) + column % 4] = bits[row, column]
    return tiles.flatten()


def parts_of(name: str, weight: Fp4, swizzled: bool, generator: torch.Generator) -> tuple[Tensors, str]:
    """The stored tensors of a weight, and its description."""
    stem, _, last = name.rpartition(".")
    prefix = f"{stem}._{last}_"
    *leading, rows, columns = weight.scale_bits.shape
    bits = weight.scale_bits
    if swizzled:
        tiles = in_tiles(bits.reshape(-1, columns))
        bits = tiles.view(*leading, -(-rows // 128) * 32, -(-columns // 4) * 16)
    dtype = torch.float8_e4m3fn if weight.is_e4m3 else torch.float8_e8m0fnu
    parts = {prefix + "qdata": weight.packed(), prefix + "scale": bits.contiguous().view(dtype)}
    said: dict[str, Any] = {"block_size": 16 if weight.is_e4m3 else 32, "is_swizzled_scales": swizzled}
    if weight.is_e4m3:
        number = torch.rand([len(weight.codes), 1, 1] if leading else [], generator=generator) * 1e-4 + 3e-4
        weight.global_scale = number.double()
        parts[prefix + "per_tensor_scale"] = number
    else:
        said["elem_dtype"] = {"_type": "torch.dtype", "_data": "float4_e2m1fn_x2"}
    kind = "NVFP4Tensor" if weight.is_e4m3 else "MXTensor"
    return parts, json.dumps({"_type": kind, "_data": said, "_tensor_data_names": ["qdata", "scale"]})


def write_torchao(folder: Path, *, is_e4m3: bool, swizzled: bool, **changes: Any) -> Checkpoint:
    """A Qwen3-MoE checkpoint whose experts and attention are torchao's tensors. Experts have 128 rows each."""
    generator = torch.Generator().manual_seed(2)
    config = model_config("qwen3_moe", hidden_size=128, moe_intermediate_size=64, **changes)
    made, metadata = Checkpoint(folder, {}), {}
    for name, shape in shapes_of(config).items():
        if "experts" in name or ("self_attn" in name and "norm" not in name):
            weight = random_fp4(tuple(shape), generator, block=16 if is_e4m3 else 32, is_e4m3=is_e4m3)
            parts, metadata[name] = parts_of(name, weight, swizzled, generator)
            made.tensors |= parts
            made.exact[name] = weight.exact()
        else:
            value = torch.randn(shape, generator=generator) * 0.05 + (1.0 if "norm" in name else 0.0)
            made.tensors[name] = made.plain[name] = value.to(torch.bfloat16)
            metadata[name] = json.dumps({"_type": "Tensor"})
    save_config(folder, config, {"quant_method": "torchao"})
    save_file(made.tensors, folder / "model.safetensors", metadata=metadata)
    return made
