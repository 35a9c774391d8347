"""The results of all experts in one tensor, from which scores or ids pick what each token sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import fx

from ..matching import NoMatch
from .expert_chain import factor_of
from .graph_tools import CAST, arguments, aten, dtype, inputs, is_call, permutation, same, shape
from .picked import Axis, Value
from .picks import Picks

StackAxis = Axis | Literal["width"]
Axes = tuple[StackAxis, ...]


@dataclass(frozen=True, slots=True)
class StackSum:
    """What a stack of results ends in.

    Attributes:
        output: ``[T, H]``.
        score: the weights that the results are summed with; None where they carry theirs already.
        nodes: the steps from the stack to ``output``.
    """

    output: fx.Node
    score: Value | None
    nodes: frozenset[fx.Node]


@dataclass(frozen=True, slots=True)
class _State:
    node: fx.Node
    axes: Axes
    score: Value | None = None
    chosen: Value | None = None


def read_stack(stack: fx.Node, count: int, picks: Picks, *, weighted: bool) -> StackSum:
    """Follow a stack of the results of ``count`` experts, ``weighted`` already or not, to their sum.

    Raises:
        NoMatch: a step that picks no results by expert ids and sums none.
    """
    state = _stacked(stack, count)
    nodes = {stack, state.node}
    while "experts" in state.axes or "slots" in state.axes or not (weighted or state.score):
        if len(state.node.users) != 1:
            raise NoMatch("{} should have one reader, has {}", state.node, len(state.node.users), node=state.node)
        (reader,) = state.node.users
        state = _step(state, reader, picks)
        nodes.add(reader)
    if tuple(axis for axis in state.axes if axis != "one") != ("tokens", "width"):
        raise NoMatch("{} holds {}, not tokens", state.node, state.axes, node=state.node)
    return StackSum(state.node, state.score, frozenset(nodes))


def _stacked(stack: fx.Node, count: int) -> _State:
    """The stack as ``[T, E, H]`` or ``[E, T, H]``, of parts ``[T, H]`` or of those with an axis for experts."""
    parts, dim = inputs(stack, "tensors", "dim")
    sizes = shape(parts[0])
    dim %= len(sizes)
    if len(parts) != count:
        raise NoMatch("{} stacks {} tensors, of which {} are experts' results", stack, len(parts), count, node=stack)
    if len(sizes) == 3 and same(sizes[dim], 1) and dim < 2:
        return _State(stack, ("tokens", "experts", "width") if dim == 1 else ("experts", "tokens", "width"))
    if len(sizes) == 2 and len(stack.users) == 1:
        (view,) = stack.users
        wanted = (sizes[0], count, sizes[1]) if dim == 1 else (count, *sizes)
        if is_call(view, aten.view.default, aten.reshape.default) and _is_shaped(view, wanted):
            return _State(view, ("tokens", "experts", "width") if dim == 1 else ("experts", "tokens", "width"))
    raise NoMatch("{} does not stack the results of experts", stack, node=stack)


def _is_shaped(node: fx.Node, sizes: tuple[object, ...]) -> bool:
    return len(shape(node)) == len(sizes) and all(map(same, shape(node), sizes))


def _step(state: _State, reader: fx.Node, picks: Picks) -> _State:
    if is_call(reader, aten.permute.default, aten.transpose.int):
        return _State(reader, tuple(state.axes[axis] for axis in permutation(reader)), state.score, state.chosen)
    if is_call(reader, aten.clone.default) or (is_call(reader, CAST) and dtype(reader).is_floating_point):
        if dtype(reader).itemsize < 2:
            raise NoMatch("{} rounds rows to {}", reader.name, dtype(reader), node=reader)
        return _State(reader, state.axes, state.score, state.chosen)
    if is_call(reader, aten.mul.Tensor):
        return _weighted(state, reader, picks)
    if is_call(reader, aten.sum.dim_IntList):
        return _summed(state, reader)
    if is_call(reader, aten.gather.default):
        return _gathered(state, reader, picks)
    if is_call(reader, aten.bmm.default):
        return _contracted(state, reader, picks)
    raise NoMatch("{} ({}) sums no results of experts", reader.name, reader.target, node=reader)


def _weighted(state: _State, reader: fx.Node, picks: Picks) -> _State:
    factor = factor_of(reader, state.node)
    read = picks.read(factor)
    if state.score is not None or read.axes != tuple("one" if axis == "width" else axis for axis in state.axes):
        raise NoMatch("{} does not weigh each result once", reader.name, node=reader)
    return _State(reader, state.axes, _accepted(state, read, reader))


def _accepted(state: _State, read: Value, node: fx.Node) -> Value:
    """The scores of all experts, or the weights of the slots that were chosen."""
    if state.chosen is None and read.kind == "score" and read.expert is None and read.rows is None:
        return read
    if state.chosen is not None and read.kind == "weights" and read.rows is None:
        return Value("score", read.axes, ids=state.chosen.ids, weights=read.weights)
    raise NoMatch("{} weighs the results of experts by {}", node.name, read.kind, node=node)


def _summed(state: _State, reader: fx.Node) -> _State:
    args = arguments(reader)
    (dim,) = args["dim"] if args["dim"] and len(args["dim"]) == 1 else (None,)
    if dim is None or state.axes[dim] not in ("experts", "slots"):
        raise NoMatch("{} does not sum over experts", reader.name, node=reader)
    dim %= len(state.axes)
    kept: Axes = ("one",) if args["keepdim"] else ()
    return _State(reader, (*state.axes[:dim], *kept, *state.axes[dim + 1 :]), state.score)


def _gathered(state: _State, reader: fx.Node, picks: Picks) -> _State:
    """``[T, k, H]`` of the chosen experts."""
    base, dim, index = inputs(reader, "self", "dim", "index")
    if (
        base is not state.node
        or state.axes != ("tokens", "experts", "width")
        or dim % 3 != 1
        or state.score is not None
    ):
        raise NoMatch("{} does not look up results by experts", reader.name, node=reader)
    if not is_call(index, aten.expand.default) or not same(shape(index)[2], shape(base)[2]):
        raise NoMatch("{} does not look up whole results", reader.name, node=reader)
    read = picks.read(arguments(index)["self"])
    if read.kind != "ids" or read.axes not in (("tokens", "slots", "one"), ("tokens", "one", "one")):
        raise NoMatch("{} does not look up results by expert ids", reader.name, node=reader)
    picks.values[index] = read
    picks.count(shape(base)[1], reader)
    return _State(reader, ("tokens", read.axes[1], "width"), None, read)


def _contracted(state: _State, reader: fx.Node, picks: Picks) -> _State:
    """``bmm(scores [T, 1, E], results [T, E, H])``."""
    left, right = inputs(reader, "self", "mat2")
    fits = right is state.node and state.axes[0] == "tokens" and state.axes[2] == "width" and state.score is None
    read = picks.read(left) if fits else None
    if read is None or read.axes != ("tokens", "one", state.axes[1]):
        raise NoMatch("{} is no weighted sum over experts", reader.name, node=reader)
    return _State(reader, ("tokens", "one", "width"), _accepted(state, read, reader))
