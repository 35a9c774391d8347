"""The weighted combine: from the rows of the down GEMM to one row a token.

Spellings differ in when the routing weights multiply, whether rows go back to slot order before the
sum, and whether the sum is a reduction over ``[T, k, H]``, a scatter into ``[T, H]`` or a small GEMM.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import fx

from ..matching import NoMatch
from .graph_tools import (
    CAST,
    arguments,
    aten,
    dtype,
    inputs,
    is_call,
    is_zero,
    numel,
    only_reader,
    readers,
    row_gather,
    same,
    same_shape,
    shape,
    source,
    value,
)
from .masks import unmasked
from .rows import RowOrder


@dataclass(frozen=True, slots=True)
class Combine:
    """How rows become tokens.

    Attributes:
        output: ``[T, H]``, the sum, or its cast where nobody else reads the sum.
        weights: routing weights, ``[T, k]`` or a view with as many elements, in the dtype they multiply in.
        nodes: the steps from rows to output, views left out.
        masked: whether rows of no expert are zeroed on the way.
    """

    output: fx.Node
    weights: fx.Node
    nodes: frozenset[fx.Node]
    masked: bool


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows on their way: the node, its order, and the weights once they are in."""

    node: fx.Node
    order: RowOrder
    top_k: int
    num_experts: object
    weights: fx.Node | None = None
    nodes: frozenset[fx.Node] = field(default_factory=frozenset)
    masked: bool = False

    def after(self, node: fx.Node, *explained: fx.Node, **changes: object) -> _Rows:
        return replace(self, node=node, nodes=self.nodes | {node, *explained}, **changes)  # type: ignore[arg-type]


def read_combine(rows: fx.Node, order: RowOrder, top_k: int, num_experts: object) -> Combine:
    """Follow the rows ``[T*k, H]`` of the down GEMM to the block's output.

    Raises:
        NoMatch: a step that is no part of a combine; ``node`` is where.
    """
    state = _Rows(rows, order, top_k, num_experts)
    while not _is_whole(state):
        reader, shown = only_reader(state.node, "the down projection's rows")
        if is_call(reader, aten.mul.Tensor):
            state = _weigh(state, reader, shown)
        elif is_call(reader, CAST):
            state = _cast(state, reader)
        elif is_call(reader, aten.index.Tensor, aten.index_select.default):
            state = _restore(state, reader)
        elif unmasked(reader, state.order, num_experts) is shown:
            state = state.after(reader, masked=True)
        elif is_call(reader, aten.sum.dim_IntList):
            return _finish(_sum(state, reader, shown), reader)
        elif is_call(reader, aten.index_put.default, aten.index_add.default):
            return _finish(_scatter(state, reader), reader)
        elif is_call(reader, aten.bmm.default):
            return _finish(_contract(state, reader, shown), reader)
        else:
            raise NoMatch("{} ({}) is no part of a weighted combine", reader.name, reader.target, node=reader)
    return _finish(state, state.node)


def _is_whole(state: _Rows) -> bool:
    """Whether weighted rows are tokens already, of one slot each, and are not summed or scattered."""
    if state.weights is None or state.order.perm is not None or state.top_k != 1:
        return False
    found = readers(state.node)
    return len(found) != 1 or not is_call(found[0][0], *_SUMS)


_SUMS = (aten.sum.dim_IntList, aten.index_put.default, aten.index_add.default)


def _weigh(state: _Rows, reader: fx.Node, shown: fx.Node) -> _Rows:
    if state.weights is not None:
        raise NoMatch("{} scales rows that already carry their routing weights", reader.name, node=reader)
    left, right = inputs(reader, "self", "other")
    factor = right if left is shown else left
    if not isinstance(factor, fx.Node) or factor is shown:
        raise NoMatch("{} scales rows by {}", reader.name, value(factor), node=reader)
    if not same_shape(factor, (*shape(shown)[:-1], 1)):
        raise NoMatch("{} is not one weight a row", factor.name, node=factor)
    gathered = source(factor)
    weights = state.order.per_slot(factor)
    explained = [gathered] if gathered is not weights else []
    return state.after(reader, *explained, weights=_checked(weights, factor, state))


