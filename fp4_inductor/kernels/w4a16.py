"""Launches the W4A16 kernels: route, gate_up, down, combine; for few tokens no route.

No host synchronisation; grids depend on shapes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton

from ..layouts.lane_words import GROUP, ROWS
from ..spec import ActivationSpec
from .launch import device_index, launch
from .w4a16_config import (
    DecodeConfig,
    DecodeGemm,
    GemmConfig,
    W4A16Config,
    choose_config,
    choose_decode,
    choose_group,
    choose_split,
    choose_stages,
)
from .w4a16_decode import down_decode_kernel, gate_up_decode_kernel
from .w4a16_gemm import combine_kernel, down_kernel, gate_up_kernel
from .w4a16_route import count_kernel, place_kernel, route_kernel
from .w4a16_tuning import choose_tuned

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Kernels run on the CPU in Triton's interpreter, which knows no inline assembly and no bfloat16 product."""
_CHUNKS = ((32, 32, 4), (128, 128, 4), (256, 256, 8), (16384, 128, 4), (None, 512, 16))
"""Up to this many pairs, how many one program sorts, and its warps. Measured on an H200."""
_ALIGNMENT = 16
"""Bytes that an asynchronous copy takes at once."""
_INTERPRETED_ARCH = 80
_INTERPRETED_SMS = 16
_SHARED_PAIRS = 256
"""Pairs up to which programs may share an output block."""
_MAX_ARRIVALS = 1024
"""Output blocks up to which they do."""


@dataclass(frozen=True, slots=True)
class Weights:
    """One GEMM's prepared weights, rows padded to 64; those of gate and up are in granules."""

    words: torch.Tensor  # int16 [E, N/64, G, 64, 16], see layouts/lane_words.py
    scales: torch.Tensor  # int32 [E, N/64, G, 64 or 32], see layouts/lane_scales.py
    rows: torch.Tensor  # float32 [E, N]
    bias: torch.Tensor | None  # [E, N]; the down projection's is not padded


@dataclass(frozen=True, slots=True)
class Experts:
    """What does not depend on the tokens; no field of ``activation`` is RUNTIME."""

    w13: Weights
    w2: Weights
    activation: ActivationSpec
    e4m3: bool
    """Scale words hold e4m3 scales of 16 columns, otherwise e8m0 scales of 32."""

    @property
    def num_experts(self) -> int:
        return self.w13.words.shape[0]


@dataclass(frozen=True, slots=True)
class Routes:
    """Pairs sorted by expert and cut into token tiles; see ``w4a16_route``. Tensors may be longer than they say."""

    num_pairs: int
    max_tiles: int
    order: torch.Tensor  # int32 [P]
    num_tiles: torch.Tensor  # int32 [1]
    tile_expert: torch.Tensor  # int32 [max_tiles]
    tile_row: torch.Tensor  # int32 [max_tiles]
    expert_end: torch.Tensor  # int32 [BINS]
    arrivals: torch.Tensor  # int32 zeros, for programs that share an output block

    @property
    def bins(self) -> int:
        """A power of two, more than the experts and one for pairs without any."""
        return self.expert_end.numel()

    @property
    def tiles(self) -> tuple[torch.Tensor, ...]:
        return self.order, self.num_tiles, self.tile_expert, self.tile_row, self.expert_end


