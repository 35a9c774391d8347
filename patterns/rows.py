"""What the T*k rows of an expert GEMM hold: which token, which of its k slots, which expert.

Rows are in slot order (row s is slot s % k of token s // k) or sorted by expert, where row r is slot
``perm[r]``. Everything that is gathered for rows must be read against the same order.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

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
    is_floor_division,
    is_iota,
    numel,
    readers,
    row_gather,
    same,
    same_shape,
    shape,
    source,
    viewed,
)


@dataclass(frozen=True, slots=True)
class RowOrder:
    """How rows are laid out.

    Attributes:
        ids: expert ids, ``[T, k]`` or any view of it, behind all views.
        perm: None in slot order, else the node that says which slot each row holds.
        sorted_ids: ``ids[perm]`` as the sort returns it.
    """

    ids: fx.Node
    perm: fx.Node | None = None
    sorted_ids: fx.Node | None = None

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return tuple(node for node in (self.ids, self.perm, self.sorted_ids) if node is not None)

    def holds_ids(self, node: fx.Node) -> bool:
        """Whether ``node`` is the expert id of each row as the router gives it."""
        node = source(node)
        if self.perm is None:
            return node is self.ids
        return node is self.sorted_ids or self._by_perm(node) is self.ids

    def holds_experts(self, node: fx.Node, num_experts: object) -> bool:
        """Whether ``node`` is the expert of each row, to look up something by: ids of no expert may be brought inside.

        Raises:
            NoMatch: ids of an expert are changed too.
        """
        return self.holds_ids(node) or self.holds_ids(unbounded(node, num_experts))

    def per_slot(self, node: fx.Node) -> fx.Node:
        """The per-slot values, behind views, that ``node`` holds in row order.

        Raises:
            NoMatch: gathered in another order.
        """
        node = source(node)
        if self.perm is None:
            return node
        slots = self._by_perm(node)
        if slots is None:
            raise NoMatch("{} is not gathered by the permutation that sorts the tokens", node.name, node=node)
        return slots

    def _by_perm(self, node: fx.Node) -> fx.Node | None:
        """x, behind views, where ``node`` is ``x[perm]``."""
        gather = row_gather(node)
        return source(gather[0]) if gather and self.perm is not None and source(gather[1]) is self.perm else None

    def per_token(self, rows: fx.Node, top_k: int) -> fx.Node:
        """The per-token matrix ``[T, ...]`` that ``rows`` repeats for every row.

        The result keeps its dtype: a cast between it and the rows would change the values.

        Raises:
            NoMatch: rows are not each their own token's.
        """
        node = source(rows)
        if self.perm is not None:
            slots = self._by_perm(node)
            if slots is not None and top_k > 1:
                return RowOrder(self.ids).per_token(slots, top_k)
        elif is_call(node, aten.expand.default):
            return matrix(_repeated(node, top_k))
        elif top_k == 1 and row_gather(node) is None:
            return matrix(rows)
        gather = row_gather(node)
        if gather is None:
            raise NoMatch("rows of the first GEMM are not gathered tokens but {}", node.name, node=node)
        if not self.holds_tokens(gather[1], top_k):
            raise NoMatch("{} is not the token of each row", gather[1].name, node=gather[1])
        return gather[0]

    def holds_tokens(self, node: fx.Node, top_k: int) -> bool:
        """Whether ``node`` is the token of each row: its slot // k."""
        node = source(node)
        slots = numel(self.ids)
        if self.perm is None:
            if is_call(node, aten.expand.default):
                column = arguments(node)["self"]
                pairs = len(shape(node)) == 2 and same(shape(node)[1], top_k)
                return pairs and _is_column(column) and is_iota(source(column), shape(node)[0])
            if top_k == 1:
                return is_iota(node, slots)
            division = is_floor_division(node)
            return bool(division and division[1] == top_k and is_iota(source(division[0]), slots))
        slot_tokens = self._by_perm(node)
        if slot_tokens is not None:
            return RowOrder(self.ids).holds_tokens(slot_tokens, top_k)
        division = is_floor_division(node)
        if division is None and top_k == 1:
            return node is self.perm
        return bool(division and division[1] == top_k and source(division[0]) is self.perm)

    def restores_slots(self, node: fx.Node) -> bool:
        """Whether ``node`` is the inverse permutation: which row each slot is in."""
        node = source(node)
        if self.perm is None:
            return False
        if is_call(node, aten.index_put.default):
            args = arguments(node)
            indices, rows = args["indices"], source(args["values"])
            one = len(indices) == 1 and indices[0] is not None and source(indices[0]) is self.perm
            return one and not args["accumulate"] and is_iota(rows, numel(self.perm))
        if is_call(node, aten.scatter.src):
            args = arguments(node)
            return source(args["index"]) is self.perm and is_iota(source(args["src"]), numel(self.perm))
        order = sort_result(node, 1)
        return order is not None and source(order) is self.perm


def _is_column(node: fx.Node) -> bool:
    return len(shape(node)) == 2 and same(shape(node)[1], 1)


