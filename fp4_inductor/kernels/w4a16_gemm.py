"""The three GEMM-side kernels of a W4A16 experts block, in Triton.

Weights are the left, wide operand and tokens the right one, so that few tokens waste little of a matrix
instruction, and a weight goes from its word to the register that the instruction reads. An expert's last tokens
take a product as narrow as they fit (``narrowed``): padding would cost as much as tokens.

Shapes: P = T*k routed pairs, sorted by expert; G = ceil(K/64) groups; R row tiles of 64.
"""

# Triton reads these functions itself; they hold no Python types.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .w4a16_tile import (
    GROUP,
    ROWS,
    activation,
    cast,
    dot,
    load_tokens,
    load_weights,
    narrowed,
    place_block,
    rows_of_tile,
    scale_and_bias,
    weights_of_expert,
)


@triton.jit
def _split_range(K, split, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr):
    """Columns [first, end) of one of SPLIT_K programs that share an output tile."""
    columns = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    return split * columns, tl.minimum(split * columns + columns, K)


@triton.jit
def _product(
    tokens,
    words,
    scales,
    first_row,
    N,
    K,
    split,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    WHOLE: tl.constexpr,
    E4M3: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Weight rows [BLOCK_N, K] from ``first_row`` times tokens [K, m], given as row pointers [m], in float32."""
    DTYPE: tl.constexpr = tokens.dtype.element_ty
    groups = tl.cdiv(K, GROUP)
    acc = tl.zeros((BLOCK_N, tokens.shape[0]), dtype=tl.float32)
    first, end = _split_range(K, split, BLOCK_K, SPLIT_K)
    # Without a way around the loop ptxas lets wgmmas of one step run while the next one is decoded.
    tl.assume(first < end)
    for k in range(first, end, BLOCK_K):
        x = load_tokens(tokens, k, K, BLOCK_K, WHOLE)
        w = load_weights(
            words, scales, first_row, N, k // GROUP, groups, BLOCK_N, BLOCK_K, WHOLE, E4M3, DTYPE, INTERPRETED
        )
        acc = dot(w, x, acc, INTERPRETED)
    return acc


@triton.jit
def _shared_block(parts, arrivals, block, size):
    """Scratch and counter of an output block that several programs share."""
    return parts + block.to(tl.int64) * size, arrivals + block


@triton.jit
def _part(parts, split, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Pointers [BLOCK_N, BLOCK_M] to one program's part of a block, float32."""
    offset = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    return parts + split * (BLOCK_N * BLOCK_M) + offset


@triton.jit
def _whole_sum(acc, shared, split, SPLIT_K: tl.constexpr):
    """The sum of a block's SPLIT_K parts, and whether this program has it: the last one to bring its part does.

    The parts are added in the order of their columns, whichever program was last.
    """
    whole = True
    if SPLIT_K > 1:
        BLOCK_N: tl.constexpr = acc.shape[0]
        BLOCK_M: tl.constexpr = acc.shape[1]
        parts, arrivals = shared
        tl.store(_part(parts, split, BLOCK_N, BLOCK_M), acc)
        tl.debug_barrier()
        whole = tl.atomic_add(arrivals, 1, sem="acq_rel") == SPLIT_K - 1
        if whole:
            tl.store(arrivals, 0)  # the next GEMM counts from zero again
            acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            for i in tl.static_range(SPLIT_K):
                acc += tl.load(_part(parts, i, BLOCK_N, BLOCK_M), cache_modifier=".cg")
    return acc, whole


@triton.jit
def _gate_up_tile(
    BLOCK_M: tl.constexpr,
    hidden,
    weights,
    order,
    h,
    shared,
    place,
    sizes,
    knobs,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    WHOLE: tl.constexpr,
    E4M3: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    BOUND: tl.constexpr,
    KIND: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """At most BLOCK_M rows of h and BLOCK_N rows of w13; the weights are one expert's."""
    words, scales, row_scale, bias = weights
    first_row, first, end, split = place
    top_k, H, I, N = sizes  # noqa: E741
    row = first + tl.arange(0, BLOCK_M)
    token = tl.load(order + tl.minimum(row, end - 1)) // top_k  # rows past the end repeat the last
    acc = _product(
        hidden + token.to(tl.int64) * H,
        words,
        scales,
        first_row,
        N,
        H,
        split,
        BLOCK_N,
        BLOCK_K,
        SPLIT_K,
        WHOLE,
        E4M3,
        INTERPRETED,
    )
    acc, whole = _whole_sum(acc, shared, split, SPLIT_K)
    if whole:
        n = tl.minimum(first_row + tl.arange(0, BLOCK_N), N - 1)
        acc = scale_and_bias(acc, row_scale, bias, n, HAS_BIAS)
        out = activation(acc, knobs, GATED, BOUND, KIND)
        i = first_row // (2 if GATED else 1) + tl.arange(0, out.shape[0])
        pointers = h + row.to(tl.int64)[None, :] * I + i[:, None]
        out = cast(out, h.dtype.element_ty, INTERPRETED)
        tl.store(pointers, out, mask=(i < I)[:, None] & (row < end)[None, :])


@triton.jit
def gate_up_kernel(
    hidden,  # [T, H]
    words,  # int16 [E, R, G, 64, 16]; gated: rows in granules
    scales,  # int32 [E, R, G, 64 or 32]
    row_scale,  # float32 [E, N], N = 64 R
    bias,  # [E, N]
    order,  # int32 [P] pair of a sorted row
    num_tiles,  # int32 [1]
    tile_expert,  # int32 [tiles]
    tile_row,  # int32 [tiles]
    expert_end,  # int32 [>= E]
    h,  # out: [P, I], sorted rows
    parts,  # scratch where SPLIT_K > 1: float32 [BLOCK_N, BLOCK_M] a program
    arrivals,  # int32 zeros, one a block of h
    top_k,
    H,
    I,  # noqa: E741
    alpha,
    beta,
    limit,
    up_limit,
    BLOCK_M: tl.constexpr,
    MIN_M: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    WHOLE: tl.constexpr,
    E4M3: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    BOUND: tl.constexpr,
    KIND: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """h = act(hidden @ w13) for one token tile and BLOCK_N rows of w13."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    block = tl.program_id(0) // SPLIT_K
    N = I * 2 if GATED else I
    blocks = tl.cdiv(N, BLOCK_N)
    tiles = tl.load(num_tiles)
    if block >= tiles * blocks:
        return
    tile, row_block = place_block(block, tiles, blocks, GROUP_M)
    expert, first, end = rows_of_tile(tile, tile_expert, tile_row, expert_end)
    weights = weights_of_expert(words, scales, row_scale, bias, expert, N, N, H, E4M3)
    shared = _shared_block(parts, arrivals, block, BLOCK_N * BLOCK_M * SPLIT_K)
    place = (row_block * BLOCK_N, first, end, tl.program_id(0) % SPLIT_K)
    sizes = (top_k, H, I, N)
    knobs = (alpha, beta, limit, up_limit)
    narrowed(
        _gate_up_tile,
        end - first,
        BLOCK_M,
        MIN_M,
        (
            hidden,
            weights,
            order,
            h,
            shared,
            place,
            sizes,
            knobs,
            BLOCK_N,
            BLOCK_K,
            SPLIT_K,
            WHOLE,
            E4M3,
            HAS_BIAS,
            GATED,
            BOUND,
            KIND,
            INTERPRETED,
        ),
    )


@triton.jit
def _down_tile(
    BLOCK_M: tl.constexpr,
    h,
    weights,
    topk_weights,
    order,
    y,
    shared,
    place,
    sizes,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    WHOLE: tl.constexpr,
    E4M3: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """At most BLOCK_M rows of y and BLOCK_N of its columns; the weights are one expert's."""
    words, scales, row_scale, bias = weights
    first_row, first, end, split = place
    H, I, N = sizes  # noqa: E741
    row = first + tl.arange(0, BLOCK_M)
    acc = _product(
        h + tl.minimum(row, end - 1).to(tl.int64) * I,
        words,
        scales,
        first_row,
        N,
        I,
        split,
        BLOCK_N,
        BLOCK_K,
        SPLIT_K,
        WHOLE,
        E4M3,
        INTERPRETED,
    )
    acc, whole = _whole_sum(acc, shared, split, SPLIT_K)
    if whole:
        n = first_row + tl.arange(0, BLOCK_N)
        acc = scale_and_bias(acc, row_scale, bias, tl.minimum(n, H - 1), HAS_BIAS)
        pair = tl.load(order + tl.minimum(row, end - 1))
        acc *= tl.load(topk_weights + pair).to(tl.float32)[None, :]
        pointers = y + pair.to(tl.int64)[None, :] * H + n[:, None]
        out = cast(acc, y.dtype.element_ty, INTERPRETED)
        tl.store(pointers, out, mask=(n < H)[:, None] & (row < end)[None, :])


@triton.jit
def down_kernel(
    h,  # [P, I] sorted rows
    words,  # int16 [E, R, G, 64, 16]
    scales,  # int32 [E, R, G, 64 or 32]
    row_scale,  # float32 [E, N], N = H padded to 64
    bias,  # [E, H]
    topk_weights,  # [P]
    order,
    num_tiles,
    tile_expert,
    tile_row,
    expert_end,
    y,  # out: [P, H], by pair
    parts,
    arrivals,
    H,
    I,  # noqa: E741
    BLOCK_M: tl.constexpr,
    MIN_M: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    WHOLE: tl.constexpr,
    E4M3: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """y = topk_weight * (h @ w2 + bias) for one token tile and BLOCK_N output columns."""
    block = tl.program_id(0) // SPLIT_K
    blocks = tl.cdiv(H, BLOCK_N)
    tiles = tl.load(num_tiles)  # gate_up waited for the route before this kernel could start
    if block >= tiles * blocks:
        if PDL:
            gdc_wait()
        return
    tile, row_block = place_block(block, tiles, blocks, GROUP_M)
    expert, first, end = rows_of_tile(tile, tile_expert, tile_row, expert_end)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    N = tl.cdiv(H, ROWS) * ROWS
    weights = weights_of_expert(words, scales, row_scale, bias, expert, N, H, I, E4M3)
    shared = _shared_block(parts, arrivals, block, BLOCK_N * BLOCK_M * SPLIT_K)
    place = (row_block * BLOCK_N, first, end, tl.program_id(0) % SPLIT_K)
    sizes = (H, I, N)
    narrowed(
        _down_tile,
        end - first,
        BLOCK_M,
        MIN_M,
        (
            h,
            weights,
            topk_weights,
            order,
            y,
            shared,
            place,
            sizes,
            BLOCK_N,
            BLOCK_K,
            SPLIT_K,
            WHOLE,
            E4M3,
            HAS_BIAS,
            INTERPRETED,
        ),
    )


@triton.jit
def combine_kernel(
    y,  # [P, H] by pair
    topk_ids,  # [P]
    out,  # out: [T, H]
    H,
    num_experts,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """out[t] = sum over slots of y[t, slot], in slot order and float32; slots without an expert are not read."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        expert = tl.load(topk_ids + pair)
        end = tl.where((expert >= 0) & (expert < num_experts), H, 0)
        total += tl.load(y + pair * H + column, mask=column < end, other=0.0).to(tl.float32)
    tl.store(out + token * H + column, cast(total, out.dtype.element_ty, INTERPRETED), mask=column < H)
