"""Routing weights written as a matrix ``[T, E]`` that is zero but at the experts each token has chosen.

Either weights ``[T, k]`` are spread by their ids: scattered, or multiplied by one-hot rows. Or all scores are
masked, and may be normalised after; the weights are then what the matrix holds at the ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import torch
from torch import fx

from ..matching import Assembled, NoMatch, Source
from ..spec import Operand
from .axes import Layout, along, axes, broadcast, laid_out, multiplied, names, runs_over, trail
from .block import Feed
from .branches import slot_layout
from .graph_tools import (
    CAST,
    arguments,
    aten,
    dtype,
    inputs,
    is_call,
    is_iota,
    is_zero,
    same,
    same_shape,
    shape,
    source,
)
from .probing import cone
from .rows import is_choice
from .weights import Bound

_MAX_STEPS = 12
"""Steps between a mask and the scores it ends in."""


@dataclass(frozen=True, slots=True)
class Scores:
    """A matrix of routing weights.

    Attributes:
        layout: of the matrix.
        ids: ``[..., k]``.
        weights: ``[T, k]``, in the dtype that the matrix is read in.
        feeds: the nodes at which a region that reads the matrix is cut.
        nodes: the steps from there to ``matrix``.
    """

    layout: Layout
    ids: fx.Node
    weights: Source
    feeds: Mapping[fx.Node, Feed]
    nodes: frozenset[fx.Node]


def read_scores(node: fx.Node, num_experts: int, read_as: torch.dtype) -> Scores:
    """What ``node``, ``[..., E]``, holds, where it is multiplied in ``read_as``.

    Raises:
        NoMatch: it may hold more than one value for each chosen expert.
    """
    matrix = node
    while is_call(matrix, CAST):
        matrix = arguments(matrix)["a"]
    spread = _scattered(matrix, num_experts) or _one_hot_sum(matrix, num_experts)
    if spread is not None:
        ids, weights, layout = spread
        if not dtype(weights).is_floating_point:
            raise NoMatch("{} are no routing weights", weights.name, node=weights)
        feeds = {ids: Feed(Operand.TOPK_IDS), weights: Feed(Operand.TOPK_WEIGHTS)}
        read: Source = weights
        if dtype(weights) is not read_as:
            read = Assembled(Bound(in_dtype, (read_as,)), (weights,))
        return Scores(layout, ids, read, feeds, frozenset(cone([node], feeds)))
    chosen = _differs_at(node, num_experts, 0.0)
    if chosen is None or not same_shape(chosen, (*shape(node)[:-1], shape(chosen)[-1])):
        raise NoMatch(
            "{} is not seen to be zero but at the chosen experts; write it as "
            "torch.zeros_like(scores).scatter(-1, ids, weights)",
            node.name,
            node=node,
        )
    at_chosen = Assembled(Bound(_at_the_chosen, (read_as,)), (node, chosen))
    feed = Feed(Operand.TOPK_WEIGHTS, spread=True)
    return Scores(_layout(node), chosen, at_chosen, {node: feed}, frozenset())


def _at_the_chosen(dtype: torch.dtype, matrix: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The routing weights ``[..., k]`` of a matrix ``[..., E]`` at ids ``[..., k]``, as they multiply."""
    return matrix.gather(-1, ids).to(dtype)


def in_dtype(dtype: torch.dtype, weights: torch.Tensor) -> torch.Tensor:
    """The routing weights ``[T, k]`` as they multiply."""
    return weights.to(dtype)


def _scattered(node: fx.Node, num_experts: int) -> tuple[fx.Node, fx.Node, Layout] | None:
    """ids, weights and layout where ``node`` is weights put, or added, at ids of zeros."""
    if is_call(node, aten.index_put.default):
        into, indices, weights, adds = inputs(node, "self", "indices", "values", "accumulate")
        ids = _column_of_tokens(node, indices)
    else:
        found = _scatter(node)
        if found is None:
            return None
        into, ids, weights, adds = found
    if ids is None or not isinstance(weights, fx.Node) or not is_zero(source(into)):
        return None
    if not same_shape(weights, shape(ids)) or not isinstance(shape(ids)[-1], int):
        return None
    if not adds and not _distinct(ids, num_experts):
        raise NoMatch(
            "{} keeps one weight where a token has an expert twice, and {} are not seen to be distinct; "
            "write it as scatter_add",
            node.name,
            ids.name,
            node=node,
        )
    return ids, weights, _layout(node)


