"""Masks that zero the rows of no expert.

Slots that belong to another device's experts carry ids of E and more. No group of a grouped GEMM holds
their rows, which it leaves unwritten; a mask made from the ids then keeps them out of every sum.
"""

from __future__ import annotations

import torch
from torch import fx

from ..matching import NoMatch
from .graph_tools import CAST, aten, dtype, inputs, is_call, is_zero, numel, same, same_shape, shape, source
from .rows import RowOrder


def unmasked(node: fx.Node, order: RowOrder, num_experts: object) -> fx.Node | None:
    """x where ``node`` is x with zeros in the rows of no expert; None where ``node`` picks no rows by their ids.

    Raises:
        NoMatch: it picks other rows, or fills them with something else.
    """
    choice = _choice(node)
    if choice is None:
        return None
    mask, if_true, if_false = choice
    compared = _truth(mask) or source(mask)
    while is_call(compared, aten.logical_not.default, aten.bitwise_not.default):
        compared, if_true, if_false = source(inputs(compared, "self")[0]), if_false, if_true
    if is_call(compared, aten.ge.Scalar, aten.gt.Scalar):
        fill, kept = if_true, if_false
    elif is_call(compared, aten.lt.Scalar, aten.le.Scalar):
        fill, kept = if_false, if_true
    else:
        return None
    ids, bound = inputs(compared, "self", "other")
    if dtype(ids).is_floating_point:
        return None
    first = bound + is_call(compared, aten.gt.Scalar, aten.le.Scalar) if isinstance(bound, int) else None
    if not same(first, num_experts):
        raise NoMatch("{} does not tell ids of {} experts from others", compared.name, num_experts, node=compared)
    if not order.holds_ids(ids):
        raise NoMatch("{} is not made from the expert ids of the rows", compared.name, node=compared)
    if not is_zero(fill):
        raise NoMatch("{} does not fill the rows of no expert with zeros", node.name, node=node)
    whole = same_shape(mask, (*shape(node)[:-1], 1)) and same(numel(mask), numel(order.ids))
    if not whole or not isinstance(kept, fx.Node) or not same_shape(kept, shape(node)):
        raise NoMatch("{} does not mask whole rows, one a slot", node.name, node=node)
    return kept


def _choice(node: fx.Node) -> tuple[fx.Node, object, object] | None:
    """The condition of an elementwise choice, what is taken where it is true, and what elsewhere."""
    if is_call(node, aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther):
        mask, if_true, if_false = inputs(node, "condition", "self", "other")
    elif is_call(node, aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        mask, if_true, if_false = inputs(node, "mask", "value", "self")
    elif is_call(node, aten.mul.Tensor):  # by 0 and 1
        product = inputs(node, "self", "other")
        mask = next((side for side in product if _truth(side) is not None), None)
        if_true, if_false = next((side for side in product if side is not mask), None), 0
        if mask is None:
            return None
    else:
        return None
    return mask, if_true, if_false


def _truth(node: object) -> fx.Node | None:
    """The truth values that ``node`` holds as numbers 0 and 1."""
    node = source(node) if isinstance(node, fx.Node) else node
    if not is_call(node, CAST):
        return None
    base: fx.Node = inputs(node, "a")[0]  # type: ignore[arg-type]
    return source(base) if dtype(base) is torch.bool else None
