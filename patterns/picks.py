"""What one expert of a loop takes: masks made from expert ids, the tokens they pick, and weights picked alike.

Every tensor between expert ids, routing weights and an expert's rows is read as one of a few things
(``Value``) with named axes, operation by operation. What is none of them is refused, so nothing but
``ids == expert`` can decide which rows an expert sees.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

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
    is_zero,
    permutation,
    prims,
    same,
    shape,
)
from .graph_tools import is_iota as _counts_up
from .picked import Axis, Kind, Value, overlaid, product, same_rows, without


@dataclass(slots=True)
class Picks:
    """Reads the tensors of one block and remembers them.

    Attributes:
        experts: the lengths of axes that count experts.
        values: what was read, node by node.
    """

    experts: set[int] = field(default_factory=set)
    values: dict[fx.Node, Value] = field(default_factory=dict)

    def read(self, node: object) -> Value:
        """What ``node`` holds.

        Raises:
            NoMatch: nothing that picks by expert ids, and no ids or routing weights.
        """
        if not isinstance(node, fx.Node):
            raise NoMatch("{!r} is no tensor", node)
        if node not in self.values:
            rule = _RULES.get(node.target) if node.op == "call_function" else None
            found = rule(self, node) if rule is not None else None
            self.values[node] = found or _root(node)
        return self.values[node]

    def mask(self, node: object) -> Value:
        """What ``node`` holds, which must be a mask.

        Raises:
            NoMatch: it is something else.
        """
        read = self.read(node)
        if read.kind not in ("match", "takes"):
            raise NoMatch("{} is no mask of expert ids but {}", node, read.kind)
        return read

    def count(self, size: object, node: fx.Node) -> None:
        if not isinstance(size, int):
            raise NoMatch("{} counts experts whose number is not constant", node.name, node=node)
        self.experts.add(size)


def _root(node: fx.Node) -> Value:
    """Ids or routing weights: what is read, but picks nothing itself."""
    sizes = shape(node)
    if len(sizes) not in (1, 2, 3):
        raise NoMatch("{} ({}) picks nothing by expert ids", node.name, node.target, node=node)
    tokens: tuple[Axis, ...] = ("batch", "tokens") if len(sizes) == 3 else ("tokens",)
    last: Axis = "one" if same(sizes[-1], 1) else "slots"
    axes = tokens if len(sizes) == 1 else (*tokens, last)
    if dtype(node) in (torch.int64, torch.int32):
        return Value("ids", axes, ids=node)
    if not dtype(node).is_floating_point:
        raise NoMatch("{} ({}) is no mask of expert ids", node.name, node.target, node=node)
    return Value("weights", axes, weights=node)


Rule: TypeAlias = Callable[[Picks, fx.Node], "Value | None"]
"""What a call holds; None: what it gives is a root if anything."""


def _same_as_input(picks: Picks, node: fx.Node) -> Value:
    return picks.read(arguments(node)["self"])


def _unsqueeze(picks: Picks, node: fx.Node) -> Value:
    base, dim = inputs(node, "self", "dim")
    read = picks.read(base)
    place = dim % (len(read.axes) + 1)
    return replace(read, axes=(*read.axes[:place], "one", *read.axes[place:]))


def _squeeze(picks: Picks, node: fx.Node) -> Value:
    args = arguments(node)
    read, sizes = picks.read(args["self"]), shape(args["self"])
    dims = args.get("dim", range(len(sizes)))
    for dim in sorted((d % len(sizes) for d in ([dims] if isinstance(dims, int) else dims)), reverse=True):
        if same(sizes[dim], 1):
            read = without(read, dim, node)
    return read


def _view(picks: Picks, node: fx.Node) -> Value | None:
    """A view that only adds and drops axes of one place; routing in another shape is read in that."""
    base: fx.Node = arguments(node)["self"]
    read = picks.read(base)
    kept = [(name, size) for name, size in zip(read.axes, shape(base), strict=True) if name != "one"]
    axes: list[Any] = []
    for size in shape(node):
        if kept and same(size, kept[0][1]):
            axes.append(kept.pop(0)[0])
        elif same(size, 1):
            axes.append("one")
        else:
            break
    if not kept and len(axes) == len(shape(node)):
        return replace(read, axes=tuple(axes))
    if read.axes == ("tokens", "slots") and len(shape(node)) == 1:
        return replace(read, axes=("places",))
    if base in (read.ids, read.weights) and same(shape(node)[-1], shape(base)[-1]):
        return None
    raise NoMatch("{} views {} as {}", node.name, read.axes, shape(node), node=node)


def _permute(picks: Picks, node: fx.Node) -> Value:
    read = picks.read(arguments(node)["self"])
    return replace(read, axes=tuple(read.axes[axis] for axis in permutation(node)))


def _cast(picks: Picks, node: fx.Node) -> Value | None:
    base: fx.Node = arguments(node)["a"]
    read = picks.read(base)
    to = dtype(node)
    if read.kind == "weights" and read.rows is None:
        return None  # the weights are what the graph multiplies by
    if read.kind in ("weights", "picked", "score") and not to.is_floating_point:
        raise NoMatch("{} makes {} of routing weights", node.name, to, node=node)
    if read.kind in ("ids", "index", "experts") and to not in (torch.int32, torch.int64):
        raise NoMatch("{} makes {} of expert ids", node.name, to, node=node)
    return read


def _compare(picks: Picks, node: fx.Node) -> Value:
    negated = is_call(node, aten.ne.Scalar, aten.ne.Tensor)
    left, right = inputs(node, "self", "other")
    ids = picks.read(left)
    if isinstance(right, fx.Node):
        other = picks.read(right)
        if ids.kind == "experts":
            ids, other = other, ids
        if (ids.kind, other.kind) != ("ids", "experts"):
            raise NoMatch("{} compares {} with {}", node.name, ids.kind, other.kind, node=node)
        axes, expert = overlaid(ids, other, node), None
    else:
        if ids.kind != "ids" or type(right) is not int:
            raise NoMatch("{} compares {} with {!r}", node.name, ids.kind, right, node=node)
        axes, expert = ids.axes, right
    kind: Kind = "match" if "slots" in axes or "places" in axes else "takes"
    return replace(ids, kind=kind, axes=axes, expert=expert, negated=negated)


def _not(picks: Picks, node: fx.Node) -> Value:
    read = picks.mask(arguments(node)["self"])
    if dtype(node) is not torch.bool:
        raise NoMatch("{} is no truth value", node.name, node=node)
    return replace(read, negated=not read.negated)


def _reduced(picks: Picks, node: fx.Node) -> Value | None:
    """A sum, or any, over the slots."""
    args = arguments(node)
    read = picks.read(args["self"])
    if read.kind == "weights":
        return None
    rank, summed = len(read.axes), is_call(node, aten.sum.dim_IntList)
    given = args["dim"]
    dims = sorted(d % rank for d in ([given] if isinstance(given, int) else given or range(rank)))
    for dim in reversed(dims):
        read = without(read, dim, node, exact=not summed)
        if args["keepdim"]:
            read = replace(read, axes=(*read.axes[:dim], "one", *read.axes[dim:]))
    return read


def _mul(picks: Picks, node: fx.Node) -> Value | None:
    left, right = inputs(node, "self", "other")
    if not all(isinstance(arg, fx.Node) and shape(arg) for arg in (left, right)):
        return None
    first, second = picks.read(left), picks.read(right)
    if first.kind == second.kind == "weights":
        return None  # scaled by something before anything is picked
    return product(first, second, node)


def _where(picks: Picks, node: fx.Node) -> Value:
    """Weights where a mask holds, zeros elsewhere."""
    if is_call(node, aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        mask, if_true, if_false = inputs(node, "mask", "value", "self")
    else:
        mask, if_true, if_false = inputs(node, "condition", "self", "other")
    read = picks.mask(mask)
    kept, fill = (if_false, if_true) if read.negated else (if_true, if_false)
    if not is_zero(fill):
        raise NoMatch("{} does not fill with zeros", node.name, node=node)
    return product(picks.read(kept), replace(read, negated=False), node)


def _select(picks: Picks, node: fx.Node) -> Value:
    base, dim, index = inputs(node, "self", "dim", "index")
    return _taken(picks.read(base), dim % len(shape(base)), index % _length(base, dim), node)


def _slice(picks: Picks, node: fx.Node) -> Value:
    base, dim, start, end = inputs(node, "self", "dim", "start", "end")
    read, length = picks.read(base), shape(node)[dim]
    if same(length, shape(base)[dim]):
        return read
    if not same(length, 1) or not isinstance(start, int) or not isinstance(end, int):
        raise NoMatch("{} takes a part of {}", node.name, read.kind, node=node)
    place = dim % len(read.axes)
    taken = _taken(read, place, start % _length(base, dim), node)
    return replace(taken, axes=(*taken.axes[:place], "one", *taken.axes[place:]))


def _getitem(picks: Picks, node: fx.Node) -> Value | None:
    unbind, index = node.args
    if not is_call(unbind, aten.unbind.int) or not isinstance(index, int):
        return None
    base, dim = inputs(unbind, "self", "dim")  # type: ignore[arg-type]
    picks.values[unbind] = picks.read(base)  # type: ignore[index]
    return _taken(picks.read(base), dim % len(shape(base)), index, node)


def _length(node: fx.Node, dim: int) -> int:
    size = shape(node)[dim]
    if not isinstance(size, int):
        raise NoMatch("{} has an axis of a length that is not constant", node.name, node=node)
    return size


def _taken(read: Value, axis: int, place: int, node: fx.Node) -> Value:
    """One place of an axis: that of an expert, or a column of positions."""
    name = read.axes[axis]
    rest = replace(read, axes=read.axes[:axis] + read.axes[axis + 1 :])
    if name == "one":
        return rest
    if name == "experts" and read.kind in ("match", "takes", "picked", "score"):
        return replace(rest, expert=place)
    if name == "columns" and read.rows is not None:
        return replace(rest, along=read.rows.axes[place])
    raise NoMatch("{} takes one of the {} of {}", node.name, name, read.kind, node=node)


def _nonzero(picks: Picks, node: fx.Node) -> Value:
    mask = picks.mask(arguments(node)["self"])
    if len(mask.axes) == 1:
        return Value("index", ("rows", "one"), rows=_rows(mask, node), along=mask.axes[0])
    return Value("index", ("rows", "columns"), rows=_rows(mask, node))


def _rows(mask: Value, node: fx.Node) -> Value:
    if mask.expert is None or mask.negated or mask.rows is not None:
        raise NoMatch("{} picks rows by no single expert", node.name, node=node)
    return mask


def _index(picks: Picks, node: fx.Node) -> Value | None:
    """Values of the rows that a mask picks."""
    if is_call(node, aten.index.Tensor):
        base, indices = inputs(node, "self", "indices")
    else:
        base, dim, index = inputs(node, "self", "dim", "index")
        indices = [*([None] * (dim % len(shape(base)))), index]
    if not all(index is None or is_picked_index(picks, index) for index in indices):
        return None
    return indexed(picks, picks.read(base), indices, node)


def is_picked_index(picks: Picks, index: fx.Node) -> bool:
    """Whether ``index`` gives rows that a mask picks."""
    try:
        return picks.read(index).kind in ("index", "match", "takes")
    except NoMatch:
        return False


def indexed(picks: Picks, read: Value, indices: list[fx.Node | None], node: fx.Node) -> Value:
    """``read[indices]``.

    Raises:
        NoMatch: not whole rows that one mask picks.
    """
    mask, along, place = picked_rows(picks, indices, node)
    if read.axes[:place] != ("one",) * place or read.axes[place : place + len(along)] != along or read.rows is not None:
        raise NoMatch("{} looks up {} of {} by {}", node.name, read.axes, read.kind, along, node=node)
    made = replace(read, axes=(*read.axes[:place], "rows", *read.axes[place + len(along) :]), rows=mask)
    if read.kind == "weights" and "slots" not in made.axes:  # those of the slots where the mask holds
        return replace(made, kind="score", ids=mask.ids, expert=mask.expert)
    if read.kind == "score" and mask.kind == "match":  # once for every slot
        return replace(made, distinct=True)
    return made


def picked_rows(picks: Picks, indices: list[fx.Node | None], node: fx.Node) -> tuple[Value, tuple[Axis, ...], int]:
    """The mask that picks rows, the axes looked up, and how many axes come before them."""
    place = next(place for place, index in enumerate(indices) if index is not None)
    found = [picks.read(index) for index in indices[place:]]
    (shown, *_) = (index for index in indices if index is not None)
    if len(found) == 1 and found[0].kind in ("match", "takes") and dtype(shown) is torch.bool:
        return _rows(found[0], node), found[0].axes, place
    mask, indices_only = found[0].rows, all((read.kind, read.axes) == ("index", ("rows",)) for read in found)
    if mask is None or not indices_only or not all(read.rows and same_rows(mask, read.rows) for read in found):
        raise NoMatch("{} looks up no rows that one mask picks", node.name, node=node)
    return mask, tuple(read.along for read in found if read.along is not None), place


def _contracted(picks: Picks, node: fx.Node) -> Value:
    """``bmm(weights [T, 1, k], one-hot rows [T, k, E])``."""
    left, right = inputs(node, "self", "mat2")
    weights, masks = picks.read(left), picks.mask(right)
    if weights.axes != ("tokens", "one", "slots") or masks.axes != ("tokens", "slots", "experts"):
        raise NoMatch("{} multiplies {} by {}", node.name, weights.kind, masks.kind, node=node)
    turned = replace(weights, axes=("tokens", "slots", "one"))
    score = without(product(turned, masks, node), 1, node)
    return replace(score, axes=("tokens", "one", "experts"))


def _scatter(picks: Picks, node: fx.Node) -> Value:
    """``[T, E]``: the weights of every expert, zeros for those that are not chosen."""
    base, dim, index, src = inputs(node, "self", "dim", "index", "src")
    ids, weights = picks.read(index), picks.read(src)
    last = dim % 2 == 1 and len(shape(node)) == 2
    if not last or not is_zero(base) or (ids.kind, weights.kind) != ("ids", "weights") or ids.axes != weights.axes:
        raise NoMatch("{} does not spread routing weights over experts", node.name, node=node)
    picks.count(shape(node)[1], node)
    once = is_call(node, aten.scatter.src)
    return replace(weights, kind="score", axes=("tokens", "experts"), ids=ids.ids, distinct=once)


def _divided(picks: Picks, node: fx.Node) -> Value | None:
    """The tokens of places."""
    division = is_floor_division(node)
    read = picks.read(division[0]) if division is not None else None
    if division is None or read is None or (read.kind, read.along) != ("index", "places"):
        return None
    if read.rows is None or read.rows.ids is None or not same(shape(read.rows.ids)[-1], division[1]):
        raise NoMatch("{} does not find the token of a slot", node.name, node=node)
    return replace(read, along="tokens")


def _experts(picks: Picks, node: fx.Node) -> Value | None:
    (size,) = shape(node)
    if not _counts_up(node, size):
        return None
    picks.count(size, node)
    return Value("experts", ("experts",))


_RULES: dict[Any, Rule] = {
    **dict.fromkeys(
        (aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default), _same_as_input
    ),
    aten.unsqueeze.default: _unsqueeze,
    **dict.fromkeys((aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims), _squeeze),
    **dict.fromkeys((aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default), _view),
    **dict.fromkeys((aten.permute.default, aten.transpose.int, aten.t.default), _permute),
    CAST: _cast,
    **dict.fromkeys((aten.eq.Scalar, aten.ne.Scalar, aten.eq.Tensor, aten.ne.Tensor), _compare),
    **dict.fromkeys((aten.logical_not.default, aten.bitwise_not.default), _not),
    **dict.fromkeys((aten.any.dim, aten.any.dims, aten.amax.default, aten.sum.dim_IntList), _reduced),
    **dict.fromkeys((aten.mul.Tensor, aten.logical_and.default, aten.bitwise_and.Tensor), _mul),
    **dict.fromkeys((aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.masked_fill.Scalar), _where),
    aten.select.int: _select,
    aten.bmm.default: _contracted,
    **dict.fromkeys((aten.div.Tensor_mode, aten.div.Scalar_mode, aten.floor_divide.default), _divided),
    aten.slice.Tensor: _slice,
    operator.getitem: _getitem,
    aten.nonzero.default: _nonzero,
    **dict.fromkeys((aten.index.Tensor, aten.index_select.default), _index),
    **dict.fromkeys((aten.scatter.src, aten.scatter_add.default), _scatter),
    **dict.fromkeys((prims.iota.default, aten.arange.default, aten.arange.start_step), _experts),
}