def _repeated(node: fx.Node, top_k: int) -> fx.Node:
    """x ``[T, 1, H]`` where ``node`` is ``x[:, None].expand(T, k, H)``."""
    base: fx.Node = arguments(node)["self"]
    if len(shape(base)) == 3:
        tokens, one, width = shape(base)
        if same(one, 1) and same_shape(node, (tokens, top_k, width)):
            return matrix(base)
    raise NoMatch("{} does not repeat each token {} times", node.name, top_k, node=node)


def matrix(node: fx.Node) -> fx.Node:
    """The nearest node behind views that has two axes, or the one behind all views."""
    while len(shape(node)) != 2 and (base := viewed(node)) is not None:
        node = base
    return node


def sort_result(node: fx.Node, item: int) -> fx.Node | None:
    """The key where ``node`` is item 0 (values) or 1 (indices) of an ascending sort of all its elements."""
    if not is_call(node, operator.getitem) or node.args[1] != item or not is_call(node.args[0], *_SORTS):
        return None
    sort = node.args[0]
    assert isinstance(sort, fx.Node)
    args = arguments(sort)
    key = args["self"]
    flat = len(shape(key)) == 1 and args["dim"] in (-1, 0)
    return key if flat and not args["descending"] else None


def sorted_order(sorted_ids: fx.Node) -> RowOrder:
    """The order that a sort of the expert ids gives, from its first result.

    Raises:
        NoMatch: not a sort of flat ids.
    """
    key = sort_result(sorted_ids, 0)
    if key is None:
        raise NoMatch("{} is not the values of an ascending sort", sorted_ids.name, node=sorted_ids)
    sort = sorted_ids.args[0]
    assert isinstance(sort, fx.Node)
    perm = _result(sort, 1)
    if perm is None:
        raise NoMatch("the sort {} gives no permutation", sort.name, node=sort)
    return RowOrder(source(key), perm, sorted_ids)


def _result(sort: fx.Node, item: int) -> fx.Node | None:
    """Item 0 (values) or 1 (indices) of an ascending sort, if it is read."""
    return next((user for user in sort.users if sort_result(user, item) is not None), None)


_SORTS = (aten.sort.default, aten.sort.stable)


def slot_order(index: fx.Node, num_experts: object) -> RowOrder:
    """Slot order, from what experts are looked up by.

    Bounds around ids that are always inside are left out. Any others are part of the ids: a slot whose
    id they change does have that expert.

    Raises:
        NoMatch: the bounds are others than ``[0, E)``.
    """
    ids = unbounded(index, num_experts)
    return RowOrder(ids if is_choice(ids, num_experts) else source(index))


def unbounded(node: fx.Node, num_experts: object) -> fx.Node:
    """The expert ids behind views and behind bounds that change no id of an expert.

    Raises:
        NoMatch: a bound that does, or that leaves ids beyond the last expert.
    """
    node = source(node)
    while is_call(node, aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default):
        args = arguments(node)
        low, high = args.get("min"), args.get("max")
        inside = low is None or (isinstance(low, int) and low <= 0)
        if not inside or not (high is None or (isinstance(high, int) and same(high + 1, num_experts))):
            raise NoMatch("{} bounds ids by others than those of {} experts", node.name, num_experts, node=node)
        node = source(args["self"])
    return node


def is_choice(ids: fx.Node, num_experts: object) -> bool:
    """Whether ``ids`` are the indices of a top-k over all experts, and so never outside, nor one twice for a token."""
    if not is_call(ids, operator.getitem) or ids.args[1] != 1 or not is_call(ids.args[0], aten.topk.default):
        return False
    assert isinstance(ids.args[0], fx.Node)
    scores, dim = inputs(ids.args[0], "self", "dim")
    sizes = shape(scores)
    return dim in (-1, len(sizes) - 1) and same(sizes[-1], num_experts)


def order_from_counts(counted: fx.Node) -> RowOrder:
    """The order of rows whose experts are counted in ``counted``: sorted ids, or ids that one sort reads.

    Raises:
        NoMatch: no sort puts rows in an order with these counts.
    """
    counted = source(counted)
    if sort_result(counted, 0) is not None:
        return sorted_order(counted)
    gather = row_gather(counted)
    if gather is not None and sort_result(source(gather[1]), 1) is not None:
        counted = source(gather[0])  # a permutation does not change counts
    sorts = [reader for reader, _ in readers(counted) if is_call(reader, *_SORTS) and _result(reader, 1) is not None]
    if len(sorts) != 1:
        raise NoMatch("{} sorts read the counted expert ids, not one", len(sorts), node=counted)
    return RowOrder(counted, _result(sorts[0], 1), _result(sorts[0], 0))


def integer_cast(node: fx.Node) -> fx.Node:
    """``node`` behind views and casts of integer values that keep every expert id exact."""
    node = source(node)
    while is_call(node, CAST):
        base = source(arguments(node)["a"])
        if dtype(node) not in _EXACT or (dtype(base).is_floating_point and dtype(base) not in _EXACT):
            break
        node = base
    return node


_EXACT = (torch.float32, torch.float64, torch.int32, torch.int64)