def run_experts(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    experts: Experts,
    out_dtype: torch.dtype,
    config: DecodeConfig | W4A16Config,
    routes: Routes | None = None,
) -> torch.Tensor:
    """The block.

    Args:
        hidden: [T, H] bfloat16 or float16; topk_ids: [T, k] int; topk_weights: [T, k] float.
        config: what ``choose`` gives.
        routes: the pairs sorted by their ids, where that is done.

    Returns:
        [T, H] in ``out_dtype``.
    """
    hidden, topk_ids = hidden.contiguous(), topk_ids.contiguous()
    num_tokens, hidden_size = hidden.shape
    out = torch.empty(num_tokens, hidden_size, dtype=out_dtype, device=hidden.device)
    if num_tokens == 0:
        return out
    top_k, num_experts = topk_ids.shape[1], experts.num_experts
    if isinstance(config, DecodeConfig):
        with torch.cuda.device_of(hidden):
            _decode(hidden, topk_ids, topk_weights.contiguous(), experts, config, out)
        return out
    with torch.cuda.device_of(hidden):  # Triton launches on the current device
        routes = routes or route(topk_ids, num_experts, config.block_m, config.pdl)
        h = _gate_up(hidden, experts, routes, top_k, config)
        y = _pair_outputs(h, hidden_size, out_dtype)
        _down(h, topk_weights.contiguous(), experts, routes, config, y)
        _combine(y, topk_ids, out, num_experts, config.pdl)
    return out


def choose(hidden: torch.Tensor, top_k: int, experts: Experts, table: str = "") -> DecodeConfig | W4A16Config:
    """Which kernels run ``hidden`` [T, H], and how.

    ``table``: configurations by token count, see ``w4a16_tuning``; "" is the device family's.
    """
    arch, (num_tokens, hidden_size) = _arch(hidden.device), hidden.shape
    gate_up, down = experts.w13.words, experts.w2.words
    sizes = ((gate_up.shape[1] * ROWS, hidden_size), (hidden_size, down.shape[2] * GROUP))
    decode = choose_decode(arch, _sm_count(hidden.device), num_tokens, top_k, experts.num_experts, *sizes)
    if decode is not None:
        return decode
    size = (arch, num_tokens * top_k, experts.num_experts, (sizes[0][1], sizes[1][1]))
    config = choose_tuned(table, num_tokens) if table else choose_config(*size, e4m3=experts.e4m3)
    if config.hopper and (hidden.dtype != torch.bfloat16 or _hopper_kernels() is None):
        return choose_config(*size, e4m3=experts.e4m3, hopper=False)
    return config


@cache
def _hopper_kernels() -> tuple[Any, Any] | None:
    """gate_up and down of ``w4a16_hopper``, or None where this Triton lacks what they import: Gluon may change."""
    if INTERPRETED:
        return None
    try:
        from .w4a16_hopper import down_hopper_kernel, gate_up_hopper_kernel
    except (AttributeError, ImportError):
        return None
    return gate_up_hopper_kernel, down_hopper_kernel


def _kernels(config: W4A16Config) -> tuple[Any, Any]:
    """gate_up and down; all take the same arguments."""
    plain = (gate_up_kernel, down_kernel)
    gate_up, down = (_hopper_kernels() if config.hopper else None) or plain
    return gate_up if config.gate_up.hopper else plain[0], down if config.down.hopper else plain[1]


def _decode(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    experts: Experts,
    config: DecodeConfig,
    out: torch.Tensor,
) -> None:
    """Write out [T, H]."""
    h = _gate_up_decode(hidden, topk_ids, experts, config)
    y = _pair_outputs(h, out.shape[1], out.dtype)
    _down_decode(h, topk_ids, topk_weights, experts, config, y)
    _combine(y, topk_ids, out, experts.num_experts, config.pdl)


