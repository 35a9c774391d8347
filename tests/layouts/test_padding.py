"""Padding, cropping and byte views: zeros behind, the given bits before, nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_bits import assert_prepares, random_bits, same_bits

from fp4_inductor.formats import MXFP4, NVFP4, BlockFormat
from fp4_inductor.layouts.byte_views import view_as
from fp4_inductor.layouts.gate_up import GATE_UP, INTERLEAVED, UP_GATE, RowOrder, split_gate_up
from fp4_inductor.layouts.padding import fit_columns, fit_gate_up, fit_rows, round_up
from fp4_inductor.quant import dequantize

DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32]
SIZES = st.integers(1, 9)


def test_round_up() -> None:
    assert [round_up(n, 4) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]


@settings(max_examples=60)
@given(rows=SIZES, columns=SIZES, more_rows=st.integers(0, 5), more=st.integers(0, 5), dtype=st.sampled_from(DTYPES))
def test_zeros_behind_and_back(rows: int, columns: int, more_rows: int, more: int, dtype: torch.dtype) -> None:
    given_bits = random_bits((2, rows, columns), dtype)
    padded = fit_columns(fit_rows(given_bits, rows + more_rows), columns + more)
    expected = torch.zeros(2, rows + more_rows, columns + more).to(dtype)
    for row in range(rows):
        expected[:, row, :columns] = given_bits[:, row]
    assert same_bits(padded, expected)
    assert same_bits(fit_rows(fit_columns(padded, columns), rows), given_bits)
    bias = random_bits((2, rows), dtype)
    assert same_bits(fit_rows(fit_rows(bias, rows + more_rows), rows), bias)


@pytest.mark.parametrize("size", [3, 5, 9])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padding_traces_and_owns_its_memory(size: int, dtype: torch.dtype) -> None:
    tensor = random_bits((2, 5, 5), dtype)
    assert_prepares(lambda rows: fit_rows(rows, size), tensor)
    assert_prepares(lambda rows: fit_columns(rows, size), tensor)


@settings(max_examples=60)
@given(
    intermediate=SIZES.map(lambda n: 2 * n),
    more=st.integers(0, 4).map(lambda n: 2 * n),
    order=st.sampled_from([GATE_UP, UP_GATE, INTERLEAVED, RowOrder(2, up_first=True)]),
)
def test_gate_and_up_are_padded_each(intermediate: int, more: int, order: RowOrder) -> None:
    rows = random_bits((2, 2 * intermediate, 3), torch.uint8)
    padded = fit_gate_up(rows, order, intermediate + more)
    for half, given_half in zip(split_gate_up(padded, order), split_gate_up(rows, order), strict=True):
        assert same_bits(half[:, :intermediate], given_half)
        assert not half[:, intermediate:].any()
    assert same_bits(fit_gate_up(padded, order, intermediate), rows)


@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)
def test_padded_weights_are_zero(fmt: BlockFormat) -> None:
    codes = torch.randint(0, 256, (2, 6, fmt.block_size), dtype=torch.uint8)
    scale = random_bits((2, 6, 2), fmt.scale_dtype)
    global_scale = torch.rand(2, 1) if fmt.has_global_scale else None
    weight = dequantize(codes, scale, global_scale, fmt, torch.float32)
    padded = dequantize(
        fit_columns(fit_rows(codes, 8), 2 * fmt.block_size),
        fit_columns(fit_rows(scale, 8), 4),
        global_scale,
        fmt,
        torch.float32,
    )
    assert torch.equal(padded[:, :6, : weight.shape[2]], weight)
    assert not padded[:, 6:].any()
    assert not padded[:, :, weight.shape[2] :].any()


@settings(max_examples=40)
@given(
    words=st.integers(1, 4),
    rows=SIZES,
    source=st.sampled_from([torch.uint8, torch.float8_e4m3fn]),
    target=st.sampled_from([torch.uint8, torch.float8_e4m3fn, torch.int32, torch.int64]),
)
def test_views_hold_the_same_bytes(words: int, rows: int, source: torch.dtype, target: torch.dtype) -> None:
    tensor = random_bits((2, rows, 8 * words), source)
    out = view_as(tensor, target)
    assert out.shape == (2, rows, 8 * words // target.itemsize)
    value = tensor.view(torch.uint8)[1, rows - 1, : target.itemsize].tolist()
    assert out.view(torch.uint8)[1, rows - 1, : target.itemsize].tolist() == value
    if not target.is_floating_point:
        assert out[1, rows - 1, 0].item() == int.from_bytes(bytes(value), "little")
    assert same_bits(view_as(out, source), tensor)


@pytest.mark.parametrize("target", [torch.uint8, torch.float8_e4m3fn, torch.int32, torch.int64], ids=str)
def test_views_trace_and_own_their_memory(target: torch.dtype) -> None:
    assert_prepares(lambda tensor: view_as(tensor, target), random_bits((2, 3, 16), torch.uint8))
