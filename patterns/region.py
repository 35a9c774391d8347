"""The region of a block: where it is cut, that nobody else reads inside, and that every step is explained."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from ..matching import NoMatch
from .assertions import says_nothing
from .block import Block
from .graph_tools import is_size, mutates, viewed
from .probing import cone


def check_region(block: Block) -> None:
    """Refuse a block whose region is entered, left or altered in a way that the reading does not explain.

    Raises:
        NoMatch: it reads an input that is no operand; it changes a tensor; a node inside is read outside;
            or a step on the way of the activations was not read.
    """
    feeds = block.feeds
    inner = cone([block.output], feeds)
    for node in inner:
        if node.op != "call_function" and not is_size(node) and node not in block.explained:
            raise NoMatch("the block reads {}, which is none of its operands", node.name, node=node)
        if mutates(node):
            raise NoMatch("{} changes a tensor in place", node.name, node=node)
    for node in on_the_way(inner, feeds):
        if node is not block.output:
            _check_readers(node, inner)
        if node not in block.explained and viewed(node) is None:
            raise NoMatch("{} ({}) is no step of a mixture of experts", node.name, node.target, node=node)


def on_the_way(inner: Collection[fx.Node], feeds: Collection[fx.Node]) -> list[fx.Node]:
    """The nodes of ``inner``, given inputs first, that depend on activations, routing weights or parameters.

    What depends on expert ids and sizes alone picks rows; whoever reads it checked which.
    """
    carries = {node for node in feeds if _is_float(node)}
    way: list[fx.Node] = []
    for node in inner:
        if not is_size(node) and any(arg in carries for arg in node.all_input_nodes):
            carries.add(node)
            way.append(node)
    return way


def _is_float(node: fx.Node) -> bool:
    return bool(node.meta["val"].dtype.is_floating_point)


def _check_readers(node: fx.Node, inner: Collection[fx.Node]) -> None:
    outside = [user for user in node.users if user not in inner and not says_nothing(user) and not _goes_nowhere(user)]
    if outside:
        raise NoMatch("{} inside the block is also read by {}", node.name, outside[0].name, node=outside[0])


def _goes_nowhere(node: fx.Node) -> bool:
    """Whether nothing needs ``node``: it is dead code, as shapes leave it that were computed and are known."""
    pending, seen = [node], {node}
    while pending and len(seen) <= _MAX_DEAD:
        reader = pending.pop()
        if reader.is_impure():
            return False
        new = [user for user in reader.users if user not in seen]
        seen.update(new)
        pending += new
    return not pending


_MAX_DEAD = 16
"""Nodes of dead code that are followed."""


def dying(output: fx.Node, operands: Collection[fx.Node]) -> frozenset[fx.Node]:
    """The nodes that nobody needs once ``output`` is computed in another way from ``operands``.

    Assertions about them are among them where they hold whatever the inputs.
    """
    dead = {output}
    for node in reversed(cone([output], list(operands))):
        if node.op != "call_function" or mutates(node) or not node.users or node in dead:
            continue
        if all(user in dead or says_nothing(user) or _goes_nowhere(user) for user in node.users):
            dead |= {node, *_idle(node)}
    return frozenset(dead)


def _idle(node: fx.Node) -> list[fx.Node]:
    """The assertions that read ``node``, and the sizes that they read it by."""
    pending = [user for user in node.users if says_nothing(user)]
    for user in pending:
        pending.extend(user.users)
    return pending
