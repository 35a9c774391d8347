"""``grouped_mm``: the block on unquantised weights."""

from __future__ import annotations

import torch

from ...device import DeviceInfo
from ...random_layer import random_bias, route
from ...spec import MoESpec, Operand
from ..layers import Layer
from .base import CUDA, compiled_activation


class GroupedMM:
    """torch's ``grouped_mm`` over sorted tokens on bfloat16 weights: what a user has before quantising."""

    name = "grouped_mm"
    weights: tuple[str, ...] = ("bf16",)
    logits_dtype: torch.dtype | None = None

    def missing(self, device: DeviceInfo) -> str:
        return ""

    def layer(self, spec: MoESpec) -> Layer:
        shapes = {
            Operand.W13: (spec.num_experts, spec.w13_rows, spec.hidden_size),
            Operand.W2: (spec.num_experts, spec.hidden_size, spec.intermediate_size),
        }
        weights = {o: torch.randn(s, dtype=spec.act_dtype, device=CUDA).mul_(0.02) for o, s in shapes.items()}
        if spec.has_w13_bias:
            weights[Operand.W13_BIAS] = random_bias(spec, CUDA, spec.w13_rows)
        if spec.has_w2_bias:
            weights[Operand.W2_BIAS] = random_bias(spec, CUDA, spec.hidden_size)
        return grouped_mm_layer(spec, weights)


def grouped_mm_layer(spec: MoESpec, weights: dict[Operand, torch.Tensor]) -> Layer:
    """The block on dense W13 [E, 2I, H], halves gate and up, W2 [E, H, I], and biases if the spec has them."""
    activation = compiled_activation(spec.activation)
    w13, w2 = weights[Operand.W13].transpose(-2, -1), weights[Operand.W2].transpose(-2, -1)
    w13_bias, w2_bias = weights.get(Operand.W13_BIAS), weights.get(Operand.W2_BIAS)

    def layer(hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        ids, scores = route(logits, spec.top_k)
        expert, order = ids.flatten().sort()
        token = order // spec.top_k
        counts = torch.histc(ids.float(), bins=spec.num_experts, min=0, max=spec.num_experts - 1)
        ends = counts.cumsum(0).to(torch.int32)
        h = activation(torch._grouped_mm(hidden[token], w13, offs=ends), w13_bias, expert)
        y = torch._grouped_mm(h, w2, offs=ends)
        if w2_bias is not None:
            y = y + w2_bias[expert]
        y = y * scores.flatten()[order].unsqueeze(-1).to(y.dtype)
        return torch.zeros_like(hidden).index_add_(0, token, y)

    return layer
