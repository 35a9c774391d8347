"""sm_90's mixed-input words and folded scales against loops over bytes and bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_bits import assert_prepares, random_bits, same_bits

from fp4_inductor.layouts.cutlass_sm90 import from_sm90_scales, from_sm90_words, to_sm90_scales, to_sm90_words

# Bit of a 16-bit half from (code of four, bit of it), highest first.
BITS = [(0, 3), (3, 3), (3, 0), (1, 3), (3, 2), (3, 1), (2, 3)]
BITS += [(code, bit) for code in (0, 1, 2) for bit in (2, 1, 0)]


def half(codes: list[int]) -> int:
    bits = [codes[code] >> bit & 1 for code, bit in BITS]
    return int("".join(map(str, bits)), 2)


def words_by_loops(codes: list[list[int]]) -> list[list[int]]:
    """Thread by thread: of rows r and r + 8, bytes c and c + 4, into the word at row r + 8 * odd."""
    rows, columns = len(codes), len(codes[0])
    out = [[-1] * columns for _ in range(rows)]
    for row in (row for row in range(rows) if row % 16 < 8):
        for start in range(0, columns, 32):
            for thread in range(16):
                octet, lane = thread // 4, thread % 4
                column = start + octet * 8 + lane
                four = [codes[row + r][column + c] for c in (0, 4) for r in (0, 8)]
                low, high = half([byte & 15 for byte in four]), half([byte >> 4 for byte in four])
                target = start + octet // 2 * 16 + lane * 4
                out[row + octet % 2 * 8][target : target + 4] = [low & 255, low >> 8, high & 255, high >> 8]
    return out


def test_a_half_has_every_bit_of_four_codes() -> None:
    assert len(set(BITS)) == 16


@settings(max_examples=25)
@given(row_blocks=st.integers(1, 4), column_blocks=st.integers(1, 4), num_experts=st.integers(1, 3))
def test_words_follow_the_formula_and_invert(row_blocks: int, column_blocks: int, num_experts: int) -> None:
    codes = torch.randint(0, 256, (num_experts, 16 * row_blocks, 32 * column_blocks), dtype=torch.uint8)
    words = to_sm90_words(codes)
    assert words.tolist() == [words_by_loops(expert) for expert in codes.tolist()]
    assert same_bits(from_sm90_words(words), codes)
    assert same_bits(to_sm90_words(from_sm90_words(codes)), codes)


@settings(max_examples=25)
@given(row_tiles=st.integers(1, 3), column_tiles=st.integers(1, 3), num_experts=st.integers(1, 3))
def test_scales_follow_the_formula_and_invert(row_tiles: int, column_tiles: int, num_experts: int) -> None:
    scale = random_bits((num_experts, 64 * row_tiles, 4 * column_tiles), torch.uint8)
    folded = to_sm90_scales(scale)
    assert folded.shape == (num_experts, row_tiles, column_tiles, 16, 16)
    for row in range(scale.shape[1]):
        for s in range(scale.shape[2]):
            piece = folded[:, row // 64, s // 4]
            assert torch.equal(piece[:, row % 16, row % 64 // 16 * 4 + s % 4], scale[:, row, s])
    assert same_bits(from_sm90_scales(folded), scale)
    assert same_bits(to_sm90_scales(from_sm90_scales(folded)), folded)


@pytest.mark.parametrize("shape", [(1, 64, 64), (2, 128, 128)], ids=str)
def test_both_trace_and_own_their_memory(shape: tuple[int, int, int]) -> None:
    words = assert_prepares(to_sm90_words, random_bits(shape, torch.uint8))
    assert_prepares(from_sm90_words, words)
    folded = assert_prepares(to_sm90_scales, random_bits((shape[0], shape[1], shape[2] // 16), torch.uint8))
    assert_prepares(from_sm90_scales, folded)
