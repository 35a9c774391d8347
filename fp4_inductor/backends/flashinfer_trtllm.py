"""``flashinfer_trtllm``: TensorRT-LLM's generated kernels, by FlashInfer's ``trtllm_fp4_block_scale_moe``.

MXFP4 weights meet bfloat16 activations on sm_100; MXFP4 × MXFP8 and NVFP4 × NVFP4 run where the user allows the format
(``fp4moe.activation_format``). Routers that the kernels run as the graph does are theirs (``routes_inside``); otherwise
ids and weights are given. The kernels' GeGLU is left out, since nothing says which GELU it is. Kernels are downloaded
at the first call, unless FLASHINFER_CUBIN_DIR holds them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import TypeAlias

import torch

from ..device import DeviceInfo
from ..formats import MXFP4, NVFP4
from ..layouts.kernel_rows import TRTLLM_MXFP4, TRTLLM_NVFP4
from ..layouts.kernel_scales import TrtllmScales, bias_in_units, in_units, trtllm_scales
from ..layouts.trtllm import shuffle_rows, to_trtllm_scales
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
    limit_reasons,
    padded_hidden,
    padding_text,
    present_routes,
    routes_table,
    unless_empty,
)
from .flashinfer_trtllm_routing import routes_inside, routing_args
from .flashinfer_weights import PRODUCT_FACTOR, Placing, nonzero
from .ops import ExpertsCall, RouterCall, define_experts_op, define_routed_op, experts_args, routed_args

_SM_100_103 = frozenset({100, 103})
MODES = (
    Mode(MXFP4, None, frozenset({100}), frozenset({"Swiglu"}), TRTLLM_MXFP4),
    Mode(MXFP4, "mxfp8", _SM_100_103, frozenset({"Swiglu", "Relu2"}), TRTLLM_MXFP4),
    Mode(NVFP4, "nvfp4", _SM_100_103, frozenset({"Swiglu", "SwigluStep", "Relu2"}), TRTLLM_NVFP4),
)
MAX_TOKENS = 1 << 18
"""Of one call; the kernels take about 300 thousand."""


def _bf16(router: RouterCall | None, call: ExpertsCall) -> torch.Tensor:
    return _fused_moe(call, router, padded_hidden(call.hidden, call.w2.codes.shape[1]))


def _mxfp8(router: RouterCall | None, call: ExpertsCall) -> torch.Tensor:
    from flashinfer import mxfp8_quantize

    hidden, scale = mxfp8_quantize(padded_hidden(call.hidden, call.w2.codes.shape[1]), False)
    return _fused_moe(call, router, hidden, scale)


def _nvfp4(router: RouterCall | None, call: ExpertsCall) -> torch.Tensor:
    from flashinfer import fp4_quantize

    assert call.w13.global_scale is not None, "the plan prepares them"
    assert call.w2.global_scale is not None, "the plan prepares them"
    hidden = padded_hidden(call.hidden, call.w2.codes.shape[1])
    factor = nvfp4_global_scale(hidden)
    output1, gate, up = call.w13.global_scale.unbind(0)
    if call.activation.gated:
        output1 = output1 * factor
    gate, up = gate * factor, up * factor
    scales = TrtllmScales(output1, gate, call.w2.global_scale, gate, up)
    quantized, scale = fp4_quantize(hidden, 1 / factor, NVFP4.block_size, False, False)
    bias = None if call.w13.bias is None else call.w13.bias / factor
    call = replace(call, w13=replace(call.w13, bias=bias))
    return _fused_moe(call, router, quantized, scale, scales)


def _fused_moe(
    call: ExpertsCall,
    router: RouterCall | None,
    hidden: torch.Tensor,
    hidden_scale: torch.Tensor | None = None,
    scales: TrtllmScales | None = None,
) -> torch.Tensor:
    """The block [T, H] in ``out_dtype`` from padded hidden states, as the mode wants them, and their block scales."""
    from flashinfer.tllm_enums import ActivationType, SfLayout

    if hidden.is_cuda:
        announce_build("fused_moe_trtllm_sm100", "which takes minutes, and then downloads the kernels that calls need")
    num_tokens = hidden.shape[0]
    name, codes = activation_function(call.activation), call.w13.codes
    assert name is not None, "check refuses it"
    beta = by_expert(call.activation.beta, 0.0, codes)  # type: ignore[arg-type]
    limit = by_expert(call.activation.limit, None, codes)  # type: ignore[arg-type]
    if scales is not None:
        beta = None if beta is None else in_units(beta, scales.up_unit)
        limit = None if limit is None else in_units(limit, scales.gate_unit)
    if hidden_scale is not None:
        hidden_scale = hidden_scale.view(torch.float8_e4m3fn).reshape(num_tokens, -1)
    routes = present_routes(call) if router is None else None
    pieces = []
    for start in range(0, num_tokens, MAX_TOKENS):
        piece = slice(start, start + MAX_TOKENS)
        out = _routed(router, routes, piece)(
            hidden_states=hidden[piece],
            hidden_states_scale=None if hidden_scale is None else hidden_scale[piece],
            gemm1_weights=codes,
            gemm1_weights_scale=call.w13.scale,
            gemm1_bias=call.w13.bias,
            gemm1_alpha=by_expert(call.activation.alpha, 1.0, codes),  # type: ignore[arg-type]
            gemm1_beta=beta,
            gemm1_clamp_limit=limit,
            gemm2_weights=call.w2.codes,
            gemm2_weights_scale=call.w2.scale,
            gemm2_bias=call.w2.bias,
            output1_scale_scalar=None if scales is None else scales.output1,
            output1_scale_gate_scalar=None if scales is None else scales.output1_gate,
            output2_scale_scalar=None if scales is None else scales.output2,
            num_experts=codes.shape[0],
            top_k=call.topk_ids.shape[1],
            intermediate_size=call.w2.codes.shape[2] * 2,
            local_expert_offset=0,
            local_num_experts=codes.shape[0],
            activation_type=int(ActivationType[name]),
            hidden_states_scale_layout=None if hidden_scale is None else SfLayout.layout_linear,
        )
        pieces.append(out[0][:, : call.hidden.shape[1]])
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0].contiguous()


def _routed(
    router: RouterCall | None, routes: tuple[torch.Tensor, torch.Tensor] | None, piece: slice
) -> Callable[..., list[torch.Tensor]]:
    """FlashInfer's function, told how tokens of ``piece`` are routed; ``routes``: all tokens', without a router."""
    from flashinfer.fused_moe import trtllm_fp4_block_scale_moe, trtllm_fp4_block_scale_routed_moe
    from flashinfer.tllm_enums import RoutingMethodType

    if router is not None:
        return partial(trtllm_fp4_block_scale_moe, **routing_args(router, piece))
    assert routes is not None
    ids, weights = routes[0][piece], routes[1][piece]
    weights = weights.float() if weights.dtype is torch.float16 else weights
    return partial(
        trtllm_fp4_block_scale_routed_moe,
        topk_ids=(ids, weights),
        routing_bias=None,
        n_group=None,
        topk_group=None,
        routed_scaling_factor=None,
        routing_method_type=int(RoutingMethodType.Renormalize),
    )


_Kernel: TypeAlias = "Callable[[RouterCall | None, ExpertsCall], torch.Tensor]"


def _from_logits(
    kernel: _Kernel, router: RouterCall, experts: Callable[[torch.Tensor, torch.Tensor], ExpertsCall]
) -> torch.Tensor:
    """``kernel``, which writes ids and weights for itself alone."""
    ids = router.logits.new_empty(0, router.top_k, dtype=torch.int32)
    call = experts(ids, ids.to(router.weights_dtype))
    return unless_empty(partial(kernel, router))(call)


_KERNELS: dict[str, _Kernel] = {"bf16": _bf16, "mxfp8": _mxfp8, "nvfp4": _nvfp4}
_OPS = {
    name: define_experts_op(f"moe_flashinfer_trtllm_{name}", unless_empty(partial(kernel, None)))
    for name, kernel in _KERNELS.items()
}
_ROUTED_OPS = {
    name: define_routed_op(f"moe_flashinfer_trtllm_{name}_routed", partial(_from_logits, kernel))
    for name, kernel in _KERNELS.items()
}


class FlashinferTrtllmBackend:
    name = "flashinfer_trtllm"

    def check(self, spec: MoESpec, device: DeviceInfo) -> Verdict:
        half = half_reasons(spec, common=_needs_common_globals(spec))
        return Verdict(self.name, (*common_reasons(MODES, spec, device), *half, *limit_reasons(spec)))

    def rank(self, spec: MoESpec, device: DeviceInfo) -> int:
        """First where the user allows the rounding that its kernels are there for; ``triton_w4a16`` before the others,
        which are not measured. Without a gate they gave wrong results in another engine (vllm-project/vllm#52308).
        """
        mode = choose_mode(MODES, spec, device)
        if not spec.activation.gated:
            return 10
        return 30 if mode is None or mode.activations is None else 60

    def probe_errors(self) -> tuple[type[Exception], ...]:
        return PROBE_ERRORS

    def plan(self, spec: MoESpec, device: DeviceInfo) -> KernelPlan:
        mode = choose_mode(MODES, spec, device)
        assert mode is not None, "check refuses it"
        placing = Placing.of(spec, mode.rows)
        common = _needs_common_globals(spec)
        ready: dict[str, PlanArg] = {
            **_weight("w13", mode, placing, common, spec.has_w13_bias),
            **_weight("w2", mode, placing, common, spec.has_w2_bias),
        }
        args, op = experts_args(spec, table=routes_table(spec), **ready), _OPS[mode.name]  # type: ignore[arg-type]
        if routes_inside(spec):
            args, op = routed_args(spec, args), _ROUTED_OPS[mode.name]
        padding, layout = padding_text(spec, mode.rows), "shuffled rows, scale tiles"
        return KernelPlan(op, args, layout=layout, padding=padding, activations=mode.activations)


def _needs_common_globals(spec: MoESpec) -> bool:
    """One limit meets gate and up in the units of their accumulators."""
    return spec.activation.limit is not None


@cache
def _weight(name: str, mode: Mode, placing: Placing, common: bool, has_bias: bool) -> dict[str, Prepared]:
    """Arguments of ``experts_args`` for one weight. Cached, so that equal layers share their recipes."""
    codes, scale, glob = Operand(name), Operand(f"{name}_scale"), Operand(f"{name}_global")
    suffix = f"trtllm_{mode.name}"
    ready = {
        name: Prepared(f"{name}_{suffix}", partial(_codes, name, mode, placing), (codes, scale)),
        f"{name}_scale": Prepared(f"{name}_scale_{suffix}", partial(_scales, name, mode, placing), (scale,)),
    }
    nvfp4 = mode.activations == "nvfp4"
    if nvfp4:
        factors = partial(_w13_factors, placing, common) if name == "w13" else partial(_w2_factors, placing)
        ready[f"{name}_global"] = Prepared(f"{name}_factors_{suffix}", factors, (glob,))
    if has_bias:
        bias = partial(_unit_bias if nvfp4 else _bias, name, placing)
        of = (Operand(f"{name}_bias"), glob) if nvfp4 else (Operand(f"{name}_bias"),)
        ready[f"{name}_bias"] = Prepared(f"{name}_bias_{suffix}", bias, of)
    return ready


def _codes(name: str, mode: Mode, placing: Placing, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return shuffle_rows(placing.codes(name, mode.weights, codes, scale))


def _scales(name: str, mode: Mode, placing: Placing, scale: torch.Tensor) -> torch.Tensor:
    return to_trtllm_scales(placing.scales(name, mode.weights, scale))


def _w13_factors(placing: Placing, common: bool, global_scale: torch.Tensor) -> torch.Tensor:
    """float32 [3, E]: ``output1``, gate's and up's units, for activations of factor 1."""
    gate, up = placing.globals(common, global_scale)
    one = torch.ones_like(gate)
    scales = trtllm_scales(gate, up, one, one, one * PRODUCT_FACTOR)
    return torch.stack((scales.output1, scales.gate_unit, scales.up_unit))


def _w2_factors(placing: Placing, global_scale: torch.Tensor) -> torch.Tensor:
    return placing.product_globals(nonzero(global_scale))


def _bias(name: str, placing: Placing, bias: torch.Tensor) -> torch.Tensor:
    return shuffle_rows(placing.rows(name, bias.to(torch.float32)))


def _unit_bias(name: str, placing: Placing, bias: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """A bias as accumulators have it: w2's finished, w13's for activations of factor 1."""
    bias = bias.to(torch.float32)
    if name == "w2":
        return _bias(name, placing, in_units(bias, _w2_factors(placing, global_scale)))
    gate, up = placing.globals(False, global_scale)
    if up is None or placing.source is None:
        return _bias(name, placing, in_units(bias, gate))
    return _bias(name, placing, bias_in_units(bias, placing.source, gate, up))
