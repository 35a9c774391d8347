"""The W4A16 block for one token, from the router's logits to the output, in two launches.

No program waits for another to choose experts: each chooses them itself, every warp alone, which takes less than a
launch. A program of down multiplies its rows of all chosen experts, a warp each, and adds them up. Both wait and let
the next kernel start as those in ``w4a16_decode`` do.
"""

# Triton reads these functions itself; they hold no Python types.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .w4a16_decode import expert_words, gate_up_rows, products
from .w4a16_tile import ROWS, cast
from .w4a16_topk import choose_experts, weigh_experts


@triton.jit
def _choose(logits, rounds, WARPS: tl.constexpr, NUM_EXPERTS: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr):
    """The experts of the highest logits [WARPS, SLOTS], best first, and the logits, in every warp."""
    rows = logits + tl.zeros((WARPS, 1), dtype=tl.int32)
    ids, x = choose_experts(
        rows,
        True,
        logits,
        0.0,
        rounds,
        NUM_EXPERTS=NUM_EXPERTS,
        SCORING="softmax",
        LATE=True,
        NUM_GROUPS=1,
        TOPK_GROUPS=1,
        TOP2=False,
        HAS_BIAS=False,
        GROUPS=1,
        SIZE=SIZE,
        SLOTS=SLOTS,
    )
    return rows, ids, x


@triton.jit
def gate_up_one_token_kernel(
    hidden,  # [H]
    words,  # int16 [E, R, G, 64, 16]; gated: rows in granules
    scales,  # int32 [E, R, G, 64 or 32]
    row_scale,  # float32 [E, N], N = 64 R
    bias,  # [E, N]
    logits,  # [NUM_EXPERTS]
    h,  # out: [TOP_K, I] by slot
    H,
    I,  # noqa: E741
    alpha,
    beta,
    limit,
    up_limit,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,  # power of two
    SIZE: tl.constexpr,  # power of two, at least NUM_EXPERTS
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
    """h = act(hidden @ w13) for BLOCK_N rows of the expert in one slot."""
    N = I * 2 if GATED else I
    blocks = N // BLOCK_N
    row = tl.program_id(0) % blocks * BLOCK_N
    slot = tl.program_id(0) // blocks
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    _, ids, _ = _choose(logits, slot + 1, PARTS, NUM_EXPERTS, SIZE, TOP_K)
    own = tl.where(tl.arange(0, TOP_K)[None, :] == slot, ids, 0)
    expert = tl.max(tl.max(own, axis=1), axis=0).to(tl.int64)
    out, i = gate_up_rows(
        hidden, tl.arange(0, 1), words, scales, row_scale, bias, expert, row, H, N, (alpha, beta, limit, up_limit),
        BLOCK_N, PARTS, GROUPS, WHOLE, E4M3, HAS_BIAS, GATED, BOUND, KIND, False, INTERPRETED,
    )  # fmt: skip
    tl.store(h + slot * I + i[:, None], out)


@triton.jit
def down_one_token_kernel(
    h,  # [TOP_K, I] by slot
    words,  # int16 [E, R, G, 64, 16]
    scales,  # int32 [E, R, G, 64 or 32]
    row_scale,  # float32 [E, N], N = H padded to 64
    bias,  # [E, H]
    logits,  # [NUM_EXPERTS]
    out,  # out: [H]
    H,
    I,  # noqa: E741
    renormalize_min,
    renormalize_eps,
    routing_factor,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,  # power of two; one warp each
    SIZE: tl.constexpr,  # power of two, at least NUM_EXPERTS
    SCORING: tl.constexpr,
    LATE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    WEIGHTS_DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    WHOLE: tl.constexpr,
    E4M3: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out = sum over slots of weight * (h @ w2 + bias), for BLOCK_N columns."""
    N = tl.cdiv(H, ROWS) * ROWS
    row = tl.program_id(0) * BLOCK_N
    rows, ids, x = _choose(logits, TOP_K, TOP_K, NUM_EXPERTS, SIZE, TOP_K)
    weights = weigh_experts(
        rows,
        True,
        ids,
        x,
        logits,
        logits,
        renormalize_min,
        renormalize_eps,
        routing_factor,
        TOP_K=TOP_K,
        SCORING=SCORING,
        LATE=LATE,
        RENORMALIZE=RENORMALIZE,
        HAS_SCALE=False,
        HAS_EXPERT_SCALE=False,
    )
    weights = cast(weights, WEIGHTS_DTYPE, INTERPRETED).to(tl.float32)
    slot = tl.arange(0, TOP_K)
    own = slot[None, :] == slot[:, None]
    expert = tl.sum(tl.where(own, ids, 0), axis=1).to(tl.int64)
    weight = tl.sum(tl.where(own, weights, 0.0), axis=1)

    n = row + tl.arange(0, BLOCK_N)
    n_read = tl.minimum(n, H - 1)[None, :]
    factor = tl.load(row_scale + expert[:, None] * N + n_read)
    shift = tl.load(bias + expert[:, None] * H + n_read).to(tl.float32) if HAS_BIAS else tl.zeros_like(factor)
    words_size, scales_size = expert_words(N, I, E4M3)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = products(
        (h + slot * I)[:, None, None],
        words + (expert * words_size)[:, None, None, None],
        scales + (expert * scales_size)[:, None, None],
        row,
        tl.zeros_like(slot),
        I,
        BLOCK_N,
        GROUPS,
        GROUPS,
        WHOLE,
        E4M3,
        INTERPRETED,
    )
    total = (tl.sum(total, axis=2) * factor + shift) * weight[:, None]
    tl.store(out + n, cast(tl.sum(total, axis=0), out.dtype.element_ty, INTERPRETED), mask=n < H)
