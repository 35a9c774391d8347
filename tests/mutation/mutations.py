"""Every way to change one thing in a graph: a literal, an operation, an edge, a node more, a node less.

A mutation names nodes, not holds them, so that it is listed once and made in any number of copies.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from insertions import aten, insertions, known_same, tensor_of
from torch import fx
from torch._guards import detect_fake_mode

_ENDLESS = 1 << 62
_REPLACEMENTS = 3
"""Other sources that are tried for each edge."""


class NoGraph(Exception):
    """A mutation that leaves no graph that could run."""


@dataclass(frozen=True)
class Mutation:
    kind: str
    node: str
    detail: str
    edit: Callable[[dict[str, fx.Node]], None]

    def __str__(self) -> str:
        return f"{self.kind} {self.node}: {self.detail}"

    def make(self, gm: fx.GraphModule) -> None:
        """Change ``gm`` and give its nodes the values that they now have.

        Raises:
            NoGraph: nothing could run it.
        """
        before = {node: _written(node) for node in gm.graph.nodes}
        self.edit({node.name: node for node in gm.graph.nodes})
        propagate(gm.graph, before)
        gm.graph.lint()


def mutations(graph: fx.Graph, region: Sequence[fx.Node]) -> Iterator[Mutation]:
    """Every mutation of the nodes of ``region``."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in sorted(region, key=order.__getitem__):
        yield Mutation("read outside", node.name, "one more reader", _read_outside(node.name))
        if node.op != "call_function":
            yield from (Mutation(kind, node.name, detail, edit) for kind, detail, edit in insertions(node))
            continue
        yield from _literals(node)
        yield from _twins(node)
        yield from _defaults(node)
        yield from _swapped(node)
        yield from _removed(node)
        yield from _rewired(node, order)
        yield from (Mutation(kind, node.name, detail, edit) for kind, detail, edit in insertions(node))
        yield Mutation("duplicated", node.name, "one reader has its own", _duplicated(node.name))
    yield from _exchanged(region, order)


def propagate(graph: fx.Graph, before: Mapping[fx.Node, tuple[Any, ...]]) -> None:
    """Compute the fake values of nodes that are not written as they were ``before``, and of all that read them.

    The others keep theirs, and so the sizes that only data tells: computed anew, those would be other sizes.

    Raises:
        NoGraph: an operation refuses its arguments, or would need to know a dynamic size.
    """
    values = [node.meta["val"] for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    mode = detect_fake_mode(values)
    assert mode is not None
    anew: set[fx.Node] = set()
    with mode, _no_new_guards(mode), _quiet():
        for node in graph.nodes:
            kept = node in before and all(map(operator.is_, before[node], _written(node)))
            if kept and anew.isdisjoint(node.all_input_nodes):
                continue
            anew.add(node)
            if node.op != "call_function" or (node.meta.get("val") is not None and not _hastensor_of(node)):
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            try:
                node.meta["val"] = node.target(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  whatever an operation raises for arguments that it cannot take
                raise NoGraph(str(error)) from None


def _written(node: fx.Node) -> tuple[Any, ...]:
    """Arguments cannot be changed, only given anew: a node that nobody edited holds the same objects."""
    return node.target, node.args, node.kwargs


@contextlib.contextmanager
def _no_new_guards(mode: Any) -> Iterator[None]:
    shape_env = mode.shape_env
    known = 0 if shape_env is None else len(shape_env.guards)
    yield
    if shape_env is not None and len(shape_env.guards) != known:
        raise NoGraph("it would add a guard")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Torch logs every operation that refuses its arguments."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _hastensor_of(node: fx.Node) -> bool:
    val = node.meta["val"]
    return isinstance(val, torch.Tensor) or (isinstance(val, (tuple, list)) and isinstance(val[0], torch.Tensor))


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every argument that is no container, with the way to it."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, (list, tuple, dict)):
            yield from _leaves(item, (*path, key))
        else:
            yield (*path, key), item


def _with(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """``value`` with another argument at ``path``."""
    if not path:
        return new
    key, *rest = path
    if isinstance(value, dict):
        return {**value, key: _with(value[key], tuple(rest), new)}
    return type(value)([_with(item, tuple(rest), new) if place == key else item for place, item in enumerate(value)])


def _set(name: str, path: tuple[Any, ...], new: Any) -> Callable[[dict[str, fx.Node]], None]:
    def edit(nodes: dict[str, fx.Node]) -> None:
        node = nodes[name]
        value = nodes[new.name] if isinstance(new, fx.Node) else new
        args, kwargs = _with([list(node.args), dict(node.kwargs)], path, value)
        node.args, node.kwargs = tuple(args), kwargs

    return edit


def _literals(node: fx.Node) -> Iterator[Mutation]:
    for path, value in _leaves([list(node.args), dict(node.kwargs)]):
        for other in _others(value):
            yield Mutation("literal", node.name, f"{value!r} becomes {other!r} in {node.target}",
                           _set(node.name, path, other))  # fmt: skip
    for path, numbers in _lists([list(node.args), dict(node.kwargs)]):
        for place in range(len(numbers) - 1):
            turned = [*numbers[:place], numbers[place + 1], numbers[place], *numbers[place + 2 :]]
            if turned != list(numbers):
                if any(isinstance(item, fx.Node) for item in turned):
                    yield Mutation("turned", node.name, f"{numbers} of {node.target} at {place}",
                                   _turned(node.name, path, place))  # fmt: skip
                else:
                    yield Mutation("turned", node.name, f"{numbers} becomes {turned} in {node.target}",
                                   _set(node.name, path, turned))  # fmt: skip


def _lists(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], list[Any]]]:
    items: Any = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, (list, tuple)):
            if path:
                yield (*path, key), list(item)
            yield from _lists(item, (*path, key))
        elif isinstance(item, dict):
            yield from _lists(item, (*path, key))


