"""Walking an ATen graph by meaning: views are transparent, casts are not; sizes may be symbolic."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .. import errors
from ..matching import NoMatch, SourceLocation

aten = torch.ops.aten
prims = torch.ops.prims

_VIEWS = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.clone.default,
        aten.alias.default,
        aten.detach.default,
        aten.lift_fresh_copy.default,
    }
)
_PERMUTES = frozenset({aten.permute.default, aten.transpose.int, aten.t.default})
_SHOWING = (*_VIEWS, *_PERMUTES, aten.expand.default, aten.select.int)
CAST = prims.convert_element_type.default
_NARROW = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def stage(progress: float) -> Iterator[None]:
    """Refusals in here have come at least this far."""
    try:
        yield
    except NoMatch as miss:
        miss.progress = max(miss.progress, progress)
        raise


def is_call(node: object, *targets: object) -> bool:
    """Whether ``node`` calls one of ``targets``."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an ATen call by name, defaults included."""
    schema = node.target._schema  # type: ignore[union-attr]
    values = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    values.update(zip((a.name for a in schema.arguments), node.args, strict=False))
    values.update(node.kwargs)
    return values


def inputs(node: fx.Node, *names: str) -> list[Any]:
    """The named arguments of an ATen call."""
    args = arguments(node)
    return [args[name] for name in names]


def value(arg: object) -> Any:
    """An argument's value: a node's fake value, or the constant itself."""
    return arg.meta.get("val") if isinstance(arg, fx.Node) else arg


def tensor(node: object) -> torch.Tensor | None:
    """The fake tensor of a node, or None where it is no tensor."""
    val = value(node)
    return val if isinstance(val, torch.Tensor) else None


def shape(node: fx.Node) -> tuple[int | torch.SymInt, ...]:
    """A tensor node's sizes.

    Raises:
        NoMatch: the node is no tensor.
    """
    val = tensor(node)
    if val is None:
        raise NoMatch("{} is no tensor", node.name, node=node)
    return tuple(val.shape)


def dtype(node: fx.Node) -> torch.dtype:
    val = tensor(node)
    if val is None:
        raise NoMatch("{} is no tensor", node.name, node=node)
    return val.dtype


def numel(node: fx.Node) -> int | torch.SymInt:
    return num_elements(shape(node))


def num_elements(sizes: Iterable[int | torch.SymInt]) -> int | torch.SymInt:
    """How many elements dimensions of ``sizes`` have."""
    total: int | torch.SymInt = 1
    for size in sizes:
        total = total * size
    return total


def same(a: object, b: object) -> bool:
    """Whether two sizes are equal for every input; adds no guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    if isinstance(a, int | torch.SymInt) and isinstance(b, int | torch.SymInt):
        return bool(statically_known_true(a == b))
    return False


def same_shape(node: fx.Node, sizes: Iterable[object]) -> bool:
    mine, wanted = shape(node), tuple(sizes)
    return len(mine) == len(wanted) and all(map(same, mine, wanted))


def viewed(node: object) -> fx.Node | None:
    """The node that ``node`` shows with the same elements in the same order, or None."""
    if not is_call(node, *_SHOWING) or tensor(node) is None:
        return None
    assert isinstance(node, fx.Node)
    base: fx.Node = arguments(node)["self"]
    if tensor(base) is None:
        return None
    if node.target in _VIEWS:
        return base
    if node.target in _PERMUTES:
        kept = [size for size in shape(base) if not same(size, 1)]
        order = permutation(node)
        moved = [shape(base)[axis] for axis in order if not same(shape(base)[axis], 1)]
        in_order = [axis for axis in order if not same(shape(base)[axis], 1)]
        return base if len(kept) == len(moved) and in_order == sorted(in_order) else None
    if node.target is aten.expand.default:
        return base if same(numel(base), numel(node)) else None
    if node.target is aten.select.int:
        return base if same(shape(base)[arguments(node)["dim"]], 1) else None
    return None


def source(node: object) -> fx.Node:
    """The first node behind views and copies.

    Raises:
        NoMatch: ``node`` is no node.
    """
    if not isinstance(node, fx.Node):
        raise NoMatch("a node was expected, not the constant {!r}", node)
    while (base := viewed(node)) is not None:
        node = base
    return node


def unwidened(node: fx.Node) -> fx.Node:
    """``node`` behind a cast to a wider float, which changes no value."""
    shown = source(node)
    if is_call(shown, CAST):
        base: fx.Node = arguments(shown)["a"]
        if dtype(base).is_floating_point and dtype(base).itemsize < dtype(shown).itemsize:
            return base
    return node


def permutation(node: fx.Node) -> list[int]:
    """The axes of the input that a permute, transpose or t shows, in order."""
    rank = len(shape(node))
    if node.target is aten.permute.default:
        return [axis % rank for axis in arguments(node)["dims"]]
    order = list(range(rank))
    first, second = (0, rank - 1) if node.target is aten.t.default else inputs(node, "dim0", "dim1")
    order[first], order[second] = order[second], order[first]
    return order


def swaps_last_two(node: fx.Node) -> bool:
    """Whether ``node`` is a matrix transpose of its input."""
    if not is_call(node, *_PERMUTES):
        return False
    rank = len(shape(node))
    return rank >= 2 and permutation(node) == [*range(rank - 2), rank - 1, rank - 2]


def readers(node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Who reads ``node`` through views: pairs of the reader and the view of ``node`` that it reads.

    Sizes and assertions on metadata read no values; whether they may go is for the audit of the region to say.
    """
    found: list[tuple[fx.Node, fx.Node]] = []
    pending = [node]
    while pending:
        shown = pending.pop()
        for user in shown.users:
            if viewed(user) is shown:
                pending.append(user)
            elif not is_size(user) and not is_call(user, aten._assert_tensor_metadata.default):
                found.append((user, shown))
    return found


