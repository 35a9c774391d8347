"""The timed call: hidden states and router logits in, hidden states out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ..plan import KernelPlan, Prepared, prepare, resolve_op
from ..random_layer import route
from ..spec import MoESpec, Operand

Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From hidden [T, H] and logits [T, E] to [T, H]."""


def planned_layer(spec: MoESpec, plan: KernelPlan, weights: Mapping[Operand, torch.Tensor]) -> Layer:
    """The planned call on prepared weights; it keeps no canonical weight that the plan does not read as it is.

    Logits go to the op where the plan takes them, and are routed by torch operations where it does not. The op and
    what does not change are looked up once, as in a compiled graph.
    """
    op, prepared, top_k = resolve_op(plan.op), prepare(plan, weights), spec.top_k
    fixed = [
        prepared[arg.name] if isinstance(arg, Prepared) else weights.get(arg) if isinstance(arg, Operand) else arg
        for arg in plan.args
    ]
    at = {arg: index for index, arg in enumerate(plan.args) if isinstance(arg, Operand)}
    hidden_at, logits_at = at[Operand.HIDDEN], at.get(Operand.ROUTER_LOGITS)
    ids_at, weights_at = at.get(Operand.TOPK_IDS), at.get(Operand.TOPK_WEIGHTS)

    def layer(hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        args = list(fixed)
        args[hidden_at] = hidden
        if logits_at is not None:
            args[logits_at] = logits
        if ids_at is not None and weights_at is not None:
            args[ids_at], args[weights_at] = route(logits, top_k)
        return op(*args)  # type: ignore[no-any-return]

    return layer
