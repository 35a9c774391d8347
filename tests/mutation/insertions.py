"""Operations that a mutation puts behind a value: steps that a block has not, and updates in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

aten, prims = torch.ops.aten, torch.ops.prims
CAST = prims.convert_element_type.default
Edit = Callable[[dict[str, fx.Node]], None]
"""Changes a graph, whose nodes it is given by name."""


def tensor_of(node: object) -> torch.Tensor | None:
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    return val if isinstance(val, torch.Tensor) else None


def known_same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(str(x) == str(y) for x, y in zip(a, b, strict=True))


def insertions(node: fx.Node) -> Iterator[tuple[str, str, Edit]]:
    """Every operation more behind a value: kind, what is inserted, and the edit that does it."""
    val = tensor_of(node)
    if val is None:
        return
    steps = dict(_STEPS[_family(val.dtype)])
    for axis, size in enumerate(val.shape):
        if not isinstance(size, int) or size > 1:
            steps[f"flip({axis})"] = lambda n, axis=axis: [(aten.flip.default, (n, [axis]))]
            steps[f"roll({axis})"] = lambda n, axis=axis: [(aten.roll.default, (n, [1], [axis]))]
    if val.dim() >= 2 and known_same(val.shape[-1:], val.shape[-2:-1]):
        steps["transposed"] = lambda n: [(aten.transpose.int, (n, -1, -2))]
    if val.is_floating_point():
        steps["there and back"] = lambda n, dtype=val.dtype: [
            (CAST, (n, torch.float8_e4m3fn)), (CAST, (None, dtype))]  # fmt: skip
        steps["whole numbers"] = lambda n, dtype=val.dtype: [(CAST, (n, torch.int64)), (CAST, (None, dtype))]
        steps["small ones dropped"] = lambda n: [
            (aten.gt.Scalar, (n, 0.1)), (aten.where.ScalarOther, (None, n, 0.0))]  # fmt: skip
        steps["dropout"] = lambda n: [(aten.bernoulli.p, (n, 0.5)), (aten.mul.Tensor, (None, n))]
    for name, step in steps.items():
        yield "inserted", f"{name} behind {node.target}", _insert(node.name, step)
    if node.op == "call_function":
        yield "in place", "changed behind its readers' back", _write(node.name)


Step = Callable[[fx.Node], list[tuple[Any, tuple[Any, ...]]]]
"""Calls, one behind the other; None stands for the call before."""


def _one(target: Any, *args: Any) -> Step:
    return lambda n: [(target, (n, *args))]


_STEPS: dict[str, dict[str, Step]] = {
    "float": {
        "scaled": _one(aten.mul.Tensor, 1.25),
        "nudged": _one(aten.mul.Tensor, 1.003),
        "shifted": _one(aten.add.Tensor, 0.125),
        "negated": _one(aten.neg.default),
        "doubled": lambda n: [(aten.add.Tensor, (n, n))],
        "squared": lambda n: [(aten.mul.Tensor, (n, n))],
        "abs": _one(aten.abs.default),
        "relu": _one(aten.relu.default),
        "clamp_max": _one(aten.clamp_max.default, 3.0),
        "clamp_min": _one(aten.clamp_min.default, -3.0),
        "rounded": _one(aten.round.default),
        "nan_to_num": _one(aten.nan_to_num.default),
        "noise": lambda n: [(aten.rand_like.default, (n,)), (aten.add.Tensor, (None, n))],
    },
    "int": {
        "one more": _one(aten.add.Tensor, 1),
        "bounded": _one(aten.clamp.default, 1, 6),
        "remainder": _one(aten.remainder.Scalar, 5),
        "flipped bit": _one(aten.bitwise_xor.Scalar, 1),
        "one changed": lambda n: [(aten.eq.Scalar, (n, 3)), (aten.where.ScalarSelf, (None, 2, n))],
    },
    "bool": {"negated": _one(aten.logical_not.default)},
    "byte": {},
}


def _family(dtype: torch.dtype) -> str:
    if dtype is torch.bool:
        return "bool"
    if dtype.is_floating_point:
        return "float" if dtype.itemsize > 1 else "byte"
    return "int"


def _insert(name: str, step: Step) -> Edit:
    def edit(nodes: dict[str, fx.Node]) -> None:
        node = nodes[name]
        users = list(node.users)
        last = _last_of(node)
        for target, args in step(node):
            with node.graph.inserting_after(last):
                new = node.graph.call_function(target, tuple(last if arg is None else arg for arg in args))
            new.meta.update({key: value for key, value in node.meta.items() if key != "val"})
            last = new
        for user in users:
            user.replace_input_with(node, last)

    return edit


def _write(name: str) -> Edit:
    def edit(nodes: dict[str, fx.Node]) -> None:
        node = nodes[name]
        val = node.meta["val"]
        write = (aten.logical_not_.default, (node,)) if val.dtype is torch.bool else (aten.mul_.Tensor, (node, 2))
        with node.graph.inserting_after(next(iter(node.users))):
            node.graph.call_function(*write)

    return edit


def _last_of(node: fx.Node) -> fx.Node:
    """The node behind which calls may stand: inputs stand together."""
    if node.op != "placeholder":
        return node
    return list(node.graph.find_nodes(op="placeholder"))[-1]