def narrowed(total: fx.Node) -> fx.Node:
    """``total``, or its cast to a 16-bit float where that is all that is read of it."""
    found = readers(total)
    if len(found) == 1 and is_call(found[0][0], CAST) and dtype(found[0][0]) in _NARROW:
        return found[0][0]
    return total


def only_reader(node: fx.Node, what: str) -> tuple[fx.Node, fx.Node]:
    """The one reader of ``node``, and the view of it that it reads.

    Raises:
        NoMatch: nobody or several read it.
    """
    found = readers(node)
    if len(found) != 1:
        names = ", ".join(user.name for user, _ in found) or "nobody"
        raise NoMatch("{} {} should have one reader, has: {}", what, node.name, names, node=node)
    return found[0]


def row_gather(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """``(x, index)`` where ``node`` is ``x[index]`` with an integer index of the first axis."""
    if is_call(node, aten.index.Tensor):
        base, indices = inputs(node, "self", "indices")
        index = indices[0] if len(indices) == 1 else None
    elif is_call(node, aten.index_select.default) and arguments(node)["dim"] == 0:
        base, index = inputs(node, "self", "index")
    elif is_call(node, aten.gather.default) and arguments(node)["dim"] in (0, -len(shape(node))):
        base, index = inputs(node, "self", "index")
        if len(shape(base)) > 1:
            index = whole_rows(index) if all(map(same, shape(base)[1:], shape(index)[1:])) else None
    else:
        return None
    if not isinstance(base, fx.Node) or not isinstance(index, fx.Node):
        return None
    return (base, index) if dtype(index) in (torch.int64, torch.int32) else None


def whole_rows(index: fx.Node) -> fx.Node | None:
    """The indices ``[R]`` that ``index``, ``[R, N]``, repeats along its rows, or None."""
    column = index
    while is_call(column, aten.clone.default):
        column = arguments(column)["self"]
    if not is_call(column, aten.expand.default, aten.repeat.default):
        return None
    rows: fx.Node = arguments(column)["self"]
    return rows if same_shape(rows, (shape(index)[0], *[1] * (len(shape(index)) - 1))) else None


def is_iota(node: fx.Node, length: int | torch.SymInt) -> bool:
    """Whether ``node`` is ``arange(length)``."""
    if is_call(node, prims.iota.default):
        args = arguments(node)
        return args["start"] == 0 and args["step"] == 1 and same(value(args["length"]), length)
    if is_call(node, aten.arange.default):
        return same(value(arguments(node)["end"]), length)
    if is_call(node, aten.arange.start_step):
        start, end, step = inputs(node, "start", "end", "step")
        return start == 0 and step == 1 and same(value(end), length)
    return False


def is_zero(arg: object) -> bool:
    """Whether an argument is zero, or a tensor of nothing but zeros that the graph makes."""
    if is_call(arg, aten.full.default, aten.full_like.default):
        return bool(arguments(arg)["fill_value"] == 0)  # type: ignore[arg-type]
    if is_call(arg, aten.scalar_tensor.default):
        return bool(arguments(arg)["s"] == 0)  # type: ignore[arg-type]
    if isinstance(arg, int | float):
        return arg == 0
    return is_call(arg, aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)


def is_size(node: fx.Node) -> bool:
    """Whether a node computes a size and not a tensor."""
    return isinstance(value(node), int | torch.SymInt | torch.SymBool | bool)


def mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*\n\s*(?P<code>[^\n]*)')
_NOT_THE_USERS = tuple(str(Path(file).parent) + os.sep for file in (torch.__file__, errors.__file__))


def location(node: fx.Node) -> SourceLocation:
    """The innermost frame outside torch and this package that made ``node``, and the module's path."""
    modules = node.meta.get("nn_module_stack") or {}
    path = next((entry[0] for entry in reversed(list(modules.values())) if isinstance(entry, tuple)), "")
    module = re.sub(r"^L\['\w+'\]\.?", "", path)
    trace = node.meta.get("stack_trace") or ""
    frames = [frame for frame in _FRAME.finditer(trace) if not frame["file"].startswith(_NOT_THE_USERS)]
    if not frames:
        return SourceLocation("", 0, "", module)
    return SourceLocation(frames[-1]["file"], int(frames[-1]["line"]), frames[-1]["code"].strip(), module)


def is_floor_division(node: fx.Node) -> tuple[fx.Node, int] | None:
    """``(x, k)`` where ``node`` is ``x // k`` of a non-negative integer tensor."""
    modes = aten.div.Tensor_mode, aten.div.Scalar_mode
    floors = is_call(node, *modes) and arguments(node)["rounding_mode"] in ("floor", "trunc")
    if floors or is_call(node, aten.floor_divide.default, aten.floor_divide.Scalar):
        base, divisor = inputs(node, "self", "other")
        if isinstance(base, fx.Node) and isinstance(divisor, int):
            return base, divisor
    return None
