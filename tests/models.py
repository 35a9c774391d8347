"""Tiny transformers models with mixture-of-experts layers, and the same with FP4 experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, VOCAB = 128, 96, 8, 2, 64
"""All different, so that no shape can be taken for another."""

COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT_ATTENTION: dict[str, Any] = {
    "head_dim": 16,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_GROUPS: dict[str, Any] = {
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 2.5,
    "n_routed_experts": EXPERTS,
    "moe_intermediate_size": INTERMEDIATE,
    "intermediate_size": 2 * INTERMEDIATE,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": INTERMEDIATE, "num_local_experts": EXPERTS},
    "qwen3_moe": {
        "moe_intermediate_size": INTERMEDIATE,
        "intermediate_size": 2 * INTERMEDIATE,
        "num_experts": EXPERTS,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    },
    "olmoe": {"intermediate_size": INTERMEDIATE, "num_experts": EXPERTS, "norm_topk_prob": False},
    "gpt_oss": {"intermediate_size": INTERMEDIATE, "num_local_experts": EXPERTS, "sliding_window": 16},
    "deepseek_v3": {**_GROUPS, **_LATENT_ATTENTION},
    "glm4_moe": {**_GROUPS},
}
"""What each family's config needs beyond the common sizes. Any other family may be named too."""


def tiny_model(
    name: str,
    *,
    layers: int = 2,
    experts_implementation: str = "grouped_mm",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    **config: Any,
) -> nn.Module:
    """A random causal language model of family ``name``, in evaluation mode; ``config`` overrides its sizes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**COMMON, "num_experts_per_tok": TOP_K, **CONFIGS.get(name, {}), **config}
    torch.manual_seed(seed)
    model_config = AutoConfig.for_model(name, num_hidden_layers=layers, **settings)
    model = AutoModelForCausalLM.from_config(model_config, dtype=dtype).eval()
    model.set_experts_implementation(experts_implementation)
    randomize_biases(model)
    return model.requires_grad_(False)


def randomize_biases(model: nn.Module) -> None:
    """Give every bias random values, in place: transformers starts them at zero, which would hide them."""
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("bias") and value.is_floating_point():
            nn.init.normal_(value, std=0.1)


def token_ids(tokens: int = 16, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Random token ids ``int64 [batch, tokens]``."""
    return torch.randint(3, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def moe_layers(model: nn.Module) -> list[nn.Module]:
    """The mixture-of-experts modules of a model: those that directly hold an ``experts`` child."""
    return [module for module in model.modules() if isinstance(getattr(module, "experts", None), nn.Module)]


class MoEStack(nn.Module):
    """The MoE layers of a model alone, each behind a norm and a residual: captures in a fraction of the time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(moe_layers(model))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden ``[B, S, H]``; returns the same shape."""
        for layer in self.layers:
            normed = nn.functional.layer_norm(hidden, hidden.shape[-1:])
            out = layer(normed)
            hidden = hidden + (out[0] if isinstance(out, tuple) else out)
        return hidden


class Block(nn.Module):
    """The first MoE layer of a model alone: compiles a fifth of its kernels, and shows errors that a residual hides."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.layer = moe_layers(model)[0]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden ``[B, S, H]``; returns the same shape."""
        out: torch.Tensor | tuple[torch.Tensor, ...] = self.layer(hidden)
        return out[0] if isinstance(out, tuple) else out


def hidden_states(tokens: int = 16, batch: int = 1, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Random hidden states ``[batch, tokens, H]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, tokens, HIDDEN, generator=generator).to(dtype)


def pack_experts(model: nn.Module, fmt: str) -> nn.Module:
    """The model with its experts in FP4 ("mxfp4" or "nvfp4"), dequantised by plain ops where they are read."""
    from fp4_inductor.quantize import quantize_

    return quantize_(model, fmt)
