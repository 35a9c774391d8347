"""Stands in for FlashInfer's CuTe-DSL functions: checks every argument, then computes what the kernel does with it.

As in ``flashinfer_stand_in``; beside shapes and dtypes, block scales must lie under the strides that kernels read by.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from flashinfer_stand_in import (
    FP4_QUANTIZE,
    INSTALLED,
    MXFP8_QUANTIZE,
    ActivationType,
    _activated,
    _routes,
    _ungated,
    by_expert,
    fp4_quantize,
    is_like,
    mxfp8_quantize,
    real,
    values,
)

from fp4_inductor.layouts.gate_up import UP_GATE, RowOrder, reorder_gate_up
from fp4_inductor.layouts.kernel_rows import BLOCKS_OF_64
from fp4_inductor.layouts.scale_128x4 import from_mma_scale_view, from_scale_tiles, mma_scale_view

CUTEDSL, B12X = "fused_moe.cute_dsl_fused_moe", "fused_moe.b12x_fused_moe"
MASKED_QUANTIZE, MASKED_GEMM = "scaled_fp4_grouped_quantize", "gemm.grouped_gemm_nt_masked"

given_to_b12x: list[list[weakref.ref[torch.Tensor]]] = []
"""The weights of each call for bfloat16 activations: what FlashInfer packs it keeps as long as these objects live."""


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put the functions here in FlashInfer's place; returns the names of those called, as they are."""
    signatures = {name: inspect.signature(real(name)) for name in _FUNCTIONS} if INSTALLED else {}
    calls: list[str] = []
    given_to_b12x.clear()

    def recorded(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if signatures:
                signatures[name].bind(*args, **kwargs)
            return _FUNCTIONS[name](*args, **kwargs)

        return call

    names = ("flashinfer", "flashinfer.fused_moe", "flashinfer.gemm", "flashinfer.tllm_enums")
    modules = {name: ModuleType(name) for name in names}
    for name in _FUNCTIONS:
        path, _, function = f"flashinfer.{name}".rpartition(".")
        setattr(modules[path], function, recorded(name))
    modules["flashinfer.tllm_enums"].ActivationType = ActivationType  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def weights_under_view(codes: torch.Tensor, view: torch.Tensor, block: int) -> torch.Tensor:
    """float64 [E, N, K] of codes and block scales under the six-dimensional view."""
    experts, rows, columns = *codes.shape[:2], codes.shape[2] * 2
    is_like(codes, torch.uint8, experts, rows, columns // 2)
    assert codes.is_contiguous()
    row_tiles, column_tiles = -(-rows // 128), -(-columns // (4 * block))
    encoding = torch.uint8 if block == 32 else torch.float8_e4m3fn
    is_like(view, encoding, 32, 4, row_tiles, 4, column_tiles, experts)
    assert view.stride() == (16, 4, column_tiles * 512, 1, 512, row_tiles * column_tiles * 512)
    tiles = from_mma_scale_view(view)
    return values(codes, from_scale_tiles(tiles, rows, columns // block))


def gate_and_up_last(rows: torch.Tensor, order: RowOrder, gated: bool) -> torch.Tensor:
    """Rows of w13 as halves, up first, where gated."""
    return reorder_gate_up(rows, order, UP_GATE) if gated else rows


def check_routes(ids: torch.Tensor, weights: torch.Tensor, experts: int, top_k: int) -> None:
    is_like(ids, torch.int32, ids.shape[0], top_k)
    is_like(weights, torch.float32, ids.shape[0], top_k)


def experts_in_float64(
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    alpha1: torch.Tensor,
    alpha2: torch.Tensor,
    quantise2: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    name: str,
    knobs: tuple[float, float, float | None],
) -> torch.Tensor:
    """bfloat16 [T, H] of w1's halves, up first; factors [E] multiply accumulators and products of gate and up."""
    experts, hidden_size, inner = w2.shape
    out = torch.zeros(ids.shape[0], hidden_size, dtype=torch.float64)
    for token, slot, e in _routes(ids, experts):
        y = w1[e] @ x[token] * alpha1[e].double()
        numbers = [None if knob is None else torch.tensor(knob, dtype=torch.float64) for knob in knobs]
        h = _ungated(name, y) if name == "Relu2" else _activated(name, y[:inner], y[inner:], *numbers)
        z = w2[e] @ (h * quantise2[e].double()) * alpha2[e].double()
        out[token] += weights[token, slot].double() * z
    return out.to(torch.bfloat16)


def cute_dsl_fused_moe(
    *,
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor,
    w1_weight: torch.Tensor,
    w1_weight_sf: torch.Tensor,
    w1_alpha: torch.Tensor,
    fc2_input_scale: torch.Tensor | None,
    w2_weight: torch.Tensor,
    w2_weight_sf: torch.Tensor,
    w2_alpha: torch.Tensor,
    num_experts: int,
    top_k: int,
    output_dtype: torch.dtype,
    use_fused_finalize: bool,
    activation_type: int,
    swiglu_alpha: float,
    swiglu_beta: float,
    swiglu_limit: float,
    quant_mode: str,
) -> torch.Tensor:
    name, tokens, hidden_size = ActivationType(activation_type).name, x.shape[0], w2_weight.shape[1]
    assert name in ("Swiglu", "GegluTanh", "Relu2")
    assert output_dtype == torch.bfloat16
    assert use_fused_finalize == (quant_mode == "w4a8")
    gated, block = name != "Relu2", 32 if quant_mode == "w4a8" else 16
    inner = w2_weight.shape[2] * 2
    assert w1_weight.shape == (num_experts, inner * (1 + gated), hidden_size // 2)
    assert w1_weight.shape[1] % 128 == 0, "no partial tile"
    assert hidden_size % (256 if block == 16 else 128) == 0
    assert inner % (64 if block == 16 and gated else 128) == 0
    assert all(knob == float(knob) for knob in (swiglu_alpha, swiglu_beta, swiglu_limit))
    assert 0 < swiglu_limit <= torch.finfo(torch.float32).max
    check_routes(token_selected_experts, token_final_scales, num_experts, top_k)
    by_expert(num_experts, w1_alpha, w2_alpha)
    tensors = (x, x_sf, token_selected_experts, token_final_scales, w1_alpha, fc2_input_scale, w2_alpha)
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    assert all(t is None or t.data_ptr() % 16 == 0 for t in (w1_alpha, w2_alpha, fc2_input_scale))
    quantise2 = torch.ones(1)
    if quant_mode == "w4a4":
        is_like(x, torch.uint8, tokens, hidden_size // 2)
        is_like(x_sf, torch.float8_e4m3fn, tokens, hidden_size // 16)
        is_like(fc2_input_scale, torch.float32, 1)
        numbers, quantise2 = values(x, x_sf), fc2_input_scale
    else:
        assert fc2_input_scale is None
    if quant_mode == "w4a8":
        is_like(x, torch.float8_e4m3fn, tokens, hidden_size)
        is_like(x_sf, torch.uint8, tokens, hidden_size // 32)
        numbers = x.double() * torch.exp2(x_sf.double() - 127).repeat_interleave(32, dim=-1)
    if quant_mode == "w4a16":
        assert x_sf is None
        is_like(x, torch.bfloat16, tokens, hidden_size)
        numbers = x.double()
    w1 = gate_and_up_last(weights_under_view(w1_weight, w1_weight_sf, block), BLOCKS_OF_64, gated)
    return experts_in_float64(
        numbers,
        w1,
        weights_under_view(w2_weight, w2_weight_sf, block),
        w1_alpha,
        w2_alpha,
        quantise2.expand(num_experts),
        token_selected_experts,
        token_final_scales,
        name,
        (swiglu_alpha, swiglu_beta, swiglu_limit),
    )


def b12x_fused_moe(
    *,
    x: torch.Tensor,
    w1_weight: torch.Tensor,
    w1_weight_sf: torch.Tensor,
    w2_weight: torch.Tensor,
    w2_weight_sf: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor,
    num_experts: int,
    top_k: int,
    w1_alpha: torch.Tensor,
    w2_alpha: torch.Tensor,
    output: torch.Tensor,
    output_dtype: torch.dtype,
    activation: str,
    quant_mode: str,
    fc2_input_scale: torch.Tensor | None = None,
    input_global_scale: torch.Tensor | None = None,
    swiglu_alpha: float = 1.702,
    swiglu_beta: float = 1.0,
    swiglu_limit: float | None = None,
) -> torch.Tensor:
    tokens, hidden_size, inner = x.shape[0], w2_weight.shape[1], w2_weight.shape[2] * 2
    kinds = {"silu": "Swiglu", "relu2": "Relu2"}
    if quant_mode != "w4a16":
        kinds |= {"gelu_tanh": "GegluTanh", "swigluoai_uninterleave": "Swiglu"}
    name = kinds[activation]
    knobs: tuple[float, float, float | None] = (1.0, 0.0, None)
    if activation == "swigluoai_uninterleave":
        assert swiglu_limit is not None, "it would be 7"
        knobs = (swiglu_alpha, swiglu_beta, swiglu_limit)
    assert activation == "swigluoai_uninterleave" or swiglu_limit is None
    gated, block = name != "Relu2", 32 if quant_mode == "mxfp4" else 16
    assert hidden_size % 128 == 0
    assert inner % (128 if quant_mode == "w4a16" else 256) == 0, "it would pad a copy of all weights"
    assert w1_weight.shape == (num_experts, inner * (1 + gated), hidden_size // 2)
    is_like(x, torch.bfloat16, tokens, hidden_size)
    is_like(output, output_dtype, tokens, hidden_size)
    check_routes(token_selected_experts, token_final_scales, num_experts, top_k)
    by_expert(num_experts, w1_alpha, w2_alpha)
    tensors = (x, token_selected_experts, token_final_scales, w1_alpha, w2_alpha, fc2_input_scale, input_global_scale)
    assert all(tensor is None or tensor.is_contiguous() for tensor in (*tensors, output))
    assert all(t is None or t.data_ptr() % 16 == 0 for t in (w1_alpha, w2_alpha, fc2_input_scale))
    numbers, alpha1, quantise2 = x.double(), w1_alpha.double(), torch.ones(num_experts, dtype=torch.float64)
    if quant_mode == "nvfp4":
        is_like(input_global_scale, torch.float32, 1)
        is_like(fc2_input_scale, torch.float32, num_experts)
        numbers, alpha1 = numbers / input_global_scale.double(), alpha1 * input_global_scale.double()
        quantise2 = 1 / fc2_input_scale.double()
    else:
        assert input_global_scale is None
        assert fc2_input_scale is None
    if quant_mode == "w4a16":
        objects = (w1_weight, w1_weight_sf, w1_alpha, w2_weight, w2_weight_sf, w2_alpha)
        given_to_b12x.append([weakref.ref(tensor) for tensor in objects])
        w1, w2 = (packed_weights(*pair) for pair in ((w1_weight, w1_weight_sf), (w2_weight, w2_weight_sf)))
    else:
        w1, w2 = (weights_under_view(*pair, block) for pair in ((w1_weight, w1_weight_sf), (w2_weight, w2_weight_sf)))
    routing = (token_selected_experts, token_final_scales)
    return output.copy_(experts_in_float64(numbers, w1, w2, alpha1, w2_alpha, quantise2, *routing, name, knobs))


def packed_weights(codes: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
    """float64 [E, N, K] as packing makes of codes and tiles of block scales: those that are small become zero."""
    experts, rows, columns = *codes.shape[:2], codes.shape[2] * 2
    is_like(codes, torch.uint8, experts, rows, columns // 2)
    is_like(tiles, torch.float8_e4m3fn, experts, -(-rows // 128) * 128, -(-columns // 64) * 4)
    assert codes.is_contiguous()
    assert tiles.is_contiguous()
    scale = from_scale_tiles(tiles, rows, columns // 16).double()
    factor = 2.0 ** float((448 / scale.amax()).log2().floor())
    return values(codes, torch.where(scale * factor < 2.0**-6, 0.0, scale))


class Quantised(torch.Tensor):
    """Codes uint8 [M, K/2, E], strided as they come, with the numbers that they stand for, float64 [E, M, K]."""

    numbers: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, numbers: torch.Tensor) -> Quantised:
        made = codes.as_subclass(cls)
        made.numbers = numbers
        return made


def scaled_fp4_grouped_quantize(
    a: torch.Tensor, mask: torch.Tensor, a_global_sf: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Without rounding: the codes carry the numbers. Rows that are not there are read by nobody."""
    experts, rows, columns = a.shape
    is_like(a, torch.bfloat16, experts, rows, columns)
    is_like(mask, torch.int32, experts)
    is_like(a_global_sf, torch.float32, experts)
    assert all(tensor.is_contiguous() for tensor in (a, mask, a_global_sf))
    there = torch.arange(rows) < mask.unsqueeze(1)
    numbers = torch.where(there.unsqueeze(2), a.double() * a_global_sf.double()[:, None, None], torch.nan)
    assert numbers[there].isfinite().all()
    codes = Quantised(torch.empty(experts, rows, columns // 2, dtype=torch.uint8).permute(1, 2, 0), numbers)
    tiles = torch.empty(experts, -(-rows // 128) * 128, -(-columns // 64) * 4, dtype=torch.float8_e4m3fn)
    return codes, mma_scale_view(tiles)


def grouped_gemm_nt_masked(
    lhs: tuple[Quantised, torch.Tensor],
    rhs: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    masked_m: torch.Tensor,
    *,
    ab_dtype: str,
    sf_dtype: str,
    c_dtype: str,
    sf_vec_size: int,
) -> torch.Tensor:
    assert (ab_dtype, sf_dtype, c_dtype, sf_vec_size) == ("float4_e2m1fn", "float8_e4m3fn", "bfloat16", 16)
    weights = weights_under_view(rhs[0].permute(2, 0, 1), rhs[1], 16)
    experts, columns, depth = weights.shape
    rows = lhs[0].shape[0]
    assert (rows % 128, columns % 128, depth % 32) == (0, 0, 0)
    is_like(lhs[0], torch.uint8, rows, depth // 2, experts)
    is_like(out, torch.bfloat16, rows, columns, experts)
    is_like(masked_m, torch.int32, experts)
    assert out.permute(2, 0, 1).is_contiguous(), "another layout mixes experts up"
    out.fill_(torch.nan)
    for expert, count in enumerate(masked_m.tolist()):
        out[:count, :, expert] = (lhs[0].numbers[expert, :count] @ weights[expert].T).to(out.dtype)
    return out


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    MASKED_QUANTIZE: scaled_fp4_grouped_quantize,
    MASKED_GEMM: grouped_gemm_nt_masked,
    CUTEDSL: cute_dsl_fused_moe,
    B12X: b12x_fused_moe,
    FP4_QUANTIZE: fp4_quantize,
    MXFP8_QUANTIZE: mxfp8_quantize,
}
