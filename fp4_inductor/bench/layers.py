"""The timed call: hidden states and router logits in, hidden states out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ..plan import KernelPlan, prepare, run_plan
from ..random_layer import route
from ..spec import MoESpec, Operand

Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From hidden [T, H] and logits [T, E] to [T, H]."""


def planned_layer(spec: MoESpec, plan: KernelPlan, weights: Mapping[Operand, torch.Tensor]) -> Layer:
    """The planned call on prepared weights; it keeps no canonical weight that the plan does not read as it is.

    Logits go to the op where the plan takes them, and are routed by torch operations where it does not.
    """
    prepared = prepare(plan, weights)
    direct = {arg: weights[arg] for arg in plan.args if isinstance(arg, Operand) and arg in weights}
    takes_logits = Operand.ROUTER_LOGITS in plan.operands
    top_k = spec.top_k

    def layer(hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        operands = {**direct, Operand.HIDDEN: hidden}
        if takes_logits:
            operands[Operand.ROUTER_LOGITS] = logits
        else:
            operands[Operand.TOPK_IDS], operands[Operand.TOPK_WEIGHTS] = route(logits, top_k)
        return run_plan(plan, operands, prepared)

    return layer
