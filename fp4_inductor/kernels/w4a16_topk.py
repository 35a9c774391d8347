"""Choose each token's experts and weigh them, from the router's logits, in registers.

A program takes a few tokens, whose scores are a tile ``[TOKENS, EXPERTS]`` with each group of experts padded to a
power of two. Every round takes the best that is left: floats become integers of the same order, which reduce in
one instruction over a warp. Of equals the lowest index is taken, and of a token with NaN still k different experts.
Weights are computed from the logits of the chosen experts alone, read once more.
"""

# Triton reads these functions itself; they hold no Python types.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .w4a16_route import route_kernel
from .w4a16_tile import cast

_LOWEST = tl.constexpr(-0x80000000)
"""Below the key of every float: what is padding or taken already."""
_LOW_BITS = tl.constexpr(0x1FFF)
"""What the key of a bfloat16 or float16 number does not need."""


@triton.jit
def _keys(x):
    """int32 in the order of float32 ``x``: NaN above all, both zeros equal."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def _values(keys):
    """The float32 that have ``keys``."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best_place(keys, place, MARKED: tl.constexpr):
    """The place, along the last axis, of the highest key; of equals the lowest. Marked keys hold their places."""
    best = tl.max(keys, axis=-1, keep_dims=True)
    if MARKED:
        return _LOW_BITS - (best & _LOW_BITS)
    return tl.min(tl.where(keys == best, place, 0x7FFFFFFF), axis=-1, keep_dims=True)


@triton.jit
def _score(x, SCORING: tl.constexpr):
    if SCORING == "sigmoid":
        return 1 / (1 + tl.exp(-x))
    # softplus(x) = max(x, 0) + log(1 + e), where log(1 + e) = 2 atanh(e / (2 + e)) loses nothing for small e.
    e = tl.exp(-tl.abs(x))
    s = e / (2 + e)
    q = s * s
    odd = 1 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q * (1 / 13))))))
    return tl.sqrt(tl.where(x > 0, x, 0.0) + 2 * s * odd)


@triton.jit
def _softmax(x, over):
    """Of ``x``, where the sum is that of ``over``."""
    highest = tl.max(over, axis=1, keep_dims=True)
    return tl.exp(x - highest) / tl.sum(tl.exp(over - highest), axis=1, keep_dims=True)


@triton.jit
def _weights(chosen, x, SCORING: tl.constexpr, LATE: tl.constexpr):
    """Scores of the logits ``chosen`` [TOKENS, SLOTS] from all of them [TOKENS, EXPERTS]."""
    if SCORING != "softmax":
        return _score(chosen, SCORING)
    if LATE:
        return _softmax(chosen, chosen)
    return _softmax(chosen, x)


