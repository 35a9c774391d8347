"""The timed call: hidden states and router logits in, hidden states out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ..plan import KernelPlan, Prepared, prepare, resolve_op
from ..random_layer import route
from ..spec import MoESpec, Operand

Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From hidden [T, H] and logits [T, E] to [T, H]."""

_INPUTS = (Operand.HIDDEN, Operand.ROUTER_LOGITS, Operand.TOPK_IDS, Operand.TOPK_WEIGHTS)
"""What differs from call to call."""


def planned_layer(spec: MoESpec, plan: KernelPlan, weights: Mapping[Operand, torch.Tensor]) -> Layer:
    """The planned call on prepared weights; it keeps no canonical weight that the plan does not read as it is.

    Logits go to the op where the plan takes them, and are routed by torch operations where it does not. The op and
    what does not change are looked up once, as in a compiled graph.
    """
    op, prepared, top_k = resolve_op(plan.op), prepare(plan, weights), spec.top_k
    bound = [
        prepared[arg.name] if isinstance(arg, Prepared) else weights.get(arg, arg) if isinstance(arg, Operand) else arg
        for arg in plan.args
    ]
    free = [(index, _INPUTS.index(arg)) for index, arg in enumerate(bound) if isinstance(arg, Operand)]
    routed = Operand.ROUTER_LOGITS not in plan.operands

    def layer(hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        given = (hidden, logits, *route(logits, top_k)) if routed else (hidden, logits)
        args = list(bound)
        for index, place in free:
            args[index] = given[place]
        return op(*args)  # type: ignore[no-any-return]

    return layer
