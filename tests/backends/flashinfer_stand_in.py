"""Stands in for FlashInfer's functions: checks every argument, then computes what the kernel does with it.

Weights are read back through the inverses of the layouts, and the arithmetic is that of the kernels, scalars and all,
in float64; activations are quantised only where the function's input is. Where FlashInfer is installed, each call must
bind to the signature of the function it stands for.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from enum import IntEnum
from types import ModuleType
from typing import Any

import pytest
import torch

from fp4_inductor.backends.flashinfer_common import LIBRARY
from fp4_inductor.device import DeviceInfo
from fp4_inductor.layouts.cutlass_sm90 import from_sm90_scales, from_sm90_words
from fp4_inductor.layouts.scale_128x4 import from_scale_tiles, to_scale_tiles
from fp4_inductor.layouts.trtllm import from_trtllm_scales, unshuffle_rows
from fp4_inductor.quant import e2m1
from fp4_inductor.quant.nvfp4 import quantize_nvfp4

ActivationType = IntEnum(
    "ActivationType",
    {"Gelu": 0, "Relu": 1, "Silu": 2, "Swiglu": 3, "Geglu": 4, "Relu2": 6, "SwigluStep": 7, "GegluTanh": 8},
)
_METHODS = "Default Renormalize DeepSeekV3 Llama4 RenormalizeNaive TopK SigmoidRenorm MiniMax2 Sigmoid TopKSigmoid"
RoutingMethodType = IntEnum("RoutingMethodType", _METHODS, start=0)
SfLayout = IntEnum("SfLayout", {"layout_128x4": 0, "layout_8x4": 1, "layout_linear": 2})
INSTALLED = DeviceInfo.parse("cpu").library(LIBRARY) is not None
CUTLASS, TRTLLM = "fused_moe.cutlass_fused_moe", "fused_moe.trtllm_fp4_block_scale_routed_moe"
TRTLLM_FROM_LOGITS = "fused_moe.trtllm_fp4_block_scale_moe"
FP4_QUANTIZE, MXFP8_QUANTIZE = "fp4_quantize", "mxfp8_quantize"


def real(name: str) -> Any:
    """A function or class of FlashInfer's, as in ``fused_moe.cutlass_fused_moe``; skips where it is not installed."""
    if not INSTALLED:
        pytest.skip(f"{LIBRARY} is not installed: pip install {LIBRARY}")
    path, _, attribute = f"flashinfer.{name}".rpartition(".")
    return getattr(importlib.import_module(path), attribute)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put the functions here in FlashInfer's place; returns the names of those called, as they are."""
    signatures = {name: inspect.signature(real(name)) for name in _FUNCTIONS} if INSTALLED else {}
    calls: list[str] = []

    def recorded(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if signatures:
                signatures[name].bind(*args, **kwargs)
            for value in (*args, *kwargs.values()):
                for tensor in value if isinstance(value, list | tuple) else [value]:
                    assert not isinstance(tensor, torch.Tensor) or tensor.is_contiguous(), (name, tensor.shape)
            return _FUNCTIONS[name](*args, **kwargs)

        return call

    modules = {name: ModuleType(name) for name in ("flashinfer", "flashinfer.fused_moe", "flashinfer.tllm_enums")}
    for name in _FUNCTIONS:
        path, _, function = f"flashinfer.{name}".rpartition(".")
        setattr(modules[path], function, recorded(name))
    for enum in (ActivationType, RoutingMethodType, SfLayout):
        setattr(modules["flashinfer.tllm_enums"], enum.__name__, enum)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def is_like(tensor: torch.Tensor | None, dtype: torch.dtype, *shape: int) -> None:
    assert tensor is not None
    assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape)


def by_expert(num_experts: int, *values: torch.Tensor | None) -> None:
    for value in values:
        if value is not None:
            is_like(value, torch.float32, num_experts)


