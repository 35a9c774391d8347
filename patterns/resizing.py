"""Shrink the sizes a graph was traced with, for probes: which shapes follow, and which operations allow it.

A probe gives some axes (experts, rows, tokens) fewer indices than the graph has. That says something
about the full size only if no operation tells one index of such an axis from another, so everything
that is not known to treat them alike is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from ..matching import NoMatch

_ELEMENTWISE = {
    "_to_copy", "to", "convert_element_type", "copy", "lift_fresh_copy", "alias", "detach", "contiguous",
    "full_like", "zeros_like", "ones_like", "empty_like", "masked_fill", "where", "__and__", "__or__", "__xor__",
    "view", "fma",
}  # fmt: skip
"""Act on each element alone, though not all are tagged pointwise. "view" is view.dtype: sizes are handled apart."""

_MAX_ELEMENTS = 1 << 22
"""Of a probe at full size, where no smaller one can be run."""

_RESHAPING = {"expand", "permute", "transpose", "t", "unsqueeze", "stack"}
"""Move axes as a whole."""

_ALONG_DIM = {
    "slice", "select", "split", "split_with_sizes", "unbind", "chunk", "cat", "slice_scatter", "select_scatter",
    "sum", "mean", "amax", "amin", "max", "min", "argmax", "topk", "sort", "gather", "scatter", "scatter_add",
    "cumsum", "_softmax", "_log_softmax", "softmax", "logsumexp", "any", "all", "squeeze", "index_select", "flip",
}  # fmt: skip
"""Mix or pick indices, but along the axis ``dim`` only."""


def op_name(target: torch._ops.OpOverload) -> str:
    """``slice`` for ``aten::slice`` and for what functionalisation may call ``aten::slice_copy``."""
    name = target._schema.name.partition("::")[2]
    return name.removesuffix("_copy") if name not in ("_to_copy", "lift_fresh_copy") else name


def regroup(old_in: Sequence[int], new_in: Sequence[int], old_out: Sequence[int]) -> list[int]:
    """The shape that a view has when its input, traced as ``old_in``, is ``new_in``.

    Input and output axes fall into runs of equal products. In a run whose input changed, the first
    output axis longer than one takes up the change.

    Raises:
        NoMatch: the change does not fit there.
    """
    if len(old_in) != len(new_in):
        raise NoMatch("a probe of rank {} stands for rank {}", len(new_in), len(old_in))
    out: list[int] = []
    source = target = 0
    while target < len(old_out) or source < len(old_in):
        first, start = target, source
        old = made = 1
        while (source == start and target == first) or old != made:
            if old <= made and source < len(old_in):
                old *= old_in[source]
                source += 1
            elif target < len(old_out):
                made *= old_out[target]
                target += 1
            else:
                raise NoMatch("a view from {} to {} does not keep its elements", tuple(old_in), tuple(old_out))
        new = 1
        for size in new_in[start:source]:
            new *= size
        out += _absorb(list(old_out[first:target]), old, new)
    return out


def _absorb(sizes: list[int], old: int, new: int) -> list[int]:
    if old == new:
        return sizes
    for axis, size in enumerate(sizes):
        if size > 1:
            if size * new % old:
                break
            return [*sizes[:axis], size * new // old, *sizes[axis + 1 :]]
    raise NoMatch("an axis of {} cannot become {} in a view to {}", old, new, tuple(sizes))


def probe_shapes(shape: Sequence[int], rows: int) -> list[tuple[int, ...]]:
    """Shapes to probe a tensor of ``shape`` with, of about ``rows`` rows in all, the likeliest first.

    Views into tokens and slots may need sizes that divide the traced ones, or the traced ones themselves.
    """
    few, dividing, left = [], [], rows
    for size in shape[:-1]:
        cap = min(size, max(2, left))
        few.append(cap)
        dividing.append(next((count for count in range(cap, 1, -1) if size % count == 0), size))
        left //= cap
    shapes = [(*few, *shape[-1:]), (*dividing, *shape[-1:]), tuple(shape)]
    return [made for made in dict.fromkeys(shapes) if made == shapes[0] or prod(made) <= _MAX_ELEMENTS]


def resize_leading(shape: Sequence[int], leading: Mapping[int, int]) -> tuple[int, ...]:
    """``shape`` with its first axis, or a multiple of it, as the probe has it."""
    if not shape:
        return ()
    first = leading.get(shape[0], shape[0])
    for old, new in leading.items():
        if shape[0] not in leading and len(shape) > 1 and shape[0] % old == 0:
            first = shape[0] // old * new
    return (first, *shape[1:])


def check_resizable(
    target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], old_args: Sequence[Any]
) -> None:
    """Refuse an operation that may tell the indices of a shortened axis apart.

    ``old_args`` are the arguments with traced shapes in place of tensors.

    Raises:
        NoMatch: it does, or is not known not to.
    """
    name = op_name(target)
    if torch.Tag.pointwise in target.tags or name in _ELEMENTWISE or name in _RESHAPING:
        return
    if name in ("index", "embedding"):  # a table look-up by any number of indices
        if tuple(args[0].shape) == old_args[0]:
            return
    elif name in _ALONG_DIM:
        bound = {argument.name: value for argument, value in zip(target._schema.arguments, args, strict=False)}
        bound.update(kwargs)
        defaults = {argument.name: argument.default_value for argument in target._schema.arguments}
        dims = bound.get("dim", bound.get("dims", defaults.get("dim", defaults.get("dims"))))
        new, old = args[0], old_args[0]
        if isinstance(new, (list, tuple)):
            new, old = new[0], old[0]
        axes = [dims] if isinstance(dims, int) else list(dims or [])
        if axes and all(new.shape[axis] == old[axis] for axis in axes) and _alike(args, old_args):
            return
        if name == "slice" and _whole(bound, old[dims]):
            return
    raise NoMatch("{} may treat the rows of a shortened axis unlike", target)


def _alike(args: Sequence[Any], old_args: Sequence[Any]) -> bool:
    """Whether tensors of equal rank are shortened along the same axes, so that rows meet their own."""
    changed: dict[int, set[tuple[int, ...]]] = {}
    for new, old in zip(args, old_args, strict=True):
        pairs = zip(new, old, strict=True) if isinstance(new, (list, tuple)) else [(new, old)]
        for tensor, traced in pairs:
            if isinstance(tensor, torch.Tensor):
                axes = tuple(axis for axis, size in enumerate(tensor.shape) if size != traced[axis])
                changed.setdefault(tensor.dim(), set()).add(axes)
    return all(len(axes) == 1 for axes in changed.values())


def _whole(bound: Mapping[str, Any], size: int) -> bool:
    end = bound.get("end")
    return bound.get("start") in (None, 0) and (end is None or end >= size) and bound.get("step", 1) == 1
