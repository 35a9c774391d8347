"""``flashinfer_cutedsl``: FlashInfer's CuTe-DSL kernels for sm_100 and sm_103, ``cute_dsl_fused_moe``.

NVFP4 weights meet bfloat16 activations; NVFP4 × NVFP4 and MXFP4 × MXFP8 run where the user allows the format
(``fp4moe.activation_format``). Ids and weights are given. Expert outputs are bfloat16; the combine sums them in
float32 in the order of the slots, except with MXFP8, where it adds to a bfloat16 output in no order.

NVFP4 × NVFP4 blocks that the fused kernel does not know, for their biases, their activation or their global scales, go
through the masked grouped GEMM. The helper that sorts routes is compiled at the first call, with headers that are
downloaded.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import torch

from ..device import DeviceInfo
from ..formats import MXFP4, NVFP4
from ..layouts.global_scales import expert_globals
from ..layouts.kernel_rows import CUTEDSL_MXFP4, CUTEDSL_NVFP4
from ..layouts.kernel_scales import cutedsl_scales
from ..layouts.scale_128x4 import mma_scale_view
from ..plan import KernelPlan, PlanArg, Prepared
from ..quant.nvfp4 import nvfp4_global_scale
from ..reasons import Reason, Verdict
from ..spec import MoESpec, Operand
from .flashinfer_common import (
    PROBE_ERRORS,
    Mode,
    activation_function,
    announce_build,
    choose_mode,
    common_reasons,
    half_reasons,
    limit_reasons,
    padded_hidden,
    padding_text,
    routes_table,
    unless_empty,
)
from .flashinfer_cute_common import (
    aligned_rows,
    cute_reasons,
    joined,
    needs_common_globals,
    pieces,
    routes,
    swiglu_knobs,
    weight,
)
from .flashinfer_masked import MODE, masked_plan, masked_reasons
from .flashinfer_weights import PRODUCT_FACTOR, Placing, ones
from .ops import ExpertsCall, define_experts_op, experts_args

_SM_100_103 = frozenset({100, 103})
_FUNCTIONS = frozenset({"Swiglu", "GegluTanh", "Relu2"})
MODES = (
    Mode(NVFP4, None, _SM_100_103, _FUNCTIONS, CUTEDSL_NVFP4),
    Mode(NVFP4, "nvfp4", _SM_100_103, _FUNCTIONS, CUTEDSL_NVFP4),
    Mode(MXFP4, "mxfp8", _SM_100_103, _FUNCTIONS, CUTEDSL_MXFP4),
)


def _bf16(call: ExpertsCall) -> torch.Tensor:
    hidden = padded_hidden(call.hidden, call.w2.codes.shape[1])
    return _fused_moe(call, "w4a16", hidden, None, call.w13.global_scale, None)


def _mxfp8(call: ExpertsCall) -> torch.Tensor:
    from flashinfer import mxfp8_quantize

    hidden, scale = mxfp8_quantize(padded_hidden(call.hidden, call.w2.codes.shape[1]), False)
    return _fused_moe(call, "w4a8", hidden, scale.reshape(hidden.shape[0], -1), call.w13.global_scale, None)


def _nvfp4(call: ExpertsCall) -> torch.Tensor:
    from flashinfer import fp4_quantize

    assert call.w13.global_scale is not None, "the plan prepares them"
    hidden = padded_hidden(call.hidden, call.w2.codes.shape[1])
    factor = nvfp4_global_scale(hidden)
    quantized, scale = fp4_quantize(hidden, 1 / factor, NVFP4.block_size, False, False)
    scale = scale.view(NVFP4.scale_dtype).reshape(hidden.shape[0], -1)
    alpha, quantise2 = call.w13.global_scale
    alpha = alpha[: call.w13.codes.shape[0]] * factor
    return _fused_moe(call, "w4a4", quantized, scale, alpha, quantise2[:1])


def _fused_moe(
    call: ExpertsCall,
    quant_mode: str,
    hidden: torch.Tensor,
    hidden_scale: torch.Tensor | None,
    w13_alpha: torch.Tensor | None,
    quantise2: torch.Tensor | None,
) -> torch.Tensor:
    """The block [T, H] in ``out_dtype`` from padded hidden states, as the mode wants them, and their block scales."""
    from flashinfer.fused_moe import cute_dsl_fused_moe
    from flashinfer.tllm_enums import ActivationType

    if hidden.is_cuda:
        announce_build("moe_utils", "for which it downloads headers, in minutes")
    name = activation_function(call.activation)
    assert name is not None, "check refuses it"
    alpha, beta, limit = swiglu_knobs(call.activation)
    ids, weights = routes(call)
    outputs = [
        cute_dsl_fused_moe(
            x=hidden[piece],
            x_sf=None if hidden_scale is None else hidden_scale[piece],
            token_selected_experts=ids[piece],
            token_final_scales=weights[piece],
            w1_weight=call.w13.codes,
            w1_weight_sf=mma_scale_view(call.w13.scale),
            w1_alpha=w13_alpha,
            fc2_input_scale=quantise2,
            w2_weight=call.w2.codes,
            w2_weight_sf=mma_scale_view(call.w2.scale),
            w2_alpha=call.w2.global_scale,
            num_experts=call.w13.codes.shape[0],
            top_k=ids.shape[1],
            output_dtype=call.out_dtype,
            # Fused, it adds to a bfloat16 output with atomics; MXFP8 kernels know no other way.
            use_fused_finalize=quant_mode == "w4a8",
            activation_type=int(ActivationType[name]),
            swiglu_alpha=alpha,
            swiglu_beta=beta,
            swiglu_limit=limit,
            quant_mode=quant_mode,
        )
        for piece in pieces(call)
    ]
    return joined(outputs, call.hidden.shape[1])


_OPS = {
    name: define_experts_op(f"moe_flashinfer_cutedsl_{name}", unless_empty(kernel))
    for name, kernel in (("bf16", _bf16), ("mxfp8", _mxfp8), ("nvfp4", _nvfp4))
}


class FlashinferCutedslBackend:
    name = "flashinfer_cutedsl"

    def check(self, spec: MoESpec, device: DeviceInfo) -> Verdict:
        """What is against the fused kernel, where the masked grouped GEMM does not know it either."""
        reasons = _fused_reasons(spec, device)
        if not reasons or not masked_reasons(spec, device):
            return Verdict(self.name)
        if not masked_reasons(replace(spec, activation_format=MODE.activations), device):
            cure = f"options={{'fp4moe.activation_format': '{MODE.activations}'}} allows another kernel, which can"
            reasons = tuple(replace(reason, hint=cure) for reason in reasons)
        return Verdict(self.name, reasons)

    def probe_errors(self) -> tuple[type[Exception], ...]:
        return PROBE_ERRORS

    def rank(self, spec: MoESpec, device: DeviceInfo) -> int:
        """Below FlashInfer's others, since it is not measured and compiles kernels as they are called."""
        return 15

    def plan(self, spec: MoESpec, device: DeviceInfo) -> KernelPlan:
        if _fused_reasons(spec, device):
            return masked_plan(spec)
        mode = choose_mode(MODES, spec, device)
        assert mode is not None, "check refuses it"
        placing = Placing.of(spec, mode.rows)
        suffix = f"cutedsl_{mode.name}"
        ready: dict[str, PlanArg] = {
            **weight("w13", suffix, mode, placing),
            **weight("w2", suffix, mode, placing),
            **_globals(mode, placing, needs_common_globals(spec)),
        }
        args = experts_args(spec, table=routes_table(spec), **ready)  # type: ignore[arg-type]
        padding, layout = padding_text(spec, mode.rows), "blocks of 64 rows, scale tiles"
        return KernelPlan(_OPS[mode.name], args, layout=layout, padding=padding, activations=mode.activations)


