"""The weighted combine: from the rows of the down GEMM to one row a token.

Spellings differ in when the routing weights multiply, whether rows go back to slot order before the
sum, and whether the sum is a reduction over ``[T, k, H]``, a scatter into ``[T, H]`` or a small GEMM.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import fx

from ..matching import NoMatch
from .axes import Axis, Size, axes, axis_over, regrouped
from .branch_combine import Branches, Way, combine_branches
from .graph_tools import (
    CAST,
    arguments,
    aten,
    dtype,
    inputs,
    is_call,
    is_zero,
    narrowed,
    numel,
    only_reader,
    readers,
    row_gather,
    same,
    same_shape,
    shape,
    source,
    value,
    whole_rows,
)
from .masks import unmasked
from .rows import RowOrder


@dataclass(frozen=True, slots=True)
class Combine:
    """How rows become tokens.

    Attributes:
        output: ``[T, H]``, the sum, or its cast where nobody else reads the sum.
        weights: routing weights, ``[T, k]`` or a view with as many elements.
        weights_dtype: in which they multiply.
        nodes: the steps from rows to output, views left out.
        masked: whether rows of no expert are zeroed on the way.
    """

    output: fx.Node
    weights: fx.Node
    weights_dtype: torch.dtype
    nodes: frozenset[fx.Node]
    masked: bool


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows on their way: the node, its order, and the weights once they are in."""

    node: fx.Node
    order: RowOrder
    top_k: int
    num_experts: int
    width: Size
    weights: fx.Node | None = None
    weights_dtype: torch.dtype | None = None
    nodes: frozenset[fx.Node] = field(default_factory=frozenset)
    masked: bool = False

    def after(self, node: fx.Node, *explained: fx.Node, **changes: object) -> _Rows:
        return replace(self, node=node, nodes=self.nodes | {node, *explained}, **changes)  # type: ignore[arg-type]


def read_combine(
    rows: fx.Node, order: RowOrder, top_k: int, num_experts: int, width: Size, weights: fx.Node | None = None
) -> Combine:
    """Follow the rows ``[T*k, width]`` of the down GEMM to the block's output; ``weights`` may be in them already.

    Raises:
        NoMatch: a step that is no part of a combine; ``node`` is where.
    """
    try:
        return _follow(_Rows(rows, order, top_k, num_experts, width, weights))
    except NoMatch:
        norm = _norm_behind(rows)
        if norm is None:
            raise
    raise NoMatch(
        "a norm of what each expert gives comes before its weight; no fused kernel normalises there", node=norm
    )


def _follow(state: _Rows) -> Combine:
    num_experts = state.num_experts
    while not _is_whole(state):
        reader, shown = only_reader(state.node, "the down projection's rows")
        if unmasked(reader, state.order, num_experts) is shown:
            state = state.after(reader, masked=True)
        elif is_call(reader, aten.mul.Tensor) and (state.order.perm is not None or _is_one_a_row(reader, shown)):
            state = _weigh(state, reader, shown)
        elif is_call(reader, CAST):
            state = _cast(state, reader)
        elif is_call(reader, aten.index.Tensor, aten.index_select.default):
            state = _restore(state, reader)
        elif _writes_rows(reader, shown):
            state = _put_back(state, reader)
        elif is_call(reader, aten.sum.dim_IntList):
            return _finish(_sum(state, reader, shown), reader)
        elif is_call(reader, *_SCATTERS):
            return _finish(_scatter(state, reader), reader)
        elif is_call(reader, *_PRODUCTS):
            return _contract(state)
        else:
            raise NoMatch("{} ({}) is no part of a weighted combine", reader.name, reader.target, node=reader)
    return _finish(state, state.node)


def _is_whole(state: _Rows) -> bool:
    """Whether weighted rows are tokens already, of one slot each, and are not summed or scattered."""
    if state.weights is None or state.order.perm is not None or state.top_k != 1:
        return False
    found = readers(state.node)
    return len(found) != 1 or not is_call(found[0][0], *_SUMS)


_SCATTERS = (aten.index_put.default, aten.index_add.default, aten.scatter_add.default, aten.scatter_reduce.two)
_PRODUCTS = (aten.mul.Tensor, aten.bmm.default, aten.mm.default, aten.permute.default, aten.transpose.int)
_SUMS = (aten.sum.dim_IntList, *_SCATTERS)


def _weigh(state: _Rows, reader: fx.Node, shown: fx.Node) -> _Rows:
    if state.weights is not None:
        raise NoMatch("{} scales rows that already carry their routing weights", reader.name, node=reader)
    left, right = inputs(reader, "self", "other")
    factor = right if left is shown else left
    if not isinstance(factor, fx.Node) or factor is shown:
        raise NoMatch("{} scales rows by {}", reader.name, value(factor), node=reader)
    if not _is_one_a_row(reader, shown):
        raise NoMatch("{} is not one weight a row", factor.name, node=factor)
    gathered = last = source(factor)
    if state.order.perm is not None and is_call(last, CAST):
        gathered = source(arguments(last)["a"])
    weights = _checked(state.order.per_slot(gathered), factor, state)
    explained = [node for node in (gathered, last) if node is not weights]
    return state.after(reader, *explained, weights=weights, weights_dtype=dtype(last))


