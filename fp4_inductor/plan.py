"""``KernelPlan``: which op to call and how each argument comes from the operands. Data, no FX.

One plan has two interpreters: ``run_plan`` here evaluates it eagerly (tests, benchmarks), and
``emit.emit_plan`` writes it into a graph, where the prepared weights fold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from .layouts.huge_pages import to_huge_pages
from .spec import Operand


@dataclass(frozen=True, slots=True)
class Prepared:
    """A kernel-ready tensor as a pure torch function of canonical operands.

    ``fn`` must be traceable by ``make_fx``, must not read sizes of anything but its arguments, and
    must not return an alias that depends on strides of its inputs.
    """

    name: str
    fn: Callable[..., torch.Tensor]
    of: tuple[Operand, ...]


PlanArg: TypeAlias = "Operand | Prepared | int | float | bool | str | torch.dtype | None"


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """A call of ``torch.ops.<op>.default(*args)`` that returns ``[T, H]`` in the spec's ``out_dtype``.

    Attributes:
        op: qualified name, e.g. ``"fp4_inductor::moe_w4a16"``.
        args: in the op's order.
        layout: name of the weight layout, for people.
        padding: what was padded, for people ("" if nothing was).
        weighs_input: the op itself multiplies what goes into an expert by its routing weight, where the spec says
            ``weight_on_input``. For ops that do not, whoever interprets the plan gives them rows of one slot each.
        activations: the format to which the op rounds activations; None where they stay in their dtype.
    """

    op: str
    args: tuple[PlanArg, ...]
    layout: str = "canonical"
    padding: str = ""
    weighs_input: bool = False
    activations: str | None = None

    @property
    def prepared(self) -> tuple[Prepared, ...]:
        return tuple(arg for arg in self.args if isinstance(arg, Prepared))

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Every operand the plan reads, directly or through a prepared tensor, each once."""
        found: dict[Operand, None] = {}
        for arg in self.args:
            if isinstance(arg, Operand):
                found[arg] = None
            elif isinstance(arg, Prepared):
                found.update(dict.fromkeys(arg.of))
        return tuple(found)


def resolve_op(name: str) -> torch._ops.OpOverload:
    """The default overload of the op called ``namespace::name``."""
    namespace, _, op = name.partition("::")
    return getattr(getattr(torch.ops, namespace), op).default  # type: ignore[no-any-return]


def prepare(plan: KernelPlan, operands: Mapping[Operand, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The plan's prepared tensors by name, from canonical operands."""
    return {p.name: to_huge_pages(p.fn(*(operands[o] for o in p.of))) for p in plan.prepared}


def run_plan(
    plan: KernelPlan,
    operands: Mapping[Operand, torch.Tensor],
    prepared: Mapping[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Evaluate a plan eagerly on canonical operands; ``prepared`` skips the re-layout."""
    ready = prepare(plan, operands) if prepared is None else prepared
    args = [
        ready[arg.name] if isinstance(arg, Prepared) else operands[arg] if isinstance(arg, Operand) else arg
        for arg in plan.args
    ]
    out: torch.Tensor = resolve_op(plan.op)(*args)
    return out