def _scatter(node: fx.Node) -> tuple[object, fx.Node, object, bool] | None:
    """What a scatter along the last axis writes into, its index, what it writes, and whether it adds."""
    if is_call(node, aten.scatter.src, aten.scatter_add.default):
        into, dim, index, values = inputs(node, "self", "dim", "index", "src")
    elif is_call(node, aten.scatter.value):
        into, dim, index, values = inputs(node, "self", "dim", "index", "value")
    elif is_call(node, aten.scatter_reduce.two) and arguments(node)["reduce"] == "sum":
        into, dim, index, values = inputs(node, "self", "dim", "index", "src")
        if not arguments(node)["include_self"]:
            return None
    else:
        return None
    sizes = shape(node)
    if dim not in (-1, len(sizes) - 1) or not same_shape(index, (*sizes[:-1], shape(index)[-1])):
        return None
    return into, index, values, is_call(node, aten.scatter_add.default, aten.scatter_reduce.two)


def _column_of_tokens(node: fx.Node, indices: list[fx.Node | None]) -> fx.Node | None:
    """ids ``[T, k]`` where the ``indices`` of a matrix are each token's own row, and ids."""
    if len(indices) != 2 or len(shape(node)) != 2:
        return None
    token, ids = indices
    if token is None or ids is None or len(shape(ids)) != 2:
        return None
    rows = shape(node)[0]
    own = same_shape(token, (rows, 1)) and is_iota(source(token), rows)
    return ids if own and same(shape(ids)[0], rows) else None


def _distinct(ids: fx.Node, num_experts: int) -> bool:
    """Whether no token has an expert twice."""
    return same(shape(ids)[-1], 1) or is_choice(source(ids), num_experts)


def _one_hot_sum(node: fx.Node, num_experts: int) -> tuple[fx.Node, fx.Node, Layout] | None:
    """ids, weights and layout where ``node`` sums, over a token's slots, one-hot rows times weights."""
    sides = _factors(node)
    if sides is None:
        return None
    found = [_one_hot(side, num_experts) for side in sides]
    hot = next((one for one in found if one is not None), None)
    if hot is None or all(found):
        return None
    ids, weighing = hot[0], sides[found.index(None)]
    steps = trail(weighing)
    if not same_shape(steps[0], shape(ids)):
        return None
    layouts = [along(slot_layout(ids), steps) if one is None else one[1] for one in found]
    summed = _summed(node, layouts[0], layouts[1])
    return None if summed is None or "k" in names(summed) else (ids, steps[0], summed)