@triton.jit
def _kept_groups(
    selection,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Which experts [TOKENS, GROUPS * SIZE] are in the best TOPK_GROUPS groups."""
    TOKENS: tl.constexpr = selection.shape[0]
    member = tl.arange(0, SIZE)[None, None, :]
    keys = tl.reshape(_keys(selection), (TOKENS, GROUPS, SIZE))
    keys = tl.where(member < GROUP_SIZE, keys, _LOWEST)
    score = _values(tl.max(keys, axis=2))
    if TOP2 and GROUP_SIZE > 1:
        score += _values(tl.max(tl.where(member == _best_place(keys, member, False), _LOWEST, keys), axis=2))
    group = tl.arange(0, GROUPS)[None, :]
    group_keys = tl.where(group < NUM_GROUPS, _keys(score), _LOWEST)
    kept = tl.zeros((TOKENS, GROUPS), dtype=tl.int32)
    for _ in tl.static_range(TOPK_GROUPS):
        best = group == _best_place(group_keys, group, False)
        group_keys = tl.where(best, _LOWEST, group_keys)
        kept = tl.where(best, 1, kept)
    return tl.reshape(tl.broadcast_to(kept[:, :, None], (TOKENS, GROUPS, SIZE)), (TOKENS, GROUPS * SIZE)) != 0


@triton.jit
def _renormalized(weights, used, renormalize_min, renormalize_eps):
    total = tl.sum(tl.where(used, weights, 0.0), axis=1, keep_dims=True)
    return weights / (tl.where(total < renormalize_min, renormalize_min, total) + renormalize_eps)


@triton.jit
def choose_experts(
    rows,  # pointers [TOKENS, 1] to a token's logits [NUM_EXPERTS]
    exists,  # [TOKENS, 1]: whether they may be read
    bias,  # [NUM_EXPERTS], read if HAS_BIAS
    group_fill,
    rounds,  # how many experts: TOP_K, or fewer of the best
    NUM_EXPERTS: tl.constexpr,
    SCORING: tl.constexpr,
    LATE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Each token's experts int32 [TOKENS, SLOTS], best first, and its logits float32 [TOKENS, GROUPS * SIZE]."""
    GROUP_SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    NARROW: tl.constexpr = rows.dtype.element_ty.primitive_bitwidth == 16
    place = tl.arange(0, GROUPS * SIZE)[None, :]
    expert = place // SIZE * GROUP_SIZE + place % SIZE
    real = (place % SIZE < GROUP_SIZE) & (place // SIZE < NUM_GROUPS)
    x = tl.load(rows + expert, mask=real & exists, other=float("-inf")).to(tl.float32)

    # Softmax keeps the order of logits: where nothing is added to scores, they need not be waited for.
    BY_LOGITS: tl.constexpr = LATE or (SCORING == "softmax" and not HAS_BIAS and NUM_GROUPS == 1)
    selection = x if BY_LOGITS else (_softmax(x, x) if SCORING == "softmax" else _score(x, SCORING))
    if HAS_BIAS:
        selection += tl.load(bias + expert, mask=real, other=0.0).to(tl.float32)
    if NUM_GROUPS > 1:
        kept = _kept_groups(selection, NUM_GROUPS, GROUP_SIZE, TOPK_GROUPS, TOP2, GROUPS, SIZE)
        selection = tl.where(kept, selection, group_fill)
    keys = _keys(selection)
    # The place beside a 16-bit number makes every key another, and is read off the highest.
    MARKED: tl.constexpr = NARROW and BY_LOGITS and not HAS_BIAS and GROUPS * SIZE <= _LOW_BITS
    if MARKED:
        keys = (keys | _LOW_BITS) - place
    keys = tl.where(real, keys, _LOWEST)

    slot = tl.arange(0, SLOTS)[None, :]
    ids = tl.zeros((rows.shape[0], SLOTS), dtype=tl.int32)
    for i in range(rounds):
        first = _best_place(keys, place, MARKED)
        keys = tl.where(place == first, _LOWEST, keys)
        ids = tl.where(slot == i, first // SIZE * GROUP_SIZE + first % SIZE, ids)
    return ids, x


@triton.jit
def weigh_experts(
    rows,
    exists,
    ids,
    x,
    scale,  # [1], read if HAS_SCALE
    expert_scale,  # [NUM_EXPERTS], read if HAS_EXPERT_SCALE
    renormalize_min,
    renormalize_eps,
    factor,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    LATE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_EXPERT_SCALE: tl.constexpr,
):
    """float32 weights [TOKENS, SLOTS] of what ``choose_experts`` gives."""
    slot = tl.arange(0, ids.shape[1])[None, :]
    used = (slot < TOP_K) & exists
    chosen = tl.load(rows + ids, mask=used, other=float("-inf")).to(tl.float32)
    weights = _weights(chosen, x, SCORING, LATE)
    if RENORMALIZE:
        weights = _renormalized(weights, slot < TOP_K, renormalize_min, renormalize_eps)
    weights *= factor
    if HAS_SCALE:
        weights *= tl.load(scale).to(tl.float32)
    if HAS_EXPERT_SCALE:
        weights *= tl.load(expert_scale + ids, mask=used, other=0.0).to(tl.float32)
    return weights


@triton.jit
def _count(ids, counts, arrivals, BINS: tl.constexpr, ARRIVALS: tl.constexpr):
    """Pairs of each expert among ``ids`` [TOKENS, SLOTS], all slots used."""
    pairs = tl.reshape(ids, (ids.shape[0] * ids.shape[1],))
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), tl.histogram(pairs, BINS))
    if ARRIVALS > 0:
        i = tl.arange(0, ARRIVALS)
        tl.store(arrivals + i, tl.zeros_like(i), mask=i < tl.where(tl.program_id(0) == 0, ARRIVALS, 0))


@triton.jit(do_not_specialize=["num_tokens"])
def topk_kernel(
    logits,  # [T, NUM_EXPERTS]
    bias,  # [NUM_EXPERTS], read if HAS_BIAS
    scale,  # [1], read if HAS_SCALE
    expert_scale,  # [NUM_EXPERTS], read if HAS_EXPERT_SCALE
    topk_ids,  # out: int32 [T, TOP_K]
    topk_weights,  # out: [T, TOP_K]
    counts,  # out, if COUNT: int32 [programs, BINS] as count_kernel's, for programs of whole chunks
    order,  # out, if SORT: from here to arrivals as route_kernel's
    num_tiles,
    tile_expert,
    tile_row,
    expert_end,
    arrivals,
    num_tokens,
    group_fill,
    renormalize_min,
    renormalize_eps,
    factor,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,  # "softmax", "sigmoid" or "sqrt_softplus"
    LATE: tl.constexpr,  # experts are chosen by logits, and only theirs are scored
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,  # a group is as good as its best two experts, else as its best
    RENORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_EXPERT_SCALE: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,  # power of two, at least NUM_GROUPS
    SIZE: tl.constexpr,  # power of two, at least NUM_EXPERTS / NUM_GROUPS
    SLOTS: tl.constexpr,  # power of two, at least TOP_K
    COUNT: tl.constexpr,
    SORT: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ARRIVALS: tl.constexpr,  # where pairs are counted or sorted, how many zeros the first program writes
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """One program for TOKENS tokens, which may count the pairs of each expert; if it is the only one, it may sort its
    pairs, at most CHUNK, by expert."""
    if PDL:
        gdc_wait()
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None]
    exists = token < num_tokens
    rows = logits + token.to(tl.int64) * NUM_EXPERTS
    ids, x = choose_experts(
        rows, exists, bias, group_fill, TOP_K,
        NUM_EXPERTS, SCORING, LATE, NUM_GROUPS, TOPK_GROUPS, TOP2, HAS_BIAS, GROUPS, SIZE, SLOTS,
    )  # fmt: skip
    weights = weigh_experts(
        rows, exists, ids, x, scale, expert_scale, renormalize_min, renormalize_eps, factor,
        TOP_K, SCORING, LATE, RENORMALIZE, HAS_SCALE, HAS_EXPERT_SCALE,
    )  # fmt: skip
    slot = tl.arange(0, SLOTS)[None, :]
    used = (slot < TOP_K) & exists
    out = token.to(tl.int64) * TOP_K + slot
    tl.store(topk_ids + out, ids, mask=used)
    tl.store(topk_weights + out, cast(weights, topk_weights.dtype.element_ty, INTERPRETED), mask=used)
    if COUNT:
        _count(tl.where(exists, ids, NUM_EXPERTS + 1), counts, arrivals, BINS, ARRIVALS)
    if SORT:
        tl.debug_barrier()  # ids are read back by other threads than wrote them
        route_kernel(
            topk_ids, order, num_tiles, tile_expert, tile_row, expert_end, arrivals,
            num_tokens * TOP_K, NUM_EXPERTS, CHUNK, BINS, BLOCK_M, ARRIVALS,
        )  # fmt: skip
    if PDL:  # at the end: programs that wait long take the place of others, and crowd on a few multiprocessors
        gdc_launch_dependents()
