"""gpt-oss in GGUF: MXFP4 blocks of 17 bytes, gate and up apart, under llama.cpp's names.

A block is one e8m0 byte and 16 bytes, whose low nibbles are its first 16 codes and whose high nibbles are its last.
Other families are refused: a converter may have moved their rows. Source: ggml, ggml-quants.c; llama.cpp, its
converter and its tables of names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NoReturn

import torch

from ..errors import CheckpointError
from ..formats import MXFP4
from ..quant import PackedTensors
from .files import CheckpointFiles
from .gguf_header import BLOCK_SIZE, MXFP4_BYTES, Q8_0_BYTES
from .parts import require, some
from .weights import Fp4Weight, PlainWeight, Weight, packed

DESCRIPTION = "gpt-oss MXFP4 in GGUF (blk.0.ffn_down_exps)"

_FAMILY = "gpt-oss"
_SOURCE = "load the checkpoint in safetensors that it was converted from"
_CONFIG = "put the config.json of the checkpoint that it was converted from beside it"
_NAMES = {
    r"token_embd\.weight": "model.embed_tokens.weight",
    r"output\.weight": "lm_head.weight",
    r"output_norm\.weight": "model.norm.weight",
    r"blk\.(\d+)\.attn_norm\.weight": r"model.layers.\1.input_layernorm.weight",
    r"blk\.(\d+)\.post_attention_norm\.weight": r"model.layers.\1.post_attention_layernorm.weight",
    r"blk\.(\d+)\.attn_([qkv])\.(weight|bias)": r"model.layers.\1.self_attn.\2_proj.\3",
    r"blk\.(\d+)\.attn_output\.(weight|bias)": r"model.layers.\1.self_attn.o_proj.\2",
    r"blk\.(\d+)\.attn_sinks\.weight": r"model.layers.\1.self_attn.sinks",
    r"blk\.(\d+)\.ffn_gate_inp\.(weight|bias)": r"model.layers.\1.mlp.router.\2",
    r"blk\.(\d+)\.ffn_down_exps\.weight": r"model.layers.\1.mlp.experts.down_proj",
    r"blk\.(\d+)\.ffn_down_exps\.bias": r"model.layers.\1.mlp.experts.down_proj_bias",
    r"blk\.(\d+)\.ffn_gate_exps\.weight": r"model.layers.\1.mlp.experts.gate_up_proj",
    r"blk\.(\d+)\.ffn_gate_exps\.bias": r"model.layers.\1.mlp.experts.gate_up_proj_bias",
}
_GATE, _UP = ".ffn_gate_exps.", ".ffn_up_exps."
_SAME = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}
"""What the file says under its family's name, and the entry of config.json that says the same."""


def find(files: CheckpointFiles) -> Iterator[Weight]:
    """The weights of this layout, none for a checkpoint of another.

    Raises:
        CheckpointError: another family, a config of another model, parts that are missing or do not fit together, or
            tensors that have no place.
    """
    if not files.is_gguf:
        return
    _check_family(files)
    gates = [key for key in files.tensors if _GATE in key and _name(key)]
    require(files.tensors, (key.replace(_GATE, _UP) for key in gates), DESCRIPTION)
    left = []
    for key in files.tensors:
        if (name := _name(key)) is not None:
            pair = (key, key.replace(_GATE, _UP)) if _GATE in key else (key,)
            yield _weight(files, name, pair)
        elif key.replace(_UP, _GATE) not in gates:
            left.append(key)
    if left:
        _refuse(files, "tensors that gpt-oss has, no others", some(sorted(left)), _SOURCE)


def _check_family(files: CheckpointFiles) -> None:
    family = files.metadata.get("general.architecture")
    if family != _FAMILY:
        _refuse(files, f"the family {_FAMILY}", repr(family), f"{_SOURCE}: converters move rows of some families")
    if not files.config:
        _refuse(files, "config.json beside the file", "none", _CONFIG)
    said = {"general.architecture": (_FAMILY, str(files.config.get("model_type")).replace("_", "-"))}
    for entry, name in _SAME.items():
        stored = files.metadata.get(f"{_FAMILY}.{entry}")
        if stored is not None and name in files.config:
            said[entry] = (stored, str(files.config[name]))
    for entry, (stored, configured) in said.items():
        if stored != configured:
            _refuse(files, f"a config.json of the same model, {entry} {stored}", configured, _CONFIG)


