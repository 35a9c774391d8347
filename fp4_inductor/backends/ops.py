"""The ops that fused calls are, and their arguments: from a spec into a plan, and back to what a kernel takes.

Backends that compute the experts grade ``(hidden, ids, weights, w13, w2, ...) -> [T, H]`` share one op
schema, so that every fused call reads the same in a dump. Those that also route share a second one, with the
router's logits and fields in the place of ids and weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ..formats import BlockFormat
from ..plan import PlanArg, Prepared, resolve_op
from ..reasons import Reason, ReasonCode
from ..spec import RUNTIME, ActivationSpec, GateUpOrder, MoESpec, Operand, RouterSpec, Runtime, Scoring


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
        table: what the backend wrote into the plan for itself, as configurations by token count; "" for none.
    """

    hidden: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    w13: ExpertWeights
    w2: ExpertWeights
    activation: ActivationSpec
    w13_order: GateUpOrder
    weight_format: BlockFormat
    table: str
    out_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class RouterCall:
    """The router's arguments of a routed op, decoded.

    Attributes:
        spec: scores are float32, and a RUNTIME factor is replaced by its value where the host knows it.
        logits: [T, E]; bias, expert_scale: [E]; scale: one element, where ``spec.scaling_factor`` is RUNTIME.
        weights_dtype: in which weights leave the router.
    """

    spec: RouterSpec
    top_k: int
    weights_dtype: torch.dtype
    logits: torch.Tensor
    bias: torch.Tensor | None
    scale: torch.Tensor | None
    expert_scale: torch.Tensor | None


_ROUTING_SCHEMA = "Tensor topk_ids, Tensor topk_weights, "
_ROUTER_SCHEMA = (
    "Tensor router_logits, Tensor? router_bias, Tensor? router_scale, Tensor? router_expert_scale, "
    "int top_k, str scoring, bool topk_before_scoring, int num_groups, int topk_groups, str group_score, "
    "float group_fill, bool renormalize, float renormalize_eps, float renormalize_min, float scaling_factor, "
    "ScalarType weights_dtype, "
)
_NUM_ROUTER_ARGS = _ROUTER_SCHEMA.count(",")
_EXPERTS_SCHEMA = (
    "Tensor w13, Tensor w13_scale, Tensor? w13_global, Tensor? w13_bias, "
    "Tensor w2, Tensor w2_scale, Tensor? w2_global, Tensor? w2_bias, "
    "Tensor? alpha_input, Tensor? beta_input, Tensor? limit_input, Tensor? up_limit_input, "
    "str activation, bool gated, float alpha, float beta, float? limit, float? up_limit, str bound, str w13_order, "
    "str weight_format, int block_size, str scale_encoding, str table, ScalarType out_dtype) -> Tensor"
)

_library = torch.library.Library("fp4_inductor", "FRAGMENT")
_implementations: dict[str, Callable[..., torch.Tensor]] = {}


def call_implementation(op: str, args: tuple[Any, ...]) -> torch.Tensor:
    """What the op called ``op`` does, whatever device its arguments are on."""
    return _implementations[op](*args)


def define_experts_op(name: str, kernel: Callable[[ExpertsCall], torch.Tensor]) -> str:
    """Register ``fp4_inductor::<name>`` with the experts schema and return its qualified name.

    ``kernel`` returns ``[T, H]`` in ``out_dtype``; it may allocate, and must not synchronise with the
    host where it is meant for CUDA graphs. The op is functional and has no autograd formula: graphs
    that need gradients are never rewritten.
    """

    def implementation(*args: object) -> torch.Tensor:
        return kernel(_decode(*args))  # type: ignore[arg-type]

    return _define(name, _ROUTING_SCHEMA, implementation)


def define_native_op(name: str, install: Callable[[], None]) -> str:
    """As ``define_experts_op``, for an op of which ``install`` registers with torch's dispatcher what it does on a CPU.

    The first call goes through Python, to install that, and so do those while Dynamo traces, since torch's dispatcher
    in Python keeps what it found first.
    """
    qualified = f"fp4_inductor::{name}"
    on_cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def implementation(hidden: torch.Tensor, *args: object) -> torch.Tensor:
        if hidden.device.type != "cpu":
            got = f"{qualified} needs tensors on a CPU, got them on {hidden.device}"
            raise NotImplementedError(f"{got}: compile the model again where it is now")
        install()
        return resolve_op(qualified).redispatch(on_cpu, hidden, *args)  # type: ignore[no-any-return]

    return _define(name, _ROUTING_SCHEMA, implementation)


