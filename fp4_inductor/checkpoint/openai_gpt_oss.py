"""gpt-oss as OpenAI published it: ``block.L.mlp.mlp1_weight.blocks`` and a config without a model type.

Experts hold the bytes of the other gpt-oss layout; the rest has other names, norms in float32, and q, k and v in
one matrix. Source: gpt-oss, gpt_oss/torch/model.py and weights.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from ..errors import CheckpointError
from .files import CheckpointFiles
from .gpt_oss import blocks_weight
from .parts import require
from .weights import PlainWeight, Weight

DESCRIPTION = "gpt-oss MXFP4 as published by OpenAI (mlp1_weight.blocks)"

_BLOCKS, _SCALES = ".blocks", ".scales"
_NAMES = {
    r"embedding\.weight": "model.embed_tokens.weight",
    r"unembedding\.weight": "lm_head.weight",
    r"norm\.scale": "model.norm.weight",
    r"block\.(\d+)\.attn\.norm\.scale": r"model.layers.\1.input_layernorm.weight",
    r"block\.(\d+)\.attn\.sinks": r"model.layers.\1.self_attn.sinks",
    r"block\.(\d+)\.attn\.out\.(weight|bias)": r"model.layers.\1.self_attn.o_proj.\2",
    r"block\.(\d+)\.mlp\.norm\.scale": r"model.layers.\1.post_attention_layernorm.weight",
    r"block\.(\d+)\.mlp\.gate\.(weight|bias)": r"model.layers.\1.mlp.router.\2",
    r"block\.(\d+)\.mlp\.mlp1_bias": r"model.layers.\1.mlp.experts.gate_up_proj_bias",
    r"block\.(\d+)\.mlp\.mlp2_bias": r"model.layers.\1.mlp.experts.down_proj_bias",
    r"block\.(\d+)\.mlp\.mlp1_weight": r"model.layers.\1.mlp.experts.gate_up_proj",
    r"block\.(\d+)\.mlp\.mlp2_weight": r"model.layers.\1.mlp.experts.down_proj",
}
_QKV = r"block\.(\d+)\.attn\.qkv\.(weight|bias)"


def claims(files: CheckpointFiles) -> bool:
    """Whether the checkpoint is one of these."""
    return any(key.endswith(("mlp1_weight" + _BLOCKS, "mlp1_weight" + _SCALES)) for key in files.tensors)


def find(files: CheckpointFiles) -> Iterator[Weight]:
    """The weights of this layout, none for a checkpoint of another.

    Raises:
        CheckpointError: parts that are missing, or that do not fit together.
    """
    if not claims(files):
        return
    experts = [key.removesuffix(_BLOCKS) for key in files.tensors if key.endswith(_BLOCKS)]
    require(files.tensors, (base + _SCALES for base in experts), DESCRIPTION)
    for base in experts:
        yield blocks_weight(files, _name(base), base + _BLOCKS, base + _SCALES, DESCRIPTION)
    for key in files.tensors:
        if match := re.fullmatch(_QKV, key):
            yield from _split_qkv(files, key, match[1], match[2])
        elif (name := _name(key)) != key:
            yield _plain(files, name, key, slice(None))


def text_config(files: CheckpointFiles) -> Any:
    """transformers' config of the model that OpenAI's own config describes.

    Raises:
        CheckpointError: a config that lacks an entry.
    """
    from transformers import GptOssConfig

    said = files.config
    try:
        length, factor = said["initial_context_length"], said["rope_scaling_factor"]
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": said["rope_theta"]}
        if factor > 1:
            rope |= {
                "rope_type": "yarn",
                "factor": factor,
                "beta_fast": said["rope_ntk_beta"],
                "beta_slow": said["rope_ntk_alpha"],
                "truncate": False,
                "original_max_position_embeddings": length,
            }
        return GptOssConfig(
            num_hidden_layers=said["num_hidden_layers"],
            num_local_experts=said["num_experts"],
            num_experts_per_tok=said["experts_per_token"],
            vocab_size=said["vocab_size"],
            hidden_size=said["hidden_size"],
            intermediate_size=said["intermediate_size"],
            swiglu_limit=said["swiglu_limit"],
            head_dim=said["head_dim"],
            num_attention_heads=said["num_attention_heads"],
            num_key_value_heads=said["num_key_value_heads"],
            sliding_window=said["sliding_window"],
            max_position_embeddings=int(length * factor),
            rope_parameters=rope,
            tie_word_embeddings=False,
            architectures=["GptOssForCausalLM"],
        )
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"reading the config of {DESCRIPTION}",
            needed="OpenAI's config.json",
            got=repr(error),
            where=str(files.folder),
        ) from None


def _name(key: str) -> str:
    for pattern, name in _NAMES.items():
        if match := re.fullmatch(pattern, key):
            return match.expand(name)
    return key


def _split_qkv(files: CheckpointFiles, key: str, layer: str, kind: str) -> Iterator[PlainWeight]:
    try:
        dim, heads, kv_heads = (
            int(files.config[entry]) for entry in ("head_dim", "num_attention_heads", "num_key_value_heads")
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"splitting q, k and v of {DESCRIPTION}", needed="OpenAI's config.json", got=repr(error), where=key
        ) from None
    start = 0
    for part, rows in (("q", heads * dim), ("k", kv_heads * dim), ("v", kv_heads * dim)):
        name = f"model.layers.{layer}.self_attn.{part}_proj.{kind}"
        yield _plain(files, name, key, slice(start, start + rows))
        start += rows
    if files.tensors[key].shape[0] != start:
        did = f"splitting q, k and v of {DESCRIPTION}"
        raise CheckpointError(did, needed=f"{start} rows", got=str(files.tensors[key].shape[0]), where=key)


def _plain(files: CheckpointFiles, name: str, key: str, rows: slice) -> PlainWeight:
    stored = files.tensors[key].shape

    def read() -> torch.Tensor:
        return files.read(key)[rows]

    length = len(range(*rows.indices(stored[0])))
    return PlainWeight(name, (length, *stored[1:]), files.tensors[key].dtype, (key,), read)