def _turned(name: str, path: tuple[Any, ...], place: int) -> Callable[[dict[str, fx.Node]], None]:
    def edit(nodes: dict[str, fx.Node]) -> None:
        node = nodes[name]
        whole: Any = [list(node.args), dict(node.kwargs)]
        items = whole
        for key in path:
            items = items[key]
        items = list(items)
        items[place], items[place + 1] = items[place + 1], items[place]
        args, kwargs = _with(whole, path, items)
        node.args, node.kwargs = tuple(args), kwargs

    return edit


def _others(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [-1] if abs(value) > _ENDLESS else [value + 1, value - 1]
    if isinstance(value, float):
        if value in (float("inf"), float("-inf")):
            return [0.0, -1e4]
        return [value * 1.01, value + 1.0, -value] if value else [0.01, -1.0]
    if isinstance(value, torch.dtype):
        if value.is_floating_point:
            narrow = torch.float8_e4m3fn if value.itemsize > 1 else torch.float8_e5m2
            return [narrow, torch.int32, torch.bfloat16 if value is not torch.bfloat16 else torch.float32]
        return [torch.int32 if value is torch.int64 else torch.int64, torch.uint8, torch.bool]
    if value in ("floor", "trunc"):
        return ["trunc" if value == "floor" else "floor"]
    return []


_TWINS = (
    {"ge", "gt", "le", "lt", "eq", "ne"},
    {"amax", "amin"},
    {"sum", "mean", "amax"},
    {"mul", "add", "sub", "div"},
    {"exp", "exp2", "expm1"},
    {"sigmoid", "tanh", "relu", "silu", "gelu", "exp"},
    {"neg", "abs", "relu"},
    {"floor", "ceil", "trunc", "round"},
    {"clamp_min", "clamp_max"},
    {"maximum", "minimum"},
    {"bitwise_and", "bitwise_or", "bitwise_xor"},
    {"__lshift__", "__rshift__"},
    {"sqrt", "rsqrt"},
    {"log", "log1p", "log2"},
    {"cumsum", "cumprod"},
    {"scatter", "scatter_add"},
    {"index_add", "index_copy"},
    {"logical_and", "logical_or"},
    {"zeros_like", "ones_like"},
    {"zeros", "ones"},
)


def _twins(node: fx.Node) -> Iterator[Mutation]:
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return
    name = node.target._schema.name.partition("::")[2]
    for twin in sorted(set().union(*(family for family in _TWINS if name in family)) - {name}):
        packet = getattr(aten, twin)
        overload = node.target._overloadname
        if overload in packet.overloads():
            yield Mutation("twin", node.name, f"{name} becomes {twin}", _retarget(node.name, getattr(packet, overload)))


def _retarget(name: str, target: Any) -> Callable[[dict[str, fx.Node]], None]:
    def edit(nodes: dict[str, fx.Node]) -> None:
        nodes[name].target = target

    return edit


def _defaults(node: fx.Node) -> Iterator[Mutation]:
    """Flags and factors that the graph leaves as they are by default."""
    schema = getattr(node.target, "_schema", None)
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if place < len(node.args) or argument.name in node.kwargs or not argument.has_default_value():
            continue
        default = argument.default_value
        for other in [not default] if isinstance(default, bool) else [2] if default == 1 else []:
            yield Mutation("default", node.name, f"{argument.name}={other} in {node.target}",
                           _keyword(node.name, argument.name, other))  # fmt: skip


def _keyword(name: str, keyword: str, value: Any) -> Callable[[dict[str, fx.Node]], None]:
    def edit(nodes: dict[str, fx.Node]) -> None:
        nodes[name].kwargs = {**nodes[name].kwargs, keyword: value}

    return edit


def _swapped(node: fx.Node) -> Iterator[Mutation]:
    if len(node.args) >= 2 and isinstance(node.args[0], fx.Node) and node.args[0] is not node.args[1]:

        def edit(nodes: dict[str, fx.Node], name: str = node.name) -> None:
            first, second, *rest = nodes[name].args
            nodes[name].args = (second, first, *rest)

        yield Mutation("swapped", node.name, f"arguments of {node.target}", edit)


def _removed(node: fx.Node) -> Iterator[Mutation]:
    own = tensor_of(node)
    for source in node.all_input_nodes:
        given = tensor_of(source)
        if own is not None and given is not None and known_same(own.shape, given.shape):

            def edit(nodes: dict[str, fx.Node], name: str = node.name, other: str = source.name) -> None:
                nodes[name].replace_all_uses_with(nodes[other])
                nodes[name].graph.erase_node(nodes[name])

            yield Mutation("removed", node.name, f"{node.target}, for its input {source.name}", edit)


def _rewired(node: fx.Node, order: dict[fx.Node, int]) -> Iterator[Mutation]:
    """Each edge to the nearest other values of equal shape and dtype."""
    for path, source in _leaves([list(node.args), dict(node.kwargs)]):
        given = tensor_of(source)
        if given is None:
            continue
        alike = [
            other for other in order if other is not source and order[other] < order[node] and _alike(other, given)
        ]
        alike.sort(key=lambda other: (other.op == "placeholder", abs(order[other] - order[source])))
        for other in alike[:_REPLACEMENTS]:
            yield Mutation("rewired", node.name, f"reads {other.name} instead of {source.name} in {node.target}",
                           _set(node.name, path, other))  # fmt: skip


def _alike(node: fx.Node, like: torch.Tensor) -> bool:
    val = tensor_of(node)
    return val is not None and val.dtype is like.dtype and known_same(val.shape, like.shape)


def _exchanged(region: Sequence[fx.Node], order: dict[fx.Node, int]) -> Iterator[Mutation]:
    """Two values of equal shape that stand for each other: results of one operation, or two parameters."""
    for first, second in combinations(sorted(region, key=order.__getitem__), 2):
        given = tensor_of(second)
        related = (
            first.op == second.op == "placeholder"
            or (first.target is second.target is operator.getitem and first.args[0] is second.args[0])
            or (first.target is second.target and first.all_input_nodes != second.all_input_nodes)
        )
        if given is not None and related and _alike(first, given):
            yield Mutation("exchanged", first.name, f"with {second.name}", _exchange(first.name, second.name))


def _exchange(first: str, second: str) -> Callable[[dict[str, fx.Node]], None]:
    def edit(nodes: dict[str, fx.Node]) -> None:
        one, two = nodes[first], nodes[second]
        of_one, of_two = list(one.users), list(two.users)
        place = {node: place for place, node in enumerate(one.graph.nodes)}
        if any(place[user] < place[two] for user in of_one) or two in of_one:
            raise NoGraph("one is read before the other is made")
        for user in of_one:
            if user not in of_two:
                user.replace_input_with(one, two)
        for user in of_two:
            if user not in of_one:
                user.replace_input_with(two, one)

    return edit


def _read_outside(name: str) -> Callable[[dict[str, fx.Node]], None]:
    def edit(nodes: dict[str, fx.Node]) -> None:
        output = nodes[name].graph.output_node()
        output.args = ((*output.args[0], nodes[name]),)  # type: ignore[misc]

    return edit


def _duplicated(name: str) -> Callable[[dict[str, fx.Node]], None]:
    def edit(nodes: dict[str, fx.Node]) -> None:
        node = nodes[name]
        with node.graph.inserting_after(node):
            copy = node.graph.node_copy(node, lambda arg: arg)
        next(iter(node.users)).replace_input_with(node, copy)

    return edit
