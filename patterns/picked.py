"""What tensors between expert ids, routing weights and an expert's rows hold, and what their products are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import fx

from ..matching import NoMatch

Axis = Literal["batch", "tokens", "slots", "places", "experts", "rows", "columns", "one"]
Kind = Literal["ids", "experts", "match", "takes", "index", "weights", "picked", "score"]


@dataclass(frozen=True, slots=True)
class Value:
    """What a tensor holds.

    - "ids": expert ids; "experts": 0, 1, ... along its only axis.
    - "match": whether an id is ``expert``, as a truth value or 0 and 1; "takes": whether any of a token's is.
    - "index": the positions where ``rows`` is true, along its axis ``along``.
    - "weights": routing weights; "picked": them where "match", else 0; "score": the sum of "picked" over the slots.

    Attributes:
        axes: what each axis counts; "places" are the slots of all tokens, token by token, "rows" those where ``rows``
            is true, "one" has one index.
        expert: the expert that ids are compared with; None where an axis counts experts.
        negated: a truth value that holds everywhere else.
        distinct: so only if the ids of a token differ.
    """

    kind: Kind
    axes: tuple[Axis, ...]
    ids: fx.Node | None = None
    weights: fx.Node | None = None
    expert: int | None = None
    negated: bool = False
    rows: Value | None = None
    along: Axis | None = None
    distinct: bool = False

    @property
    def named(self) -> tuple[Axis, ...]:
        return tuple(axis for axis in self.axes if axis != "one")


def without(read: Value, axis: int, node: fx.Node, *, exact: bool = True) -> Value:
    """``read`` with one axis taken away: of one place, or slots summed over (of truth values: any of them).

    ``exact`` says that several matches count as one.
    """
    name = read.axes[axis]
    rest = replace(read, axes=read.axes[:axis] + read.axes[axis + 1 :])
    if name == "one":
        return rest
    if name != "slots" or read.negated or read.kind not in ("picked", "match"):
        raise NoMatch("{} takes the {} of {} away", node.name, name, read.kind, node=node)
    if read.kind == "picked":
        return replace(rest, kind="score")
    return replace(rest, kind="takes", distinct=read.distinct or not exact)


def product(left: Value, right: Value, node: fx.Node) -> Value:
    """Elementwise product: weights by a mask, or masks of the same expert.

    Raises:
        NoMatch: any other.
    """
    if left.kind in ("match", "takes"):
        left, right = right, left
    kinds = (left.kind, right.kind)
    other_rows = left.rows is not None and right.rows is not None and not same_rows(left.rows, right.rows)
    if left.negated or right.negated or other_rows:
        raise NoMatch("{} multiplies {} by {} of other rows", node.name, *kinds, node=node)
    both = replace(
        left,
        axes=overlaid(left, right, node),
        ids=right.ids,
        expert=right.expert,
        rows=left.rows or right.rows,
        distinct=left.distinct or right.distinct,
    )
    if kinds == ("weights", "match"):
        return replace(both, kind="picked")
    if kinds == ("weights", "takes") and "slots" not in both.axes:  # each token has one
        return replace(both, kind="score")
    alike = (left.expert, left.ids) == (right.expert, right.ids)
    if alike and kinds in _ABSORBED:
        return both
    raise NoMatch("{} multiplies {} by {}", node.name, *kinds, node=node)


def same_rows(left: Value, right: Value) -> bool:
    """Whether two masks are true at the same places."""
    return replace(left, axes=left.named) == replace(right, axes=right.named)


_ABSORBED = (("picked", "match"), ("picked", "takes"), ("score", "takes"), ("match", "match"), ("takes", "takes"))
"""Products with a mask that holds wherever the left side is not zero."""


def overlaid(left: Value, right: Value, node: fx.Node) -> tuple[Axis, ...]:
    """The axes of two values that are broadcast against each other."""
    rank = max(len(left.axes), len(right.axes))
    first, second = (("one",) * (rank - len(read.axes)) + read.axes for read in (left, right))
    axes: list[Any] = []
    for one, other in zip(first, second, strict=True):
        if one != other and "one" not in (one, other):
            raise NoMatch("{} lays {} over {}", node.name, one, other, node=node)
        axes.append(other if one == "one" else one)
    return tuple(axes)
