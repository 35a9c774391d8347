"""Decodes the exporters' fixtures from the files' bytes in float64, by names of their own: no reader is shared."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from fp4_values import Fp4

Decoded = dict[str, torch.Tensor]


def decode_folder(folder: Path) -> Decoded:
    """Every FP4 weight of ``model.safetensors`` in float64, ``[..., N, K]``, by its tensor's name."""
    raw = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])

    def tensor(name: str) -> torch.Tensor:
        begin, end = header[name]["data_offsets"]
        values = torch.frombuffer(bytearray(raw[start + begin : start + end]), dtype=torch.uint8)
        if header[name]["dtype"] == "F32":
            return values.view(torch.float32).double().reshape(header[name]["shape"])
        return values.reshape(header[name]["shape"])

    found: Decoded = {}
    for name in header:
        for codes_end, scale_end in _PAIRS:
            scale = name.removesuffix(codes_end) + scale_end
            if name.endswith(codes_end) and scale in header and header[name]["dtype"] in ("U8", "I8"):
                found[name] = _decode(header, tensor, name, scale)
    return found


_PAIRS = (
    ("_blocks", "_scales"),
    (".blocks", ".scales"),
    (".weight_packed", ".weight_scale"),
    (".weight", ".weight_scale"),
    (".weight", ".scale"),
    ("_proj", "_proj_weight_scale"),
)


def _decode(header: dict, tensor, name: str, scale_name: str) -> torch.Tensor:  # type: ignore[no-untyped-def,type-arg]
    packed, bits = tensor(name), tensor(scale_name)
    if name.endswith("blocks"):
        packed = packed.flatten(-2)
    if name.endswith("_proj"):  # stacked by ModelOpt for modules that keep K second
        packed, bits = packed.mT, bits.mT
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    number = torch.tensor(1.0, dtype=torch.float64)
    if scale_name + "_2" in header:
        number = tensor(scale_name + "_2")
    divisor = name.replace("weight_packed", "weight_global_scale")
    if divisor != name and divisor in header:
        number = 1 / tensor(divisor)
    return Fp4(codes, bits, header[scale_name]["dtype"] == "F8_E4M3", number).exact()


def expected_parameter(name: str, stored: Decoded) -> torch.Tensor:
    """The model's parameter ``name`` from decoded weights, in the model's own shape."""
    direct = _first(stored, name, f"{name}_blocks", f"{name}_packed")
    if direct is not None:
        return direct.mT if direct.dim() == 3 else direct  # gpt-oss alone stacks experts in these files
    layer = re.search(r"layers\.(\d+)\.", name)
    assert layer
    native = _first(stored, f"block.{layer[1]}.mlp.mlp{1 if 'gate_up' in name else 2}_weight.blocks")
    if native is not None:
        return native.mT
    parts = (("gate_proj", "up_proj"), ("w1", "w3")) if "gate_up" in name else (("down_proj",), ("w2",))
    for names in parts:
        experts = [[_expert(stored, layer[1], expert, part) for part in names] for expert in range(4)]
        if all(weight is not None for weights in experts for weight in weights):
            return torch.stack([torch.cat(weights) for weights in experts])  # type: ignore[arg-type]
    raise AssertionError(f"nothing for {name}")


def _expert(stored: Decoded, layer: str, expert: int, part: str) -> torch.Tensor | None:
    pattern = rf"(model\.)?layers\.{layer}\.\w+\.experts\.{expert}\.{part}\.weight(_packed)?"
    return next((value for name, value in stored.items() if re.fullmatch(pattern, name)), None)


def _first(stored: Decoded, *names: str) -> torch.Tensor | None:
    return next((stored[name] for name in names if name in stored), None)
