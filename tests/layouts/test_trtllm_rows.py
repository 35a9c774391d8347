"""TRTLLM's row shuffle against its formula, and scales that are shuffled and tiled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_bits import assert_prepares, random_bits, same_bits

from fp4_inductor.formats import MXFP4, NVFP4
from fp4_inductor.layouts.gate_up import GATE_UP, INTERLEAVED, UP_GATE, RowOrder, reorder_gate_up
from fp4_inductor.layouts.kernel_rows import PAIRS, TRTLLM_MXFP4, TRTLLM_NVFP4
from fp4_inductor.layouts.scale_128x4 import to_scale_tiles
from fp4_inductor.layouts.trtllm import from_trtllm_scales, shuffle_rows, to_trtllm_scales, unshuffle_rows

DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32]


def shuffled_from(row: int) -> int:
    return row // 32 * 32 + row % 8 * 4 + row % 32 // 8


@settings(max_examples=60)
@given(
    blocks=st.integers(1, 9),
    rest=st.lists(st.integers(1, 5), max_size=2),
    num_experts=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
)
def test_rows_follow_the_formula_and_invert(blocks: int, rest: list[int], num_experts: int, dtype: torch.dtype) -> None:
    rows = random_bits((num_experts, 32 * blocks, *rest), dtype)
    out = shuffle_rows(rows)
    for row in range(32 * blocks):
        assert same_bits(out[:, row], rows[:, shuffled_from(row)])
    assert same_bits(unshuffle_rows(out), rows)
    assert same_bits(shuffle_rows(unshuffle_rows(rows)), rows)


@pytest.mark.parametrize("source", [GATE_UP, UP_GATE, INTERLEAVED], ids=str)
def test_w13_of_any_order_becomes_pairs_first(source: RowOrder) -> None:
    """Up row i stands at 2 i of the pairs, its gate row behind it."""
    intermediate = 64
    gate = [f"g{i}" for i in range(intermediate)]
    up = [f"u{i}" for i in range(intermediate)]
    names = {
        GATE_UP: gate + up,
        UP_GATE: up + gate,
        INTERLEAVED: [name for pair in zip(gate, up, strict=True) for name in pair],
    }[source]
    index = torch.arange(2 * intermediate, dtype=torch.int32)[None]
    out = shuffle_rows(reorder_gate_up(index, source, PAIRS))[0].tolist()
    pairs = [name for pair in zip(up, gate, strict=True) for name in pair]
    assert [names[i] for i in out] == [pairs[shuffled_from(row)] for row in range(2 * intermediate)]


@settings(max_examples=30)
@given(row_tiles=st.integers(1, 3), column_tiles=st.integers(1, 4), fmt=st.sampled_from([MXFP4, NVFP4]))
def test_scales_are_shuffled_then_tiled_and_invert(row_tiles: int, column_tiles: int, fmt) -> None:  # type: ignore[no-untyped-def]
    scale = random_bits((2, 128 * row_tiles, 4 * column_tiles), fmt.scale_dtype)
    out = to_trtllm_scales(scale)
    assert out.dtype == torch.float8_e4m3fn
    assert out.shape == scale.shape
    shuffled = torch.stack([scale.view(torch.uint8)[:, shuffled_from(row)] for row in range(scale.shape[1])], dim=1)
    assert same_bits(out.view(torch.uint8), to_scale_tiles(shuffled))
    assert same_bits(from_trtllm_scales(out, fmt.scale_dtype), scale)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn], ids=str)
def test_shuffles_trace_and_own_their_memory(dtype: torch.dtype) -> None:
    scale = random_bits((2, 128, 4), dtype)
    assert_prepares(shuffle_rows, scale)
    assert_prepares(unshuffle_rows, scale)
    assert_prepares(shuffle_rows, torch.rand(2, 64))
    out = assert_prepares(to_trtllm_scales, scale)
    assert_prepares(lambda tiles: from_trtllm_scales(tiles, dtype), out)


@pytest.mark.parametrize("needs", [TRTLLM_MXFP4, TRTLLM_NVFP4], ids=["mxfp4", "nvfp4"])
@pytest.mark.parametrize("gated", [True, False])
def test_padded_sizes_are_whole_tiles(needs, gated: bool) -> None:  # type: ignore[no-untyped-def]
    intermediate = needs.multiple(gated)
    block = 16 if needs is TRTLLM_NVFP4 else 32
    for rows, columns in ((intermediate * (1 + gated), needs.hidden), (needs.hidden, intermediate)):
        assert rows % 128 == 0
        assert columns // block % 4 == 0