def _name(key: str) -> str | None:
    return next((match.expand(name) for pattern, name in _NAMES.items() if (match := re.fullmatch(pattern, key))), None)


def _weight(files: CheckpointFiles, name: str, keys: tuple[str, ...]) -> Weight:
    """The weight of one tensor, or of gate's and up's, whose rows take turns."""
    stored = [files.tensors[key] for key in keys]
    shape, dtype = stored[0].shape, stored[0].dtype
    if any((other.shape, other.dtype) != (shape, dtype) for other in stored):
        got = " and ".join(f"{other.dtype} {list(other.shape)}" for other in stored)
        _refuse(files, f"{' and '.join(keys)} of one shape and type", got, _SOURCE)
    is_experts = name.endswith((".gate_up_proj", ".down_proj"))
    if dtype == torch.uint8 and shape[-1] == MXFP4_BYTES:
        if len(shape) < 3 or not (is_experts or name.endswith("_proj.weight")):
            _refuse(files, "MXFP4 in matrices of experts and attention alone", keys[0], _SOURCE)
        *leading, rows, blocks, _ = shape
        fp4_shape = (*leading, len(keys) * rows, blocks * BLOCK_SIZE)
        return Fp4Weight(name, DESCRIPTION, MXFP4, fp4_shape, keys, lambda: _read_fp4(files, keys, fp4_shape))
    if is_experts:
        _refuse(files, "experts of type MXFP4", f"another type: {keys[0]}", _SOURCE)
    if dtype == torch.uint8:
        shape, dtype = (*shape[:-2], shape[-2] * BLOCK_SIZE), torch.float32
    plain_shape = (*shape[:-1], len(keys) * shape[-1])
    return PlainWeight(name, plain_shape, dtype, keys, lambda: _read_plain(files, keys))


def _read_fp4(files: CheckpointFiles, keys: tuple[str, ...], shape: tuple[int, ...]) -> PackedTensors:
    codes = torch.empty(*shape[:-1], shape[-1] // 2, dtype=torch.uint8, device="cpu")
    scale = torch.empty(*shape[:-1], shape[-1] // BLOCK_SIZE, dtype=torch.uint8, device="cpu")
    for turn, key in enumerate(keys):
        rows = slice(turn, None, len(keys))
        _unpack(files.read(key), codes[..., rows, :], scale[..., rows, :])
    return packed(codes, scale, None, keys[0])


def _unpack(blocks: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> None:
    """Write blocks in canonical form, an expert at a time.

    Args:
        blocks: ``uint8 [..., N, K/32, 17]``.
        codes: ``uint8 [..., N, K/2]``, written.
        scale: ``uint8 [..., N, K/32]``, written.
    """
    if blocks.dim() > 3:
        for parts in zip(blocks, codes, scale, strict=True):
            _unpack(*parts)
        return
    scale.copy_(blocks[..., 0])
    nibbles = blocks[..., 1:]
    ordered = torch.cat((nibbles & 15, nibbles >> 4), dim=-1)
    codes.copy_((ordered[..., 0::2] | (ordered[..., 1::2] << 4)).flatten(-2))


def _read_plain(files: CheckpointFiles, keys: tuple[str, ...]) -> torch.Tensor:
    values = [_numbers(files.read(key), key) for key in keys]
    return values[0] if len(values) == 1 else torch.stack(values, dim=-1).flatten(-2)


def _numbers(stored: torch.Tensor, key: str) -> torch.Tensor:
    """``stored`` as it is, blocks of Q8_0 ``uint8 [..., K/32, 34]`` as the ``float32 [..., K]`` that they stand for."""
    if stored.dtype != torch.uint8:
        return stored
    assert stored.shape[-1] == Q8_0_BYTES
    scale = stored[..., :2].contiguous().view(torch.float16).float()
    values = (scale * stored[..., 2:].contiguous().view(torch.int8)).flatten(-2)
    if not bool(values.isfinite().all()):
        raise CheckpointError(f"reading {DESCRIPTION}", needed="numbers", got="NaN or infinity", where=key)
    return values


def _refuse(files: CheckpointFiles, needed: str, got: str, now: str) -> NoReturn:
    raise CheckpointError(f"reading {DESCRIPTION}", needed=needed, got=got, where=str(files.folder), now=now)
