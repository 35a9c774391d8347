"""Random weights and inputs of one MoE layer, to time kernels on."""

from __future__ import annotations

import math

import torch

from .formats import BlockFormat
from .spec import MoESpec, Operand

ROTATED_UP_TO = 1024
"""Most tokens for which several inputs take turns; beyond, every expert is read and one input does."""

_ROTATED = 8
_SCALE_BYTES = {"e8m0": (118, 122), "e4m3": (0x28, 0x48)}
"""Scales from 2**-9 to 2**-6 for e8m0; from a quarter to four for e4m3, which has a global scale too."""


def random_weights(
    spec: MoESpec, device: torch.device, rng: torch.Generator | None = None
) -> dict[Operand, torch.Tensor]:
    """Canonical weights of ``spec``: all codes random, outputs of order one. ``rng``: the default one if None."""
    fmt, found = spec.weight_format, {}
    sizes = (
        (Operand.W13, spec.w13_rows, spec.hidden_size, spec.has_w13_bias),
        (Operand.W2, spec.hidden_size, spec.intermediate_size, spec.has_w2_bias),
    )
    for operand, rows, columns, has_bias in sizes:
        experts = spec.num_experts
        found[operand] = random_codes(device, experts, rows, columns // 2, rng=rng)
        shape = (experts, rows, columns // fmt.block_size)
        found[Operand(f"{operand}_scale")] = random_scales(fmt, device, *shape, rng=rng)
        if fmt.has_global_scale:
            found[Operand(f"{operand}_global")] = torch.full((experts, 1), 0.5 / math.sqrt(columns), device=device)
        if has_bias:
            found[Operand(f"{operand}_bias")] = random_bias(spec, device, rows, rng)
    return found


def random_codes(device: torch.device, *shape: int, rng: torch.Generator | None = None) -> torch.Tensor:
    """uint8 of ``shape``, two codes a byte."""
    return torch.randint(0, 256, shape, generator=rng, dtype=torch.uint8, device=device)


def random_scales(
    fmt: BlockFormat, device: torch.device, *shape: int, rng: torch.Generator | None = None
) -> torch.Tensor:
    """Block scales of ``shape`` in the dtype that ``fmt`` stores them in."""
    low, high = _SCALE_BYTES[fmt.scale_encoding]
    return torch.randint(low, high, shape, generator=rng, dtype=torch.uint8, device=device).view(fmt.scale_dtype)


def random_bias(spec: MoESpec, device: torch.device, rows: int, rng: torch.Generator | None = None) -> torch.Tensor:
    """[E, rows] in the activation dtype."""
    return torch.randn(spec.num_experts, rows, generator=rng, device=device).mul_(0.1).to(spec.act_dtype)


def inputs(spec: MoESpec, num_tokens: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Hidden states [T, H] and router logits [T, E] that take turns, every expert equally likely.

    The same for every call with the same arguments, so that all who are timed get the same.
    """
    rng = torch.Generator(device).manual_seed(num_tokens)
    made = []
    for _ in range(_ROTATED if num_tokens <= ROTATED_UP_TO else 1):
        hidden = torch.randn(num_tokens, spec.hidden_size, generator=rng, device=device).mul_(0.1)
        logits = torch.randn(num_tokens, spec.num_experts, generator=rng, device=device)
        made.append((hidden.to(spec.act_dtype), logits.to(spec.act_dtype)))
    return made


def route(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the best k of logits [T, E]: ids [T, k] int64 and weights [T, k] float32."""
    values, ids = logits.topk(top_k, dim=-1)
    return ids, values.softmax(-1, dtype=torch.float32)
