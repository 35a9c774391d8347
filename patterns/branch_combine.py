"""From the products of branches to one row a token: weighted by the scores of the branches and summed over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from ..matching import NoMatch, Source
from ..spec import Operand
from .axes import Axis, Layout, along, broadcast, moved, moves, multiplied, names, runs_over, trail, unified
from .block import Feed
from .branches import onward, read_ids, slot_layout, values_of
from .graph_tools import (
    CAST,
    arguments,
    aten,
    dtype,
    inputs,
    is_call,
    is_iota,
    narrowed,
    numel,
    same,
    same_shape,
    shape,
    source,
    value,
)
from .scores import read_scores


@dataclass(frozen=True, slots=True)
class Branches:
    """What tokens run over: their slots, with these ids, or all experts (None)."""

    ids: fx.Node | None
    num_experts: int

    @property
    def name(self) -> str:
        return "E" if self.ids is None else "k"


@dataclass(frozen=True, slots=True)
class Routing:
    """Routing weights where they multiply.

    Attributes:
        ids, weights: ``[..., k]``, the weights in the dtype they multiply in.
        layout, dtype: of the factor that holds them.
        feeds: where a region that reads them is cut.
        nodes: the steps from there to the factor.
    """

    ids: fx.Node
    weights: Source
    layout: Layout
    dtype: torch.dtype
    feeds: Mapping[fx.Node, Feed]
    nodes: frozenset[fx.Node]


@dataclass(frozen=True, slots=True)
class Way:
    """Rows on their way: the node, its axes, and the routing weights once they are in."""

    node: fx.Node
    layout: Layout
    branches: Branches
    routing: Routing | None = None
    nodes: frozenset[fx.Node] = field(default_factory=frozenset)

    def after(self, node: fx.Node, layout: Layout) -> Way:
        return replace(self, node=node, layout=layout, nodes=self.nodes | {node})


def read_routing(factor: fx.Node, branches: Branches) -> Routing:
    """The routing weights, one for every token and branch, that ``factor`` holds.

    Raises:
        NoMatch: it holds something else.
    """
    if branches.ids is None:
        steps = trail(factor, casts=True)
        casts = next((place for place, step in enumerate(steps[1:]) if not is_call(step, CAST)), len(steps) - 1)
        scores = read_scores(steps[casts], branches.num_experts, dtype(factor))
        layout = along(scores.layout, steps[casts:])
        nodes = scores.nodes | frozenset(steps[casts + 1 :])
        return Routing(scores.ids, scores.weights, layout, dtype(factor), scores.feeds, nodes)
    steps = trail(factor)
    weights = steps[0]
    if not same(numel(weights), numel(branches.ids)) or not dtype(weights).is_floating_point:
        raise NoMatch("{} does not hold one weight a slot", weights.name, node=factor)
    sizes = shape(branches.ids)
    flat = len(shape(weights)) == 1 and len(sizes) > 1
    layout = (tuple(axis for dim in slot_layout(branches.ids) for axis in dim),) if flat else slot_layout(weights)
    feeds = {branches.ids: Feed(Operand.TOPK_IDS), weights: Feed(Operand.TOPK_WEIGHTS)}
    return Routing(branches.ids, weights, along(layout, steps), dtype(factor), feeds, frozenset(steps[1:]))


@dataclass(frozen=True, slots=True)
class BranchCombine:
    """``output`` holds ``[T, O]``; ``nodes``: the steps to it."""

    output: fx.Node
    routing: Routing
    nodes: frozenset[fx.Node]


def combine_branches(way: Way, tokens: Axis, out: Axis) -> BranchCombine:
    """Follow the rows of the down GEMM to the block's output.

    Raises:
        NoMatch: a step that is no part of a combine; ``node`` is where.
    """
    while way.routing is None or not runs_over(way.layout, tokens, out) or _sums_nothing(way):
        users = values_of(way.node)
        if len(users) != 1:
            read_by = ", ".join(user.name for user in users) or "nobody"
            raise NoMatch("{} should have one reader, has: {}", way.node.name, read_by, node=way.node)
        way = _step(way, users[0])
    shown = [node for node, layout in onward(way.node, way.layout) if runs_over(layout, tokens, out)]
    output = next((node for node in reversed(shown) if len(shape(node)) == 2), way.node)
    output = narrowed(output)
    return BranchCombine(output, way.routing, way.nodes | {output, *shown})


def _sums_nothing(way: Way) -> bool:
    """Whether a sum over no more than one element follows."""
    for node, layout in onward(way.node, way.layout):
        users = values_of(node)
        if len(users) == 1 and is_call(users[0], aten.sum.dim_IntList):
            return not any(layout[dim] for dim in arguments(users[0])["dim"] or range(len(layout)))
    return False


def _step(way: Way, user: fx.Node) -> Way:
    if moves(user) is way.node:
        return way.after(user, moved(user, way.layout))
    if is_call(user, CAST) and dtype(user).is_floating_point and dtype(user).itemsize >= 2:
        return way.after(user, way.layout)
    if is_call(user, aten.mul.Tensor):
        return _weigh(way, user)
    if is_call(user, aten.sum.dim_IntList):
        return _sum(way, user)
    if is_call(user, aten.bmm.default, aten.mm.default):
        return _contract(way, user)
    if is_call(user, aten.gather.default, aten.index.Tensor) and way.branches.ids is None:
        return _pick(way, user)
    raise NoMatch("{} ({}) is no part of a weighted combine", user.name, user.target, node=user)


def _weigh(way: Way, user: fx.Node) -> Way:
    left, right = inputs(user, "self", "other")
    factor = right if left is way.node else left
    if not isinstance(factor, fx.Node) or factor is way.node:
        raise NoMatch("{} scales rows by {}", user.name, value(factor), node=user)
    weighed = weigh(way, factor)
    if not same_shape(user, shape(way.node)):
        raise NoMatch("{} repeats rows for {}", user.name, factor.name, node=user)
    return weighed.after(user, weighed.layout)


def weigh(way: Way, factor: fx.Node) -> Way:
    """Rows times routing weights, one for each token and branch.

    Raises:
        NoMatch: the factor holds something else, or rows carry their weights already.
    """
    if way.routing is not None:
        raise NoMatch("{} scales rows that already carry their routing weights", factor.name, node=factor)
    routing = read_routing(factor, way.branches)
    product = broadcast(way.layout, routing.layout)
    if product is None or names(routing.layout) != names(product) & {"T", way.branches.name}:
        raise NoMatch("{} does not hold one weight for each token and expert of the rows", factor.name, node=factor)
    return replace(way, layout=product, routing=routing, nodes=way.nodes | routing.nodes)


def _sum(way: Way, user: fx.Node) -> Way:
    args = arguments(user)
    rank = len(way.layout)
    dims = {dim % rank for dim in args["dim"] or range(rank)}
    summed = {axis.name for dim in dims for axis in way.layout[dim]}
    if not summed <= {way.branches.name}:
        raise NoMatch("{} sums over others than the branches of each token", user.name, node=user)
    if way.routing is None:
        raise NoMatch("{} sums rows without routing weights", user.name, node=user)
    kept = [() if place in dims else dim for place, dim in enumerate(way.layout)]
    left = kept if args["keepdim"] else [dim for place, dim in enumerate(kept) if place not in dims]
    return way.after(user, tuple(left))


def _contract(way: Way, user: fx.Node) -> Way:
    """``bmm`` or ``mm`` of rows and routing weights that sums over branches."""
    left, right = inputs(user, "self", "mat2")
    factor = right if left is way.node else left
    if way.routing is not None or factor is way.node:
        raise NoMatch("{} is no weighted sum over branches", user.name, node=user)
    routing = read_routing(factor, way.branches)
    product = multiplied(*((way.layout, routing.layout) if left is way.node else (routing.layout, way.layout)))
    wanted = names(way.layout) & {"T", way.branches.name}
    if product is None or names(routing.layout) != wanted or {axis.name for axis in product[1]} - {way.branches.name}:
        raise NoMatch("{} does not weigh the branches of each token", user.name, node=user)
    return replace(way, node=user, layout=product[0], routing=routing, nodes=way.nodes | routing.nodes | {user})


def _pick(way: Way, user: fx.Node) -> Way:
    """The rows of the experts that each token has chosen, out of those of all experts."""
    at = [place for place, dim in enumerate(way.layout) if [axis.name for axis in dim] == ["E"]]
    tokens = [place for place, dim in enumerate(way.layout) if [axis.name for axis in dim] == ["T"]]
    index, layout = None, None
    if is_call(user, aten.gather.default):
        dim, index = inputs(user, "dim", "index")
        ids, layout = read_ids(index, way.branches.num_experts)
        others = [unified(a, b) for place, (a, b) in enumerate(zip(layout, way.layout, strict=True)) if place not in at]
        if at != [dim % len(way.layout)] or None in others:
            layout = None
        else:
            layout = tuple(layout[place] if place in at else dim for place, dim in enumerate(way.layout))
    else:
        indices = arguments(user)["indices"]
        if sorted(at + tokens) == [0, 1] and len(indices) == 2:
            index, token = indices[at[0]], indices[tokens[0]]
            ids, chosen = read_ids(index, way.branches.num_experts)
            rows = shape(way.node)[tokens[0]]
            if same_shape(token, (rows, 1)) and is_iota(source(token), rows) and len(chosen) == 2:
                layout = (*chosen, *way.layout[2:])
    if layout is None or index is None:
        raise NoMatch("{} does not pick the rows of each token's experts", user.name, node=user)
    return replace(way.after(user, layout), branches=Branches(ids, way.branches.num_experts))
