"""What happened to each block: for people (``str``), for tools (``to_json``), for logs and dumps."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from .device import DeviceInfo
from .emit import KernelWeight
from .matching import LinearLayer, Match, NearMiss, SourceLocation
from .reasons import Verdict
from .select import Selection

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SiteReport:
    """One recognised block.

    Attributes:
        bytes_before: codes and block scales as the model holds them.
        bytes_dense: what the graph as written would materialise in each call (all experts, dequantised).
        weights: as the kernel reads them; those that are prepared are the folded graph's inputs.
    """

    where: SourceLocation
    pattern: str
    grade: str
    selection: Selection
    nodes_replaced: int
    bytes_before: int
    bytes_dense: int
    weights: tuple[KernelWeight, ...] = ()

    @classmethod
    def of(cls, match: Match, selection: Selection, weights: tuple[KernelWeight, ...]) -> SiteReport:
        spec = match.spec
        num_weights = spec.num_experts * spec.hidden_size * (spec.w13_rows + spec.intermediate_size)
        return cls(
            where=match.where,
            pattern=match.pattern,
            grade=match.grade,
            selection=selection,
            nodes_replaced=len(match.nodes) if selection.chosen else 0,
            bytes_before=spec.packed_bytes,
            bytes_dense=num_weights * spec.act_dtype.itemsize,
            weights=weights,
        )

    @property
    def lowered(self) -> bool:
        return self.selection.chosen is not None

    @property
    def bytes_prepared(self) -> int:
        """Kernel-ready copies that folding keeps beside the originals (0: canonical layout)."""
        return sum(weight.num_bytes for weight in self.weights if weight.prepared)

    def to_json(self) -> dict[str, Any]:
        selection = self.selection
        return {
            "where": _location_json(self.where),
            "pattern": self.pattern,
            "grade": self.grade,
            "spec": str(selection.spec),
            "device": str(selection.device),
            "backend": selection.chosen,
            "layout": selection.plan.layout if selection.plan else None,
            "padding": selection.plan.padding if selection.plan else None,
            "op": selection.plan.op if selection.plan else None,
            "activations": selection.plan.activations if selection.plan else None,
            "verdicts": [verdict_json(verdict) for verdict in selection.verdicts],
            "weights": [_weight_json(weight) for weight in self.weights],
            "nodes_replaced": self.nodes_replaced,
            "bytes": {"packed": self.bytes_before, "dense": self.bytes_dense, "prepared": self.bytes_prepared},
        }


@dataclass(frozen=True, slots=True)
class BrokenExperts:
    """Experts that run as a loop in Python, between graphs that hold a part of one of them each.

    Those of one class are equal, wherever in the loop they were seen.

    Attributes:
        owner: class of the module that runs the loop; "" where there is none.
        in_transformers: whether transformers can compute this module's experts without a loop.
        unrolls: whether the loop broke over sizes that values decide, which Dynamo can be told to trace.
    """

    where: SourceLocation = field(compare=False)
    owner: str
    in_transformers: bool
    unrolls: bool

    @property
    def cure(self) -> str:
        if self.in_transformers:
            return (
                'call model.set_experts_implementation("grouped_mm") before compiling, or pass '
                'experts_implementation="grouped_mm" to from_pretrained'
            )
        at_once = "compute all experts at once, by torch.nn.functional.grouped_mm over tokens sorted by expert"
        option = "set torch._dynamo.config.capture_dynamic_output_shape_ops = True, which traces it whole, or "
        return f"{option}{at_once}" if self.unrolls else at_once

    def __str__(self) -> str:
        owner = f" of {self.owner}" if self.owner else ""
        return (
            f"a loop over experts{owner} at {self.where} breaks the graph, so no graph holds the block and its FP4 "
            f"weights are dequantised in every call; {self.cure}"
        )


@dataclass(slots=True)
class LoweringReport:
    """Everything recognition and selection decided, over all graphs of a model, in order."""

    device: DeviceInfo | None = None
    sites: list[SiteReport] = field(default_factory=list)
    near_misses: list[NearMiss] = field(default_factory=list)
    linear_layers: list[LinearLayer] = field(default_factory=list)
    num_graphs: int = 0
    notes: list[str] = field(default_factory=list)
    broken_experts: list[BrokenExperts] = field(default_factory=list)

    @property
    def num_lowered(self) -> int:
        return sum(site.lowered for site in self.sites)

    def add(self, other: LoweringReport) -> None:
        """Append the report of another graph of the same model."""
        self.device = self.device or other.device
        self.sites += other.sites
        self.near_misses += other.near_misses
        self.linear_layers += other.linear_layers
        self.num_graphs += other.num_graphs
        self.notes += [note for note in other.notes if note not in self.notes]
        self.broken_experts += [broken for broken in other.broken_experts if broken not in self.broken_experts]

    def to_json(self) -> dict[str, Any]:
        return {
            "device": str(self.device) if self.device else None,
            "num_graphs": self.num_graphs,
            "sites": [site.to_json() for site in self.sites],
            "near_misses": [
                {
                    "anchor": miss.anchor,
                    "pattern": miss.pattern,
                    "reason": miss.reason,
                    "progress": miss.progress,
                    "packed_bytes": miss.packed_bytes,
                    "where": _location_json(miss.where),
                }
                for miss in self.near_misses
            ],
            "linear_layers": [
                {"anchor": layer.anchor, "packed_bytes": layer.packed_bytes, "where": _location_json(layer.where)}
                for layer in self.linear_layers
            ],
            "broken_experts": [
                {"where": _location_json(broken.where), "owner": broken.owner, "cure": broken.cure}
                for broken in self.broken_experts
            ],
            "notes": self.notes,
        }

    def __str__(self) -> str:
        graphs = f"{self.num_graphs} graph{'' if self.num_graphs == 1 else 's'}"
        lines = [
            f"fp4moe on {self.device or 'no device'}: {self.num_lowered} of {len(self.sites)} MoE blocks lowered, "
            f"{len(self.near_misses)} FP4 weights left behind, {graphs}"
        ]
        lines += [text for group in _group_sites(self.sites) for text in _site_lines(*group)]
        for group in _group_misses(self.near_misses):
            packed = _size(sum(miss.packed_bytes for miss in group))
            lines.append(f"  left behind: {_anchors(group)} ({packed} packed) at {group[0].where}")
            lines.append(f"    nearest pattern {group[0].pattern}: {group[0].reason}")
        lines += [f"  {text}" for text in _layer_lines(self.linear_layers)]
        lines += [f"  note: {note}" for note in (*self.broken_experts, *self.notes)]
        return "\n".join(lines)


def _group_sites(sites: list[SiteReport]) -> list[tuple[SiteReport, list[SiteReport]]]:
    """Runs of blocks that differ only in where they stand."""
    groups: list[tuple[SiteReport, list[SiteReport]]] = []
    for site in sites:
        if groups and _same_decision(groups[-1][0], site):
            groups[-1][1].append(site)
        else:
            groups.append((site, [site]))
    return groups


def _group_misses(misses: list[NearMiss]) -> list[list[NearMiss]]:
    """Weights that were left behind at one place for one reason."""
    groups: dict[tuple[object, ...], list[NearMiss]] = {}
    for miss in misses:
        groups.setdefault((miss.where, miss.pattern, miss.reason), []).append(miss)
    return list(groups.values())


def _layer_lines(layers: list[LinearLayer]) -> list[str]:
    """Linear layers in one line: a model has hundreds."""
    if not layers:
        return []
    names = list(dict.fromkeys(re.sub(r"\d+", "*", layer.anchor.split()[0]) for layer in layers))
    listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    packed = _size(sum(layer.packed_bytes for layer in layers))
    return [f"{len(layers)} FP4 linear layers ({packed} packed) run dequantised, as written, in no MoE block: {listed}"]


def _anchors(misses: list[NearMiss]) -> str:
    return " and ".join(miss.anchor for miss in misses)


def _same_decision(a: SiteReport, b: SiteReport) -> bool:
    def decision(site: SiteReport) -> tuple[object, ...]:
        selection = site.selection
        return site.pattern, site.grade, selection.spec, selection.verdicts, selection.chosen, site.weights

    return decision(a) == decision(b)


def _site_lines(first: SiteReport, members: list[SiteReport]) -> list[str]:
    selection = first.selection
    names = first.where.module or "block"
    if len(members) > 1:
        names = f"{names} … {members[-1].where.module or 'block'} ({len(members)} blocks)"
    prepared = f", prepared {_size(first.bytes_prepared)}" if first.bytes_prepared else ""
    lines = [
        f"  {names}",
        f"    at       {first.where.file}:{first.where.line}" if first.where.file else "    at       unknown source",
        f"    found    {first.pattern}, grade {first.grade}, {first.nodes_replaced} nodes",
        f"    spec     {selection.spec}",
        f"    runs on  {_runs_on(selection)}",
        f"    bytes    {_size(first.bytes_before)} packed{prepared}; as written {_size(first.bytes_dense)} a call",
    ]
    for label, entries in (("weights", map(_weight_line, first.weights)), ("asked", _answers(selection))):
        lines += [f"    {label if index == 0 else '':8} {entry}" for index, entry in enumerate(entries)]
    return lines


def _weight_line(weight: KernelWeight) -> str:
    dtype = str(weight.dtype).removeprefix("torch.")
    as_it_is = "" if weight.prepared else ", as the model holds it"
    return f"{weight.name} {dtype} {list(weight.shape)}, {_size(weight.num_bytes)}{as_it_is}"


def _answers(selection: Selection) -> Iterator[str]:
    """What each backend said, in the order in which they were asked; every reason on its own line."""
    for verdict in selection.verdicts:
        reasons = list(map(str, verdict.reasons))
        if verdict.ok:
            reasons = ["chosen" if verdict.backend == selection.chosen else "willing"]
        yield f"{verdict.backend}: {reasons[0]}"
        yield from (f"{'':{len(verdict.backend)}}  {reason}" for reason in reasons[1:])


def _runs_on(selection: Selection) -> str:
    if selection.plan is None:
        return "nothing: left as written, every call dequantises all experts"
    padding = f", pads {selection.plan.padding}" if selection.plan.padding else ""
    rounds = f", rounds activations to {selection.plan.activations}" if selection.plan.activations else ""
    return f"{selection.chosen} ({selection.plan.op}, layout {selection.plan.layout}{padding}{rounds})"


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    reasons = [{"code": r.code.name, "need": r.need, "got": r.got, "hint": r.hint} for r in verdict.reasons]
    return {"backend": verdict.backend, "ok": verdict.ok, "reasons": reasons}


def _location_json(where: SourceLocation) -> dict[str, Any]:
    return {"module": where.module, "file": where.file, "line": where.line, "code": where.code}


def _weight_json(weight: KernelWeight) -> dict[str, Any]:
    return {
        "name": weight.name,
        "shape": list(weight.shape),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "bytes": weight.num_bytes,
        "prepared": weight.prepared,
    }


def _size(num_bytes: int) -> str:
    for unit, step in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= step:
            return f"{num_bytes / step:.1f} {unit}"
    return f"{num_bytes} B"


def log_report(report: LoweringReport) -> None:
    """One INFO line a block, verdicts at DEBUG, a WARNING only where a wish was not met."""
    for site in report.sites:
        selection = site.selection
        if site.lowered:
            logger.info("%s: %s → %s [%s]", site.where, site.pattern, selection.chosen, selection.spec)
        else:
            refusals = "; ".join(map(str, selection.verdicts))
            logger.warning("%s: no backend runs %s, left as written: %s", site.where, selection.spec, refusals)
        for verdict in selection.verdicts:
            logger.debug("%s: %s", site.where, verdict)
    for group in _group_misses(report.near_misses):
        logger.warning(
            "%s: no recognised MoE block reads %s: dequantised whole in every call (%s: %s)",
            group[0].where,
            _anchors(group),
            group[0].pattern,
            group[0].reason,
        )
    for line in (*_layer_lines(report.linear_layers), *report.notes):
        logger.info("%s", line)


def dump_graph(name: str, gm: fx.GraphModule) -> None:
    """Show a graph in depyf dumps, in ``TORCH_LOGS="+fp4_inductor"`` and in tlparse."""
    from torch._dynamo.utils import lazy_format_graph_code
    from torch._logging import trace_structured

    gm.recompile()
    # depyf listens to this call, not to the log level, so it is made also where nothing is logged.
    logger.debug("%s", lazy_format_graph_code(name, gm, include_stride=True, include_device=True))
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name.lower().replace(" ", "_"), "encoding": "string"},
        payload_fn=lambda: gm.print_readable(print_output=False),
    )


def dump_report(report: LoweringReport) -> None:
    """Put the report beside the graphs in tlparse."""
    import json

    from torch._logging import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "fp4moe_report", "encoding": "json"},
        payload_fn=lambda: json.dumps(report.to_json()),
    )
