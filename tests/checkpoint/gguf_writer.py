"""Writes GGUF files from nothing, and gpt-oss checkpoints as llama.cpp's converter names and splits them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import torch
from gpt_oss_writer import write_gpt_oss

F32, F16, Q8_0, BF16, MXFP4 = 0, 1, 8, 30, 39
Tensor = tuple[int, tuple[int, ...], bytes]
"""Type, shape with the last axis last, and data."""

METADATA: dict[str, Any] = {
    "general.architecture": "gpt-oss",
    "general.alignment": 32,
    "gpt-oss.block_count": 2,
    "gpt-oss.attention.head_count": 4,
    "gpt-oss.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.tokens": ["<a>", "b", "ü"],
    "tokenizer.ggml.token_type": [1, 2, 3],
    "tokenizer.ggml.add_bos_token": False,
}
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.router": "ffn_gate_inp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "model.layers": "blk",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_bytes(
    metadata: dict[str, Any], tensors: dict[str, Tensor], *, version: int = 3, offsets: dict[str, int] | None = None
) -> bytes:
    """A whole file; ``offsets`` puts tensors elsewhere than they are."""
    alignment = metadata.get("general.alignment", 32)
    alignment = alignment if isinstance(alignment, int) and alignment > 0 else 32
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for name, value in metadata.items():
        head += _text(name) + _value(value)
    data = b""
    for name, (kind, shape, content) in tensors.items():
        offset = (offsets or {}).get(name, len(data))
        head += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)
        data += content + bytes(-len(content) % alignment)
    return head + bytes(-len(head) % alignment) + data


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, list):
        items = [_value(item) for item in value]
        return struct.pack("<I", 9) + items[0][:4] + struct.pack("<Q", len(items)) + b"".join(i[4:] for i in items)
    layouts = {bool: (7, "<?"), int: (4, "<I"), float: (6, "<f")}
    kind, layout = layouts[type(value)]
    return struct.pack("<I", kind) + struct.pack(layout, value)


def plain(tensor: torch.Tensor, kind: int) -> Tensor:
    dtype = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}[kind]
    return kind, tuple(tensor.shape), tensor.to(dtype).contiguous().flatten().view(torch.uint8).numpy().tobytes()


def q8_0(scale: torch.Tensor, values: torch.Tensor) -> Tensor:
    """scale float16 [..., K/32], values int8 [..., K]."""
    blocks = values.unflatten(-1, (-1, 32)).view(torch.uint8)
    content = torch.cat((scale.unsqueeze(-1).view(torch.uint8), blocks), dim=-1)
    return Q8_0, tuple(values.shape), content.numpy().tobytes()


def mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> Tensor:
    """blocks uint8 [..., K/32, 16] with the even code low, scales uint8 [..., K/32]."""
    out = torch.empty(*blocks.shape[:-1], 17, dtype=torch.uint8)
    out[..., 0] = scales
    for byte in range(16):  # codes `byte` and `byte + 16` of 32
        first, second = (blocks[..., code // 2] >> (4 * (code % 2)) & 15 for code in (byte, byte + 16))
        out[..., 1 + byte] = first | (second << 4)
    return MXFP4, (*blocks.shape[:-2], blocks.shape[-2] * 32), out.numpy().tobytes()


def gguf_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, Tensor]:
    """The tensors of ``write_gpt_oss`` in llama.cpp's names: experts MXFP4, matrices bfloat16, the rest float32."""
    written: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
        if "gate_up_proj" in name:
            for turn, part in enumerate(("gate", "up")):
                if name.endswith("_blocks"):
                    scales = tensors[name.replace("_blocks", "_scales")]
                    written[f"{layer}.ffn_{part}_exps.weight"] = mxfp4(tensor[:, turn::2], scales[:, turn::2])
                elif name.endswith("_bias"):
                    written[f"{layer}.ffn_{part}_exps.bias"] = plain(tensor[:, turn::2], F32)
        elif "down_proj" in name:
            if name.endswith("_blocks"):
                scales = tensors[name.replace("_blocks", "_scales")]
                written[f"{layer}.ffn_down_exps.weight"] = mxfp4(tensor, scales)
            elif name.endswith("_bias"):
                written[f"{layer}.ffn_down_exps.bias"] = plain(tensor, F32)
        else:
            key = name
            for old, new in _NAMES.items():
                key = key.replace(old, new)
            written[key] = plain(tensor, BF16 if tensor.dim() > 1 and "router" not in name else F32)
    return written


def write_gguf(folder: Path, **config: Any) -> tuple[Path, dict[str, torch.Tensor], dict[str, Tensor]]:
    """A gpt-oss GGUF file with its config beside it: its path, the checkpoint's tensors, and the file's."""
    tensors = write_gpt_oss(folder, **config)
    (folder / "model.safetensors").unlink()
    stored = gguf_tensors(tensors)
    path = folder / "tiny-mxfp4.gguf"
    path.write_bytes(gguf_bytes(METADATA, stored))
    return path, tensors, stored
