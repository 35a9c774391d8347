"""From the router's logits to expert ids, weights and, for few pairs, their order by expert: one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from ..spec import RUNTIME, RouterSpec
from .launch import launch
from .w4a16 import INTERPRETED, Routes, empty_routes, pdl_options, place
from .w4a16_config import DecodeConfig, W4A16Config
from .w4a16_topk import topk_kernel

_ALONE = 1024
"""Tokens up to which each has a program of one warp."""
_SORTED_PAIRS = 128
"""Pairs up to which the program that chooses experts also sorts them."""
_COUNTED_PAIRS = 16384
"""Pairs up to which programs that choose experts also count them, chunk by chunk."""
_CHUNK = 128
_TILE = 8192
"""Scores that one program may hold."""


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
    """Write ids and weights; sort the pairs too, if ``config`` wants that and a launch is saved, else None."""
    (num_tokens, num_experts), top_k = logits.shape, router.top_k
    num_pairs, width = num_tokens * top_k, triton.next_power_of_2(num_experts)
    alone = num_pairs <= _SORTED_PAIRS
    block = next((b for b in (1, 4, 16, 64, 128) if num_tokens <= b), 0) if alone else _CHUNK // top_k
    if (
        isinstance(config, DecodeConfig)
        or not 0 < num_pairs <= _COUNTED_PAIRS
        or not 0 < block * width <= _TILE
        or not (alone or block * top_k == _CHUNK)
    ):
        write_topk(logits, router, ids, weights, config.pdl)
        return None
    num_chunks = 1 if alone else triton.cdiv(num_pairs, _CHUNK)
    routes, counts = empty_routes(num_pairs, num_experts, config.block_m, num_chunks, logits.device)
    sort = {"CHUNK": 32 if num_pairs <= 32 else _CHUNK, "BINS": routes.bins, "BLOCK_M": config.block_m}
    written = (counts, *routes.tiles, routes.arrivals)
    alike = {"COUNT": not alone, "SORT": alone, "ARRIVALS": routes.arrivals.numel(), **sort, **pdl_options(config.pdl)}
    _launch(logits, router, ids, weights, block, written, **alike)
    if not alone:
        with torch.cuda.device_of(logits):
            place(ids, counts, routes, num_chunks, num_experts, config.pdl, **sort, num_warps=4)
    return routes


def write_topk(
    logits: torch.Tensor, router: Router, ids: torch.Tensor, weights: torch.Tensor, pdl: bool = False
) -> None:
    """Write ids and weights of ``logits`` [T, E]; ``pdl``: start while the kernel before still runs."""
    if logits.shape[0]:
        block = 1 if logits.shape[0] <= _ALONE else 4
        unused = {"COUNT": False, "SORT": False, "CHUNK": 1, "BINS": 1, "BLOCK_M": 1, "ARRIVALS": 1}
        _launch(logits, router, ids, weights, block, [ids] * 7, **unused, **pdl_options(pdl))


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
        launch(topk_kernel, (triton.cdiv(num_tokens, block),))(
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
