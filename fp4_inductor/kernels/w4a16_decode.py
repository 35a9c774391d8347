"""The W4A16 experts block for few tokens, in two launches: no sort, no counters, no atomics.

Every pair of token and slot is a tile of its own, or joins the first pair of the same expert. The warps of a
program take parts of K (and, in the second kernel, the slots of a token) as the batch of one matrix product;
their sums meet in shared memory.

Where PDL is set a kernel starts while the one before it still runs. Until ``gdc_wait`` it may touch only what
kernels before that one have written, so every kernel waits before it lets the next one start.
"""

# Triton reads these functions itself; they hold no Python types.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .w4a16_gemm import _activated, _bounded_up, _cast, _gate_and_up, _weights, prefetch

_ROWS = tl.constexpr(64)
_GROUP = tl.constexpr(64)
_PLANE = tl.constexpr(16)
_LINE = tl.constexpr(128)


@triton.jit
def _scale_words(E4M3: tl.constexpr):
    """Scale words of a tile of 64 rows by one group."""
    return _ROWS if E4M3 else _ROWS // 2


@triton.jit
def _expert_words(num_rows, groups, E4M3: tl.constexpr):
    """Words and scale words of an expert, int64."""
    tiles = (num_rows // _ROWS).to(tl.int64) * groups
    return tiles * (_ROWS * _PLANE), tiles * _scale_words(E4M3)


@triton.jit
def _load_parts(
    words,
    scales,
    row,
    group,
    groups,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    WHOLE: tl.constexpr,
    E4M3: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    part_group,
    scale_part_group,
):
    """Weights [PARTS, BLOCK_N, 64 GROUPS] of rows from ``row``, which lie in one tile.

    ``words`` and ``scales`` are pointers, or one a row of all parts; ``part_group`` is each part's first group,
    again by rows. Groups past the last are zero unless WHOLE.
    """
    SCALES: tl.constexpr = BLOCK_N if E4M3 else BLOCK_N // 2
    tile = row // _ROWS * groups
    n = row % _ROWS + tl.arange(0, PARTS * BLOCK_N) % BLOCK_N
    word = tl.arange(0, GROUPS * _PLANE)
    word_group = (group + part_group)[:, None] + (word // _PLANE)[None, :]
    offset = (tile + word_group) * (_ROWS * _PLANE) + (n * _PLANE)[:, None] + (word % _PLANE)[None, :]
    n = row % _ROWS * SCALES // BLOCK_N + tl.arange(0, PARTS * SCALES) % SCALES
    scale_group = (group + scale_part_group)[:, None] + tl.arange(0, GROUPS)[None, :]
    scale_offset = (tile + scale_group) * _scale_words(E4M3) + n[:, None]
    if WHOLE:
        w = tl.load(words + offset)
        s = tl.load(scales + scale_offset)
    else:
        w = tl.load(words + offset, mask=word_group < groups, other=0)
        s = tl.load(scales + scale_offset, mask=scale_group < groups, other=0)
    return _weights(w, s, E4M3, DTYPE, INTERPRETED).reshape(PARTS, BLOCK_N, GROUPS * _GROUP)


@triton.jit
def _dot_parts(w, x, acc, INTERPRETED: tl.constexpr):
    if INTERPRETED:  # the interpreter multiplies bfloat16 bits as integers
        return tl.dot(w.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(w, x, acc)


@triton.jit
def _prefetch_rows(words, scales, row, groups, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr, E4M3: tl.constexpr):
    """Prefetch the first GROUPS groups of BLOCK_N rows; ``words`` and ``scales`` are pointers to experts [e]."""
    LINES: tl.constexpr = BLOCK_N * _PLANE * 2 // _LINE
    tile = row // _ROWS * groups + tl.minimum(tl.arange(0, GROUPS), groups - 1)
    line = row % _ROWS * _PLANE + tl.arange(0, LINES) * (_LINE // 2)
    offset = (tile * (_ROWS * _PLANE))[:, None] + line[None, :]
    prefetch(words[:, None, None] + offset[None, :, :])
    scale = row % _ROWS * _scale_words(E4M3) // _ROWS
    prefetch(scales[:, None] + (tile * _scale_words(E4M3) + scale)[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def gate_up_decode_kernel(
    hidden,  # [T, H]
    words,  # int16 [E, R, G, 64, 16]; gated: rows in granules
    scales,  # int32 [E, R, G, 64 or 32]
    row_scale,  # float32 [E, N], N = 64 R
    bias,  # [E, N]
    topk_ids,  # [P]
    h,  # out: [P, I] by pair
    num_pairs,
    num_experts,
    top_k,
    H,
    I,  # noqa: E741
    alpha,
    beta,
    limit,
    up_limit,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    PREFETCH: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    WHOLE: tl.constexpr,
    E4M3: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    BOUND: tl.constexpr,
    KIND: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """h = act(hidden @ w13) for BLOCK_N rows of w13 and all pairs of one expert; P is at most BLOCK_P."""
    N = I * 2 if GATED else I
    blocks = N // BLOCK_N
    row = tl.program_id(0) % blocks * BLOCK_N
    pair = tl.program_id(0) // blocks
    DTYPE: tl.constexpr = hidden.dtype.element_ty
    groups = tl.cdiv(H, _GROUP)
    r = tl.arange(0, PARTS * BLOCK_N)
    part_group = r // BLOCK_N * GROUPS
    SCALES: tl.constexpr = BLOCK_N if E4M3 else BLOCK_N // 2
    scale_part_group = tl.arange(0, PARTS * SCALES) // SCALES * GROUPS
    p = tl.arange(0, BLOCK_P)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(topk_ids + pair).to(tl.int32)
    own = tl.load(topk_ids + tl.minimum(p, num_pairs - 1)).to(tl.int32) == expert
    own = own & (p < num_pairs)
    if (expert < 0) | (expert >= num_experts) | (tl.min(tl.where(own, p, BLOCK_P), axis=0) < pair):
        return
    expert_words, expert_scales = _expert_words(N, groups, E4M3)
    words += expert * expert_words
    scales += expert * expert_scales
    if PREFETCH > 0:
        one = tl.zeros((1,), dtype=tl.int32)
        _prefetch_rows(words + one, scales + one, row, groups, BLOCK_N, PREFETCH, E4M3)
    n = row + tl.arange(0, BLOCK_N)
    offset = expert.to(tl.int64) * N
    factor = tl.load(row_scale + offset + n)
    shift = tl.load(bias + offset + n).to(tl.float32) if HAS_BIAS else tl.zeros_like(factor)
    token = tl.where(own, p, pair) // top_k
    part_column = tl.arange(0, PARTS) * (GROUPS * _GROUP)
    column = part_column[:, None] + tl.arange(0, GROUPS * _GROUP)[None, :]

    acc = tl.zeros((PARTS, BLOCK_N, BLOCK_P), dtype=tl.float32)
    for group in range(0, groups, PARTS * GROUPS):
        k = group * _GROUP + column
        if ONE_TOKEN:
            x = tl.load(hidden + k) if WHOLE else tl.load(hidden + k, mask=k < H, other=0.0)
            x = x[:, :, None].broadcast_to([PARTS, GROUPS * _GROUP, BLOCK_P])
        else:
            pointers = hidden + token[None, None, :] * H + k[:, :, None]
            x = tl.load(pointers) if WHOLE else tl.load(pointers, mask=(k < H)[:, :, None], other=0.0)
        w = _load_parts(
            words,
            scales,
            row,
            group,
            groups,
            PARTS,
            BLOCK_N,
            GROUPS,
            WHOLE,
            E4M3,
            DTYPE,
            INTERPRETED,
            part_group,
            scale_part_group,
        )
        acc = _dot_parts(w, x, acc, INTERPRETED)

    total = tl.sum(acc, axis=0) * factor[:, None] + shift[:, None]
    if GATED:
        gate, up = _gate_and_up(total)
        out = _activated(gate, limit, alpha, BOUND, KIND) * (_bounded_up(up, up_limit, BOUND) + beta)
        i = row // 2 + tl.arange(0, BLOCK_N // 2)
    else:
        out = _activated(total, limit, alpha, BOUND, KIND)
        i = n
    tl.store(h + p[None, :] * I + i[:, None], _cast(out, DTYPE, INTERPRETED), mask=own[None, :])


@triton.jit
def _slot_experts(topk_ids, slot, num_experts, TOP_K: tl.constexpr):
    """Experts int64 of a token's slots and whether each exists; 0 where it does not."""
    expert = tl.load(topk_ids + slot, mask=slot < TOP_K, other=-1).to(tl.int64)
    exists = (expert >= 0) & (expert < num_experts)
    return tl.where(exists, expert, 0), exists


@triton.jit
def down_decode_kernel(
    h,  # [P, I] by pair
    words,  # int16 [E, R, G, 64, 16]
    scales,  # int32 [E, R, G, 64 or 32]
    row_scale,  # float32 [E, N], N = H padded to 64
    bias,  # [E, H]
    topk_ids,  # [P]
    topk_weights,  # [P]
    out,  # out: [T, H]
    num_experts,
    H,
    I,  # noqa: E741
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    PREFETCH: tl.constexpr,
    WHOLE: tl.constexpr,
    E4M3: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out[t] = sum over slots of topk_weight * (h @ w2 + bias), BLOCK_N columns of one token.

    SLOTS is TOP_K or the next power of two. Slots without an expert read the weights of the first and count
    nothing.
    """
    PARTS: tl.constexpr = SLOTS * SPLIT
    SCALES: tl.constexpr = BLOCK_N if E4M3 else BLOCK_N // 2
    STEP: tl.constexpr = SPLIT * GROUPS
    N = tl.cdiv(H, _ROWS) * _ROWS
    blocks = tl.cdiv(H, BLOCK_N)
    row = tl.program_id(0) % blocks * BLOCK_N
    token = (tl.program_id(0) // blocks).to(tl.int64)
    DTYPE: tl.constexpr = h.dtype.element_ty
    groups = tl.cdiv(I, _GROUP)
    topk_ids += token * TOP_K
    part = tl.arange(0, PARTS * BLOCK_N) // BLOCK_N
    scale_part = tl.arange(0, PARTS * SCALES) // SCALES
    expert_words, expert_scales = _expert_words(N, groups, E4M3)
    slot = tl.arange(0, SLOTS)
    expert, exists = _slot_experts(topk_ids, slot, num_experts, TOP_K)
    if PREFETCH > 0:
        _prefetch_rows(
            words + expert * expert_words, scales + expert * expert_scales, row, groups, BLOCK_N, PREFETCH, E4M3
        )
    row_expert, _ = _slot_experts(topk_ids, part // SPLIT, num_experts, TOP_K)
    scale_expert, _ = _slot_experts(topk_ids, scale_part // SPLIT, num_experts, TOP_K)
    words += (row_expert * expert_words)[:, None]
    scales += (scale_expert * expert_scales)[:, None]
    n = row + tl.arange(0, BLOCK_N)
    n_read = tl.minimum(n, H - 1)[None, :]
    factor = tl.load(row_scale + (expert * N)[:, None] + n_read)
    shift = tl.load(bias + (expert * H)[:, None] + n_read).to(tl.float32) if HAS_BIAS else tl.zeros_like(factor)
    weight = tl.load(topk_weights + token * TOP_K + slot, mask=exists, other=0.0).to(tl.float32)
    x_part = tl.arange(0, PARTS)
    x_row = h + (token * TOP_K + tl.minimum(x_part // SPLIT, TOP_K - 1)) * I
    column = (x_part % SPLIT * GROUPS * _GROUP)[:, None] + tl.arange(0, GROUPS * _GROUP)[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

    acc = tl.zeros((PARTS, BLOCK_N, 8), dtype=tl.float32)
    for group in range(0, groups, STEP):
        k = group * _GROUP + column
        pointers = x_row[:, None] + k
        x = tl.load(pointers) if WHOLE else tl.load(pointers, mask=k < I, other=0.0)
        x = x[:, :, None].broadcast_to([PARTS, GROUPS * _GROUP, 8])
        w = _load_parts(
            words,
            scales,
            row,
            group,
            groups,
            PARTS,
            BLOCK_N,
            GROUPS,
            WHOLE,
            E4M3,
            DTYPE,
            INTERPRETED,
            part % SPLIT * GROUPS,
            scale_part % SPLIT * GROUPS,
        )
        acc = _dot_parts(w, x, acc, INTERPRETED)

    # All eight columns are equal, and eight times a number divided by eight is that number.
    y = tl.sum((tl.sum(acc, axis=2) * 0.125).reshape(SLOTS, SPLIT, BLOCK_N), axis=1)
    y = y * factor + shift
    y = tl.where(exists[:, None], y * weight[:, None], 0.0)
    # A lower-precision combine rounds each product; a float32 result keeps them.
    if out.dtype.element_ty != tl.float32:
        y = _cast(y, DTYPE, INTERPRETED).to(tl.float32)
    total = _cast(tl.sum(y, axis=0), out.dtype.element_ty, INTERPRETED)
    tl.store(out + token * H + n, total, mask=n < H)
