"""From the router's logits to expert ids, weights and, for few pairs, their order by expert: one launch. For one token
of a small layer on to the output: two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..spec import RUNTIME, RouterSpec, Scoring
from .launch import launch
from .w4a16 import (
    INTERPRETED,
    Experts,
    Routes,
    activation_constants,
    decode_constants,
    empty_h,
    empty_routes,
    knobs,
    pdl_options,
    place,
    weight_args,
)
from .w4a16_config import DecodeConfig, W4A16Config
from .w4a16_one_token import down_one_token_kernel, gate_up_one_token_kernel
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
_TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


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


def chooses_by_logits(router: Router) -> bool:
    """Whether the highest logits are chosen, as the kernels for one token do, and weighed by nothing else."""
    spec, extra = router.spec, (router.bias, router.scale, router.expert_scale)
    in_their_order = spec.topk_before_scoring or spec.scoring is Scoring.SOFTMAX
    return in_their_order and spec.num_groups == 1 and all(tensor is None for tensor in extra)


def run_one_token(
    hidden: torch.Tensor,
    logits: torch.Tensor,
    router: Router,
    experts: Experts,
    config: DecodeConfig,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The block for one token.

    Args:
        hidden: [1, H] bfloat16 or float16; logits: [1, E].
        router: ``chooses_by_logits``.
        config: has ``one_token``.

    Returns:
        [1, H] in ``out_dtype``.
    """
    hidden, logits = hidden.contiguous(), logits.contiguous()
    h = empty_h(hidden, experts, router.top_k)
    out = torch.empty_like(hidden, dtype=out_dtype)
    choice = {
        "NUM_EXPERTS": logits.shape[1],
        "TOP_K": router.top_k,
        "SIZE": triton.next_power_of_2(logits.shape[1]),
    }
    with torch.cuda.device_of(hidden):
        _gate_up_one_token(hidden, logits, experts, config, h, choice)
        _down_one_token(h, logits, router, experts, config, out, choice)
    return out


def _gate_up_one_token(
    hidden: torch.Tensor,
    logits: torch.Tensor,
    experts: Experts,
    config: DecodeConfig,
    h: torch.Tensor,
    choice: dict[str, int],
) -> None:
    """Write h [k, I]."""
    w13, gemm, hidden_size = experts.w13, config.gate_up, hidden.shape[1]
    launch(gate_up_one_token_kernel, (h.shape[0] * (w13.rows.shape[1] // gemm.block_n),))(
        hidden,
        *weight_args(w13),
        logits,
        h,
        hidden_size,
        h.shape[1],
        *knobs(experts.activation),
        PARTS=gemm.split,
        HAS_BIAS=w13.bias is not None,
        **choice,
        **activation_constants(experts.activation),
        **decode_constants(experts.e4m3, hidden_size, gemm, config.pdl),
        num_warps=gemm.split,
    )


def _down_one_token(
    h: torch.Tensor,
    logits: torch.Tensor,
    router: Router,
    experts: Experts,
    config: DecodeConfig,
    out: torch.Tensor,
    choice: dict[str, int],
) -> None:
    """Write out [1, H]."""
    w2, spec, gemm = experts.w2, router.spec, config.one_token
    hidden_size, intermediate_size = out.shape[1], h.shape[1]
    assert gemm is not None
    launch(down_one_token_kernel, (triton.cdiv(hidden_size, gemm.block_n),))(
        h,
        *weight_args(w2),
        logits,
        out,
        hidden_size,
        intermediate_size,
        spec.renormalize_min,
        spec.renormalize_eps,
        spec.scaling_factor,
        SCORING=str(spec.scoring),
        LATE=spec.topk_before_scoring,
        RENORMALIZE=spec.renormalize,
        WEIGHTS_DTYPE=_TRITON_DTYPES[router.weights_dtype],
        HAS_BIAS=w2.bias is not None,
        **choice,
        **decode_constants(experts.e4m3, intermediate_size, gemm, config.pdl),
        num_warps=router.top_k,
    )


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
