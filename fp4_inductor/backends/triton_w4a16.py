"""``triton_w4a16``: FP4 weights × bfloat16 or float16 activations, own Triton kernels, any CUDA device from sm_80.

Weights are decoded exactly: e2m1 times block scale is exact in both activation types, and a float32 factor a
row multiplies the accumulator. Rows and columns of any multiple of 32 are padded to 64 with zero codes by the
re-layout; one layout serves every token count. Where the router is recognised and of a kind that the kernels know,
they route from its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ..device import DeviceInfo
from ..formats import FORMATS, MXFP4, NVFP4, BlockFormat
from ..kernels.w4a16_config import FAMILIES, DecodeConfig, choose_config, configs, shared_memory
from ..kernels.w4a16_tuning import PARTS, read_config, variants, write_config, write_table
from ..layouts.gate_up import to_granules
from ..layouts.lane_scales import absorb_scale_signs, e4m3_bytes, e4m3_rows, e8m0_bytes, e8m0_rows, to_scale_words
from ..layouts.lane_words import ROWS, to_lane_words
from ..plan import KernelPlan, Prepared
from ..reasons import Reason, ReasonCode, Verdict
from ..spec import GateUpOrder, MoESpec, Operand, RouterSpec, Scoring
from .ops import (
    ExpertsCall,
    ExpertWeights,
    RouterCall,
    call_implementation,
    define_experts_op,
    define_routed_op,
    experts_args,
    range_reasons,
    routed_args,
)

if TYPE_CHECKING:
    from ..kernels.w4a16 import Experts

_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
_BOUNDS = ("clamp", "clamp_activated", "softcap")
_ACT_DTYPES = (torch.bfloat16, torch.float16)
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MULTIPLE = 32
_SCORINGS = (Scoring.SOFTMAX, Scoring.SIGMOID, Scoring.SQRT_SOFTPLUS)
_ANY = "options={'fp4moe.backend': 'reference'} computes any, slowly"
_MAX_ROUTED = 1024
"""Experts that one program's registers hold the scores of."""


def _moe(call: ExpertsCall) -> torch.Tensor:
    from ..kernels.w4a16 import choose, run_experts

    layer = _experts(call)
    config = choose(call.hidden, call.topk_ids.shape[1], layer, call.table)
    return run_experts(call.hidden, call.topk_ids, call.topk_weights, layer, call.out_dtype, config)


def _moe_routed(call: RouterCall, experts: Callable[[torch.Tensor, torch.Tensor], ExpertsCall]) -> torch.Tensor:
    from ..kernels.w4a16 import choose, run_experts
    from ..kernels.w4a16_routed import chooses_by_logits, run_one_token
    from ..kernels.w4a16_routing import Router, empty_routing, route_from_logits

    router = Router(call.spec, call.top_k, call.weights_dtype, call.bias, call.scale, call.expert_scale)
    ids, weights = empty_routing(call.logits, router)
    given = experts(ids, weights)
    layer = _experts(given)
    config = choose(given.hidden, call.top_k, layer, given.table)
    if isinstance(config, DecodeConfig) and config.one_token is not None and chooses_by_logits(router):
        return run_one_token(given.hidden, call.logits, router, layer, config, given.out_dtype)
    routes = route_from_logits(call.logits, router, ids, weights, config)
    return run_experts(given.hidden, ids, weights, layer, given.out_dtype, config, routes)


def _experts(call: ExpertsCall) -> Experts:
    from ..kernels.w4a16 import Experts, Weights

    def weights(given: ExpertWeights) -> Weights:
        assert given.global_scale is not None, "the plan always prepares row factors"
        return Weights(given.codes, given.scale, given.global_scale, given.bias)

    e4m3 = call.weight_format.scale_encoding == "e4m3"
    return Experts(weights(call.w13), weights(call.w2), call.activation, e4m3=e4m3)