def _factors(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The factors of a product, or of a sum of products."""
    product = source(arguments(node)["self"]) if is_call(node, aten.sum.dim_IntList) else node
    if is_call(product, aten.bmm.default) and product is node:
        left, right = inputs(product, "self", "mat2")
    elif is_call(product, aten.mul.Tensor):
        left, right = inputs(product, "self", "other")
    elif is_call(product, aten.where.self, aten.where.ScalarOther):
        left, right, other = inputs(product, "condition", "self", "other")
        if not is_zero(source(other) if isinstance(other, fx.Node) else other):
            return None
    else:
        return None
    return (left, right) if isinstance(left, fx.Node) and isinstance(right, fx.Node) else None


def _summed(node: fx.Node, left: Layout, right: Layout) -> Layout | None:
    """The layout of a product summed over the slots alone, or None."""
    if is_call(node, aten.bmm.default):
        found = multiplied(left, right)
        return found[0] if found is not None and {axis.name for axis in found[1]} <= {"k"} else None
    product = broadcast(left, right)
    if product is None or not is_call(node, aten.sum.dim_IntList):
        return product
    args = arguments(node)
    dims = {dim % len(product) for dim in args["dim"] or range(len(product))}
    if not {axis.name for dim in dims for axis in product[dim]} <= {"k"} or len(shape(args["self"])) != len(product):
        return None
    return tuple(dim for place, dim in enumerate(product) if place not in dims)


def _one_hot(node: fx.Node, num_experts: int) -> tuple[fx.Node, Layout] | None:
    """ids, and the layout of ``node``, where it holds whether a slot's id is this expert's."""
    steps = trail(node, casts=True)
    if not is_call(steps[0], aten.eq.Tensor):
        return None
    sides = [trail(side) for side in inputs(steps[0], "self", "other")]
    experts = next((side for side in sides if is_iota(side[0], num_experts)), None)
    ids = next((side for side in sides if side is not experts), None)
    if experts is None or ids is None or len(shape(ids[0])) < 2:
        return None
    hot = broadcast(along(slot_layout(ids[0]), ids), along(laid_out(shape(experts[0]), ("E", 1)), experts))
    return None if hot is None else (ids[0], along(hot, steps))


def _layout(node: fx.Node) -> Layout:
    """The layout of scores ``[..., E]``, tokens first."""
    return laid_out(shape(node), ("T", len(shape(node)) - 1), ("E", 1))


def _differs_at(node: fx.Node, num_experts: int, fill: float, steps: int = 0) -> fx.Node | None:
    """The distinct ids ``[..., k]`` but at which ``node``, ``[..., E]``, is ``fill``; None if not seen."""
    if steps > _MAX_STEPS or not same(shape(node)[-1], num_experts):
        return None

    def at(inner: object, value: float = fill) -> fx.Node | None:
        return _differs_at(inner, num_experts, value, steps + 1) if isinstance(inner, fx.Node) else None

    if is_call(node, aten.clone.default, CAST):
        return at(node.args[0]) if fill == 0 or dtype(node).is_floating_point else None
    if (scatter := _scatter(node)) is not None:
        into, ids, _, _ = scatter
        distinct = isinstance(shape(ids)[-1], int) and _distinct(ids, num_experts)
        return ids if distinct and _is_filled(source(into), fill) else None
    if is_call(node, aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf):
        mask, if_true, if_false = inputs(node, "condition", "self", "other")
        return _kept(mask, if_true, if_false, num_experts, fill, steps)
    if is_call(node, aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        mask, if_true, if_false = inputs(node, "mask", "value", "self")
        return _kept(mask, if_true, if_false, num_experts, fill, steps)
    if is_call(node, aten.sub.Tensor) and fill == -inf:
        left, right, alpha = inputs(node, "self", "other", "alpha")
        return at(left) if alpha == 1 and _per_token(node, right) else None
    if fill != 0:
        return None
    if is_call(node, aten.sigmoid.default, aten.exp.default):
        return at(node.args[0], -inf)
    if is_call(node, aten.mul.Tensor):
        left, right = inputs(node, "self", "other")
        return next((found for side in (left, right) if _as_wide(node, side) and (found := at(side))), None)
    if is_call(node, aten.div.Tensor):
        left, right = inputs(node, "self", "other")
        return at(left) if _per_token(node, right) else None
    if is_call(node, aten.sum.dim_IntList):  # of one-hot rows
        return _counted(node, num_experts)
    return None


def _kept(mask: fx.Node, if_true: object, if_false: object, experts: int, fill: float, steps: int) -> fx.Node | None:
    """The ids where a choice keeps what is not ``fill``."""
    found = _mask(mask, experts, steps)
    if found is None:
        return None
    ids, kept_if_true = found
    other = if_false if kept_if_true else if_true
    other = source(other) if isinstance(other, fx.Node) else other
    return ids if _is_filled(other, fill) else None


def _mask(node: fx.Node, num_experts: int, steps: int) -> tuple[fx.Node, bool] | None:
    """The distinct ids of a mask ``[..., E]``, and what it does not hold at the other experts."""
    if not same(shape(node)[-1], num_experts):
        return None
    if is_call(node, aten.logical_not.default, aten.bitwise_not.default):
        found = _mask(node.args[0], num_experts, steps)  # type: ignore[arg-type]
        return None if found is None else (found[0], not found[1])
    if is_call(node, aten.eq.Scalar, aten.ne.Scalar, aten.gt.Scalar) and arguments(node)["other"] == 0:
        ids = _differs_at(arguments(node)["self"], num_experts, 0.0, steps + 1)
        return None if ids is None else (ids, not is_call(node, aten.eq.Scalar))
    if is_call(node, aten.any.dim, aten.any.dims):
        ids = _counted(node, num_experts)
        return None if ids is None else (ids, True)
    hot = _one_hot(node, num_experts)  # of one slot
    if hot is not None:
        return (hot[0], True) if runs_over(hot[1], *axes(_layout(node))) else None
    for fill in (0.0, 1.0) if dtype(node) is torch.bool else ():
        ids = _differs_at(node, num_experts, fill, steps + 1)
        if ids is not None:
            return ids, fill == 0
    return None


def _counted(node: fx.Node, num_experts: int) -> fx.Node | None:
    """ids where ``node`` says, of one-hot rows, whether or how often a token has an expert."""
    hot = _one_hot(arguments(node)["self"], num_experts)
    if hot is None or not _distinct(hot[0], num_experts):
        return None
    dims = arguments(node)["dim"]
    summed = {dim % len(hot[1]) for dim in ([dims] if isinstance(dims, int) else dims or [])}
    left = tuple(dim for place, dim in enumerate(hot[1]) if place not in summed)
    return hot[0] if runs_over(left, *axes(_layout(node))) else None


def _is_filled(value: object, fill: float) -> bool:
    if fill == 0:
        return is_zero(value) or value is False
    if is_call(value, aten.full.default, aten.full_like.default):
        value = arguments(value)["fill_value"]  # type: ignore[arg-type]
    elif is_call(value, aten.scalar_tensor.default):
        value = arguments(value)["s"]  # type: ignore[arg-type]
    return value == fill


def _per_token(node: fx.Node, value: object) -> bool:
    return isinstance(value, fx.Node) and same_shape(value, (*shape(node)[:-1], 1))


def _as_wide(node: fx.Node, value: object) -> bool:
    return isinstance(value, fx.Node) and same_shape(value, shape(node))
