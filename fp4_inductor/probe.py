"""Try a kernel on a small layer, once, before a graph is rewritten for it.

Libraries that build or download kernels when they are first called may fail then: without a compiler, without a
network, on a device whose kernels they lack. While a graph is compiled, another backend can still take the block. The
small layer has the sizes, formats and activation of the block, few experts and random weights; its result must be
that of the reference, so that a kernel that runs and is wrong is not used either.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import replace

import torch

from .backends.base import KernelBackend, ProbedBackend
from .device import DeviceInfo
from .errors import NoBackendError
from .layouts.gate_up import join_gate_up, row_order
from .layouts.padding import round_up
from .patterns.router_formulas import router_reference
from .plan import prepare, run_plan
from .random_layer import random_weights
from .reasons import Reason, ReasonCode
from .reference import moe_reference
from .spec import ACTIVATION_KNOBS, RUNTIME, GlobalGrain, MoESpec, Operand, RouterSpec
from .verify import relative_errors, tolerances

logger = logging.getLogger(__name__)

_COUNTS = {"cuda": (1, 32, 192, 1024)}
"""Tokens of a trial: on a GPU from few to many an expert, since libraries have a kernel for each of some ranges."""
_COUNT = (32,)
_MOST_TOKENS = 1024
_CURE = "see the log for all of it; leave fp4moe.backend out, so that another backend is chosen"
_LONGEST_LINE = 300
_tried: dict[tuple[str, MoESpec, DeviceInfo, torch.device], Reason | None] = {}
"""What came of every trial of this process."""


def probe(
    backend: KernelBackend, spec: MoESpec, device: DeviceInfo, where: torch.device, *, launch: bool = True
) -> Reason | None:
    """Why ``backend``, which is willing, does not run ``spec`` after all; None where it does, or needs no trial.

    Args:
        device: what ``where`` is.
        where: the device that the graph will run on; kernels are launched there.
        launch: False asks only what an earlier trial found.

    Raises:
        NoBackendError: the trial left the device unusable for this process.
    """
    if not isinstance(backend, ProbedBackend):
        return None
    key = (backend.name, small_layer(spec), device, where)
    if launch and key not in _tried:
        _tried[key] = _try(backend, small_layer(spec), device, where)
    return _tried.get(key)


def forget_trials() -> None:
    """Let every kernel be tried again: what failed may have been cured."""
    _tried.clear()


def small_layer(spec: MoESpec) -> MoESpec:
    """``spec`` with as few experts as its router can choose from, all of them here."""
    router, top_k = spec.router, spec.top_k
    groups, chosen = (router.num_groups, router.topk_groups) if isinstance(router, RouterSpec) else (1, 1)
    experts = groups * round_up(max(-(-top_k // chosen), 2), 4)
    return replace(spec, num_experts=min(experts, spec.num_experts), local_experts=None, weight_on_input=False)


def _try(backend: ProbedBackend, spec: MoESpec, device: DeviceInfo, where: torch.device) -> Reason | None:
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    logger.info("trying %s on %s, once: %s", backend.name, device, spec)
    start = time.perf_counter()
    try:
        with unset_fake_temporarily(), torch.no_grad(), _current(where):
            failure = _wrong_result(backend, spec, device, where)
    except backend.probe_errors() as error:
        logger.debug("%s failed on %s", backend.name, device, exc_info=True)
        _require_usable(backend.name, where, error)
        failure = Reason(ReasonCode.PROBE_FAILED, "a small layer to run on this device", _text(error), _CURE)
    if where.type == "cuda":
        torch.cuda.empty_cache()  # the model's own weights are prepared next
    if failure is not None:
        logger.warning("%s is not used on %s: %s", backend.name, device, failure)
    else:
        logger.info("%s runs on %s; trying it took %.1f s", backend.name, device, time.perf_counter() - start)
    return failure


def _current(where: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(where) if where.type == "cuda" else contextlib.nullcontext()


def _wrong_result(backend: ProbedBackend, spec: MoESpec, device: DeviceInfo, where: torch.device) -> Reason | None:
    plan = backend.plan(spec, device)
    rng = torch.Generator(where).manual_seed(0)  # the user's own numbers stay what they are
    weights = _weights(spec, where, rng)
    ready = prepare(plan, weights)
    for count in _token_counts(spec, where):
        operands = {**weights, **_inputs(spec, count, where, rng)}
        out = run_plan(plan, operands, ready)
        want = moe_reference(spec, operands, torch.float32).double()
        assert (out.shape, out.dtype) == (want.shape, spec.out_dtype), (out.shape, out.dtype)
        whole, per_token = relative_errors(want, out.double())
        worst = float(per_token.max())
        limits = tolerances(spec, plan.activations)
        # NaN compares false.
        if not (whole <= limits[0] and worst <= limits[1]):
            need = f"a small layer's result within {limits[0]:g} of the reference, each token within {limits[1]:g}"
            got = f"{whole:.3g}, and {worst:.3g} in a token, of {count}"
            return Reason(ReasonCode.PROBE_FAILED, need, got, "please report this")
    return None


def _token_counts(spec: MoESpec, where: torch.device) -> list[int]:
    """Those of a trial that a graph may have, or the nearest, each once; at least one token."""
    least = min(max(spec.num_tokens.min, 1), _MOST_TOKENS)
    most = _MOST_TOKENS if spec.num_tokens.max is None else max(min(spec.num_tokens.max, _MOST_TOKENS), 1)
    return sorted({min(max(count, least), most) for count in _COUNTS.get(where.type, _COUNT)})


def _weights(spec: MoESpec, where: torch.device, rng: torch.Generator) -> dict[Operand, torch.Tensor]:
    """Random weights for gates, ups and results of order one, and what else does not depend on tokens."""
    found = random_weights(spec, where, rng)
    if spec.w13_global is GlobalGrain.HALF:
        gate = found[Operand.W13_GLOBAL].expand(-1, spec.intermediate_size)
        found[Operand.W13_GLOBAL] = join_gate_up(gate, 1.5 * gate, row_order(spec.w13_order))
    for field, knob in ACTIVATION_KNOBS.items():
        if getattr(spec.activation, field) is RUNTIME:
            found[knob] = torch.tensor(1.0, dtype=torch.float64)
    return found


def _inputs(spec: MoESpec, count: int, where: torch.device, rng: torch.Generator) -> dict[Operand, torch.Tensor]:
    """What differs from call to call, for kernels that route and for others; scores of a token are distinct."""
    router, experts = spec.router, spec.num_experts
    hidden = torch.randn(count, spec.hidden_size, generator=rng, device=where)
    order = torch.rand(count, experts, generator=rng, device=where).argsort(dim=-1)
    logits = (order * (8 / experts) - 4).to(spec.act_dtype)
    found = {Operand.HIDDEN: hidden.to(spec.act_dtype), Operand.ROUTER_LOGITS: logits}
    if isinstance(router, RouterSpec) and not (
        router.ids_given or router.num_null_experts or router.num_shared_experts
    ):
        scale, factor = torch.ones(experts, device=where), 1.0
        bias = torch.rand(experts, generator=rng, device=where) if router.has_bias else None
        ids, weights = router_reference(router, logits.float(), spec.top_k, bias, factor, expert_scale=scale)
        found |= {Operand.ROUTER_EXPERT_SCALE: scale, Operand.ROUTER_SCALE: torch.tensor(factor, device=where)}
        found |= {} if bias is None else {Operand.ROUTER_BIAS: bias}
    else:
        weights, ids = logits.float().softmax(-1).topk(spec.top_k, dim=-1)
    return {**found, Operand.TOPK_IDS: ids, Operand.TOPK_WEIGHTS: weights.to(spec.weights_dtype)}


def _text(error: Exception) -> str:
    """The first line of what was raised, and the first that tells of an error: builds print thousands."""
    first, *rest = str(error).strip().splitlines() or [""]
    told = [first, *(line.strip() for line in rest if "error" in line.lower())][:2]
    return f"{type(error).__name__}: {' … '.join(line[:_LONGEST_LINE] for line in told)}"


def _require_usable(name: str, where: torch.device, error: Exception) -> None:
    """After some failures of a kernel every call to the device fails, and no other backend could run."""
    if where.type != "cuda":
        return
    try:
        torch.cuda.synchronize(where)
    except RuntimeError as dead:
        raise NoBackendError(
            f"trying kernel backend {name!r}",
            needed="a device that another backend can run on",
            got=f"{_text(error)}; since then the device answers {_text(dead)}",
            now="start again, with another backend named in options={'fp4moe.backend': ...}",
        ) from error