class TritonW4A16Backend:
    name = "triton_w4a16"
    tuned_parts = PARTS
    op = define_experts_op("moe_triton_w4a16", _moe)
    routed_op = define_routed_op("moe_triton_w4a16_routed", _moe_routed)
    ops = (op, routed_op)

    def check(self, spec: MoESpec, device: DeviceInfo) -> Verdict:
        reasons = [*_device_reasons(device), *_spec_reasons(spec)]
        return Verdict(self.name, tuple(reasons))

    def rank(self, spec: MoESpec, device: DeviceInfo) -> int:
        return 50

    def plan(self, spec: MoESpec, device: DeviceInfo, table: str = "") -> KernelPlan:
        order = spec.w13_order if spec.activation.gated else None
        w13 = _weight("w13", spec.weight_format, order, spec.has_w13_bias)
        w2 = _weight("w2", spec.weight_format, None, False)
        args = experts_args(spec, **w13, **w2, w13_order=spec.w13_order, table=table)
        op = self.op
        if _routes(spec):
            op, args = self.routed_op, routed_args(spec, args)
        return KernelPlan(op, args, layout="lane words, 64x64 tiles", padding=_padding(spec))

    def compile_call(self, op: str, args: tuple[Any, ...]) -> None:
        from ..kernels.launch import compiling_only

        with compiling_only():
            call_implementation(op, args)

    def config(self, spec: MoESpec, device: DeviceInfo, num_tokens: int) -> str:
        assert device.arch is not None, "check refuses it"
        columns = (spec.hidden_size, spec.intermediate_size)
        e4m3, hopper = spec.weight_format.scale_encoding == "e4m3", spec.act_dtype == torch.bfloat16
        size = (device.arch, num_tokens * spec.top_k, spec.num_experts, columns)
        return write_config(choose_config(*size, e4m3=e4m3, hopper=hopper))

    def variants(self, config: str, part: str, device: DeviceInfo) -> tuple[str, ...]:
        return tuple(map(write_config, variants(read_config(config), part, device.shared_memory)))

    def table(self, rows: Sequence[tuple[int | None, str]]) -> str:
        return write_table(rows)


def _device_reasons(device: DeviceInfo) -> list[Reason]:
    reasons = []
    if device.arch is None or device.arch not in FAMILIES:
        known = ", ".join(f"sm_{arch}" for arch in FAMILIES)
        reasons.append(Reason(ReasonCode.CAPABILITY, f"one of {known}", str(device), "move the model to such a GPU"))
    elif device.shared_memory < (need := max(shared_memory(config) for config in configs(device.arch))):
        shared, got = f"{need} bytes of shared memory a block", f"{device.shared_memory} bytes"
        reasons.append(Reason(ReasonCode.CAPABILITY, shared, got, "move the model to a GPU that has them"))
    if device.library("triton") is None:
        reasons.append(Reason(ReasonCode.LIBRARY, "triton", "none installed", "pip install triton"))
    return reasons


def _spec_reasons(spec: MoESpec) -> list[Reason]:
    reasons = []
    if spec.weight_format not in FORMATS.values():
        need, cure = f"weights in {' or '.join(FORMATS)}", "fp4_inductor.quantize_ makes them"
        reasons.append(Reason(ReasonCode.FORMAT, need, repr(spec.weight_format), cure))
    if spec.activation.kind not in _ACTIVATIONS:
        reasons.append(Reason(ReasonCode.ACTIVATION, f"one of {', '.join(_ACTIVATIONS)}", str(spec.activation), _ANY))
    if spec.activation.bound not in _BOUNDS:
        reasons.append(Reason(ReasonCode.ACTIVATION, f"one of {', '.join(_BOUNDS)}", spec.activation.bound, _ANY))
    for what, size in (("hidden size", spec.hidden_size), ("intermediate size", spec.intermediate_size)):
        if size % _MULTIPLE or size <= 0:
            need, cure = f"a {what} that is a multiple of {_MULTIPLE}", "pad the weights with zeros before packing"
            reasons.append(Reason(ReasonCode.SHAPE, need, str(size), cure))
    for what, dtype, known in (
        ("activations", spec.act_dtype, _ACT_DTYPES),
        ("routing weights", spec.weights_dtype, _OUT_DTYPES),
        ("output", spec.out_dtype, _OUT_DTYPES),
    ):
        if dtype not in known:
            need = f"{what} in {' or '.join(str(d).removeprefix('torch.') for d in known)}"
            got = str(dtype).removeprefix("torch.")
            reasons.append(Reason(ReasonCode.DTYPE, need, got, "model.to(torch.bfloat16)"))
    return [*reasons, *range_reasons(spec)]