def _checked(weights: fx.Node, factor: fx.Node, state: _Rows) -> fx.Node:
    """The routing weights, if there is one for every slot."""
    if not same(numel(weights), numel(state.order.ids)) or not dtype(weights).is_floating_point:
        raise NoMatch("{} does not hold one weight a slot", weights.name, node=factor)
    return weights


def _cast(state: _Rows, reader: fx.Node) -> _Rows:
    """Rows cast to the weights' dtype before they are weighted, or to the accumulator's after."""
    if not dtype(reader).is_floating_point or dtype(reader).itemsize < 2:
        raise NoMatch("{} rounds rows to {}", reader.name, dtype(reader), node=reader)
    return state.after(reader)


def _restore(state: _Rows, reader: fx.Node) -> _Rows:
    gather = row_gather(reader)
    if gather is None or not state.order.restores_slots(gather[1]):
        raise NoMatch("{} does not bring rows back to slot order", reader.name, node=reader)
    return state.after(reader, order=RowOrder(state.order.ids))


def _weighted(state: _Rows, reader: fx.Node) -> fx.Node:
    if state.weights is None:
        raise NoMatch("{} sums rows without routing weights", reader.name, node=reader)
    return state.weights


def _sum(state: _Rows, reader: fx.Node, shown: fx.Node) -> _Rows:
    _weighted(state, reader)
    if state.order.perm is not None:
        raise NoMatch("{} sums rows that are still sorted by expert", reader.name, node=reader)
    args = arguments(reader)
    sizes = shape(shown)
    slots_last = len(sizes) == 3 and same(sizes[1], state.top_k) and [d % 3 for d in args["dim"] or []] == [1]
    if not slots_last:
        raise NoMatch("{} does not sum the {} slots of each token", reader.name, state.top_k, node=reader)
    return state.after(reader)


def _scatter(state: _Rows, reader: fx.Node) -> _Rows:
    _weighted(state, reader)
    args = arguments(reader)
    if is_call(reader, aten.index_add.default):
        adds, index = args["dim"] in (0, -2) and args["alpha"] == 1, args["index"]
    else:
        adds, index = args["accumulate"] and len(args["indices"]) == 1, args["indices"][0]
    if not adds or not isinstance(index, fx.Node) or not is_zero(source(args["self"])):
        raise NoMatch("{} does not add rows into zeros", reader.name, node=reader)
    if not state.order.holds_tokens(index, state.top_k):
        raise NoMatch("{} does not add each row to its token", reader.name, node=reader)
    return state.after(reader)


def _contract(state: _Rows, reader: fx.Node, shown: fx.Node) -> _Rows:
    """``bmm(weights [T, 1, k], rows [T, k, H])``."""
    left, right = inputs(reader, "self", "mat2")
    if state.weights is not None or state.order.perm is not None or right is not shown:
        raise NoMatch("{} is no weighted sum over slots", reader.name, node=reader)
    if not same_shape(left, (shape(shown)[0], 1, state.top_k)) or not same(shape(shown)[1], state.top_k):
        raise NoMatch("{} does not weigh the {} slots of each token", reader.name, state.top_k, node=reader)
    return state.after(reader, weights=_checked(source(left), left, state))


def _finish(state: _Rows, total: fx.Node) -> Combine:
    """The output is the sum, or its cast where that is all that is read of it."""
    weights = _weighted(state, total)
    output = total
    found = readers(total)
    if len(found) == 1 and is_call(found[0][0], CAST) and dtype(found[0][0]) in NARROW:
        output = found[0][0]
    return Combine(output, weights, state.nodes | {output}, state.masked)


NARROW = (torch.bfloat16, torch.float16)
