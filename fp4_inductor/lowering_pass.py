"""The whole way of a graph on one screen.

    match      fx.Graph → Match             matching.find_matches, patterns/
    describe   Match → MoESpec              Match.spec: the only thing that kernel backends see
    select     MoESpec → KernelPlan         select.select, backends/
    re-layout  KernelPlan → Prepared        layouts/, as pure torch functions
    emit       KernelPlan → fx nodes        emit.emit_plan
    fold       fx nodes → prepared weights  fold.fold
    compile    fx.Graph → callable          Inductor
    report     all of it → LoweringReport   report

``lower`` rewrites a graph; ``fold_and_compile`` turns it into something to call. The doors
(``dynamo_backend``, ``post_grad_pass``, ``_explain``) only decide when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import fx

from .backends.base import KernelBackend
from .compile_ahead import CompilingAhead
from .device import DeviceInfo
from .emit import Emitted, emit_plan
from .errors import UnmatchedError
from .exact_weights import refused_weights
from .fold import FoldedCall, fold
from .matching import Match, Recognition, find_matches
from .options import Options
from .probe import probe
from .reasons import Reason
from .report import LoweringReport, SiteReport, dump_graph, log_report
from .select import Probe, Selection, select
from .spec import MoESpec, Operand
from .tuned_plan import tuned
from .verify import Verification


@dataclass(frozen=True)
class Lowering:
    report: LoweringReport
    verification: Verification | None


def lower(
    graph: fx.Graph,
    options: Options,
    device: DeviceInfo | None = None,
    *,
    try_kernels: bool = True,
    values: Mapping[fx.Node, torch.Tensor] = MappingProxyType({}),
) -> Lowering:
    """Rewrite every recognised MoE block of ``graph`` in place and say what was decided.

    Args:
        graph: functional ATen, with fake values in ``meta["val"]``.
        options: how blocks are lowered.
        device: choose kernels for this device; by default for the one that holds the activations.
        try_kernels: on that one, a kernel whose library may fail is tried before it is chosen; without, only what
            earlier trials found counts (``probe``).
        values: of placeholders, where they are at hand: a backend whose form cannot hold them is refused.

    Raises:
        NoBackendError, UnknownNameError: see ``select``.
        UnmatchedError: ``strict`` or ``expect_matches`` is not met. The graph is untouched.
    """
    found = find_matches(graph)
    check_wishes(found, options)
    choose = partial(_select, options=options, device=device, try_kernels=try_kernels)
    chosen = [(match, choose(match)) for match in found.matches[: options.max_sites]]
    rewrites = [_rewrite(graph, match, selection, choose, values) for match, selection in chosen]
    for match, _, new in rewrites:
        if new is not None:
            match.output.replace_all_uses_with(new.result)
    verification = _verification(graph, rewrites) if options.verify == "first_call" else None
    replaced = frozenset().union(*(match.nodes for match, _, new in rewrites if new is not None))
    graph.eliminate_dead_code(lambda node: node.is_impure() and node not in replaced)
    report = _report(graph, found, rewrites, device)
    if left := len(found.matches) - len(rewrites):
        report.notes.append(f"fp4moe.max_sites={options.max_sites} leaves {left} recognised blocks as written")
    log_report(report)
    return Lowering(report, verification)


def fold_and_compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    static_input_idxs: Iterable[int],
    lowering: Lowering,
    compile_graph: Callable[..., Callable[..., Any]],
    *,
    release_originals: bool = False,
) -> Callable[..., Any]:
    """Take the re-layouts out of a lowered graph and compile the rest.

    Args:
        example_inputs: fake inputs, in placeholder order.
        static_input_idxs: inputs whose storage outlives the call.
        compile_graph: called with the graph, its inputs and ``static_input_idxs``.
        release_originals: see ``FoldedCall``.

    Returns:
        A boxed callable with the arguments of ``gm`` as it came.
    """
    folding = fold(gm, example_inputs, static_input_idxs)
    dump_graph("FP4MOE AFTER", gm)
    kernels = CompilingAhead(gm.graph)
    static = list(folding.static_input_idxs)
    compiled = compile_graph(gm, list(folding.example_inputs), static_input_idxs=static)

    def first_call(args: Sequence[Any]) -> None:
        kernels.wait()
        if lowering.verification is not None:
            lowering.verification(args)

    return FoldedCall(folding, compiled, first_call, release_originals=release_originals)


Rewrite: TypeAlias = "tuple[Match, Selection, Emitted | None]"
"""A match, what was chosen for it, and what was written for it (None: left as the user wrote it)."""


def check_wishes(found: Recognition, options: Options) -> None:
    """Refuse a graph that the user asked to be lowered more completely than recognition can."""
    if options.strict and found.near_misses:
        misses = [f"{miss.anchor} at {miss.where}: {miss.pattern}: {miss.reason}" for miss in found.near_misses]
        raise UnmatchedError(
            "lowering with fp4moe.strict",
            needed="every FP4 weight in a recognised MoE block",
            got="\n    ".join([f"{len(misses)} left behind:", *misses]),
            now="rewrite the block in a recognised form, or leave fp4moe.strict out",
        )
    has_fp4 = bool(found.matches or found.near_misses)
    if options.expect_matches is not None and has_fp4 and len(found.matches) != options.expect_matches:
        raise UnmatchedError(
            "lowering with fp4moe.expect_matches",
            needed=f"{options.expect_matches} MoE blocks in each graph that holds FP4 weights",
            got=f"{len(found.matches)}: {', '.join(str(match.where) for match in found.matches) or 'none'}",
            now="see fp4_inductor.explain(model, *args) for what was found and why the rest was not",
        )


def _select(
    match: Match,
    *,
    options: Options,
    device: DeviceInfo | None,
    try_kernels: bool,
    refused: Mapping[str, Reason] = MappingProxyType({}),
) -> Selection:
    """``refused``: backends that do not hold the weights at hand, and why."""
    trial: Probe | None = None
    if device is None:
        hidden: torch.Tensor = match.node(Operand.HIDDEN).meta["val"]
        device = DeviceInfo.current(hidden.device)
        trial = partial(probe, device=device, where=hidden.device, launch=try_kernels)

    def failure(backend: KernelBackend, spec: MoESpec) -> Reason | None:
        return refused.get(backend.name) or (None if trial is None else trial(backend, spec))

    selection = select(match.spec, device, options, where=str(match.where), probe=failure)
    return tuned(selection) if options.autotune else selection


def _rewrite(
    graph: fx.Graph,
    match: Match,
    selection: Selection,
    choose: Callable[..., Selection],
    values: Mapping[fx.Node, torch.Tensor],
) -> Rewrite:
    """The fused call of the best backend that holds the weights at hand; what was written for others is dead code."""
    refused: dict[str, Reason] = {}
    while (new := _emit(graph, match, selection)) is not None:
        reason = refused_weights(new.fused, values)
        if reason is None:
            break
        assert selection.chosen is not None, "it has a plan"
        refused[selection.chosen] = reason
        selection = choose(match, refused=refused)
    return match, selection, new


def _emit(graph: fx.Graph, match: Match, selection: Selection) -> Emitted | None:
    if selection.plan is None or selection.chosen is None:
        return None
    return emit_plan(graph, match, selection.plan, selection.chosen)


def _verification(graph: fx.Graph, rewrites: list[Rewrite]) -> Verification | None:
    lowered = [(match, new.result, selection) for match, selection, new in rewrites if new is not None]
    return Verification(graph, lowered) if lowered else None


def _device_of(graph: fx.Graph) -> DeviceInfo | None:
    values = (node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    return next((DeviceInfo.current(value.device) for value in values if isinstance(value, torch.Tensor)), None)


def _report(graph: fx.Graph, found: Recognition, rewrites: list[Rewrite], device: DeviceInfo | None) -> LoweringReport:
    report = LoweringReport(
        device or _device_of(graph),
        near_misses=list(found.near_misses),
        linear_layers=list(found.linear_layers),
        num_graphs=1,
    )
    for match, selection, new in rewrites:
        report.sites.append(SiteReport.of(match, selection, new.weights if new else ()))
    return report