def _fused_reasons(spec: MoESpec, device: DeviceInfo) -> tuple[Reason, ...]:
    half = half_reasons(spec, common=needs_common_globals(spec))
    return (*common_reasons(MODES, spec, device), *half, *cute_reasons(spec, device), *limit_reasons(spec))


@cache
def _globals(mode: Mode, placing: Placing, common: bool) -> dict[str, Prepared]:
    """The factors of both GEMMs; cached, so that equal layers share their recipes."""
    suffix = f"cutedsl_{mode.name}"
    if not mode.weights.has_global_scale:
        return {f"{name}_global": ones(name, suffix) for name in ("w13", "w2")}
    quantised = mode.activations is not None
    w13 = partial(_w13_factors, placing, common, quantised)
    w2 = partial(_w2_factors, placing, common, quantised)
    return {
        "w13_global": Prepared(f"w13_factors_{suffix}", w13, (Operand.W13_GLOBAL,)),
        "w2_global": Prepared(f"w2_factors_{suffix}", w2, (Operand.W13_GLOBAL, Operand.W2_GLOBAL)),
    }


def _w13_factors(placing: Placing, common: bool, quantised: bool, w13_global: torch.Tensor) -> torch.Tensor:
    """float32 [E] gate's factor; with quantised products [2, Ep], and what quantises those of all experts."""
    gate, up = placing.globals(common, w13_global)
    if not quantised:
        return gate
    one = torch.ones_like(gate)
    scales = cutedsl_scales(gate, up, one, one, one * PRODUCT_FACTOR)
    assert scales.quantise2 is not None, "activations have factors"
    return aligned_rows(scales.alpha1, scales.quantise2.expand_as(gate))


def _w2_factors(
    placing: Placing, common: bool, quantised: bool, w13_global: torch.Tensor, w2_global: torch.Tensor
) -> torch.Tensor:
    """float32 [E]: w2's factor, with what up's differs from gate's, and what products were quantised by."""
    gate, up = placing.globals(common, w13_global)
    down = expert_globals(w2_global, placing.num_experts)
    one = torch.ones_like(gate)
    act = (one, one * PRODUCT_FACTOR) if quantised else ()
    return cutedsl_scales(gate, up, down, *act).alpha2
