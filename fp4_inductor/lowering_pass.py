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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import fx

from .device import DeviceInfo
from .emit import Emitted, emit_plan
from .errors import UnmatchedError
from .fold import FoldedCall, fold
from .matching import Match, Recognition, find_matches
from .options import Options
from .probe import probe
from .report import LoweringReport, SiteReport, dump_graph, log_report
from .select import Selection, select
from .spec import Operand
from .tuned_plan import tuned
from .verify import Verification


@dataclass(frozen=True)
class Lowering:
    report: LoweringReport
    verification: Verification | None


def lower(graph: fx.Graph, options: Options, device: DeviceInfo | None = None, *, try_kernels: bool = True) -> Lowering:
    """Rewrite every recognised MoE block of ``graph`` in place and say what was decided.

    Args:
        graph: functional ATen, with fake values in ``meta["val"]``.
        options: how blocks are lowered.
        device: choose kernels for this device; by default for the one that holds the activations.
        try_kernels: on that one, a kernel whose library may fail is tried before it is chosen; without, only what
            earlier trials found counts (``probe``).

    Raises:
        NoBackendError, UnknownNameError: see ``select``.
        UnmatchedError: ``strict`` or ``expect_matches`` is not met. The graph is untouched.
    """
    found = find_matches(graph)
    check_wishes(found, options)
    chosen = [(match, _select(match, options, device, try_kernels)) for match in found.matches[: options.max_sites]]
    rewrites = [(match, selection, _emit(graph, match, selection)) for match, selection in chosen]
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
    static = list(folding.static_input_idxs)
    compiled = compile_graph(gm, list(folding.example_inputs), static_input_idxs=static)
    return FoldedCall(folding, compiled, lowering.verification, release_originals=release_originals)


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


def _select(match: Match, options: Options, device: DeviceInfo | None, try_kernels: bool) -> Selection:
    trial = None
    if device is None:
        hidden: torch.Tensor = match.node(Operand.HIDDEN).meta["val"]
        device = DeviceInfo.current(hidden.device)
        trial = partial(probe, device=device, where=hidden.device, launch=try_kernels)
    selection = select(match.spec, device, options, where=str(match.where), probe=trial)
    return tuned(selection) if options.autotune else selection


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
    report = LoweringReport(device or _device_of(graph), near_misses=list(found.near_misses), num_graphs=1)
    for match, selection, new in rewrites:
        report.sites.append(SiteReport.of(match, selection, new.weights if new else ()))
    return report
