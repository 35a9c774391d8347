"""What a kernel backend is: three pure questions over (spec, device). A backend never touches FX.

Backends that compute the experts grade ``(hidden, ids, weights, w13, w2, ...) -> [T, H]`` share one op
schema, so that every fused call reads the same in a dump.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from ..device import DeviceInfo
from ..formats import BlockFormat
from ..plan import KernelPlan, PlanArg, Prepared
from ..reasons import Verdict
from ..spec import RUNTIME, ActivationSpec, GateUpOrder, MoESpec, Operand


@runtime_checkable
class KernelBackend(Protocol):
    name: str

    def check(self, spec: MoESpec, device: DeviceInfo) -> Verdict:
        """Every reason against running ``spec`` on ``device``. Never asks the hardware."""
        ...

    def rank(self, spec: MoESpec, device: DeviceInfo) -> int:
        """Preference among the willing, higher first; backed by a measurement."""
        ...

    def plan(self, spec: MoESpec, device: DeviceInfo) -> KernelPlan:
        """The call and its prepared weights. Only asked where ``check`` is ok."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One GEMM's weights as the op got them: canonical, or in the backend's own layout."""

    codes: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ExpertsCall:
    """The arguments of an experts op, decoded.

    Attributes:
        hidden: [T, H]; topk_ids: [T, k] int; topk_weights: [T, k] float.
        activation: with every RUNTIME field replaced by its value.
    """

    hidden: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    w13: ExpertWeights
    w2: ExpertWeights
    activation: ActivationSpec
    w13_order: GateUpOrder
    weight_format: BlockFormat
    out_dtype: torch.dtype


_SCHEMA = (
    "(Tensor hidden, Tensor topk_ids, Tensor topk_weights, "
    "Tensor w13, Tensor w13_scale, Tensor? w13_global, Tensor? w13_bias, "
    "Tensor w2, Tensor w2_scale, Tensor? w2_global, Tensor? w2_bias, "
    "Tensor? alpha_input, Tensor? beta_input, Tensor? limit_input, Tensor? up_limit_input, "
    "str activation, bool gated, float alpha, float beta, float? limit, float? up_limit, str bound, str w13_order, "
    "str weight_format, int block_size, str scale_encoding, ScalarType out_dtype) -> Tensor"
)

_library = torch.library.Library("fp4_inductor", "FRAGMENT")


def define_experts_op(name: str, kernel: Callable[[ExpertsCall], torch.Tensor]) -> str:
    """Register ``fp4_inductor::<name>`` with the experts schema and return its qualified name.

    ``kernel`` returns ``[T, H]`` in ``out_dtype``; it may allocate, and must not synchronise with the
    host where it is meant for CUDA graphs. The op is functional and has no autograd formula: graphs
    that need gradients are never rewritten.
    """

    def implementation(*args: object) -> torch.Tensor:
        return kernel(_decode(*args))  # type: ignore[arg-type]

    def fake(hidden: torch.Tensor, *args: object) -> torch.Tensor:
        return hidden.new_empty(hidden.shape, dtype=args[-1])  # type: ignore[call-overload, no-any-return]

    qualified = f"fp4_inductor::{name}"
    _library.define(f"{name}{_SCHEMA}", tags=(torch.Tag.needs_exact_strides,))
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, fake, lib=_library)
    return qualified


def experts_args(
    spec: MoESpec,
    *,
    w13: PlanArg = Operand.W13,
    w13_scale: PlanArg = Operand.W13_SCALE,
    w13_global: PlanArg = Operand.W13_GLOBAL,
    w13_bias: PlanArg = Operand.W13_BIAS,
    w2: PlanArg = Operand.W2,
    w2_scale: PlanArg = Operand.W2_SCALE,
    w2_global: PlanArg = Operand.W2_GLOBAL,
    w2_bias: PlanArg = Operand.W2_BIAS,
    w13_order: GateUpOrder | None = None,
) -> tuple[PlanArg, ...]:
    """Plan arguments of an experts op for ``spec``; a backend passes what it prepares differently.

    Biases that the spec does not have become None; so do globals, unless the backend prepares its own.
    """
    act, fmt = spec.activation, spec.weight_format

    def has_global(arg: PlanArg) -> bool:
        return fmt.has_global_scale or isinstance(arg, Prepared)

    def knob(value: object, operand: Operand) -> Operand | None:
        return operand if value is RUNTIME else None

    def literal(value: object) -> float | None:
        return None if value is None else 0.0 if value is RUNTIME else float(value)  # type: ignore[arg-type]

    return (
        Operand.HIDDEN,
        Operand.TOPK_IDS,
        Operand.TOPK_WEIGHTS,
        w13,
        w13_scale,
        w13_global if has_global(w13_global) else None,
        w13_bias if spec.has_w13_bias else None,
        w2,
        w2_scale,
        w2_global if has_global(w2_global) else None,
        w2_bias if spec.has_w2_bias else None,
        knob(act.alpha, Operand.ALPHA),
        knob(act.beta, Operand.BETA),
        knob(act.limit, Operand.LIMIT),
        knob(act.up_limit, Operand.UP_LIMIT),
        act.kind,
        act.gated,
        literal(act.alpha),
        literal(act.beta),
        literal(act.limit),
        literal(act.up_limit),
        act.bound,
        str(spec.w13_order if w13_order is None else w13_order),
        fmt.name,
        fmt.block_size,
        fmt.scale_encoding,
        spec.out_dtype,
    )


def _decode(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_global: torch.Tensor | None,
    w13_bias: torch.Tensor | None,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_global: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    alpha_input: torch.Tensor | None,
    beta_input: torch.Tensor | None,
    limit_input: torch.Tensor | None,
    up_limit_input: torch.Tensor | None,
    activation: str,
    gated: bool,
    alpha: float,
    beta: float,
    limit: float | None,
    up_limit: float | None,
    bound: str,
    w13_order: str,
    weight_format: str,
    block_size: int,
    scale_encoding: str,
    out_dtype: torch.dtype,
) -> ExpertsCall:
    # Runtime scalars are 0-d CPU tensors (Dynamo lifts Python floats so), hence no device sync here.
    return ExpertsCall(
        hidden=hidden,
        topk_ids=topk_ids,
        topk_weights=topk_weights,
        w13=ExpertWeights(w13, w13_scale, w13_global, w13_bias),
        w2=ExpertWeights(w2, w2_scale, w2_global, w2_bias),
        activation=ActivationSpec(
            kind=activation,  # type: ignore[arg-type]
            gated=gated,
            alpha=alpha if alpha_input is None else float(alpha_input),
            beta=beta if beta_input is None else float(beta_input),
            limit=limit if limit_input is None else float(limit_input),
            up_limit=up_limit if up_limit_input is None else float(up_limit_input),
            bound=bound,  # type: ignore[arg-type]
        ),
        w13_order=GateUpOrder(w13_order),
        weight_format=BlockFormat(
            weight_format,
            block_size,
            scale_encoding,  # type: ignore[arg-type]
            has_global_scale=w13_global is not None,
        ),
        out_dtype=out_dtype,
    )
