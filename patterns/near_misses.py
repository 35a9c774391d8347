"""Why FP4 weights are in no recognised block: the furthest refusal of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx

from ..matching import LinearLayer, NearMiss, NoMatch
from .graph_tools import location, numel, same, tensor

INPUT_NAME = "fp4moe_name"
"""Where ``node.meta`` of an input holds the name that people know it by."""


class Misses:
    """The furthest refusal of every packed weight. ``reads`` says which of them each GEMM reads."""

    def __init__(self, reads: Mapping[fx.Node, frozenset[fx.Node]]) -> None:
        self.reads = reads
        self.by_root: dict[fx.Node, tuple[str, NoMatch, fx.Node]] = {}

    def keep(self, pattern: str, miss: NoMatch, gemm: fx.Node) -> None:
        for root in self.reads[gemm]:
            kept = self.by_root.get(root)
            if kept is None or miss.progress > kept[1].progress:
                self.by_root[root] = (pattern, miss, gemm)

    def report(self, roots: Iterable[fx.Node]) -> tuple[NearMiss, ...]:
        return tuple(self._near_miss(root) for root in roots)

    def report_layers(self, roots: Iterable[fx.Node]) -> tuple[LinearLayer, ...]:
        """Those of ``roots`` that no block could be made of, each where its GEMM is."""
        found = []
        for root in roots:
            gemm = next(gemm for gemm, read in self.reads.items() if root in read)
            val = tensor(root)
            assert val is not None
            found.append(LinearLayer(_anchor(root, val), val.numel(), location(gemm)))
        return tuple(found)

    def _near_miss(self, root: fx.Node) -> NearMiss:
        pattern, miss, gemm = self.by_root.get(root) or ("none", _no_gemm(root), next(iter(root.users)))
        where = location(miss.node) if miss.node is not None else location(gemm)
        val = tensor(root)
        assert val is not None
        return NearMiss(
            anchor=_anchor(root, val),
            pattern=pattern,
            reason=_reason(miss, root.graph),
            progress=miss.progress,
            packed_bytes=val.numel(),
            where=where if where.file else location(gemm),
        )


def _anchor(root: fx.Node, val: torch.Tensor) -> str:
    return f"{_called(root)} {str(val.dtype).removeprefix('torch.')}{list(val.shape)}"


def _called(node: fx.Node) -> str:
    """What people call an input, where the door knows it."""
    return str(node.meta.get(INPUT_NAME, node.name))


def _reason(miss: NoMatch, graph: fx.Graph) -> str:
    """The message, with the names that people know."""
    known = {node.name: _called(node) for node in graph.find_nodes(op="placeholder")}
    return str(NoMatch(miss.template, *(known.get(str(arg), arg) for arg in miss.format_args)))


def _no_gemm(root: fx.Node) -> NoMatch:
    """Why no GEMM was found behind a packed weight."""
    seen = {root}
    pending = [root]
    while pending:
        node = pending.pop()
        for reader in node.users:
            if reader.op == "output" and tensor(node) is not None and same(numel(node), 2 * numel(root)):
                return NoMatch("its values leave the graph before a GEMM: a graph break, as in a loop over experts")
            if reader not in seen:
                seen.add(reader)
                pending.append(reader)
    return NoMatch("no GEMM that could be an expert's reads it")
