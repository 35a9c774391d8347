"""The floor against numbers worked out by hand, and the shapes that it is asked for."""

from __future__ import annotations

import random

import pytest

from fp4_inductor.bench.floor import H200, Rates, floor_us
from fp4_inductor.bench.shapes import SHAPES, parse_shape
from fp4_inductor.errors import InvalidOptionError, UnknownNameError
from fp4_inductor.formats import MXFP4, NVFP4
from fp4_inductor.spec import GateUpOrder, Scoring


@pytest.mark.parametrize(
    ("shape", "tokens", "expected"),
    [
        # 4 of 32 experts, 3 * 2880 * 2880 weights each at 4.25 bits, over 4.27 TB/s
        ("gpt-oss-20b", 1, 4 * 3 * 2880 * 2880 * 4.25 / 8 / 4.27e6),
        # two tokens miss an expert both with probability (7/8)**2
        ("gpt-oss-20b", 2, 32 * (1 - 0.875**2) * 3 * 2880 * 2880 * 4.25 / 8 / 4.27e6),
        # all 8 experts, and not yet bound by operations
        ("mixtral-8x7b", 64, 8 * (1 - 0.75**64) * 3 * 4096 * 14336 * 4.25 / 8 / 4.27e6),
        # operations: 2 a weight and slot
        ("qwen3-30b-a3b", 16384, 2 * 16384 * 8 * 3 * 2048 * 768 / 730e6),
        ("deepseek-v3", 4096, 2 * 4096 * 8 * 3 * 7168 * 2048 / 730e6),
    ],
)
def test_floor_of_real_shapes(shape: str, tokens: int, expected: float) -> None:
    assert floor_us(SHAPES[shape].spec(MXFP4), tokens, H200) == pytest.approx(expected, rel=1e-9)


def test_nvfp4_weights_are_bigger_by_their_scales() -> None:
    shape = SHAPES["gpt-oss-120b"]
    ours, other = (floor_us(shape.spec(fmt), 4, H200) for fmt in (NVFP4, MXFP4))
    assert ours is not None
    assert other is not None
    assert ours / other == pytest.approx(4.5 / 4.25)


def test_expected_distinct_experts_are_those_that_are_drawn() -> None:
    shape, rng = parse_shape("16x3x64x64"), random.Random(0)
    drawn = [len({e for _ in range(5) for e in rng.sample(range(16), 3)}) for _ in range(4000)]
    spec = shape.spec(MXFP4)
    per_expert = spec.packed_bytes / 16 / 1e6
    assert floor_us(spec, 5, Rates(bandwidth=1.0)) == pytest.approx(per_expert * sum(drawn) / len(drawn), rel=0.01)


def test_one_rate_or_none() -> None:
    spec = parse_shape("4x2x64x64").spec(MXFP4)
    assert floor_us(spec, 8, Rates()) is None
    assert floor_us(spec, 8, Rates(tflops=1e-6)) == 2 * 8 * 2 * 3 * 64 * 64
    assert floor_us(spec, 8, Rates(bandwidth=1e-6)) == pytest.approx(4 * 3 * 64 * 64 * 4.25 / 8 * (1 - 0.5**8))


def test_shapes_by_name_and_by_numbers() -> None:
    assert parse_shape("mixtral-8x7b").sizes == (8, 2, 4096, 14336)
    assert parse_shape("32x4x2880x1440").sizes == (32, 4, 2880, 1440)
    spec = parse_shape("gpt-oss-20b").spec(MXFP4)
    assert (spec.activation.alpha, spec.activation.beta, spec.activation.limit) == (1.702, 1.0, 7.0)
    assert spec.has_w13_bias
    assert spec.has_w2_bias
    assert spec.w13_order is GateUpOrder.INTERLEAVED
    plain = parse_shape("32x4x2880x2880").spec(MXFP4)
    assert plain.activation.limit is None
    assert not plain.has_w13_bias
    assert plain.router.scoring is Scoring.SOFTMAX  # type: ignore[union-attr]
    assert plain.router.topk_before_scoring  # type: ignore[union-attr]


@pytest.mark.parametrize("text", ["gpt-oss", "8x2x64", "8x2x64x64x1", "axbxcxd", "-8x2x64x64", ""])
def test_unknown_shapes(text: str) -> None:
    with pytest.raises(UnknownNameError, match=r"reading --shapes: needed one of .*ExkxHxI"):
        parse_shape(text)


@pytest.mark.parametrize("text", ["4x8x64x64", "0x0x64x64", "8x2x0x64"])
def test_impossible_shapes(text: str) -> None:
    with pytest.raises(InvalidOptionError, match="1 <= k <= E"):
        parse_shape(text)
