"""128x4 tiles of block scales against the byte offsets they promise, and the view with strides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_bits import assert_prepares, random_bits, same_bits

from fp4_inductor.layouts.scale_128x4 import from_mma_scale_view, from_scale_tiles, mma_scale_view, to_scale_tiles

SCALE_DTYPES = [torch.uint8, torch.float8_e4m3fn]


@settings(max_examples=30)
@given(rows=st.integers(1, 300), scales=st.integers(1, 13), dtype=st.sampled_from(SCALE_DTYPES))
def test_bytes_stand_where_the_formula_says(rows: int, scales: int, dtype: torch.dtype) -> None:
    scale = random_bits((2, rows, scales), dtype)
    tiles = to_scale_tiles(scale)
    padded = -(-rows // 128) * 128, -(-scales // 4) * 4
    assert tiles.shape == (2, *padded)
    for expert, flat in zip(scale.view(torch.uint8), tiles.view(torch.uint8).flatten(1), strict=True):
        expected = [0] * (padded[0] * padded[1])
        for row, values in enumerate(expert.tolist()):
            for s, value in enumerate(values):
                tile = row // 128 * (padded[1] // 4) + s // 4
                expected[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + s % 4] = value
        assert flat.tolist() == expected
    assert same_bits(from_scale_tiles(tiles, rows, scales), scale)


@settings(max_examples=30)
@given(row_tiles=st.integers(1, 3), column_tiles=st.integers(1, 3), num_experts=st.integers(1, 3))
def test_tiles_round_trip_the_other_way(row_tiles: int, column_tiles: int, num_experts: int) -> None:
    tiles = random_bits((num_experts, 128 * row_tiles, 4 * column_tiles), torch.uint8)
    assert same_bits(to_scale_tiles(from_scale_tiles(tiles, *tiles.shape[1:])), tiles)


@pytest.mark.parametrize("dtype", SCALE_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 130, 5), (1, 128, 4), (3, 256, 8)], ids=str)
def test_tiling_traces_and_owns_its_memory(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    tiles = assert_prepares(to_scale_tiles, random_bits(shape, dtype))
    assert_prepares(lambda t: from_scale_tiles(t, shape[1], shape[2]), tiles)
    assert_prepares(from_mma_scale_view, mma_scale_view(tiles))


@settings(max_examples=30)
@given(row_tiles=st.integers(1, 3), column_tiles=st.integers(1, 3), num_experts=st.integers(1, 3))
def test_the_view_is_indexed_by_row_and_scale(row_tiles: int, column_tiles: int, num_experts: int) -> None:
    scale = random_bits((num_experts, 128 * row_tiles, 4 * column_tiles), torch.uint8)
    tiles = to_scale_tiles(scale)
    view = mma_scale_view(tiles)
    assert view.shape == (32, 4, row_tiles, 4, column_tiles, num_experts)
    assert view.stride() == (16, 4, 512 * column_tiles, 1, 512, 512 * column_tiles * row_tiles)
    assert view.data_ptr() == tiles.data_ptr()
    for row in range(0, scale.shape[1], 37):
        for s in range(scale.shape[2]):
            assert torch.equal(view[row % 32, row % 128 // 32, row // 128, s % 4, s // 4], scale[:, row, s])
    assert same_bits(from_mma_scale_view(view), tiles)
    assert same_bits(from_mma_scale_view(view.contiguous()), tiles)