def _gate_up_decode(
    hidden: torch.Tensor, topk_ids: torch.Tensor, experts: Experts, config: DecodeConfig
) -> torch.Tensor:
    """h [P, I] in the activation dtype, by pair; I is padded to 64 where there is no gate."""
    w13, gemm = experts.w13, config.gate_up
    (num_tokens, hidden_size), (num_pairs, top_k) = hidden.shape, (topk_ids.numel(), topk_ids.shape[1])
    h = empty_h(hidden, experts, num_pairs)
    launch(gate_up_decode_kernel, (num_pairs * (w13.rows.shape[1] // gemm.block_n),))(
        hidden,
        *weight_args(w13),
        topk_ids,
        h,
        num_tokens,
        experts.num_experts,
        top_k,
        hidden_size,
        h.shape[1],
        *knobs(experts.activation),
        TOKENS=triton.next_power_of_2(num_tokens),
        SLOTS=triton.next_power_of_2(top_k),
        PARTS=gemm.split,
        HAS_BIAS=w13.bias is not None,
        **activation_constants(experts.activation),
        LATE=config.late,
        num_warps=gemm.split,
        **decode_constants(experts.e4m3, hidden_size, gemm, config.pdl),
    )
    return h


def _down_decode(
    h: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    experts: Experts,
    config: DecodeConfig,
    y: torch.Tensor,
) -> None:
    """Write y [P, H], by pair, times the routing weights."""
    w2, gemm, hidden_size, intermediate_size = experts.w2, config.down, y.shape[1], h.shape[1]
    num_tokens, top_k = topk_ids.shape
    launch(down_decode_kernel, (topk_ids.numel() * triton.cdiv(hidden_size, gemm.block_n),))(
        h,
        *weight_args(w2),
        topk_ids,
        topk_weights,
        y,
        num_tokens,
        experts.num_experts,
        top_k,
        hidden_size,
        intermediate_size,
        TOKENS=triton.next_power_of_2(num_tokens),
        SLOTS=triton.next_power_of_2(top_k),
        PARTS=gemm.split,
        HAS_BIAS=w2.bias is not None,
        num_warps=gemm.split,
        **decode_constants(experts.e4m3, intermediate_size, gemm, config.pdl),
    )


def decode_constants(e4m3: bool, columns: int, gemm: DecodeGemm, pdl: bool) -> dict[str, int | bool]:
    return {
        "BLOCK_N": gemm.block_n,
        "GROUPS": gemm.groups,
        "WHOLE": columns % (gemm.split * gemm.groups * GROUP) == 0,
        "E4M3": e4m3,
        "INTERPRETED": INTERPRETED,
        "num_stages": gemm.num_stages,
        **pdl_options(pdl),
    }


def empty_h(like: torch.Tensor, experts: Experts, num_pairs: int) -> torch.Tensor:
    """h [P, I], uninitialised, in the activation dtype; I is padded to 64 where there is no gate."""
    rows = experts.w13.rows.shape[1]
    return like.new_empty(num_pairs, rows // 2 if experts.activation.gated else rows)


def weight_args(weights: Weights) -> tuple[torch.Tensor, ...]:
    """A weight as every kernel takes it; any tensor stands for a bias that there is not."""
    bias = weights.rows if weights.bias is None else weights.bias.contiguous()
    return weights.words, weights.scales, weights.rows, bias


def knobs(activation: ActivationSpec) -> tuple[Any, ...]:
    """alpha, beta, limit and up_limit."""
    limit = 0.0 if activation.limit is None else activation.limit
    up_limit = limit if activation.up_limit is None else activation.up_limit
    return activation.alpha, activation.beta, limit, up_limit


def activation_constants(activation: ActivationSpec) -> dict[str, bool | str]:
    bound = activation.bound if activation.limit is not None else "none"
    return {"GATED": activation.gated, "BOUND": bound, "KIND": activation.kind}


def _pair_outputs(like: torch.Tensor, hidden_size: int, out_dtype: torch.dtype) -> torch.Tensor:
    """y [P, H], uninitialised. A lower-precision combine rounds each product; a float32 result keeps them."""
    dtype = torch.float32 if out_dtype == torch.float32 else like.dtype
    return like.new_empty(like.shape[0], hidden_size, dtype=dtype)


def _combine(y: torch.Tensor, topk_ids: torch.Tensor, out: torch.Tensor, num_experts: int, pdl: bool) -> None:
    """Write out [T, H], the sums over slots of y [P, H]."""
    num_tokens, hidden_size = out.shape
    block = 1024
    launch(combine_kernel, (num_tokens, triton.cdiv(hidden_size, block)))(
        y,
        topk_ids,
        out,
        hidden_size,
        num_experts,
        TOP_K=topk_ids.shape[1],
        BLOCK=block,
        INTERPRETED=INTERPRETED,
        num_warps=4,
        **pdl_options(pdl),
    )


def route(topk_ids: torch.Tensor, num_experts: int, block_m: int, pdl: bool = False) -> Routes:
    """Sort pairs by expert, in one launch or two."""
    num_pairs = topk_ids.numel()
    chunk, num_warps = next((chunk, warps) for limit, chunk, warps in _CHUNKS if limit is None or num_pairs <= limit)
    num_chunks = triton.cdiv(num_pairs, chunk)
    routes, counts = empty_routes(num_pairs, num_experts, block_m, num_chunks, topk_ids.device)
    shape = {"CHUNK": chunk, "BINS": routes.bins, "num_warps": num_warps}
    if num_chunks == 1:
        launch(route_kernel, (1,))(
            topk_ids,
            *routes.tiles,
            routes.arrivals,
            num_pairs,
            num_experts,
            BLOCK_M=block_m,
            ARRIVALS=routes.arrivals.numel(),
            **shape,
            **pdl_options(pdl),
        )
        return routes
    launch(count_kernel, (num_chunks,))(topk_ids, counts, num_pairs, num_experts, **shape, **pdl_options(pdl))
    place(topk_ids, counts, routes, num_chunks, num_experts, pdl, BLOCK_M=block_m, **shape)
    return routes


def place(
    topk_ids: torch.Tensor,
    counts: torch.Tensor,
    routes: Routes,
    num_chunks: int,
    num_experts: int,
    pdl: bool,
    **shape: int,
) -> None:
    """Write ``routes`` from the pairs of each expert in each chunk; ``shape``: CHUNK, BINS, BLOCK_M, num_warps."""
    launch(place_kernel, (num_chunks + 1,))(
        topk_ids, counts, *routes.tiles, routes.num_pairs, num_chunks, num_experts, **shape, **pdl_options(pdl)
    )


def empty_routes(
    num_pairs: int, num_experts: int, block_m: int, num_chunks: int, device: torch.device
) -> tuple[Routes, torch.Tensor]:
    """Memory for routes, and for the counts int32 [chunks, bins] of pairs that are sorted in several chunks."""
    bins = triton.next_power_of_2(num_experts + 2)
    max_tiles = min(num_pairs, num_pairs // block_m + num_experts)
    arrivals = _MAX_ARRIVALS if num_pairs <= _SHARED_PAIRS else 0
    sizes = [num_pairs, 1, max_tiles, max_tiles, bins, arrivals, bins * num_chunks]
    # Triton compiles anew for a pointer that is not aligned to 16 bytes.
    sizes = [size + -size % 4 for size in sizes]
    *parts, counts = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    return Routes(num_pairs, max_tiles, *parts), counts


def _gate_up(hidden: torch.Tensor, experts: Experts, routes: Routes, top_k: int, config: W4A16Config) -> torch.Tensor:
    """h [P, I] in the activation dtype, rows sorted by expert; I is padded to 64 where there is no gate."""
    w13, hidden_size = experts.w13, hidden.shape[1]
    if config.hopper and hidden.data_ptr() % _ALIGNMENT:
        hidden = hidden.clone()
    h = empty_h(hidden, experts, routes.num_pairs)
    cut = _cut(routes, w13.rows.shape[1], hidden_size, config, config.gate_up, h.device)
    kernel, _ = _kernels(config)
    launch(kernel, (cut.num_blocks * cut.split_k,))(
        hidden,
        *weight_args(w13),
        *routes.tiles,
        h,
        _parts(cut, config.block_m * config.gate_up.block_n, h),
        routes.arrivals,
        top_k,
        hidden_size,
        h.shape[1],
        *knobs(experts.activation),
        HAS_BIAS=w13.bias is not None,
        **activation_constants(experts.activation),
        **_constants(w13, experts.e4m3, hidden_size, config, config.gate_up, cut.split_k),
    )
    return h


def _down(
    h: torch.Tensor, topk_weights: torch.Tensor, experts: Experts, routes: Routes, config: W4A16Config, y: torch.Tensor
) -> None:
    """Write y [P, H], by pair, times the routing weights."""
    w2, hidden_size, intermediate_size = experts.w2, y.shape[1], h.shape[1]
    cut = _cut(routes, hidden_size, intermediate_size, config, config.down, h.device)
    _, kernel = _kernels(config)
    launch(kernel, (cut.num_blocks * cut.split_k,))(
        h,
        *weight_args(w2),
        topk_weights,
        *routes.tiles,
        y,
        _parts(cut, config.block_m * config.down.block_n, h),
        routes.arrivals,
        hidden_size,
        intermediate_size,
        HAS_BIAS=w2.bias is not None,
        **_constants(w2, experts.e4m3, intermediate_size, config, config.down, cut.split_k),
    )


@dataclass(frozen=True, slots=True)
class _Cut:
    """How many output blocks a GEMM has, and how many programs share one."""

    num_blocks: int
    split_k: int


def _cut(routes: Routes, rows: int, columns: int, config: W4A16Config, gemm: GemmConfig, device: torch.device) -> _Cut:
    num_blocks = routes.max_tiles * triton.cdiv(rows, gemm.block_n)
    if num_blocks > routes.arrivals.numel():
        return _Cut(num_blocks, 1)
    steps = triton.cdiv(columns, gemm.block_k)
    return _Cut(num_blocks, choose_split(num_blocks, steps, _sm_count(device), gemm.hopper))


def _parts(cut: _Cut, block_size: int, like: torch.Tensor) -> torch.Tensor:
    """Scratch for partial sums; empty where no block is shared."""
    size = cut.num_blocks * cut.split_k * block_size if cut.split_k > 1 else 0
    return like.new_empty(size, dtype=torch.float32)


def _constants(
    weights: Weights, e4m3: bool, columns: int, config: W4A16Config, gemm: GemmConfig, split_k: int
) -> dict[str, int | bool]:
    common = {
        "BLOCK_M": config.block_m,
        "MIN_M": config.min_m,
        "GROUP_M": choose_group(config, weights.words.nbytes // weights.words.shape[0]),
        "SPLIT_K": split_k,
        "E4M3": e4m3,
        **pdl_options(config.pdl),
        "num_warps": gemm.num_warps,
    }
    if gemm.hopper:
        steps = triton.cdiv(triton.cdiv(columns, gemm.block_k), split_k)
        return common | {"STAGES": choose_stages(gemm.num_stages, steps, config.block_m, e4m3)}
    return common | {
        "BLOCK_N": gemm.block_n,
        "BLOCK_K": gemm.block_k,
        "WHOLE": columns % gemm.block_k == 0,
        "INTERPRETED": INTERPRETED,
        "num_stages": gemm.num_stages,
    }


def pdl_options(wanted: bool) -> dict[str, bool]:
    """Launch a kernel so that it may start while the one before it still runs."""
    return {"PDL": True, "launch_pdl": True} if wanted and not INTERPRETED else {"PDL": False}


def _arch(device: torch.device) -> int:
    return _INTERPRETED_ARCH if device.type == "cpu" else _properties(device_index(device))[0]


def _sm_count(device: torch.device) -> int:
    return _INTERPRETED_SMS if device.type == "cpu" else _properties(device_index(device))[1]


@cache
def _properties(index: int | None) -> tuple[int, int]:
    """Architecture and number of multiprocessors."""
    found = torch.cuda.get_device_properties(index)
    return 10 * found.major + found.minor, found.multi_processor_count
