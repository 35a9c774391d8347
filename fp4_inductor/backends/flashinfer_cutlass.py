"""``flashinfer_cutlass``: FlashInfer's CUTLASS kernels, ``cutlass_fused_moe``; routed by given ids and weights.

On sm_90, MXFP4 weights meet bfloat16 activations. From sm_100 on the kernels multiply low-precision activations only:
MXFP4 × MXFP8 and NVFP4 × NVFP4, for which the user must allow the format (``fp4moe.activation_format``).
Biases are rounded to bfloat16. The combine sums in float32 and rounds once, in the same order every time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from ..device import DeviceInfo
from ..formats import MXFP4, NVFP4
from ..layouts.byte_views import view_as
from ..layouts.cutlass_sm90 import to_sm90_scales, to_sm90_words
from ..layouts.global_scales import linear_in_up
from ..layouts.kernel_rows import CUTLASS_MXFP4_MXFP8, CUTLASS_MXFP4_SM90, CUTLASS_NVFP4
from ..layouts.kernel_scales import cutlass_scales
from ..layouts.scale_128x4 import to_scale_tiles
from ..plan import KernelPlan, PlanArg, Prepared
from ..quant.nvfp4 import nvfp4_global_scale
from ..reasons import Verdict
from ..spec import MoESpec, Operand
from .flashinfer_common import (
    PROBE_ERRORS,
    Mode,
    activation_function,
    announce_build,
    by_expert,
    choose_mode,
    common_reasons,
    half_reasons,
    padded_hidden,
    padding_text,
    present_routes,
    routes_table,
    unless_empty,
)
from .flashinfer_weights import PRODUCT_FACTOR, Placing, ones
from .ops import ExpertsCall, define_experts_op, experts_args

_FUNCTIONS = frozenset({"Swiglu", "SwigluStep", "Geglu", "GegluTanh", "Relu2", "Relu", "Silu", "Gelu"})
_BLACKWELL = frozenset({100, 103, 120, 121})
MODES = (
    Mode(MXFP4, None, frozenset({90}), _FUNCTIONS, CUTLASS_MXFP4_SM90),
    Mode(MXFP4, "mxfp8", _BLACKWELL, _FUNCTIONS, CUTLASS_MXFP4_MXFP8),
    Mode(NVFP4, "nvfp4", _BLACKWELL, _FUNCTIONS, CUTLASS_NVFP4),
)
_LAYOUTS = {"bf16": "sm90 words, folded scales", "mxfp8": "rows, scale tiles", "nvfp4": "rows, scale tiles"}


def _bf16(call: ExpertsCall) -> torch.Tensor:
    hidden = padded_hidden(call.hidden, call.w2.codes.shape[1])
    return _fused_moe(call, hidden, [call.w13.scale, call.w2.scale], use_w4_group_scaling=True)


def _mxfp8(call: ExpertsCall) -> torch.Tensor:
    from flashinfer import mxfp8_quantize

    assert call.w13.global_scale is not None, "the plan prepares ones"
    assert call.w2.global_scale is not None, "the plan prepares ones"
    quantized, scale = mxfp8_quantize(padded_hidden(call.hidden, call.w2.codes.shape[1]), True)
    scales = [call.w13.scale, call.w13.global_scale, call.w2.scale, call.w2.global_scale]
    return _fused_moe(call, quantized, scales, input_sf=scale, use_mxfp8_act_scaling=True)


def _nvfp4(call: ExpertsCall) -> torch.Tensor:
    assert call.w13.global_scale is not None, "the plan prepares them"
    assert call.w2.global_scale is not None, "the plan prepares them"
    hidden = padded_hidden(call.hidden, call.w2.codes.shape[1])
    factor = nvfp4_global_scale(hidden).squeeze(0)
    gate, quantise2, beta_unit = call.w13.global_scale.unbind(0)
    scales = [1 / factor, call.w13.scale, gate * factor, quantise2, call.w2.scale, call.w2.global_scale]
    return _fused_moe(call, hidden, scales, beta_unit=beta_unit)


def _fused_moe(
    call: ExpertsCall,
    hidden: torch.Tensor,
    quant_scales: list[torch.Tensor],
    *,
    beta_unit: torch.Tensor | None = None,
    **mode: Any,
) -> torch.Tensor:
    """The block [T, H] in ``out_dtype`` from padded hidden states, quantised where the mode wants it."""
    from flashinfer.fused_moe import cutlass_fused_moe
    from flashinfer.tllm_enums import ActivationType

    if hidden.is_cuda:
        major, minor = torch.cuda.get_device_capability(hidden.device)
        family = 120 if major == 12 else 10 * major + minor
        announce_build(f"fused_moe_{family}", "which takes about an hour on 16 cores")
    name, codes = activation_function(call.activation), call.w13.codes
    assert name is not None, "check refuses it"
    ids, weights = present_routes(call)
    beta = by_expert(call.activation.beta, 0.0, codes)  # type: ignore[arg-type]
    out: torch.Tensor = cutlass_fused_moe(
        input=hidden,
        token_selected_experts=ids,
        token_final_scales=weights.to(torch.float32),
        fc1_expert_weights=codes,
        fc2_expert_weights=call.w2.codes,
        output_dtype=call.out_dtype,
        quant_scales=quant_scales,
        fc1_expert_biases=call.w13.bias,
        fc2_expert_biases=call.w2.bias,
        swiglu_alpha=by_expert(call.activation.alpha, 1.0, codes),  # type: ignore[arg-type]
        swiglu_beta=beta if beta is None or beta_unit is None else beta / beta_unit,
        swiglu_limit=by_expert(call.activation.limit, None, codes),  # type: ignore[arg-type]
        activation_type=ActivationType[name],
        # Fused, it adds to a bfloat16 output with atomics: another order, and another result, every time.
        use_fused_finalize=False,
        **mode,
    )[0]
    return out[:, : call.hidden.shape[1]].contiguous()


_OPS = {
    name: define_experts_op(f"moe_flashinfer_cutlass_{name}", unless_empty(kernel))
    for name, kernel in (("bf16", _bf16), ("mxfp8", _mxfp8), ("nvfp4", _nvfp4))
}


class FlashinferCutlassBackend:
    name = "flashinfer_cutlass"

    def check(self, spec: MoESpec, device: DeviceInfo) -> Verdict:
        half = half_reasons(spec, common=_needs_common_globals(spec))
        return Verdict(self.name, (*common_reasons(MODES, spec, device), *half))

    def rank(self, spec: MoESpec, device: DeviceInfo) -> int:
        """Below ``triton_w4a16``: slower at every size measured on sm_90, and not measured elsewhere."""
        return 20

    def probe_errors(self) -> tuple[type[Exception], ...]:
        return PROBE_ERRORS

    def plan(self, spec: MoESpec, device: DeviceInfo) -> KernelPlan:
        mode = choose_mode(MODES, spec, device)
        assert mode is not None, "check refuses it"
        placing = Placing.of(spec, mode.rows)
        common = _needs_common_globals(spec)
        ready: dict[str, PlanArg] = {}
        biased = spec.has_w13_bias or spec.has_w2_bias
        for name, has_bias in (("w13", spec.has_w13_bias), ("w2", spec.has_w2_bias)):
            ready |= _weight(name, mode, placing, common)
            if biased:
                ready[f"{name}_bias"] = _bias(name, placing, has_bias)
        told, table = replace(spec, has_w13_bias=biased, has_w2_bias=biased), routes_table(spec)
        args = experts_args(told, table=table, **ready)  # type: ignore[arg-type]
        padding, layout = padding_text(spec, mode.rows), _LAYOUTS[mode.name]
        return KernelPlan(_OPS[mode.name], args, layout=layout, padding=padding, activations=mode.activations)


def _needs_common_globals(spec: MoESpec) -> bool:
    return not linear_in_up(spec.activation, spec.has_w13_bias, beta_by_expert=True)


@cache
def _weight(name: str, mode: Mode, placing: Placing, common: bool) -> dict[str, Prepared]:
    """Arguments of ``experts_args`` for one weight. Cached, so that equal layers share their recipes."""
    codes, scale, glob = Operand(name), Operand(f"{name}_scale"), Operand(f"{name}_global")
    suffix = f"cutlass_{mode.name}"
    ready = {
        name: Prepared(f"{name}_{suffix}", partial(_codes, name, mode, placing), (codes, scale)),
        f"{name}_scale": Prepared(f"{name}_scale_{suffix}", partial(_scales, name, mode, placing), (scale,)),
    }
    if mode.activations == "mxfp8":
        ready[f"{name}_global"] = ones(name, suffix)
    if mode.activations == "nvfp4":
        factors = partial(_w13_factors, placing, common) if name == "w13" else placing.product_globals
        ready[f"{name}_global"] = Prepared(f"{name}_factors_{suffix}", factors, (glob,))
    return ready


@cache
def _bias(name: str, placing: Placing, has_bias: bool) -> Prepared:
    """A bias, or zeros in its place: the kernels take both or neither."""
    if has_bias:
        return Prepared(f"{name}_bias_cutlass", partial(_rounded_bias, name, placing), (Operand(f"{name}_bias"),))
    return Prepared(f"{name}_bias_cutlass", partial(_no_bias, name, placing), (Operand(name),))


def _codes(name: str, mode: Mode, placing: Placing, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    placed = placing.codes(name, mode.weights, codes, scale)
    return to_sm90_words(placed) if mode.activations is None else view_as(placed, torch.int64)


def _scales(name: str, mode: Mode, placing: Placing, scale: torch.Tensor) -> torch.Tensor:
    placed = placing.scales(name, mode.weights, scale)
    return to_sm90_scales(placed) if mode.activations is None else view_as(to_scale_tiles(placed), torch.int32)


def _w13_factors(placing: Placing, common: bool, global_scale: torch.Tensor) -> torch.Tensor:
    """float32 [3, E]: gate's factor, what products are quantised by, what beta is divided by."""
    gate, up = placing.globals(common, global_scale)
    one = torch.ones_like(gate)
    scales = cutlass_scales(gate, up, one, one, one * PRODUCT_FACTOR)
    return torch.stack((scales.alpha1, scales.quantise2, scales.beta_unit))


def _rounded_bias(name: str, placing: Placing, bias: torch.Tensor) -> torch.Tensor:
    return placing.rows(name, bias).to(torch.bfloat16)


def _no_bias(name: str, placing: Placing, codes: torch.Tensor) -> torch.Tensor:
    return placing.rows(name, codes.new_zeros(codes.shape[:2], dtype=torch.bfloat16))
