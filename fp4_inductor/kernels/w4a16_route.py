"""Sort routed pairs by expert and cut each expert's pairs into token tiles, without leaving the device.

A pair is one (token, slot); its number is ``token * k + slot``. The sort is stable, so results do not depend on
how programs are scheduled. Pairs whose id is outside [0, E) come last and belong to no tile. One program does
everything where the pairs fit one chunk; otherwise count and place are two launches.
"""

# Triton reads these functions itself; they hold no Python types.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _keys(topk_ids, pair, num_pairs, num_experts):
    """Experts int32 of pairs: ``num_experts`` for ids outside, one more past the last pair."""
    expert = tl.load(topk_ids + pair, mask=pair < num_pairs, other=0)
    expert = tl.where((expert >= 0) & (expert < num_experts), expert, num_experts).to(tl.int32)
    return tl.where(pair < num_pairs, expert, num_experts + 1)


@triton.jit
def _chunk_rank(topk_ids, first, num_pairs, num_experts, key, CHUNK: tl.constexpr):
    """Where each of CHUNK pairs from ``first`` comes in the chunk sorted by expert, by counting those before it."""
    STEP: tl.constexpr = 32
    own = key * CHUNK + tl.arange(0, CHUNK)
    before = tl.zeros((CHUNK, STEP), dtype=tl.int32)
    for start in tl.static_range(0, CHUNK, STEP):
        i = start + tl.arange(0, STEP)
        other = _keys(topk_ids, first + i, num_pairs, num_experts) * CHUNK + i
        before += (other[None, :] < own[:, None]).to(tl.int32)
    return tl.sum(before, axis=1)


@triton.jit
def _write_tiles(counts, num_experts, num_tiles, tile_expert, tile_row, expert_end, BLOCK_M: tl.constexpr):
    """Tiles of BLOCK_M rows from ``counts`` int32 [BINS], the pairs of each expert."""
    expert = tl.arange(0, counts.shape[0])
    end = tl.cumsum(counts, axis=0)
    tl.store(expert_end + expert, end)
    tiles = tl.where(expert < num_experts, tl.cdiv(counts, BLOCK_M), 0)
    tile = tl.cumsum(tiles, axis=0) - tiles
    tl.store(num_tiles, tl.sum(tiles, axis=0))
    for i in range(tl.max(tiles, axis=0)):
        tl.store(tile_expert + tile + i, expert, mask=i < tiles)
        tl.store(tile_row + tile + i, end - counts + i * BLOCK_M, mask=i < tiles)


@triton.jit(do_not_specialize=["num_pairs"])
def route_kernel(
    topk_ids,  # [P]
    order,  # out: int32 [P] pair of each sorted row
    num_tiles,  # out: int32 [1]
    tile_expert,  # out: int32 [tiles]
    tile_row,  # out: int32 [tiles] first sorted row
    expert_end,  # out: int32 [BINS] last sorted row + 1
    arrivals,  # out: int32 [ARRIVALS] zeros
    num_pairs,
    num_experts,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ARRIVALS: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Everything in one program, for at most CHUNK pairs."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tl.store(arrivals + tl.arange(0, ARRIVALS), tl.zeros((ARRIVALS,), dtype=tl.int32))
    pair = tl.arange(0, CHUNK)
    key = _keys(topk_ids, pair, num_pairs, num_experts)
    counts = tl.histogram(key, BINS)
    _write_tiles(counts, num_experts, num_tiles, tile_expert, tile_row, expert_end, BLOCK_M)
    rank = _chunk_rank(topk_ids, 0, num_pairs, num_experts, key, CHUNK)
    tl.store(order + rank, pair, mask=pair < num_pairs)


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(
    topk_ids,
    counts,  # out: int32 [chunks, BINS] pairs of each expert in each chunk
    num_pairs,
    num_experts,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """One program a chunk."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    chunk = tl.program_id(0)
    key = _keys(topk_ids, chunk * CHUNK + tl.arange(0, CHUNK), num_pairs, num_experts)
    tl.store(counts + chunk * BINS + tl.arange(0, BINS), tl.histogram(key, BINS))


@triton.jit(do_not_specialize=["num_pairs", "num_chunks"])
def place_kernel(
    topk_ids,
    counts,  # int32 [chunks, BINS]
    order,
    num_tiles,
    tile_expert,
    tile_row,
    expert_end,
    num_pairs,
    num_chunks,
    num_experts,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Place one chunk's pairs, a program a chunk; one more cuts the tiles."""
    if PDL:
        gdc_wait()
    STEP: tl.constexpr = 32 if BINS <= 256 else 8192 // BINS  # more counters at a time spill registers
    chunk = tl.program_id(0)
    bins = tl.arange(0, BINS)
    all_sums = tl.zeros((STEP, BINS), dtype=tl.int32)
    earlier_sums = tl.zeros((STEP, BINS), dtype=tl.int32)
    for start in range(0, num_chunks, STEP):
        row = (start + tl.arange(0, STEP))[:, None]
        found = tl.load(counts + row * BINS + bins[None, :], mask=row < num_chunks, other=0)
        all_sums += found
        earlier_sums += tl.where(row < chunk, found, 0)
    total = tl.sum(all_sums, axis=0)
    earlier = tl.sum(earlier_sums, axis=0)
    if chunk == num_chunks:
        _write_tiles(total, num_experts, num_tiles, tile_expert, tile_row, expert_end, BLOCK_M)
        if PDL:
            gdc_launch_dependents()
        return
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    key = _keys(topk_ids, pair, num_pairs, num_experts)
    rank = _chunk_rank(topk_ids, chunk * CHUNK, num_pairs, num_experts, key, CHUNK)
    own = tl.load(counts + chunk * BINS + bins)
    # A pair's row: all smaller experts, then its expert's pairs of earlier chunks, then those before it in this one.
    base = tl.cumsum(total, axis=0) - total + earlier - (tl.cumsum(own, axis=0) - own)
    tl.store(order + tl.gather(base, key, 0) + rank, pair, mask=pair < num_pairs)
    if PDL:
        gdc_launch_dependents()
