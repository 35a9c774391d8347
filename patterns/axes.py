"""Which index of a tensor runs over what, followed through views, permutes, repeats and products.

A dimension holds the digits of one or several indices, the slowest first: a matrix ``[T, E*N]`` is laid out as
``((T,), (E, N))``. Only the names matter, so two axes of one size are never taken for each other. Dimensions
of one element hold nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

import torch
from torch import fx

from ..matching import NoMatch
from .graph_tools import CAST, arguments, aten, is_call, num_elements, permutation, same, shape, value, viewed

Size: TypeAlias = "int | torch.SymInt"


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
    """The digit ``index // stride % size`` of the index called ``name``; ``free``: values do not depend on it."""

    name: str
    size: Size
    stride: Size = 1
    free: bool = False


Dimension: TypeAlias = tuple[Axis, ...]
Layout: TypeAlias = tuple[Dimension, ...]


def laid_out(sizes: Sequence[Size], *names: tuple[str, int]) -> Layout:
    """The layout of ``sizes`` where each name runs over as many dimensions as it says, row-major.

    ``laid_out(shape, ("T", 2), ("H", 1))`` is that of ``[B, S, H]`` with tokens in its first two dimensions.
    """
    left, dims = list(sizes), list[Dimension]()
    for name, count in names:
        mine, left = left[:count], left[count:]
        dims += _digits(Axis(name, num_elements(mine)), mine)
    return tuple(dims)


def axis_over(name: str, sizes: Sequence[Size]) -> Axis:
    """The axis ``name`` whose digits are dimensions of ``sizes``."""
    return Axis(name, num_elements(sizes))


def axes(layout: Layout) -> Dimension:
    """All axes of a layout, the slowest first, digits of one index put together where they stand together."""
    return _joined(axis for dim in layout for axis in dim)


def names(layout: Layout) -> set[str]:
    """The indices that a layout runs over."""
    return {axis.name for dim in layout for axis in dim}


def runs_over(layout: Layout, *wanted: Axis) -> bool:
    """Whether a layout's elements stand in the order of the axes ``wanted``."""
    return unified(axes(layout), _joined(wanted)) is not None and not any(axis.free for axis in axes(layout))


def moves(node: fx.Node) -> fx.Node | None:
    """The input of a node that only moves or repeats its elements, or None."""
    if is_call(node, *_MOVES):
        base: fx.Node = arguments(node)["self"]
        return base
    return viewed(node)


_PERMUTES = (aten.permute.default, aten.transpose.int, aten.t.default)
_MOVES = (*_PERMUTES, aten.expand.default, aten.repeat.default)


def trail(node: fx.Node, *, casts: bool = False) -> list[fx.Node]:
    """``node`` and the nodes that it moves (or casts) elements of, the source first."""
    found = [node]
    while True:
        base = arguments(found[-1])["a"] if casts and is_call(found[-1], CAST) else moves(found[-1])
        if base is None:
            return found[::-1]
        found.append(base)


def along(layout: Layout, nodes: Sequence[fx.Node]) -> Layout:
    """The layout of the last of a trail, from that of its first.

    Raises:
        NoMatch: a view mixes indices.
    """
    for node in nodes[1:]:
        layout = moved(node, layout)
    return layout


def moved(node: fx.Node, layout: Layout) -> Layout:
    """The layout of a node for which ``moves`` gives one with ``layout``.

    Raises:
        NoMatch: it is a view that mixes indices.
    """
    if is_call(node, *_PERMUTES):
        return tuple(layout[axis] for axis in permutation(node))
    if is_call(node, aten.repeat.default):
        counts = [value(count) for count in arguments(node)["repeats"]]
        own = [*[()] * (len(counts) - len(layout)), *layout]
        return tuple((*_free(node, place, counts[place]), *dim) for place, dim in enumerate(own))
    if is_call(node, aten.expand.default):
        lead = len(shape(node)) - len(layout)
        own = [*[()] * lead, *layout]
        return tuple(
            dim or _free(node, place, size) for place, (size, dim) in enumerate(zip(shape(node), own, strict=True))
        )
    return regrouped(node, axes(layout), shape(node))


