"""``cpu_aten``: routed experts only, weights decoded chunk by chunk, in plain ATen.

For machines without a C++ compiler, and for blocks that ``cpu`` refuses. Reads the canonical layout. An expert that no
token is routed to costs nothing, and no more than a cache-sized piece of one expert is ever held dequantised.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..device import DeviceInfo
from ..kernels.cpu_aten import fp4_linear, gemm_dtype
from ..layouts.gate_up import to_gate_up_halves
from ..plan import KernelPlan, PlanArg, Prepared
from ..reasons import Reason, ReasonCode, Verdict
from ..reference import activate
from ..spec import GateUpOrder, MoESpec, Operand
from .ops import ExpertsCall, ExpertWeights, define_experts_op, experts_args, range_reasons

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _moe(call: ExpertsCall) -> torch.Tensor:
    """The block ``[T, H]`` in ``out_dtype``: h is rounded to the activation dtype, the combine is float32."""
    dtype = gemm_dtype(call.hidden.dtype)
    top_k = call.topk_ids.shape[1]
    hidden = call.hidden.to(dtype)
    weights = call.topk_weights.flatten().float()
    out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for expert, slots in _routes(call.topk_ids, call.w13.codes.shape[0]):
        token = slots // top_k
        gate_up = _expert_linear(hidden[token], call.w13, expert)
        h = activate(gate_up, call.activation, call.w13_order).to(call.hidden.dtype)
        y = _expert_linear(h.to(dtype), call.w2, expert)
        out.index_add_(0, token, y.mul_(weights[slots].unsqueeze(-1)))
    return out.to(call.out_dtype)


def _routes(topk_ids: torch.Tensor, num_experts: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Each routed expert with its slots: flat positions in ``topk_ids``, in token order."""
    ids = topk_ids.flatten()
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    order = ids.argsort(stable=True)
    counts = ids.bincount(minlength=num_experts).tolist()[:num_experts]
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, order[start : start + count]
            start += count


def _expert_linear(x: torch.Tensor, weights: ExpertWeights, expert: int) -> torch.Tensor:
    """One expert's linear layer [m, K] -> float32 [m, N]; the global scale multiplies the result."""
    out = fp4_linear(x, weights.codes[expert], weights.scale[expert]).float()
    if weights.global_scale is not None:
        out *= weights.global_scale[expert if weights.global_scale.shape[0] > 1 else 0]
    if weights.bias is not None:
        out += weights.bias[expert]
    return out


class CpuAtenBackend:
    name = "cpu_aten"
    op = define_experts_op("moe_cpu_aten", _moe)

    def check(self, spec: MoESpec, device: DeviceInfo) -> Verdict:
        reasons = [*range_reasons(spec)]
        if device.family != "cpu":
            reasons.append(Reason(ReasonCode.CAPABILITY, "a CPU", str(device), "it is for models on a CPU"))
        for what, dtype in (("activations", spec.act_dtype), ("output", spec.out_dtype)):
            if dtype not in _DTYPES:
                need = f"{what} in bfloat16, float16 or float32"
                reasons.append(Reason(ReasonCode.DTYPE, need, str(dtype), "model.to(torch.bfloat16)"))
        for what, size in (("hidden size", spec.hidden_size), ("intermediate size", spec.intermediate_size)):
            if size % spec.weight_format.block_size:
                need = f"a {what} that is a multiple of {spec.weight_format.block_size}"
                reasons.append(Reason(ReasonCode.SHAPE, need, str(size), "pad the weights with zeros before packing"))
        return Verdict(self.name, tuple(reasons))

    def rank(self, spec: MoESpec, device: DeviceInfo) -> int:
        return 40

    def plan(self, spec: MoESpec, device: DeviceInfo) -> KernelPlan:
        if not (spec.activation.gated and spec.w13_order is GateUpOrder.INTERLEAVED):
            return KernelPlan(self.op, experts_args(spec))

        def halves(operand: Operand) -> PlanArg:
            return Prepared(f"{operand}_halves", to_gate_up_halves, (operand,))

        has_global = spec.weight_format.has_global_scale

        args = experts_args(
            spec,
            w13=halves(Operand.W13),
            w13_scale=halves(Operand.W13_SCALE),
            w13_global=halves(Operand.W13_GLOBAL) if has_global else None,
            w13_bias=halves(Operand.W13_BIAS),
            w13_order=GateUpOrder.GATE_UP,
        )
        return KernelPlan(self.op, args, layout="gate/up halves")
