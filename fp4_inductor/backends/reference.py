"""``reference``: the block as its spec defines it, in float32 plain torch, on any device. Slow, and always right."""

from __future__ import annotations

import torch

from ..device import DeviceInfo
from ..plan import KernelPlan
from ..reasons import Verdict
from ..reference import moe_reference
from ..spec import MoESpec, Operand
from .ops import ExpertsCall, define_experts_op, experts_args, range_reasons


def _moe(call: ExpertsCall) -> torch.Tensor:
    operands = {
        Operand.HIDDEN: call.hidden,
        Operand.TOPK_IDS: call.topk_ids,
        Operand.TOPK_WEIGHTS: call.topk_weights,
        Operand.W13: call.w13.codes,
        Operand.W13_SCALE: call.w13.scale,
        Operand.W13_GLOBAL: call.w13.global_scale,
        Operand.W13_BIAS: call.w13.bias,
        Operand.W2: call.w2.codes,
        Operand.W2_SCALE: call.w2.scale,
        Operand.W2_GLOBAL: call.w2.global_scale,
        Operand.W2_BIAS: call.w2.bias,
    }
    given = {operand: tensor for operand, tensor in operands.items() if tensor is not None}
    return moe_reference(_spec_of(call), given, torch.float32).to(call.out_dtype)


def _spec_of(call: ExpertsCall) -> MoESpec:
    num_experts, hidden_size, half = call.w2.codes.shape
    return MoESpec(
        num_experts=num_experts,
        top_k=call.topk_ids.shape[1],
        hidden_size=hidden_size,
        intermediate_size=2 * half,
        weight_format=call.weight_format,
        activation=call.activation,
        act_dtype=call.hidden.dtype,
        weights_dtype=call.topk_weights.dtype,
        out_dtype=call.out_dtype,
        w13_order=call.w13_order,
        has_w13_bias=call.w13.bias is not None,
        has_w2_bias=call.w2.bias is not None,
    )


class ReferenceBackend:
    name = "reference"
    op = define_experts_op("moe_reference", _moe)

    def check(self, spec: MoESpec, device: DeviceInfo) -> Verdict:
        return Verdict(self.name, tuple(range_reasons(spec)))

    def rank(self, spec: MoESpec, device: DeviceInfo) -> int:
        return 0

    def plan(self, spec: MoESpec, device: DeviceInfo) -> KernelPlan:
        return KernelPlan(self.op, experts_args(spec))
