"""Quantisers against their documented rules, evaluated in float64."""

from __future__ import annotations

import math

import pytest
import torch

from fp4_inductor.errors import QuantizationError, UnknownNameError
from fp4_inductor.formats import E2M1_VALUES, FORMATS, MXFP4, BlockFormat
from fp4_inductor.quant import dequantize, e2m1, quantize, quantize_mxfp4, quantize_nvfp4

RULES = ("even", "floor", "rceil")


def nearest_even_code(x: float) -> int:
    """By definition: the code nearest to x, of two equally near ones the even."""
    magnitude = min(abs(x), 6.0)
    code = min(range(8), key=lambda c: (abs(E2M1_VALUES[c] - magnitude), c % 2))
    return code | (8 if math.copysign(1, x) < 0 else 0)


def mxfp4_exponent(amax: float, rule: str) -> int:
    mantissa, exponent = math.frexp(amax)
    mantissa, exponent = 2 * mantissa, exponent - 1
    bump = {"even": mantissa >= 1.75, "floor": False, "rceil": mantissa > 1.5}[rule]
    return exponent - 2 + bump


def f32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float64).float().double().item()


def sample(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_mxfp4_follows_its_rule(rule: str, dtype: torch.dtype) -> None:
    weight = sample(2, 8, 64, dtype=dtype)
    codes, scale = quantize_mxfp4(weight, rule)
    got = e2m1.unpack(codes).unflatten(-1, (2, 32))
    for index in torch.cartesian_prod(torch.arange(2), torch.arange(8), torch.arange(2)).tolist():
        e, n, b = index
        block = weight[e, n, 32 * b : 32 * b + 32].double().tolist()
        exponent = mxfp4_exponent(max(map(abs, block)), rule)
        assert scale[e, n, b].item() == exponent + 127
        assert got[e, n, b].tolist() == [nearest_even_code(x / 2.0**exponent) for x in block]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("amax", [1.0, 1.5, 1.5 + 2**-23, 1.75 - 2**-23, 1.75, 2 - 2**-23, 6.0, 7.0, 3e-39, 3e38])
def test_mxfp4_scale_at_boundaries(rule: str, amax: float) -> None:
    weight = torch.zeros(1, 32)
    weight[0, 5] = -amax
    _, scale = quantize_mxfp4(weight, rule)
    assert scale.item() == min(max(mxfp4_exponent(weight.abs().max().item(), rule) + 127, 0), 252)


@pytest.mark.parametrize("rule", RULES)
def test_mxfp4_keeps_representable_weights(rule: str) -> None:
    """Blocks whose largest magnitude is 4 or 6 hold every e2m1 value exactly, under every rule."""
    values = torch.tensor(E2M1_VALUES).repeat(4) * torch.tensor([1.0, -1.0]).repeat_interleave(16)
    weight = torch.stack([values * 2.0**e for e in (-100, -7, 0, 90)])
    codes, scale = quantize_mxfp4(weight, rule)
    assert torch.equal(dequantize(codes, scale, None, MXFP4, torch.float32), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_nvfp4_follows_its_rule(dtype: torch.dtype) -> None:
    weight = sample(3, 4, 64, dtype=dtype)
    weight[1] *= 100
    codes, scale, global_scale = quantize_nvfp4(weight)
    got = e2m1.unpack(codes).unflatten(-1, (4, 16))
    assert global_scale.shape == (3, 1)
    for e in range(3):
        expected_global = f32(weight[e].double().abs().max().item() / 2688)
        assert global_scale[e].item() == expected_global
        for n in range(4):
            for b in range(4):
                block = weight[e, n, 16 * b : 16 * b + 16].double().tolist()
                ratio = f32(f32(max(map(abs, block)) / 6) / expected_global)
                expected_scale = torch.tensor(min(max(ratio, 2.0**-9), 448.0)).to(torch.float8_e4m3fn).double().item()
                assert scale[e, n, b].double().item() == expected_scale
                step = f32(expected_scale * expected_global)
                assert got[e, n, b].tolist() == [nearest_even_code(f32(x / step)) for x in block]


def test_nvfp4_ties_go_to_even() -> None:
    """A global and block scale of one make every midpoint a tie."""
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    weight = torch.cat([midpoints, -midpoints]).unsqueeze(0)
    codes, scale, global_scale = quantize_nvfp4(weight, torch.ones(1))
    assert scale.float().item() == 1
    assert torch.equal(global_scale, torch.ones(1))
    values = e2m1.decode(e2m1.unpack(codes))[0]
    assert values.tolist() == [0, 1, 1, 2, 2, 4, 4, 6, 0, -1, -1, -2, -2, -4, -4, -6]


def test_nvfp4_clamps_scales_before_the_cast() -> None:
    weight = torch.zeros(1, 32)
    weight[0, 0], weight[0, 16] = 1e6, 1e-6
    _, scale, _ = quantize_nvfp4(weight)
    assert scale.float().tolist() == [[448.0, 2.0**-9]]
    _, scale, _ = quantize_nvfp4(weight, torch.full((1,), 1e-3))
    assert scale.float().tolist() == [[448.0, 2.0**-9]]


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_zeros_stay_zeros(fmt: BlockFormat, dtype: torch.dtype) -> None:
    weight = sample(3, 4, 64, dtype=dtype)
    weight[0] = 0
    weight[1, 2, :32] = -0.0
    codes, scale, global_scale = quantize(weight, fmt)
    back = dequantize(codes, scale, global_scale, fmt, torch.float32)
    assert back.isfinite().all()
    assert (back[0] == 0).all()
    assert (back[1, 2, :32] == 0).all()
    assert torch.signbit(back[1, 2, :32]).all()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_tiny_and_huge_weights_stay_finite(fmt: BlockFormat) -> None:
    for magnitude in (1e-45, 1e-38, 3e38):
        weight = torch.full((1, 2, 32), magnitude)
        packed = quantize(weight, fmt)
        back = dequantize(*packed, fmt, torch.float32)
        assert not back.isnan().any()
        assert (back.double() - magnitude).abs().max() <= max(0.25 * magnitude, 2.0**-128)


@pytest.mark.parametrize(("fmt", "expected"), [("mxfp4", 0.1125), ("nvfp4", 0.0953)])
def test_error_on_gaussian_weights(fmt: str, expected: float) -> None:
    weight = sample(4, 64, 512)
    back = dequantize(*quantize(weight, FORMATS[fmt]), FORMATS[fmt], torch.float32)
    assert ((back - weight).norm() / weight.norm()).item() == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@pytest.mark.parametrize("shape", [(64,), (4, 64), (2, 3, 4, 64)], ids=str)
def test_leading_dims_do_not_matter(fmt: BlockFormat, shape: tuple[int, ...]) -> None:
    weight = sample(*shape) if fmt == MXFP4 or len(shape) > 1 else sample(1, *shape)
    codes, scale, global_scale = quantize(weight, fmt)
    assert codes.shape == (*weight.shape[:-1], 32)
    assert scale.shape == (*weight.shape[:-1], 64 // fmt.block_size)
    back = dequantize(codes, scale, global_scale, fmt, torch.float32)
    rows = weight.reshape(-1, 64)
    if fmt == MXFP4:
        assert torch.equal(back.reshape(-1, 64), dequantize(*quantize(rows, fmt), fmt, torch.float32))
    assert back.shape == weight.shape


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_a_transposed_input_changes_nothing(fmt: BlockFormat) -> None:
    weight = sample(2, 64, 8).transpose(1, 2)
    for ours, expected in zip(quantize(weight, fmt), quantize(weight.contiguous(), fmt), strict=True):
        if expected is None:
            assert ours is None
        else:
            assert ours.is_contiguous()
            assert torch.equal(ours.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (torch.ones(2, 40), "multiple of"),
        (torch.ones(2, 0), "multiple of"),
        (torch.full((2, 32), float("nan")), "64 that are NaN or infinite"),
        (torch.tensor([[float("inf")] + [1.0] * 31]), "1 that are NaN or infinite"),
        (torch.ones(2, 32, dtype=torch.int8), "floating-point"),
    ],
)
def test_refusals(fmt: BlockFormat, weight: torch.Tensor, said: str) -> None:
    with pytest.raises(QuantizationError, match=said):
        quantize(weight, fmt)


def test_an_unknown_scale_rule_shows_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'floor'"):
        quantize_mxfp4(torch.ones(1, 32), "flor")  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gpu_gives_the_same_bits(fmt: BlockFormat, dtype: torch.dtype) -> None:
    weight = sample(4, 64, 512, dtype=dtype)
    weight[0] = 0
    for ours, expected in zip(quantize(weight.cuda(), fmt), quantize(weight, fmt), strict=True):
        if expected is not None:
            assert torch.equal(ours.cpu().view(torch.uint8), expected.view(torch.uint8))