def _is_one_a_row(product: fx.Node, shown: fx.Node) -> bool:
    left, right = inputs(product, "self", "other")
    factor = right if left is shown else left
    return isinstance(factor, fx.Node) and same_shape(factor, (*shape(shown)[:-1], 1))


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


def _writes_rows(reader: fx.Node, shown: fx.Node) -> bool:
    """Whether ``reader`` writes all rows to other places, over whatever is there."""
    if is_call(reader, aten.index_put.default):
        args = arguments(reader)
        return args["values"] is shown and not args["accumulate"] and same_shape(args["self"], shape(shown))
    return is_call(reader, aten.scatter.src) and arguments(reader)["src"] is shown


def _put_back(state: _Rows, reader: fx.Node) -> _Rows:
    args = arguments(reader)
    if is_call(reader, aten.scatter.src):
        index = whole_rows(args["index"]) if args["dim"] in (0, -2) else None
    else:
        index = args["indices"][0] if len(args["indices"]) == 1 else None
    placed = same_shape(reader, shape(args["self"])) and same(numel(reader), numel(state.node))
    if not placed or index is None or state.order.perm is None or source(index) is not state.order.perm:
        raise NoMatch("{} does not bring rows back to slot order", reader.name, node=reader)
    return state.after(reader, source(args["self"]), order=RowOrder(state.order.ids))


def _scatter(state: _Rows, reader: fx.Node) -> _Rows:
    _weighted(state, reader)
    args = arguments(reader)
    if is_call(reader, aten.index_add.default):
        adds, index = args["dim"] in (0, -2) and args["alpha"] == 1, args["index"]
    elif is_call(reader, aten.index_put.default):
        adds, index = args["accumulate"] and len(args["indices"]) == 1, args["indices"][0]
    else:
        whole = same_shape(args["index"], shape(args["src"])) and same(shape(args["self"])[1], shape(args["src"])[1])
        adds, index = whole and args["dim"] in (0, -2) and len(shape(reader)) == 2, whole_rows(args["index"])
        if is_call(reader, aten.scatter_reduce.two):
            adds = adds and args["reduce"] == "sum" and args["include_self"]
    if not adds or not isinstance(index, fx.Node):
        raise NoMatch("{} does not add rows", reader.name, node=reader)
    if not is_zero(source(args["self"])):
        raise NoMatch(
            "{} adds rows to {}, not to zeros; write what they are added to as an addition of its own",
            reader.name,
            args["self"].name,
            node=reader,
        )
    if not state.order.holds_tokens(index, state.top_k):
        raise NoMatch("{} does not add each row to its token", reader.name, node=reader)
    return state.after(reader)


def _contract(state: _Rows) -> Combine:
    """A product with the weights, however it is spelled, of rows in slot order."""
    if state.weights is not None or state.order.perm is not None:
        raise NoMatch("{} is no weighted sum over slots", state.node.name, node=state.node)
    ids = shape(state.order.ids)
    if len(ids) < 2:
        raise NoMatch("expert ids {} are not [T, k]", state.order.ids.name, node=state.node)
    tokens, out = axis_over("T", ids[:-1]), Axis("O", state.width)
    layout = regrouped(state.node, axes(((tokens, Axis("k", state.top_k), out),)), shape(state.node))
    way = Way(state.node, layout, Branches(state.order.ids, state.num_experts), nodes=state.nodes)
    found = combine_branches(way, tokens, out)
    assert isinstance(found.routing.weights, fx.Node), "weights a slot are in the graph"
    return Combine(found.output, found.routing.weights, found.routing.dtype, found.nodes, state.masked)


def _norm_behind(rows: fx.Node) -> fx.Node | None:
    """Where rows are normalised by themselves, soon after they are computed."""
    pending, seen = [(rows, 0)], {rows}
    while pending:
        node, steps = pending.pop()
        if is_call(node, aten.rsqrt.default):
            return node
        if steps < _NORM_STEPS and (node is rows or is_call(node, CAST, *_NORM)):
            found = [user for user in node.users if user not in seen]
            seen.update(found)
            pending += [(user, steps + 1) for user in found]
    return None


_NORM = (aten.pow.Tensor_Scalar, aten.mul.Tensor, aten.mean.dim, aten.sum.dim_IntList, aten.div.Tensor, aten.add.Tensor)
_NORM_STEPS = 10


def _finish(state: _Rows, total: fx.Node) -> Combine:
    """The output is the sum, or its cast where that is all that is read of it."""
    weights = _weighted(state, total)
    output = narrowed(total)
    return Combine(output, weights, state.weights_dtype or dtype(weights), state.nodes | {output}, state.masked)