def define_routed_op(
    name: str, kernel: Callable[[RouterCall, Callable[[torch.Tensor, torch.Tensor], ExpertsCall]], torch.Tensor]
) -> str:
    """As ``define_experts_op``, for an op that gets logits: ``kernel`` gives ids and weights and gets the rest."""

    def implementation(hidden: torch.Tensor, *args: object) -> torch.Tensor:
        router, rest = args[:_NUM_ROUTER_ARGS], args[_NUM_ROUTER_ARGS:]

        def experts(topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> ExpertsCall:
            return _decode(hidden, topk_ids, topk_weights, *rest)  # type: ignore[arg-type]

        return kernel(_decode_router(*router), experts)  # type: ignore[arg-type]

    return _define(name, _ROUTER_SCHEMA, implementation)


def _define(name: str, routing_schema: str, implementation: Callable[..., torch.Tensor]) -> str:
    def fake(hidden: torch.Tensor, *args: object) -> torch.Tensor:
        return hidden.new_empty(hidden.shape, dtype=args[-1])  # type: ignore[call-overload, no-any-return]

    qualified = f"fp4_inductor::{name}"
    schema = f"(Tensor hidden, {routing_schema}{_EXPERTS_SCHEMA}"
    _library.define(f"{name}{schema}", tags=(torch.Tag.needs_exact_strides,))
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, fake, lib=_library)
    _implementations[qualified] = implementation
    return qualified


def range_reasons(spec: MoESpec) -> Iterator[Reason]:
    """The shared schema has no range of experts: ids must count those that are here."""
    if spec.local_experts is not None:
        needed, got = "ids that count the experts of this device", str(spec.local_experts)
        cure = "subtract the first expert's number from ids in the graph: what is outside [0, E) contributes nothing"
        yield Reason(ReasonCode.PARALLEL, needed, got, cure)


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
    table: str = "",
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
        table,
        spec.out_dtype,
    )


def routed_args(spec: MoESpec, args: tuple[PlanArg, ...]) -> tuple[PlanArg, ...]:
    """Plan arguments of a routed op, from those of an experts op; ``spec.router`` has neither given ids nor columns
    for shared or null experts, and is no sparsemixer."""
    router = spec.router
    assert isinstance(router, RouterSpec), "the router must be known"
    runtime = router.scaling_factor is RUNTIME
    hidden, _, _, *experts = args
    return (
        hidden,
        Operand.ROUTER_LOGITS,
        Operand.ROUTER_BIAS if router.has_bias else None,
        Operand.ROUTER_SCALE if runtime else None,
        Operand.ROUTER_EXPERT_SCALE if router.has_expert_scale else None,
        spec.top_k,
        str(router.scoring),
        router.topk_before_scoring,
        router.num_groups,
        router.topk_groups,
        router.group_score,
        router.group_fill,
        router.renormalize,
        router.renormalize_eps,
        router.renormalize_min,
        1.0 if runtime else float(router.scaling_factor),  # type: ignore[arg-type]
        spec.weights_dtype,
        *experts,
    )


# The same in every call of a layer, and not made anew in each.
_activation, _format, _order = lru_cache(256)(ActivationSpec), lru_cache(256)(BlockFormat), lru_cache(GateUpOrder)


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
    table: str,
    out_dtype: torch.dtype,
) -> ExpertsCall:
    # Runtime scalars are 0-d CPU tensors (Dynamo lifts Python floats so), hence no device sync here.
    return ExpertsCall(
        hidden=hidden,
        topk_ids=topk_ids,
        topk_weights=topk_weights,
        w13=ExpertWeights(w13, w13_scale, w13_global, w13_bias),
        w2=ExpertWeights(w2, w2_scale, w2_global, w2_bias),
        activation=_activation(
            activation,
            gated,
            alpha if alpha_input is None else float(alpha_input),
            beta if beta_input is None else float(beta_input),
            limit if limit_input is None else float(limit_input),
            up_limit if up_limit_input is None else float(up_limit_input),
            bound,
        ),
        w13_order=_order(w13_order),
        weight_format=_format(weight_format, block_size, scale_encoding, w13_global is not None),
        table=table,
        out_dtype=out_dtype,
    )


def _decode_router(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    expert_scale: torch.Tensor | None,
    top_k: int,
    scoring: str,
    topk_before_scoring: bool,
    num_groups: int,
    topk_groups: int,
    group_score: str,
    group_fill: float,
    renormalize: bool,
    renormalize_eps: float,
    renormalize_min: float,
    scaling_factor: float,
    weights_dtype: torch.dtype,
) -> RouterCall:
    factor: float | Runtime = scaling_factor
    if scale is not None:
        # A scalar on a device stays there; one that Dynamo made of a Python float is on the host.
        factor, scale = (float(scale), None) if scale.device.type == "cpu" else (RUNTIME, scale.reshape(1))
    return RouterCall(
        spec=RouterSpec(
            Scoring(scoring),
            topk_before_scoring=topk_before_scoring,
            has_bias=bias is not None,
            num_groups=num_groups,
            topk_groups=topk_groups,
            group_score=group_score,  # type: ignore[arg-type]
            group_fill=group_fill,
            renormalize=renormalize,
            renormalize_eps=renormalize_eps,
            renormalize_min=renormalize_min,
            scaling_factor=factor,
            has_expert_scale=expert_scale is not None,
        ),
        top_k=top_k,
        weights_dtype=weights_dtype,
        logits=logits.reshape(-1, logits.shape[-1]),
        bias=None if bias is None else bias.reshape(-1),
        scale=scale,
        expert_scale=None if expert_scale is None else expert_scale.reshape(-1),
    )
