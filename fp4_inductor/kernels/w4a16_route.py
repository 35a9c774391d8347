"""Sort routed pairs by expert and cut each expert's pairs into token tiles, without leaving the device.

A pair is one (token, slot); its number is ``token * k + slot``. The sort is stable, so results do not depend on
how programs are scheduled. Pairs whose id is outside [0, E) come last and belong to no tile. One program does
everything where the pairs fit one chunk; otherwise count, plan and place are three launches.
"""

# Triton reads these functions itself; they hold no Python types.
# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _keys(topk_ids, pair, num_pairs, num_experts):
    """Experts int32 of pairs: ``num_experts`` for ids outside, one more past the last pair."""
    expert = tl.load(topk_ids + pair, mask=pair < num_pairs, other=0)
    expert = tl.where((expert >= 0) & (expert < num_experts), expert, num_experts).to(tl.int32)
    return tl.where(pair < num_pairs, expert, num_experts + 1)


@triton.jit
def _histogram(topk_ids, first, num_pairs, num_experts, CHUNK: tl.constexpr, BINS: tl.constexpr):
    """int32 [BINS] pairs of each expert among CHUNK pairs from ``first``."""
    return tl.histogram(_keys(topk_ids, first + tl.arange(0, CHUNK), num_pairs, num_experts), BINS)


@triton.jit
def _rank(topk_ids, first, num_pairs, num_experts, key, STABLE_SORT: tl.constexpr, CHUNK: tl.constexpr):
    """How many pairs of the chunk precede each pair: in sorted order (STABLE_SORT), or within its expert."""
    STEP: tl.constexpr = 32
    own = tl.arange(0, CHUNK)
    rank = tl.zeros((CHUNK,), dtype=tl.int32)
    for start in range(0, CHUNK, STEP):
        other = start + tl.arange(0, STEP)
        other_key = _keys(topk_ids, first + other, num_pairs, num_experts)
        before = (other_key[None, :] == key[:, None]) & (other[None, :] < own[:, None])
        if STABLE_SORT:
            before = before | (other_key[None, :] < key[:, None])
        rank += tl.sum(before.to(tl.int32), axis=1)
    return rank


@triton.jit
def _write_tiles(counts, num_experts, num_tiles, tile_expert, tile_row, expert_end, BLOCK_M: tl.constexpr):
    """Tiles of BLOCK_M rows from pairs of each expert, int32 [BINS]; returns each expert's first row."""
    expert = tl.arange(0, counts.shape[0])
    end = tl.cumsum(counts, axis=0)
    tl.store(expert_end + expert, end)
    tiles = tl.where(expert < num_experts, tl.cdiv(counts, BLOCK_M), 0)
    tile = tl.cumsum(tiles, axis=0) - tiles
    tl.store(num_tiles, tl.sum(tiles, axis=0))
    for i in range(tl.max(tiles, axis=0)):
        tl.store(tile_expert + tile + i, expert, mask=i < tiles)
        tl.store(tile_row + tile + i, end - counts + i * BLOCK_M, mask=i < tiles)
    return end - counts


@triton.jit(do_not_specialize=["num_pairs"])
def route_kernel(
    topk_ids,  # [P]
    order,  # out: int32 [P] pair of each sorted row
    num_tiles,  # out: int32 [1]
    tile_expert,  # out: int32 [tiles]
    tile_row,  # out: int32 [tiles] first sorted row
    expert_end,  # out: int32 [BINS] last sorted row + 1
    num_pairs,
    num_experts,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Everything in one program, for at most CHUNK pairs."""
    pair = tl.arange(0, CHUNK)
    key = _keys(topk_ids, pair, num_pairs, num_experts)
    rank = _rank(topk_ids, 0, num_pairs, num_experts, key, True, CHUNK)
    tl.store(order + rank, pair, mask=pair < num_pairs)
    counts = _histogram(topk_ids, 0, num_pairs, num_experts, CHUNK, BINS)
    _write_tiles(counts, num_experts, num_tiles, tile_expert, tile_row, expert_end, BLOCK_M)


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(topk_ids, counts, num_pairs, num_experts, CHUNK: tl.constexpr, BINS: tl.constexpr):
    """counts int32 [chunks, BINS]: pairs of each expert in each chunk."""
    chunk = tl.program_id(0)
    found = _histogram(topk_ids, chunk * CHUNK, num_pairs, num_experts, CHUNK, BINS)
    tl.store(counts + chunk * BINS + tl.arange(0, BINS), found)


@triton.jit(do_not_specialize=["num_chunks"])
def plan_kernel(
    counts,  # in: int32 [chunks, BINS] pairs; out: first sorted row of each chunk's pairs of each expert
    num_tiles,
    tile_expert,
    tile_row,
    expert_end,
    num_chunks,
    num_experts,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Tiles, and where each chunk places its pairs. One program."""
    STEP: tl.constexpr = 16
    chunk = tl.arange(0, STEP)
    bins = tl.arange(0, BINS)
    total = tl.zeros((BINS,), dtype=tl.int32)
    for start in range(0, num_chunks, STEP):
        rows = (start + chunk)[:, None]
        total += tl.sum(tl.load(counts + rows * BINS + bins[None, :], mask=rows < num_chunks, other=0), axis=0)
    base = _write_tiles(total, num_experts, num_tiles, tile_expert, tile_row, expert_end, BLOCK_M)
    for start in range(0, num_chunks, STEP):
        rows = (start + chunk)[:, None]
        pointers = counts + rows * BINS + bins[None, :]
        found = tl.load(pointers, mask=rows < num_chunks, other=0)
        tl.store(pointers, base[None, :] + tl.cumsum(found, axis=0) - found, mask=rows < num_chunks)
        base += tl.sum(found, axis=0)


@triton.jit(do_not_specialize=["num_pairs"])
def place_kernel(topk_ids, base, order, num_pairs, num_experts, CHUNK: tl.constexpr, BINS: tl.constexpr):
    """order int32 [P] from base int32 [chunks, BINS]."""
    first = tl.program_id(0) * CHUNK
    pair = first + tl.arange(0, CHUNK)
    key = _keys(topk_ids, pair, num_pairs, num_experts)
    rank = _rank(topk_ids, first, num_pairs, num_experts, key, False, CHUNK)
    start = tl.load(base + tl.program_id(0) * BINS + key, mask=pair < num_pairs, other=0)
    tl.store(order + start + rank, pair, mask=pair < num_pairs)