def values(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float64 [..., K] from codes [..., K/2] and scales [..., S] as numbers or e8m0 bits."""
    numbers = torch.exp2(scale.double() - 127) if scale.dtype == torch.uint8 else scale.double()
    decoded = e2m1.decode(e2m1.unpack(codes)).double()
    return decoded * numbers.repeat_interleave(decoded.shape[-1] // numbers.shape[-1], dim=-1)


def fp4_quantize(
    hidden: torch.Tensor, global_scale: torch.Tensor, block: int, ue8m0: bool, swizzled: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    assert (hidden.dtype, block, ue8m0, swizzled) == (torch.bfloat16, 16, False, False)
    is_like(global_scale, torch.float32, 1)
    codes, scale, _ = quantize_nvfp4(hidden, 1 / global_scale)
    return codes, scale.view(torch.uint8)


def mxfp8_quantize(hidden: torch.Tensor, swizzled: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """With scales of 1 (127), for inputs that are e4m3."""
    assert hidden.dtype == torch.bfloat16
    scale = torch.full((hidden.shape[0], hidden.shape[1] // 32), 127, dtype=torch.uint8)
    flat = to_scale_tiles(scale[None]).flatten() if swizzled else scale.flatten()
    return hidden.to(torch.float8_e4m3fn), flat


def cutlass_fused_moe(
    *,
    input: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor,
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    output_dtype: torch.dtype,
    quant_scales: list[torch.Tensor],
    fc1_expert_biases: torch.Tensor | None,
    fc2_expert_biases: torch.Tensor | None,
    swiglu_alpha: torch.Tensor | None,
    swiglu_beta: torch.Tensor | None,
    swiglu_limit: torch.Tensor | None,
    activation_type: int,
    use_fused_finalize: bool,
    input_sf: torch.Tensor | None = None,
    use_w4_group_scaling: bool = False,
    use_mxfp8_act_scaling: bool = False,
) -> list[torch.Tensor]:
    assert not use_fused_finalize
    name = ActivationType(activation_type).name
    gated = name in ("Swiglu", "SwigluStep", "Geglu", "GegluTanh")
    experts, hidden_size = fc2_expert_weights.shape[:2]
    packed = 2 if use_w4_group_scaling else 16
    inner = fc2_expert_weights.shape[2] * packed
    rows = inner * (1 + gated)
    tokens, top_k = token_selected_experts.shape
    is_like(token_selected_experts, torch.int32, tokens, top_k)
    is_like(token_final_scales, torch.float32, tokens, top_k)
    is_like(fc1_expert_weights, torch.uint8 if packed == 2 else torch.int64, experts, rows, hidden_size // packed)
    assert fc2_expert_weights.dtype == fc1_expert_weights.dtype
    assert (fc1_expert_biases is None) == (fc2_expert_biases is None)
    if fc1_expert_biases is not None:
        is_like(fc1_expert_biases, output_dtype, experts, rows)
        is_like(fc2_expert_biases, output_dtype, experts, hidden_size)
    by_expert(experts, swiglu_alpha, swiglu_beta, swiglu_limit)
    weights = fc1_expert_weights, fc2_expert_weights
    if use_w4_group_scaling:
        is_like(input, torch.bfloat16, tokens, hidden_size)
        w1, w2 = _sm90_weights(*weights, *quant_scales)
        quantise1, alpha1, quantise2, alpha2 = torch.tensor(1.0), *torch.ones(3, experts)
    elif use_mxfp8_act_scaling:
        is_like(input, torch.float8_e4m3fn, tokens, hidden_size)
        is_like(input_sf, torch.uint8, -(-tokens // 128) * 128 * (hidden_size // 32))
        s1, alpha1, s2, alpha2 = quant_scales
        quantise1, quantise2 = torch.tensor(1.0), torch.ones(experts)
        w1, w2 = _tiled_weights(*weights, s1, s2, 32, gated)
    else:
        is_like(input, torch.bfloat16, tokens, hidden_size)
        quantise1, s1, alpha1, quantise2, s2, alpha2 = quant_scales
        w1, w2 = _tiled_weights(*weights, s1, s2, 16, gated)
    is_like(quantise1, torch.float32)
    by_expert(experts, alpha1, quantise2, alpha2)
    x = input.double() * quantise1
    out = torch.zeros(tokens, hidden_size, dtype=torch.float64)
    for token, slot, e in _routes(token_selected_experts, experts):
        y = w1[e] @ x[token] * alpha1[e]
        if fc1_expert_biases is not None:
            y = y + fc1_expert_biases[e]
        knobs = [None if k is None else k[e].double() for k in (swiglu_alpha, swiglu_beta, swiglu_limit)]
        h = _activated(name, y[:inner], y[inner:], *knobs) if gated else _ungated(name, y)
        z = w2[e] @ (h * quantise2[e]) * alpha2[e]
        if fc2_expert_biases is not None:
            z = z + fc2_expert_biases[e]
        out[token] += token_final_scales[token, slot].double() * z
    return [out.to(output_dtype)]


def _sm90_weights(
    w1: torch.Tensor, w2: torch.Tensor, s1: torch.Tensor, s2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    experts, hidden_size, inner = *w2.shape[:2], w2.shape[2] * 2
    assert hidden_size % 128 == 0
    assert inner % 128 == 0
    is_like(s1, torch.uint8, experts, w1.shape[1] // 64, hidden_size // 128, 16, 16)
    is_like(s2, torch.uint8, experts, hidden_size // 64, inner // 128, 16, 16)
    return values(from_sm90_words(w1), from_sm90_scales(s1)), values(from_sm90_words(w2), from_sm90_scales(s2))


def _tiled_weights(
    w1: torch.Tensor, w2: torch.Tensor, s1: torch.Tensor, s2: torch.Tensor, block: int, gated: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The library checks w13's scales to be as many as rows up to 128 (MXFP8) or 64 (NVFP4), each of gate and up."""
    experts, hidden_size, inner = *w2.shape[:2], w2.shape[2] * 16
    if block == 32:
        assert hidden_size % 128 == 0
        assert inner % 128 == 0
    unit = 128 if block == 32 else 64
    up = -(-inner // unit) * unit * (1 + gated)
    is_like(s1, torch.int32, experts, up, -(-hidden_size // (4 * block)))
    is_like(s2, torch.int32, experts, -(-hidden_size // 128) * 128, -(-inner // (4 * block)))
    encoding = torch.uint8 if block == 32 else torch.float8_e4m3fn
    found = []
    for codes, scale, columns in ((w1, s1, hidden_size), (w2, s2, inner)):
        numbers = from_scale_tiles(scale.view(torch.uint8), codes.shape[1], columns // block).view(encoding)
        found.append(values(codes.view(torch.uint8), numbers))
    return found[0], found[1]


def trtllm_fp4_block_scale_routed_moe(
    *,
    topk_ids: tuple[torch.Tensor, torch.Tensor],
    routing_bias: None,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor | None,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm1_bias: torch.Tensor | None,
    gemm1_alpha: torch.Tensor | None,
    gemm1_beta: torch.Tensor | None,
    gemm1_clamp_limit: torch.Tensor | None,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    gemm2_bias: torch.Tensor | None,
    output1_scale_scalar: torch.Tensor | None,
    output1_scale_gate_scalar: torch.Tensor | None,
    output2_scale_scalar: torch.Tensor | None,
    num_experts: int,
    top_k: int,
    n_group: None,
    topk_group: None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: None,
    routing_method_type: int,
    activation_type: int,
    hidden_states_scale_layout: SfLayout | None,
) -> list[torch.Tensor]:
    ids, weights = topk_ids
    tokens, inner, name = ids.shape[0], intermediate_size, ActivationType(activation_type).name
    assert (local_expert_offset, local_num_experts) == (0, num_experts)
    is_like(ids, torch.int32, tokens, top_k)
    assert weights.shape == ids.shape
    assert weights.dtype in (torch.float32, torch.bfloat16)
    gated = name != "Relu2"
    rows, hidden_size = inner * (1 + gated), gemm2_weights.shape[1]
    nvfp4 = output1_scale_scalar is not None
    block = 16 if nvfp4 else 32
    assert hidden_size % 256 == 0
    assert rows % 128 == 0
    assert inner % (64 if nvfp4 and gated else 128) == 0
    is_like(gemm1_weights, torch.uint8, num_experts, rows, hidden_size // 2)
    is_like(gemm2_weights, torch.uint8, num_experts, hidden_size, inner // 2)
    is_like(gemm1_weights_scale, torch.float8_e4m3fn, num_experts, rows, hidden_size // block)
    is_like(gemm2_weights_scale, torch.float8_e4m3fn, num_experts, hidden_size, inner // block)
    if gemm1_bias is not None:
        is_like(gemm1_bias, torch.float32, num_experts, rows)
    if gemm2_bias is not None:
        is_like(gemm2_bias, torch.float32, num_experts, hidden_size)
    scalars = (output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar)
    assert all((scalar is not None) == nvfp4 for scalar in scalars)
    by_expert(num_experts, gemm1_alpha, gemm1_beta, gemm1_clamp_limit, *scalars)
    x = _hidden(hidden_states, hidden_states_scale, hidden_size, nvfp4)
    assert (hidden_states_scale is None) == (hidden_states_scale_layout is None)
    assert hidden_states_scale_layout in (None, SfLayout.layout_linear)
    encoding = torch.float8_e4m3fn if nvfp4 else torch.uint8
    w1 = values(unshuffle_rows(gemm1_weights), from_trtllm_scales(gemm1_weights_scale, encoding))
    w2 = values(unshuffle_rows(gemm2_weights), from_trtllm_scales(gemm2_weights_scale, encoding))
    ones = torch.ones(num_experts)
    scale_c, scale_gate, scale_2 = (ones if scalar is None else scalar for scalar in scalars)
    out = torch.zeros(tokens, hidden_size, dtype=torch.float64)
    for token, slot, e in _routes(ids, num_experts):
        y = w1[e] @ x[token]
        if gemm1_bias is not None:
            y = y + unshuffle_rows(gemm1_bias)[e]
        alpha, beta, limit = (
            None if knob is None else knob[e].double() for knob in (gemm1_alpha, gemm1_beta, gemm1_clamp_limit)
        )
        if gated:
            up, gate = y[0::2], y[1::2]
            if limit is not None:
                up = up.clamp(-limit, limit)
                gate = gate if name == "SwigluStep" else gate.clamp(max=limit)
            gate = gate * scale_gate[e]
            act = gate * torch.sigmoid(gate * (1.0 if alpha is None else alpha))
            if limit is not None and name == "SwigluStep":
                act = act.clamp(max=limit * scale_gate[e])
            h = scale_c[e] * (up + (0.0 if beta is None else beta)) * act
        else:
            h = scale_c[e] * (y * scale_gate[e]).relu().square()
        z = w2[e] @ h
        if gemm2_bias is not None:
            z = z + unshuffle_rows(gemm2_bias)[e]
        out[token] += weights[token, slot].double() * z * scale_2[e]
    return [out.to(torch.bfloat16)]


def trtllm_fp4_block_scale_moe(
    *,
    routing_logits: torch.Tensor,
    routing_bias: torch.Tensor | None,
    n_group: int | None,
    topk_group: int | None,
    routed_scaling_factor: float | None,
    routing_method_type: int,
    **given: Any,
) -> list[torch.Tensor]:
    """As its routing kernels: scores in float32, finished weights in bfloat16."""
    experts, top_k, method = given["num_experts"], given["top_k"], RoutingMethodType(routing_method_type).name
    assert routing_logits.dtype in (torch.float32, torch.bfloat16)
    is_like(routing_logits, routing_logits.dtype, given["hidden_states"].shape[0], experts)
    assert (routing_bias is not None) == (method == "DeepSeekV3")
    assert (routed_scaling_factor is not None) == (method == "DeepSeekV3")
    logits = routing_logits.float()
    if method.startswith(("Renormalize", "TopK")):
        best, ids = logits.topk(top_k)
        weights = best.softmax(-1) if method.startswith("Renormalize") else best.sigmoid()
    elif routing_bias is None:
        assert n_group is None
        weights, ids = (logits.softmax(-1) if method == "Default" else logits.sigmoid()).topk(top_k)
    else:
        assert routing_bias.dtype in (torch.float32, torch.bfloat16)
        selected = _left_groups(logits.sigmoid() + routing_bias.float(), n_group or 1, topk_group or 1)
        ids = selected.topk(top_k).indices
        weights = logits.sigmoid().gather(-1, ids) * routed_scaling_factor
    if method in ("SigmoidRenorm", "DeepSeekV3"):
        total = weights.sum(-1, keepdim=True) / (routed_scaling_factor or 1.0)
        weights = weights / total.clamp(min=1e-20)
    routed = (ids.to(torch.int32), weights.bfloat16())
    nothing = {"routing_bias": None, "n_group": None, "topk_group": None, "routed_scaling_factor": None}
    return trtllm_fp4_block_scale_routed_moe(topk_ids=routed, routing_method_type=1, **nothing, **given)


def _left_groups(scores: torch.Tensor, groups: int, kept: int) -> torch.Tensor:
    apart = scores.unflatten(-1, (groups, -1))
    if groups == 1:
        return scores
    assert apart.shape[-1] <= 32
    best = apart.topk(2).values.sum(-1).topk(kept).indices
    mask = torch.full_like(apart, float("-inf")).scatter(1, best.unsqueeze(-1).expand(-1, -1, apart.shape[-1]), 0.0)
    return (apart + mask).flatten(1)


def _hidden(hidden: torch.Tensor, scale: torch.Tensor | None, size: int, nvfp4: bool) -> torch.Tensor:
    tokens = hidden.shape[0]
    if scale is None:
        assert not nvfp4
        is_like(hidden, torch.bfloat16, tokens, size)
        return hidden.double()
    is_like(scale, torch.float8_e4m3fn, tokens, size // (16 if nvfp4 else 32))
    if nvfp4:
        is_like(hidden, torch.uint8, tokens, size // 2)
        return values(hidden, scale)
    is_like(hidden, torch.float8_e4m3fn, tokens, size)
    return hidden.double() * torch.exp2(scale.view(torch.uint8).double() - 127).repeat_interleave(32, dim=-1)


def _routes(ids: torch.Tensor, experts: int) -> list[tuple[int, int, int]]:
    assert bool(((ids >= -1) & (ids < experts)).all()), "kernels may read 16 bits of other ids"
    found = [(t, s, e) for t, row in enumerate(ids.tolist()) for s, e in enumerate(row) if e >= 0]
    assert len({(t, e) for t, _, e in found}) == len(found), "an expert twice"
    return found


def _activated(name, up, gate, alpha, beta, limit):  # type: ignore[no-untyped-def]
    """CUTLASS's adaptors."""
    if name == "Geglu":
        return torch.nn.functional.gelu(gate) * up
    if name == "GegluTanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    if limit is not None:
        up = up.clamp(-limit, limit)
    if name == "SwigluStep":
        return torch.nn.functional.silu(gate).clamp(max=limit) * up
    gate = gate if limit is None else gate.clamp(max=limit)
    return gate * torch.sigmoid(gate * (1.0 if alpha is None else alpha)) * (up + (0.0 if beta is None else beta))


def _ungated(name: str, y: torch.Tensor) -> torch.Tensor:
    functions = torch.nn.functional
    if name == "Relu2":
        return y.relu().square()
    return {"Relu": functions.relu, "Silu": functions.silu, "Gelu": functions.gelu}[name](y)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    CUTLASS: cutlass_fused_moe,
    TRTLLM: trtllm_fp4_block_scale_routed_moe,
    TRTLLM_FROM_LOGITS: trtllm_fp4_block_scale_moe,
    FP4_QUANTIZE: fp4_quantize,
    MXFP8_QUANTIZE: mxfp8_quantize,
}