def _free(node: fx.Node, place: int, size: Size) -> Dimension:
    return () if same(size, 1) else (Axis(f"{node.name}.{place}", size, free=True),)


def regrouped(node: fx.Node, flat: Sequence[Axis], sizes: Sequence[Size]) -> Layout:
    """``flat`` cut into dimensions of ``sizes``; an axis may be cut into digits.

    Raises:
        NoMatch: a dimension would hold parts of several axes.
    """
    left, wanted = list(flat), list(sizes)
    dims: list[Dimension] = []
    while wanted:
        if same(wanted[0], 1):
            dims.append(())
            wanted.pop(0)
            continue
        for taken, made in sorted(product(range(1, len(left) + 1), range(1, len(wanted) + 1)), key=sum):
            whole = same(num_elements([axis.size for axis in left[:taken]]), num_elements(wanted[:made]))
            if whole and 1 in (taken, made):
                break
        else:
            raise NoMatch("{} mixes experts, tokens or columns", node.name, node=node)
        dims += _digits(left[0], wanted[:made]) if taken == 1 else [tuple(left[:taken])]
        left, wanted = left[taken:], wanted[made:]
    assert not left, f"{node.name} keeps all elements"
    return tuple(dims)


def _digits(axis: Axis, sizes: Sequence[Size]) -> list[Dimension]:
    dims: list[Dimension] = []
    stride = axis.stride
    for size in reversed(sizes):
        dims.append(() if same(size, 1) else (Axis(axis.name, size, stride, axis.free),))
        stride = stride * size
    return dims[::-1]


def _joined(flat: Iterable[Axis]) -> Dimension:
    found: list[Axis] = []
    for axis in flat:
        last = found[-1] if found else None
        if last is not None and last.name == axis.name and same(last.stride, axis.size * axis.stride):
            found[-1] = Axis(axis.name, last.size * axis.size, axis.stride, axis.free)
        elif not same(axis.size, 1):
            found.append(axis)
    return tuple(found)


def unified(left: Dimension, right: Dimension) -> Dimension | None:
    """What two dimensions that meet in a product run over, or None where they run over different things.

    A free axis runs over whatever it meets.
    """
    found: list[Axis] = []
    mine, other = list(_joined(left)), list(_joined(right))
    while mine and other:
        a, b = mine[0], other[0]
        if a.name == b.name and same(a.size, b.size) and same(a.stride, b.stride):
            found.append(a)
            mine, other = mine[1:], other[1:]
            continue
        if not a.free:
            mine, other, a, b = other, mine, b, a
        met = next((n for n in range(1, len(other) + 1) if same(num_elements([x.size for x in other[:n]]), a.size)), 0)
        if not a.free or not met:
            return None
        found += other[:met]
        mine, other = mine[1:], other[met:]
    return None if mine or other else tuple(found)


def broadcast(left: Layout, right: Layout) -> Layout | None:
    """The layout of an elementwise operation on two values, or None where they do not meet axis by axis."""
    rank = max(len(left), len(right))
    found: list[Dimension] = []
    for a, b in zip((*[()] * (rank - len(left)), *left), (*[()] * (rank - len(right)), *right), strict=True):
        dim = unified(a, b) if a and b else a or b
        if dim is None:
            return None
        found.append(dim)
    return tuple(found)


def multiplied(left: Layout, right: Layout) -> tuple[Layout, Dimension] | None:
    """The layout of ``mm`` or ``bmm``, and what is summed over; None where the operands do not meet."""
    batch = [unified(a, b) for a, b in zip(left[:-2], right[:-2], strict=True)]
    summed = unified(left[-1], right[-2])
    if summed is None or any(dim is None for dim in batch):
        return None
    return (*[dim for dim in batch if dim is not None], left[-2], right[-1]), summed
