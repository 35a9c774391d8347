"""Our layouts beside flashinfer's own preparation, bit for bit, and through its references back to the layer."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import flashinfer_source
import pytest
import torch
from flashinfer_source import module, needs_flashinfer
from layout_bits import random_bits, same_bits

from fp4_inductor.formats import MXFP4, NVFP4, BlockFormat
from fp4_inductor.layouts.byte_views import view_as
from fp4_inductor.layouts.cutlass_sm90 import to_sm90_scales, to_sm90_words
from fp4_inductor.layouts.gate_up import GATE_UP, UP_GATE, join_gate_up, reorder_gate_up
from fp4_inductor.layouts.global_scales import gate_up_globals
from fp4_inductor.layouts.kernel_rows import BLOCKS_OF_64, PAIRS
from fp4_inductor.layouts.kernel_scales import bias_in_units, in_units, trtllm_scales
from fp4_inductor.layouts.scale_128x4 import from_mma_scale_view, from_scale_tiles, mma_scale_view, to_scale_tiles
from fp4_inductor.layouts.trtllm import shuffle_rows, to_trtllm_scales
from fp4_inductor.quant import dequantize, quantize

pytestmark = [needs_flashinfer, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

TILE = 128
SHAPES = [(2, 128, 16), (3, 384, 40)]


def each(function, experts: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """flashinfer prepares one expert after the other."""
    return torch.stack([function(expert) for expert in experts])


@pytest.fixture
def fp4(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """flashinfer's FP4 module, with its own PyTorch form of the swizzle in the place of the CUDA one."""
    fp4 = module("quantization.fp4_quantization")
    swizzle = module("experimental.b12x._lib.intrinsics").swizzle_block_scale
    monkeypatch.setattr(fp4, "block_scale_interleave", lambda scale: swizzle(scale).flatten())
    return fp4


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
def test_shuffled_rows(fp4: ModuleType, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows = random_bits(shape, dtype)
    assert same_bits(shuffle_rows(rows), each(lambda expert: fp4.shuffle_matrix_a(expert, TILE), rows))
    bias = random_bits(shape[:2], dtype)
    expected = each(lambda expert: fp4.shuffle_matrix_a(expert.unsqueeze(1), TILE).squeeze(1), bias)
    assert same_bits(shuffle_rows(bias), expected)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_w13_and_w2_as_flashinfer_permutes_them(shape: tuple[int, int, int], gated: bool) -> None:
    core = module("fused_moe.core")
    rows = random_bits(shape, torch.uint8)
    ours = shuffle_rows(reorder_gate_up(rows, UP_GATE, PAIRS) if gated else rows)
    indices = core._maybe_get_cached_w3_w1_permute_indices({}, rows[0], TILE, is_gated_act_gemm=gated)
    assert same_bits(ours, rows[:, indices])
    indices = core.get_w2_permute_indices_with_cache({}, rows[0], TILE)
    assert same_bits(shuffle_rows(rows), rows[:, indices])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shuffled_and_tiled_scales(fp4: ModuleType, shape: tuple[int, int, int]) -> None:
    core = module("fused_moe.core")
    scale = random_bits(shape, torch.uint8)
    for block in (16, 32):
        expected = each(lambda expert, n=block: fp4.shuffle_matrix_sf_a(expert, TILE, n), scale)
        assert same_bits(to_trtllm_scales(scale).view(torch.uint8).flatten(1), expected)
        indices = core._maybe_get_cached_w3_w1_permute_indices({}, scale[0], TILE, num_elts_per_sf=block)
        ours = to_trtllm_scales(reorder_gate_up(scale, UP_GATE, PAIRS)).view(torch.uint8).flatten(1)
        assert same_bits(ours, each(lambda expert, i=indices: fp4.block_scale_interleave(expert[i]), scale))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_w13(shape: tuple[int, int, int]) -> None:
    rows = random_bits(shape, torch.uint8)
    pairs = each(module("fused_moe.core").reorder_rows_for_gated_act_gemm, rows)
    assert same_bits(reorder_gate_up(rows, UP_GATE, PAIRS), pairs)
    blocks = module("fused_moe.prepare")._interleave_linear_and_gate(rows, group_size=64, dim=1)
    assert same_bits(reorder_gate_up(rows, UP_GATE, BLOCKS_OF_64), blocks)


@pytest.mark.parametrize("shape", [*SHAPES, (2, 130, 5), (1, 1, 1), (2, 300, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn], ids=str)
def test_scale_tiles_and_their_view(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_experts, rows, scales = shape
    scale = random_bits(shape, dtype)
    tiles = to_scale_tiles(scale)
    assert same_bits(module("experimental.b12x._lib.intrinsics").swizzle_block_scale(scale), tiles)
    cutile = module("fused_moe.prepare")._swizzle_cutile_fp4_scales(scale, scale_block_size=16)
    assert same_bits(cutile.reshape(tiles.shape), tiles)
    unswizzled = module("trace.templates.gemm")._unswizzle_batched_sf_128x4(tiles, num_experts, rows, scales)
    assert same_bits(unswizzled, scale)
    assert same_bits(from_scale_tiles(tiles, rows, scales), scale)

    cute = module("cute_dsl.utils")
    view = cute.convert_sf_to_mma_layout(tiles, rows, 16 * scales, num_groups=num_experts)
    ours = mma_scale_view(tiles)
    assert (ours.shape, ours.stride(), ours.data_ptr()) == (view.shape, view.stride(), view.data_ptr())
    back = cute.convert_sf_from_mma_layout(view, rows, 16 * scales, num_groups=num_experts)
    assert same_bits(from_mma_scale_view(ours).flatten(0, 1), back)


@pytest.mark.parametrize("shape", [(1, 64, 4), (2, 128, 8), (3, 192, 20)], ids=str)
def test_sm90_folded_scales(shape: tuple[int, int, int]) -> None:
    scale = random_bits(shape, torch.uint8)
    expected = module("fused_moe.prepare").interleave_moe_scales_for_sm90_mixed_gemm(scale, group_size=32)
    assert same_bits(to_sm90_scales(scale), expected)


@pytest.mark.parametrize("shape", [(1, 16, 32), (2, 64, 64), (3, 48, 160)], ids=str)
def test_sm90_words(shape: tuple[int, int, int], tmp_path: Path) -> None:
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    assert same_bits(to_sm90_words(codes), flashinfer_source.sm90_words(codes, tmp_path))


def random_layer(fmt: BlockFormat, num_experts: int, hidden: int, intermediate: int):  # type: ignore[no-untyped-def]
    """Packed gate, up and down weights, each with its own global scales."""
    gate, up = (torch.randn(num_experts, intermediate, hidden) * spread for spread in (0.1, 0.4))
    return [quantize(weight, fmt) for weight in (gate, up, torch.randn(num_experts, hidden, intermediate) * 0.2)]


def reference_moe(  # type: ignore[no-untyped-def]
    layer, fmt: BlockFormat, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, bias1=None, bias2=None
) -> torch.Tensor:
    """The layer in float64; biases are [E, 2I], gate first, and [E, H]."""
    gate, up, down = (dequantize(*packed, fmt, torch.float32).double() for packed in layer)
    out = torch.zeros_like(hidden, dtype=torch.float64)
    for token, x in enumerate(hidden.double()):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            g, u = gate[expert] @ x, up[expert] @ x
            if bias1 is not None:
                b_gate, b_up = bias1[expert].double().chunk(2)
                g, u = g + b_gate, u + b_up
            y = down[expert] @ (g * g.sigmoid() * u)
            out[token] += weight * (y if bias2 is None else y + bias2[expert].double())
    return out


def assert_close_by_token(found: torch.Tensor, expected: torch.Tensor) -> None:
    error = (found.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 8e-3, error


def test_trtllm_nvfp4_through_its_reference() -> None:
    """Unequal globals and both biases, prepared, then un-shuffled, un-tiled and computed by flashinfer's code."""
    num_experts, hidden_size, intermediate, tokens = 3, 256, 64, 6
    layer = random_layer(NVFP4, num_experts, hidden_size, intermediate)
    gate, up, down = layer
    codes, scale = (join_gate_up(getattr(gate, name), getattr(up, name), GATE_UP) for name in ("codes", "scale"))
    rows = join_gate_up(*(p.global_scale.expand(-1, intermediate) for p in (gate, up)), GATE_UP)
    bias1, bias2 = torch.randn(num_experts, 2 * intermediate), torch.randn(num_experts, hidden_size)
    x = quantize(torch.randn(tokens, hidden_size), NVFP4)
    assert x.global_scale is not None
    ids = torch.stack([torch.randperm(num_experts)[:2] for _ in range(tokens)])
    weights = torch.rand(tokens, 2)

    gate_global, up_global = gate_up_globals(rows, GATE_UP, num_experts)
    scales = trtllm_scales(gate_global, up_global, down.global_scale.flatten(), x.global_scale, torch.tensor(0.03))
    unit_bias = bias_in_units(bias1, GATE_UP, scales.gate_unit, scales.up_unit)
    run = module("trace.templates.moe")._fp4_moe_run_experts
    swiglu_step = int(module("fused_moe").ActivationType.SwigluStep)
    out = run(
        x.codes,
        x.scale,
        shuffle_rows(reorder_gate_up(codes, GATE_UP, PAIRS)),
        to_trtllm_scales(reorder_gate_up(scale, GATE_UP, PAIRS)),
        shuffle_rows(down.codes),
        to_trtllm_scales(down.scale),
        shuffle_rows(reorder_gate_up(unit_bias, GATE_UP, PAIRS)),
        shuffle_rows(in_units(bias2, scales.output2)),
        weights,
        ids,
        0,
        num_experts,
        activation_type=swiglu_step,
        gemm1_clamp_limit=torch.full((num_experts,), 1e30),
        output1_scale_scalar=scales.output1,
        output1_scale_gate_scalar=scales.output1_gate,
        output2_scale_scalar=scales.output2,
    )
    hidden = dequantize(*x, NVFP4, torch.float32)
    assert_close_by_token(out, reference_moe(layer, NVFP4, hidden, ids, weights, bias1, bias2))


def test_cutedsl_mxfp4_through_its_reference() -> None:
    """Tiled scales under the six-dimensional view, read by flashinfer's code; 64 rows are one block of up and gate."""
    num_experts, hidden_size, intermediate, tokens = 3, 256, 64, 6
    layer = random_layer(MXFP4, num_experts, hidden_size, intermediate)
    gate, up, down = layer
    codes, scale = (join_gate_up(getattr(gate, name), getattr(up, name), GATE_UP) for name in ("codes", "scale"))
    ids = torch.stack([torch.randperm(num_experts)[:2] for _ in range(tokens)])
    weights, ones = torch.rand(tokens, 2), torch.ones(num_experts)
    hidden = torch.randn(tokens, hidden_size).to(torch.float8_e4m3fn)
    out = module("trace.templates.moe")._cute_dsl_fused_moe_reference(
        hidden,
        torch.full((tokens, hidden_size // 32), 127, dtype=torch.uint8),
        ids,
        weights,
        reorder_gate_up(codes, GATE_UP, BLOCKS_OF_64),
        mma_scale_view(to_scale_tiles(reorder_gate_up(scale, GATE_UP, BLOCKS_OF_64))),
        ones,
        None,
        down.codes,
        mma_scale_view(to_scale_tiles(down.scale)),
        ones,
        num_experts,
        2,
        quant_mode="w4a8",
    )
    assert_close_by_token(out, reference_moe(layer, MXFP4, hidden.float(), ids, weights))


def test_views_are_what_signatures_ask_for() -> None:
    codes = random_bits((2, 128, 64), torch.uint8)
    assert same_bits(view_as(codes, torch.int64), codes.view(torch.int64))
    tiles = to_scale_tiles(random_bits((2, 128, 4), torch.uint8))
    assert same_bits(view_as(tiles, torch.int32), tiles.view(torch.int32))
