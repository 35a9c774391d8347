"""``flashinfer_b12x``: FlashInfer's b12x kernels for sm_120 and sm_121, ``b12x_fused_moe``.

NVFP4 weights meet bfloat16 activations; NVFP4 × NVFP4 and MXFP4 × MXFP4 run where the user allows the format
(``fp4moe.activation_format``). Ids and weights are given. They need CUDA 13.

For bfloat16 activations FlashInfer packs the weights anew at the first call and keeps that copy beside the ones it
was given, which it tells by their objects: they must be the plan's own, never views made for a call. Packed block
scales have no subnormals, so weights that need some are refused. Kernels for FP4 activations read the weights as
they are; what FlashInfer would remember of them for each call is let go with the call.
"""

from __future__ import annotations

from functools import cache, partial

import torch

from ..device import DeviceInfo
from ..formats import MXFP4, NVFP4
from ..layouts.b12x import require_packable, require_packable_globals
from ..layouts.global_scales import expert_globals
from ..layouts.kernel_rows import B12X, B12X_BF16
from ..layouts.kernel_scales import b12x_scales, cutedsl_scales
from ..layouts.scale_128x4 import mma_scale_view, to_scale_tiles
from ..plan import KernelPlan, PlanArg, Prepared
from ..quant.nvfp4 import nvfp4_global_scale
from ..reasons import Reason, ReasonCode, Verdict
from ..spec import ActivationSpec, MoESpec, Operand
from .flashinfer_common import (
    PROBE_ERRORS,
    Mode,
    activation_function,
    choose_mode,
    common_reasons,
    half_reasons,
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
from .flashinfer_weights import PRODUCT_FACTOR, Placing, ones
from .ops import ExpertsCall, define_experts_op, experts_args

_SM_120_121 = frozenset({120, 121})
_FUNCTIONS = frozenset({"Swiglu", "GegluTanh", "Relu2"})
MODES = (
    Mode(NVFP4, None, _SM_120_121, frozenset({"Swiglu", "Relu2"}), B12X_BF16),
    Mode(NVFP4, "nvfp4", _SM_120_121, _FUNCTIONS, B12X),
    Mode(MXFP4, "mxfp4", _SM_120_121, _FUNCTIONS, B12X),
)
_WITH_KNOBS = "swigluoai_uninterleave"
_ROWS = "rows, scale tiles"
_LAYOUTS = {"nvfp4": _ROWS, "mxfp4": _ROWS, "bf16": f"{_ROWS}, and FlashInfer's packed copy"}


def _bf16(call: ExpertsCall) -> torch.Tensor:
    weights = {
        "w1_weight": call.w13.codes,
        "w1_weight_sf": call.w13.scale,
        "w1_alpha": call.w13.global_scale,
        "w2_weight": call.w2.codes,
        "w2_weight_sf": call.w2.scale,
        "w2_alpha": call.w2.global_scale,
    }
    return _fused_moe(call, "w4a16", weights)


def _mxfp4(call: ExpertsCall) -> torch.Tensor:
    return _fused_moe(call, "mxfp4", _views(call, call.w13.global_scale))


def _nvfp4(call: ExpertsCall) -> torch.Tensor:
    assert call.w13.global_scale is not None, "the plan prepares them"
    alpha, divide2 = (row[: call.w13.codes.shape[0]] for row in call.w13.global_scale)
    factor = nvfp4_global_scale(call.hidden)
    weights = _views(call, alpha) | {"input_global_scale": factor, "fc2_input_scale": divide2}
    return _fused_moe(call, "nvfp4", weights)


def _views(call: ExpertsCall, w13_alpha: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
    """Weights as objects that end with the call: FlashInfer notes one for each call with an ``input_global_scale``."""
    assert w13_alpha is not None, "the plan prepares them"
    assert call.w2.global_scale is not None, "the plan prepares them"
    return {
        "w1_weight": call.w13.codes.detach(),
        "w1_weight_sf": mma_scale_view(call.w13.scale),
        "w1_alpha": w13_alpha.detach(),
        "w2_weight": call.w2.codes.detach(),
        "w2_weight_sf": mma_scale_view(call.w2.scale),
        "w2_alpha": call.w2.global_scale.detach(),
    }


def _fused_moe(call: ExpertsCall, quant_mode: str, weights: dict[str, torch.Tensor | None]) -> torch.Tensor:
    """The block [T, H] in ``out_dtype``."""
    from flashinfer.fused_moe import b12x_fused_moe

    hidden = padded_hidden(call.hidden, call.w2.codes.shape[1])
    function = _function(call.activation)
    knobs: dict[str, float] = {}
    if function == _WITH_KNOBS:
        # Without a limit it would take 7.
        knobs = dict(zip(("swiglu_alpha", "swiglu_beta", "swiglu_limit"), swiglu_knobs(call.activation), strict=True))
    ids, routing_weights = routes(call)
    outputs = [
        b12x_fused_moe(
            x=hidden[piece],
            token_selected_experts=ids[piece],
            token_final_scales=routing_weights[piece],
            num_experts=call.w13.codes.shape[0],
            top_k=ids.shape[1],
            # While a CUDA graph is captured it allocates none itself.
            output=torch.empty_like(hidden[piece]),
            output_dtype=call.out_dtype,
            activation=function,
            quant_mode=quant_mode,
            **knobs,
            **weights,
        )
        for piece in pieces(call)
    ]
    return joined(outputs, call.hidden.shape[1])


def _function(activation: ActivationSpec) -> str:
    """b12x's name for an activation that ``check`` accepts."""
    name = activation_function(activation)
    if name == "Swiglu":
        return "silu" if _plain(activation) else _WITH_KNOBS
    return {"GegluTanh": "gelu_tanh", "Relu2": "relu2"}[str(name)]


def _plain(activation: ActivationSpec) -> bool:
    return activation.alpha == 1.0 and activation.beta == 0.0 and activation.limit is None


_OPS = {
    name: define_experts_op(f"moe_flashinfer_b12x_{name}", unless_empty(kernel))
    for name, kernel in (("bf16", _bf16), ("mxfp4", _mxfp4), ("nvfp4", _nvfp4))
}


class FlashinferB12xBackend:
    name = "flashinfer_b12x"

    def check(self, spec: MoESpec, device: DeviceInfo) -> Verdict:
        half = half_reasons(spec, common=needs_common_globals(spec))
        reasons = (
            *common_reasons(MODES, spec, device),
            *half,
            *cute_reasons(spec, device),
            *_knob_reasons(spec, device),
        )
        return Verdict(self.name, reasons)

    def probe_errors(self) -> tuple[type[Exception], ...]:
        return PROBE_ERRORS

    def rank(self, spec: MoESpec, device: DeviceInfo) -> int:
        """Below FlashInfer's others, since it is not measured and compiles kernels as they are called."""
        return 15

    def plan(self, spec: MoESpec, device: DeviceInfo) -> KernelPlan:
        mode = choose_mode(MODES, spec, device)
        assert mode is not None, "check refuses it"
        placing = Placing.of(spec, mode.rows)
        suffix = f"b12x_{mode.name}"
        ready: dict[str, PlanArg] = {
            **weight("w13", suffix, mode, placing),
            **weight("w2", suffix, mode, placing),
            **_globals(mode, placing, needs_common_globals(spec)),
        }
        if mode.activations is None:
            ready |= _packable(placing)
        args = experts_args(spec, table=routes_table(spec), **ready)  # type: ignore[arg-type]
        padding, layout = padding_text(spec, mode.rows), _LAYOUTS[mode.name]
        return KernelPlan(_OPS[mode.name], args, layout=layout, padding=padding, activations=mode.activations)


def _knob_reasons(spec: MoESpec, device: DeviceInfo) -> list[Reason]:
    mode = choose_mode(MODES, spec, device)
    gated_by_silu = activation_function(spec.activation) == "Swiglu"
    if mode is None or mode.activations is not None or not gated_by_silu or _plain(spec.activation):
        return []
    cure = "options={'fp4moe.activation_format': 'nvfp4'} allows kernels that have these knobs"
    return [Reason(ReasonCode.ACTIVATION, "plain swiglu beside bfloat16 activations", str(spec.activation), cure)]


@cache
def _packable(placing: Placing) -> dict[str, Prepared]:
    """Tiles of block scales, which are refused where FlashInfer's packing would lose some."""
    return {
        f"{name}_scale": Prepared(
            f"{name}_scale_b12x_packable",
            partial(_packable_tiles, name, placing),
            (Operand(name), Operand(f"{name}_scale")),
        )
        for name in ("w13", "w2")
    }


def _packable_tiles(name: str, placing: Placing, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    placed = placing.scales(name, NVFP4, scale).view(NVFP4.scale_dtype)
    return to_scale_tiles(require_packable(placed, placing.codes(name, NVFP4, codes, scale)))


@cache
def _globals(mode: Mode, placing: Placing, common: bool) -> dict[str, Prepared]:
    """The factors of both GEMMs; cached, so that equal layers share their recipes."""
    suffix = f"b12x_{mode.name}"
    if not mode.weights.has_global_scale:
        return {f"{name}_global": ones(name, suffix) for name in ("w13", "w2")}
    w13, w2 = Operand.W13_GLOBAL, Operand.W2_GLOBAL
    if mode.activations is None:
        return {
            "w13_global": Prepared(f"w13_factor_{suffix}", partial(_w13_factor, placing, common), (w13,)),
            "w2_global": Prepared(f"w2_factor_{suffix}", partial(_w2_factor, placing, common), (w13, w2)),
        }
    return {
        "w13_global": Prepared(f"w13_factors_{suffix}", partial(_w13_factors, placing, common), (w13,)),
        "w2_global": Prepared(f"w2_factors_{suffix}", placing.product_globals, (w2,)),
    }


def _w13_factor(placing: Placing, common: bool, w13_global: torch.Tensor) -> torch.Tensor:
    """float32 [E] gate's factor, for bfloat16 activations."""
    return require_packable_globals(placing.globals(common, w13_global)[0])


def _w2_factor(placing: Placing, common: bool, w13_global: torch.Tensor, w2_global: torch.Tensor) -> torch.Tensor:
    """float32 [E] w2's factor and what up's differs from gate's, for bfloat16 activations."""
    gate, up = placing.globals(common, w13_global)
    down = expert_globals(w2_global, placing.num_experts)
    return require_packable_globals(cutedsl_scales(gate, up, down).alpha2)


def _w13_factors(placing: Placing, common: bool, w13_global: torch.Tensor) -> torch.Tensor:
    """float32 [2, Ep]: gate's factor, and what products are divided by."""
    gate, up = placing.globals(common, w13_global)
    one = torch.ones_like(gate)
    scales = b12x_scales(gate, up, one, one, one * PRODUCT_FACTOR)
    return aligned_rows(scales.alpha1, scales.divide2)
