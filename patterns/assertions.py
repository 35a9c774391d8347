"""Assertions that hold whatever the inputs: they may go with the nodes they speak of."""

from __future__ import annotations

import operator

import torch
from torch import fx

from .graph_tools import arguments, aten, dtype, inputs, is_call, is_size, mutates, numel, same, tensor, value


def says_nothing(node: fx.Node) -> bool:
    """Whether ``node`` is an assertion that always holds, or a size that only such assertions read."""
    if is_size(node) and node.op == "call_function" and not mutates(node):
        return all(says_nothing(user) for user in node.users)
    if is_call(node, aten._assert_tensor_metadata.default):
        return _is_static_fact(node)
    if is_call(node, aten._assert_scalar.default):
        return _always_holds(node.args[0])
    if is_call(node, aten.sym_constrain_range.default, aten.sym_constrain_range_for_size.default):
        size, low, high = inputs(node, "size", "min", "max")
        return (low is None or _is_at_least(size, low)) and (high is None or _is_at_most(size, high))
    return False


def _is_static_fact(node: fx.Node) -> bool:
    """Whether metadata is asserted that the traced tensor has for every input."""
    args = arguments(node)
    read = tensor(args["a"])
    if read is None:
        return False
    facts = [(args["dtype"], read.dtype), (args["device"], read.device), (args["layout"], read.layout)]
    if any(said is not None and said != is_so for said, is_so in facts):
        return False
    for said, is_so in ((args["size"], read.shape), (args["stride"], read.stride())):
        if said is not None and not (len(said) == len(is_so) and all(map(same, map(value, said), is_so))):
            return False
    return True


def _always_holds(condition: object) -> bool:
    """Whether a condition follows from what sizes are: none is negative, none counts more than there is."""
    if not isinstance(condition, fx.Node):
        return condition is True
    if condition.target is operator.ge:
        return _is_at_least(*condition.args)
    if condition.target is operator.le:
        return _is_at_least(condition.args[1], condition.args[0]) or _is_at_most(*condition.args)
    return False


def _is_at_least(size: object, bound: object) -> bool:
    return is_call(size, aten.sym_size.int) and isinstance(bound, int) and bound <= 0


def _is_at_most(size: object, bound: object) -> bool:
    """Whether ``size`` counts the true places of a mask, and ``bound`` all of them."""
    if not is_call(size, aten.sym_size.int):
        return False
    counted, dim = inputs(size, "self", "dim")  # type: ignore[arg-type]
    if is_call(counted, aten.nonzero.default) and dim == 0:
        mask = arguments(counted)["self"]
    elif is_call(counted, aten.index.Tensor) and dim == 0 and len(arguments(counted)["indices"]) == 1:
        (mask,) = arguments(counted)["indices"]
    else:
        return False
    if not isinstance(mask, fx.Node) or (mask is not arguments(counted)["self"] and dtype(mask) is not torch.bool):
        return False
    places, most = numel(mask), value(bound)
    return same(places, most) or (isinstance(most, int) and _largest(places) <= most)


def _largest(size: int | torch.SymInt) -> float:
    """The most that a size may be, by the guards of the graph's inputs."""
    if isinstance(size, int):
        return size
    upper = size.node.shape_env.bound_sympy(size.node.expr).upper
    return int(upper) if size.node.has_hint() and upper.is_Integer else float("inf")
