"""Both GEMMs of the W4A16 experts block for few tokens: no sort, no counters, no atomics.

A program multiplies rows of one expert's weights with every token; a column whose token did not choose the expert is
not stored. The first pair of an expert stands for all of them. The warps of a program take parts of K as the batch
of one matrix product; their sums meet in shared memory.

Where PDL is set a kernel starts while the one before it still runs. Until ``gdc_wait`` it may touch only what
kernels before that one have written, so every kernel waits before it lets the next one start.
"""

# Triton reads these functions itself; they hold no Python types.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .w4a16_tile import GROUP, PLANE, ROWS, activation, cast, decode_weights, dot

_COLUMNS = tl.constexpr(8)
"""Right-hand columns of a matrix instruction."""


@triton.jit
def _scale_words(E4M3: tl.constexpr):
    """Scale words of a tile of 64 rows by one group."""
    return ROWS if E4M3 else ROWS // 2


@triton.jit
def expert_words(num_rows, num_columns, E4M3: tl.constexpr):
    """How many words and scale words an expert has, int64."""
    tiles = (num_rows // ROWS).to(tl.int64) * tl.cdiv(num_columns, GROUP)
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

    ``words`` and ``scales`` are an expert's, or [parts, 1, 1, 1] and [parts, 1, 1], of each part's expert. ``group``
    [parts] is the first group to read; those past the last are zero unless WHOLE.
    """
    PARTS: tl.constexpr = group.shape[0]
    SCALES: tl.constexpr = BLOCK_N if E4M3 else BLOCK_N // 2
    g = tl.arange(0, GROUPS)
    tile = row // ROWS * groups + group[:, None, None] + g[None, None, :]
    n = row % ROWS * PLANE + tl.arange(0, BLOCK_N) * PLANE
    words += tile[:, :, :, None] * (ROWS * PLANE) + n[None, :, None, None] + tl.arange(0, PLANE)[None, None, None, :]
    n = row % ROWS * SCALES // BLOCK_N + tl.arange(0, SCALES)
    scales += tile * _scale_words(E4M3) + n[None, :, None]
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
def products(
    x_row,
    words,
    scales,
    row,
    first,
    K,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    GROUPS: tl.constexpr,
    WHOLE: tl.constexpr,
    E4M3: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """float32 [parts, BLOCK_N, tokens]: each part's share of weights from ``row``, in one tile, times tokens.

    ``x_row`` are pointers [1 or parts, 1, tokens], 1, 2, 4 or 8 tokens; ``words`` and ``scales`` as in
    ``_load_parts``. A part takes GROUPS groups from ``first`` [parts] on, then those STEP further.
    """
    PARTS: tl.constexpr = first.shape[0]
    TOKENS: tl.constexpr = x_row.shape[2]
    COLUMNS: tl.constexpr = GROUPS * GROUP
    DTYPE: tl.constexpr = x_row.dtype.element_ty
    groups = tl.cdiv(K, GROUP)
    column = first[:, None] * GROUP + tl.arange(0, COLUMNS)[None, :]
    acc = tl.zeros((PARTS, BLOCK_N, _COLUMNS), dtype=tl.float32)
    for group in range(0, groups, STEP):
        k = (column + group * GROUP)[:, :, None]
        x = tl.load(x_row + k) if WHOLE else tl.load(x_row + k, mask=k < K, other=0.0)
        x = x[:, :, None, :].broadcast_to([PARTS, COLUMNS, _COLUMNS // TOKENS, TOKENS])
        x = x.reshape(PARTS, COLUMNS, _COLUMNS)
        w = _load_parts(words, scales, row, first + group, groups, BLOCK_N, GROUPS, WHOLE, E4M3, DTYPE, INTERPRETED)
        acc = dot(w, x, acc, INTERPRETED)
    if TOKENS < _COLUMNS:  # a token's columns are equal, and 2**n times a number over 2**n is that number
        acc = acc.reshape(PARTS, BLOCK_N, _COLUMNS // TOKENS, TOKENS) * (TOKENS / _COLUMNS)
        acc = tl.sum(acc, axis=2)
    return acc


@triton.jit
def product(
    x_row,
    words,
    scales,
    row,
    K,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    WHOLE: tl.constexpr,
    E4M3: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """float32 [BLOCK_N, tokens]: an expert's rows from ``row``, in one tile, times tokens ``x_row`` [tokens].

    Each of PARTS takes GROUPS groups in turn.
    """
    first = tl.arange(0, PARTS) * GROUPS
    STEP: tl.constexpr = PARTS * GROUPS
    x_row = x_row[None, None, :]
    parts = products(x_row, words, scales, row, first, K, BLOCK_N, STEP, GROUPS, WHOLE, E4M3, INTERPRETED)
    return tl.sum(parts, axis=0)


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


@triton.jit
def gate_up_rows(
    hidden,
    token,
    words,
    scales,
    row_scale,
    bias,
    expert,
    row,
    H,
    N,
    knobs,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    WHOLE: tl.constexpr,
    E4M3: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    BOUND: tl.constexpr,
    KIND: tl.constexpr,
    LAUNCH: tl.constexpr,  # the next kernel may start once the product is there
    INTERPRETED: tl.constexpr,
):
    """Columns of h, in the activation dtype, from BLOCK_N rows of w13 of one expert times ``token`` [tokens], and
    which columns they are: [n, tokens] and [n]."""
    n = row + tl.arange(0, BLOCK_N)
    offset = expert * N
    factor = tl.load(row_scale + offset + n)
    shift = tl.load(bias + offset + n).to(tl.float32) if HAS_BIAS else tl.zeros_like(factor)
    words_size, scales_size = expert_words(N, H, E4M3)
    total = product(
        hidden + token * H,
        words + expert * words_size,
        scales + expert * scales_size,
        row,
        H,
        BLOCK_N,
        PARTS,
        GROUPS,
        WHOLE,
        E4M3,
        INTERPRETED,
    )
    if LAUNCH:
        gdc_launch_dependents()
    out = activation(total * factor[:, None] + shift[:, None], knobs, GATED, BOUND, KIND)
    i = row // (2 if GATED else 1) + tl.arange(0, out.shape[0])
    return cast(out, hidden.dtype.element_ty, INTERPRETED), i


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
    LATE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """h = act(hidden @ w13) for BLOCK_N rows of one expert and all tokens, at most TOKENS."""
    N = I * 2 if GATED else I
    blocks = N // BLOCK_N
    row = tl.program_id(0) % blocks * BLOCK_N
    pair = tl.program_id(0) // blocks
    if PDL:
        gdc_wait()
        if not LATE:
            gdc_launch_dependents()
    expert, own, first = _expert_of_pair(topk_ids, pair, num_tokens, num_experts, top_k, TOKENS, SLOTS)
    if not first:
        return
    t = tl.arange(0, TOKENS)
    out, i = gate_up_rows(
        hidden, tl.minimum(t, num_tokens - 1), words, scales, row_scale, bias, expert, row, H, N,
        (alpha, beta, limit, up_limit),
        BLOCK_N, PARTS, GROUPS, WHOLE, E4M3, HAS_BIAS, GATED, BOUND, KIND, PDL and LATE, INTERPRETED,
    )  # fmt: skip
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
    slot = _next_slot(own, tl.full((TOKENS,), -1, dtype=tl.int32))
    x_pair = tl.where(slot < SLOTS, t * top_k + slot, pair)
    words_size, scales_size = expert_words(N, I, E4M3)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = product(
        h + x_pair * I,
        words + expert * words_size,
        scales + expert * scales_size,
        row,
        I,
        BLOCK_N,
        PARTS,
        GROUPS,
        WHOLE,
        E4M3,
        INTERPRETED,
    )
    total = total * factor[:, None] + shift[:, None]
    for _ in range(_rounds(own)):
        to = t * top_k + slot
        weight = tl.load(topk_weights + to, mask=slot < SLOTS, other=0.0).to(tl.float32)
        out = cast(total * weight[None, :], y.dtype.element_ty, INTERPRETED)
        tl.store(y + to[None, :] * H + n[:, None], out, mask=(n < H)[:, None] & (slot < SLOTS)[None, :])
        slot = _next_slot(own, slot)