def _routes(spec: MoESpec) -> bool:
    """Whether the kernels know the router. One that rounds scores to less than float32 stays in the graph: where it
    rounds decides between experts that are nearly equal."""
    router = spec.router
    return (
        isinstance(router, RouterSpec)
        and router.scoring in _SCORINGS
        and router.dtype is torch.float32
        and spec.num_experts <= _MAX_ROUTED
        and not (router.ids_given or router.num_shared_experts or router.num_null_experts or spec.weight_on_input)
    )


def _padding(spec: MoESpec) -> str:
    """What the re-layout pads, for people."""
    sizes = {"H": spec.hidden_size, "I": spec.intermediate_size}
    return ", ".join(f"{name} {size} to {size + -size % ROWS}" for name, size in sizes.items() if size % ROWS)


@cache
def _weight(name: str, fmt: BlockFormat, order: GateUpOrder | None, bias: bool) -> dict[str, Prepared]:
    """Arguments of ``experts_args`` for one weight. Cached, so that equal layers share their recipes."""
    codes, scale, glob = Operand(name), Operand(f"{name}_scale"), Operand(f"{name}_global")

    def prepared(suffix: str, fn: partial[torch.Tensor], *of: Operand) -> Prepared:
        return Prepared(f"{name}{suffix}_w4a16", fn, of)

    if fmt.scale_encoding == "e4m3":
        ready = {
            name: prepared("", partial(_e4m3_codes, order), codes, scale),
            f"{name}_scale": prepared("_scale", partial(_e4m3_scales, order), scale),
            f"{name}_global": prepared("_rows", partial(_e4m3_rows, order), scale, glob),
        }
    else:
        ready = {
            name: prepared("", partial(_e8m0_codes, order), codes),
            f"{name}_scale": prepared("_scale", partial(_e8m0_scales, order), scale),
            f"{name}_global": prepared("_rows", partial(_e8m0_rows, order), scale),
        }
    if bias:
        ready[f"{name}_bias"] = prepared("_bias", partial(_rows, order), Operand(f"{name}_bias"))
    return ready


def _rows(order: GateUpOrder | None, tensor: torch.Tensor) -> torch.Tensor:
    """[E, N, ...] in granules where it has gate and up rows, padded with zeros to a multiple of 64 rows."""
    if order is not None:
        tensor = to_granules(tensor, order)
    padding = (0, 0) * (tensor.dim() - 2) + (0, -tensor.shape[1] % ROWS)
    return F.pad(tensor, padding).contiguous()


def _e4m3_codes(order: GateUpOrder | None, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return to_lane_words(_rows(order, absorb_scale_signs(codes, scale)))


def _e4m3_scales(order: GateUpOrder | None, scale: torch.Tensor) -> torch.Tensor:
    return to_scale_words(_rows(order, e4m3_bytes(scale)), NVFP4.block_size)


def _e4m3_rows(order: GateUpOrder | None, scale: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    return _rows(order, e4m3_rows(scale, global_scale))


def _e8m0_codes(order: GateUpOrder | None, codes: torch.Tensor) -> torch.Tensor:
    return to_lane_words(_rows(order, codes))


def _e8m0_scales(order: GateUpOrder | None, scale: torch.Tensor) -> torch.Tensor:
    return to_scale_words(_rows(order, e8m0_bytes(scale)), MXFP4.block_size)


def _e8m0_rows(order: GateUpOrder | None, scale: torch.Tensor) -> torch.Tensor:
    return _rows(order, e8m0_rows(scale))
