"""Writes into tensors. Recognition reads a graph as functional; where a write could show, a block is refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import fx

from ..matching import Match, NoMatch, nodes_of
from ..spec import Operand
from .graph_tools import mutates
from .probing import cone


class Writes:
    """Every write of a graph, with the nodes that may share the memory that it changes."""

    def __init__(self, graph: fx.Graph) -> None:
        self._order: dict[fx.Node, int] = {}
        self._aliases: list[tuple[fx.Node, set[fx.Node]]] = []
        writers = [node for node in graph.nodes if mutates(node)]
        if writers:
            self._order = {node: place for place, node in enumerate(graph.nodes)}
            self._aliases = [(writer, _aliases(_written(writer))) for writer in writers]

    def check(self, match: Match) -> None:
        """Refuse a block of which anything is written before its output: a fused call reads its operands then.

        Updates of inputs, which end a functionalised graph, come behind every output.

        Raises:
            NoMatch: there is such a write.
        """
        before = [(w, aliases) for w, aliases in self._aliases if self._order[w] < self._order[match.output]]
        if not before:
            return
        read = _read(match)
        for writer, aliases in before:
            if shared := aliases & read:
                raise NoMatch("{} writes into {}", writer.name, min(shared).name, node=writer, progress=0.8)


def _read(match: Match) -> set[fx.Node]:
    """The nodes whose values the match speaks of: from the operands to the output, and the router if it is named."""
    operands = {node for source in match.operands.values() for node in nodes_of(source)}
    read = {*operands, *match.nodes, *cone([match.output], list(operands))}
    if Operand.ROUTER_LOGITS in match.operands:
        chosen = [match.node(Operand.TOPK_IDS), match.node(Operand.TOPK_WEIGHTS)]
        read.update(cone(chosen, [match.node(Operand.ROUTER_LOGITS)]))
    return read


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments that an operation writes into."""
    for place, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (item for item in _flat(value) if isinstance(item, fx.Node))


def _flat(value: object) -> Iterator[object]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _aliases(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """All nodes that may show the same memory as ``nodes``."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += _shown(node)
            pending += [user for user in node.users if node in _shown(user)]
    return found


def _shown(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory the result of ``node`` may share."""
    if node.op != "call_function":
        return []
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.all_input_nodes  # getitem
    arguments = node.target._schema.arguments
    return [
        item
        for place, argument in enumerate(arguments)
        if argument.alias_info is not None
        for item in _flat(node.args[place] if place < len(node.args) else node.kwargs.get(argument.name))
        if isinstance(item, fx.Node)
    ]
