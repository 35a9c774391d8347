"""The W4A16 experts block for few tokens, in two or three launches: no sort, no counters, no atomics.

A program multiplies rows of one expert's weights with every token; a column whose token did not choose the expert is
not stored. The first pair of an expert stands for all of them. The warps of a program take parts of K (and, where
one kernel does the down projection and combines, the slots of a token) as the batch of one matrix product; their
sums meet in shared memory.

Where PDL is set a kernel starts while the one before it still runs. Until ``gdc_wait`` it may touch only what
kernels before that one have written, so every kernel waits before it lets the next one start.
"""

# Triton reads these functions itself; they hold no Python types.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .w4a16_tile import GROUP, PLANE, ROWS, activated, bounded_up, cast, decode_weights, dot, gate_and_up

_COLUMNS = tl.constexpr(8)
"""Right-hand columns of a matrix instruction."""


@triton.jit
def _scale_words(E4M3: tl.constexpr):
    """Scale words of a tile of 64 rows by one group."""
    return ROWS if E4M3 else ROWS // 2


@triton.jit
def _expert_words(num_rows, groups, E4M3: tl.constexpr):
    """Words and scale words of an expert, int64."""
    tiles = (num_rows // ROWS).to(tl.int64) * groups
    return tiles * (ROWS * PLANE), tiles * _scale_words(E4M3)


@triton.jit
def _load_parts(
    words,
    scales,
    row,
    group,
    groups,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    WHOLE: tl.constexpr,
    E4M3: tl.constexpr,
    DTYPE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Weights [parts, BLOCK_N, 64 GROUPS] of rows from ``row``, which lie in one tile.

    ``words`` and ``scales`` are pointers [parts] to experts, ``group`` [parts] the first group to read; those past the
    last are zero unless WHOLE.
    """
    PARTS: tl.constexpr = words.shape[0]
    SCALES: tl.constexpr = BLOCK_N if E4M3 else BLOCK_N // 2
    g = tl.arange(0, GROUPS)
    tile = row // ROWS * groups + group[:, None, None] + g[None, None, :]
    n = row % ROWS * PLANE + tl.arange(0, BLOCK_N) * PLANE
    words = words[:, None, None, None] + tile[:, :, :, None] * (ROWS * PLANE)
    words += n[None, :, None, None] + tl.arange(0, PLANE)[None, None, None, :]
    n = row % ROWS * SCALES // BLOCK_N + tl.arange(0, SCALES)
    scales = scales[:, None, None] + tile * _scale_words(E4M3) + n[None, :, None]
    if WHOLE:
        w = tl.load(words)
        s = tl.load(scales)
    else:
        exists = group[:, None, None] + g[None, None, :] < groups
        w = tl.load(words, mask=exists[:, :, :, None], other=0)
        s = tl.load(scales, mask=exists, other=0)
    w = w.reshape(PARTS * BLOCK_N, GROUPS * PLANE)
    s = s.reshape(PARTS * SCALES, GROUPS)
    return decode_weights(w, s, E4M3, DTYPE, INTERPRETED).reshape(PARTS, BLOCK_N, GROUPS * GROUP)


@triton.jit
def _product(
    x_row,
    words,
    scales,
    row,
    K,
    first,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    GROUPS: tl.constexpr,
    WHOLE: tl.constexpr,
    E4M3: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """float32 [parts, BLOCK_N, tokens]: weight rows from ``row`` of a tile times tokens.

    ``x_row`` are pointers [parts, tokens], 1, 2, 4 or 8 tokens, ``words`` and ``scales`` [parts]; a part takes GROUPS
    groups from ``first`` [parts] in every STEP.
    """
    PARTS: tl.constexpr = x_row.shape[0]
    TOKENS: tl.constexpr = x_row.shape[1]
    COLUMNS: tl.constexpr = GROUPS * GROUP
    DTYPE: tl.constexpr = x_row.dtype.element_ty
    groups = tl.cdiv(K, GROUP)
    column = first[:, None] * GROUP + tl.arange(0, COLUMNS)[None, :]
    acc = tl.zeros((PARTS, BLOCK_N, _COLUMNS), dtype=tl.float32)
    for group in range(0, groups, STEP):
        k = (column + group * GROUP)[:, :, None]
        x = tl.load(x_row[:, None, :] + k) if WHOLE else tl.load(x_row[:, None, :] + k, mask=k < K, other=0.0)
        x = x[:, :, None, :].broadcast_to([PARTS, COLUMNS, _COLUMNS // TOKENS, TOKENS])
        x = x.reshape(PARTS, COLUMNS, _COLUMNS)
        w = _load_parts(words, scales, row, first + group, groups, BLOCK_N, GROUPS, WHOLE, E4M3, DTYPE, INTERPRETED)
        acc = dot(w, x, acc, INTERPRETED)
    if TOKENS < _COLUMNS:  # a token's columns are equal, and 2**n times a number over 2**n is that number
        acc = acc.reshape(PARTS, BLOCK_N, _COLUMNS // TOKENS, TOKENS) * (TOKENS / _COLUMNS)
        acc = tl.sum(acc, axis=2)
    return acc


@triton.jit
def _expert_of_pair(topk_ids, pair, num_tokens, num_experts, top_k, TOKENS: tl.constexpr, SLOTS: tl.constexpr):
    """A pair's expert, the slots [TOKENS, SLOTS] that chose it, and whether it exists and this pair is its first."""
    expert = tl.load(topk_ids + pair).to(tl.int64)
    t = tl.arange(0, TOKENS)[:, None]
    slot = tl.arange(0, SLOTS)[None, :]
    other = t * top_k + slot
    exists = (t < num_tokens) & (slot < top_k)
    own = exists & (tl.load(topk_ids + other, mask=exists, other=-1).to(tl.int64) == expert)
    before = tl.min(tl.min(tl.where(own, other, pair), axis=1), axis=0)
    return expert, own, (before == pair) & (expert >= 0) & (expert < num_experts)


@triton.jit
def _next_slot(own, after):
    """Of each row of ``own`` [TOKENS, SLOTS], the first slot after ``after`` [TOKENS]; SLOTS where there is none."""
    slot = tl.arange(0, own.shape[1])[None, :]
    return tl.min(tl.where(own & (slot > after[:, None]), slot, own.shape[1]), axis=1)


@triton.jit
def _rounds(own):
    """How often a token has chosen an expert at most: once, unless it names one twice."""
    return tl.max(tl.sum(own.to(tl.int32), axis=1), axis=0)


@triton.jit(do_not_specialize=["num_tokens"])
def gate_up_decode_kernel(
    hidden,  # [T, H]
    words,  # int16 [E, R, G, 64, 16]; gated: rows in granules
    scales,  # int32 [E, R, G, 64 or 32]
    row_scale,  # float32 [E, N], N = 64 R
    bias,  # [E, N]
    topk_ids,  # [P]
    h,  # out: [P, I] by pair
    num_tokens,
    num_experts,
    top_k,
    H,
    I,  # noqa: E741
    alpha,
    beta,
    limit,
    up_limit,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    WHOLE: tl.constexpr,
    E4M3: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    BOUND: tl.constexpr,
    KIND: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """h = act(hidden @ w13) for BLOCK_N rows of one expert and all tokens, at most TOKENS."""
    N = I * 2 if GATED else I
    blocks = N // BLOCK_N
    row = tl.program_id(0) % blocks * BLOCK_N
    pair = tl.program_id(0) // blocks
    DTYPE: tl.constexpr = hidden.dtype.element_ty
    groups = tl.cdiv(H, GROUP)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, own, first = _expert_of_pair(topk_ids, pair, num_tokens, num_experts, top_k, TOKENS, SLOTS)
    if not first:
        return
    n = row + tl.arange(0, BLOCK_N)
    offset = expert * N
    factor = tl.load(row_scale + offset + n)
    shift = tl.load(bias + offset + n).to(tl.float32) if HAS_BIAS else tl.zeros_like(factor)
    t = tl.arange(0, TOKENS)
    part = tl.arange(0, PARTS)
    expert_words, expert_scales = _expert_words(N, groups, E4M3)
    acc = _product(
        hidden + part[:, None] * 0 + tl.minimum(t, num_tokens - 1)[None, :] * H,
        words + expert * expert_words + part * 0,
        scales + expert * expert_scales + part * 0,
        row,
        H,
        part * GROUPS,
        BLOCK_N,
        PARTS * GROUPS,
        GROUPS,
        WHOLE,
        E4M3,
        INTERPRETED,
    )
    total = tl.sum(acc, axis=0) * factor[:, None] + shift[:, None]
    if GATED:
        gate, up = gate_and_up(total)
        out = activated(gate, limit, alpha, BOUND, KIND) * (bounded_up(up, up_limit, BOUND) + beta)
        i = row // 2 + tl.arange(0, BLOCK_N // 2)
    else:
        out = activated(total, limit, alpha, BOUND, KIND)
        i = n
    out = cast(out, DTYPE, INTERPRETED)
    slot = tl.full((TOKENS,), -1, dtype=tl.int32)
    for _ in range(_rounds(own)):
        slot = _next_slot(own, slot)
        to = h + (t * top_k + slot)[None, :] * I + i[:, None]
        tl.store(to, out, mask=(slot < SLOTS)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def down_decode_kernel(
    h,  # [P, I] by pair
    words,  # int16 [E, R, G, 64, 16]
    scales,  # int32 [E, R, G, 64 or 32]
    row_scale,  # float32 [E, N], N = H padded to 64
    bias,  # [E, H]
    topk_ids,  # [P]
    topk_weights,  # [P]
    y,  # out: [P, H] by pair
    num_tokens,
    num_experts,
    top_k,
    H,
    I,  # noqa: E741
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    WHOLE: tl.constexpr,
    E4M3: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """y = topk_weight * (h @ w2 + bias) for BLOCK_N columns of one expert and all tokens, at most TOKENS."""
    N = tl.cdiv(H, ROWS) * ROWS
    blocks = tl.cdiv(H, BLOCK_N)
    row = tl.program_id(0) % blocks * BLOCK_N
    pair = tl.program_id(0) // blocks
    groups = tl.cdiv(I, GROUP)
    expert, own, first = _expert_of_pair(topk_ids, pair, num_tokens, num_experts, top_k, TOKENS, SLOTS)
    if not first:
        if PDL:
            gdc_wait()
        return
    n = row + tl.arange(0, BLOCK_N)
    n_read = tl.minimum(n, H - 1)
    factor = tl.load(row_scale + expert * N + n_read)
    shift = tl.zeros_like(factor)
    if HAS_BIAS:
        shift = tl.load(bias + expert * H + n_read).to(tl.float32)
    t = tl.arange(0, TOKENS)
    part = tl.arange(0, PARTS)
    slot = _next_slot(own, tl.full((TOKENS,), -1, dtype=tl.int32))
    x_pair = tl.where(slot < SLOTS, t * top_k + slot, pair)
    expert_words, expert_scales = _expert_words(N, groups, E4M3)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = _product(
        h + part[:, None] * 0 + x_pair[None, :] * I,
        words + expert * expert_words + part * 0,
        scales + expert * expert_scales + part * 0,
        row,
        I,
        part * GROUPS,
        BLOCK_N,
        PARTS * GROUPS,
        GROUPS,
        WHOLE,
        E4M3,
        INTERPRETED,
    )
    total = tl.sum(acc, axis=0) * factor[:, None] + shift[:, None]
    for _ in range(_rounds(own)):
        to = t * top_k + slot
        weight = tl.load(topk_weights + to, mask=slot < SLOTS, other=0.0).to(tl.float32)
        out = cast(total * weight[None, :], y.dtype.element_ty, INTERPRETED)
        tl.store(y + to[None, :] * H + n[:, None], out, mask=(n < H)[:, None] & (slot < SLOTS)[None, :])
        slot = _next_slot(own, slot)


@triton.jit
def _slot_experts(topk_ids, slot, num_experts, TOP_K: tl.constexpr):
    """Experts int64 of a token's slots and whether each exists; 0 where it does not."""
    expert = tl.load(topk_ids + slot, mask=slot < TOP_K, other=-1).to(tl.int64)
    exists = (expert >= 0) & (expert < num_experts)
    return tl.where(exists, expert, 0), exists


@triton.jit
def down_combine_decode_kernel(
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
    N = tl.cdiv(H, ROWS) * ROWS
    blocks = tl.cdiv(H, BLOCK_N)
    row = tl.program_id(0) % blocks * BLOCK_N
    token = (tl.program_id(0) // blocks).to(tl.int64)
    DTYPE: tl.constexpr = h.dtype.element_ty
    groups = tl.cdiv(I, GROUP)
    topk_ids += token * TOP_K
    slot = tl.arange(0, SLOTS)
    expert, exists = _slot_experts(topk_ids, slot, num_experts, TOP_K)
    part = tl.arange(0, PARTS)
    part_expert, _ = _slot_experts(topk_ids, part // SPLIT, num_experts, TOP_K)
    expert_words, expert_scales = _expert_words(N, groups, E4M3)
    n = row + tl.arange(0, BLOCK_N)
    n_read = tl.minimum(n, H - 1)[None, :]
    factor = tl.load(row_scale + (expert * N)[:, None] + n_read)
    shift = tl.load(bias + (expert * H)[:, None] + n_read).to(tl.float32) if HAS_BIAS else tl.zeros_like(factor)
    weight = tl.load(topk_weights + token * TOP_K + slot, mask=exists, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc = _product(
        (h + (token * TOP_K + tl.minimum(part // SPLIT, TOP_K - 1)) * I)[:, None],
        words + part_expert * expert_words,
        scales + part_expert * expert_scales,
        row,
        I,
        part % SPLIT * GROUPS,
        BLOCK_N,
        SPLIT * GROUPS,
        GROUPS,
        WHOLE,
        E4M3,
        INTERPRETED,
    )
    y = tl.sum(acc.reshape(SLOTS, SPLIT, BLOCK_N), axis=1) * factor + shift
    y = tl.where(exists[:, None], y * weight[:, None], 0.0)
    # A lower-precision combine rounds each product; a float32 result keeps them.
    if out.dtype.element_ty != tl.float32:
        y = cast(y, DTYPE, INTERPRETED).to(tl.float32)
    total = cast(tl.sum(y, axis=0), out.dtype.element_ty, INTERPRETED)
    tl.store(out + token * H + n, total, mask=n < H)
