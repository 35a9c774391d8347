"""Masks that zero the rows of no expert.

Slots that belong to another device's experts carry ids of E and more. No group of a grouped GEMM holds
their rows, which it leaves unwritten; a mask made from the ids then keeps them out of every sum.
"""

from __future__ import annotations

from torch import fx

from ..matching import NoMatch
from .graph_tools import aten, dtype, inputs, is_call, is_zero, numel, same, same_shape, shape, source
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
    compared = source(mask)
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
    else:
        return None
    return mask, if_true, if_false
