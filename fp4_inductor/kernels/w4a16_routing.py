"""From the router's logits to expert ids, weights and, for few pairs, their order by expert: one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from ..spec import RUNTIME, RouterSpec
from .w4a16 import INTERPRETED, Routes, _pdl
from .w4a16_config import DecodeConfig, W4A16Config
from .w4a16_topk import topk_kernel

_ALONE = 1024
"""Tokens up to which each has a program of one warp."""
_SORTED_PAIRS = 128
"""Pairs up to which the program that chooses experts also sorts them."""
_TILE = 8192
"""Scores that one program may hold."""
_ARRIVALS = 1024


@dataclass(frozen=True, slots=True)
class Router:
    """What turns logits into routes, beside the logits.

    Attributes:
        spec: a RUNTIME scaling factor is ``scale``; without shared and null experts, not the sparsemixer.
        bias: [E]; scale: one element on the logits' device, multiplies what the spec has; expert_scale: [E].
        weights_dtype: in which weights are given.
    """

    spec: RouterSpec
    top_k: int
    weights_dtype: torch.dtype
    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    expert_scale: torch.Tensor | None = None


def topk(logits: torch.Tensor, router: Router) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids int32 [T, k], best first, and their weights [T, k], of ``logits`` [T, E]."""
    ids, weights = empty_routing(logits, router)
    write_topk(logits, router, ids, weights)
    return ids, weights


def empty_routing(logits: torch.Tensor, router: Router) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the ids int32 [T, k] and weights [T, k] of ``logits`` [T, E]."""
    shape = logits.shape[0], router.top_k
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=router.weights_dtype)


def route_from_logits(
    logits: torch.Tensor,
    router: Router,
    ids: torch.Tensor,
    weights: torch.Tensor,
    config: DecodeConfig | W4A16Config,
) -> Routes | None:
    """Write ids and weights, and sort the pairs if ``config`` wants that and they are few enough to go along."""
    num_tokens, num_experts = logits.shape
    block = next((tokens for tokens in (1, 4, 16, 64) if num_tokens <= tokens), 0)
    num_pairs, tile = num_tokens * router.top_k, block * triton.next_power_of_2(num_experts)
    if isinstance(config, DecodeConfig) or not 0 < num_pairs <= _SORTED_PAIRS or not 0 < tile <= _TILE:
        write_topk(logits, router, ids, weights, config.pdl)
        return None
    bins = triton.next_power_of_2(num_experts + 2)
    max_tiles = min(num_pairs, num_pairs // config.block_m + num_experts)
    # Triton compiles anew for a pointer that is not aligned to 16 bytes.
    sizes = [size + -size % 4 for size in (num_pairs, 1, max_tiles, max_tiles, bins, _ARRIVALS)]
    parts = torch.empty(sum(sizes), dtype=torch.int32, device=logits.device).split(sizes)
    sort = {"CHUNK": 32 if num_pairs <= 32 else 128, "BINS": bins, "BLOCK_M": config.block_m, "ARRIVALS": _ARRIVALS}
    _launch(logits, router, ids, weights, block, parts, SORT=True, **sort, **_pdl(config.pdl))
    return Routes(num_pairs, max_tiles, *parts)


def write_topk(
    logits: torch.Tensor, router: Router, ids: torch.Tensor, weights: torch.Tensor, pdl: bool = False
) -> None:
    """Write ids and weights of ``logits`` [T, E]; ``pdl``: start while the kernel before still runs."""
    if logits.shape[0]:
        block = 1 if logits.shape[0] <= _ALONE else 4
        sort = {"CHUNK": 1, "BINS": 1, "BLOCK_M": 1, "ARRIVALS": 1}
        _launch(logits, router, ids, weights, block, [ids] * 6, SORT=False, **sort, **_pdl(pdl))


def _launch(
    logits: torch.Tensor,
    router: Router,
    ids: torch.Tensor,
    weights: torch.Tensor,
    block: int,
    routes: Any,
    **sort: int | bool,
) -> None:
    spec, (num_tokens, num_experts) = router.spec, logits.shape
    logits = logits.contiguous()
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        topk_kernel[(triton.cdiv(num_tokens, block),)](
            logits,
            logits if router.bias is None else router.bias.contiguous(),
            logits if router.scale is None else router.scale,
            logits if router.expert_scale is None else router.expert_scale.contiguous(),
            ids,
            weights,
            *routes,
            num_tokens,
            spec.group_fill,
            spec.renormalize_min,
            spec.renormalize_eps,
            1.0 if spec.scaling_factor is RUNTIME else spec.scaling_factor,
            NUM_EXPERTS=num_experts,
            TOP_K=router.top_k,
            SCORING=str(spec.scoring),
            LATE=spec.topk_before_scoring,
            NUM_GROUPS=spec.num_groups,
            TOPK_GROUPS=spec.topk_groups,
            TOP2=spec.group_score == "top2_sum",
            RENORMALIZE=spec.renormalize,
            HAS_BIAS=router.bias is not None,
            HAS_SCALE=router.scale is not None,
            HAS_EXPERT_SCALE=router.expert_scale is not None,
            TOKENS=block,
            GROUPS=triton.next_power_of_2(spec.num_groups),
            SIZE=triton.next_power_of_2(num_experts // spec.num_groups),
            SLOTS=triton.next_power_of_2(router.top_k),
            INTERPRETED=INTERPRETED,
            **sort,
            num_warps=min(block, 8),
        )
