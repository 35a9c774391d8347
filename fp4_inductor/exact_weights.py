"""Whether the weights at hand can be re-laid for a kernel: some forms hold only some values (``layouts.exactness``).

While a graph is compiled for a model its weights are at hand, and another backend can still take the block. Compiled
graphs serve other weights too: where those do not fit, preparing them raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from .emit import PREPARED
from .layouts.exactness import InexactWeightsError
from .reasons import Reason, ReasonCode


def references(inputs: Sequence[Any]) -> tuple[weakref.ref[torch.Tensor] | None, ...]:
    """The inputs of a Dynamo graph that have values, without keeping any of them alive; None for others."""
    real = [isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) for value in inputs]
    return tuple(
        weakref.ref(value) if known and not value.is_meta else None for known, value in zip(real, inputs, strict=True)
    )


def values_at_hand(graph: fx.Graph, inputs: Sequence[weakref.ref[torch.Tensor] | None]) -> dict[fx.Node, torch.Tensor]:
    """The values of an AOTAutograd graph's placeholders: it says which input of the Dynamo graph each of them is."""
    found = {}
    for node in graph.find_nodes(op="placeholder"):
        place = getattr(node.meta.get("desc"), "idx", None)
        reference = inputs[place] if isinstance(place, int) and place < len(inputs) else None
        value = None if reference is None else reference()
        if value is not None:
            found[node] = value
    return found


def refused_weights(fused: fx.Node, values: Mapping[fx.Node, torch.Tensor]) -> Reason | None:
    """Why the re-layouts that the call ``fused`` reads cannot hold the weights in ``values``; None if nothing says so.

    What depends on other inputs is not asked.
    """
    computed: dict[fx.Node, Any] = dict(values)
    with unset_fake_temporarily(), torch.no_grad():
        for node in _conditions(fused):
            try:
                _compute(node, computed)
            except InexactWeightsError as error:
                return Reason(ReasonCode.FORMAT, error.needed, error.got, error.now)
    return None


def _conditions(fused: fx.Node) -> list[fx.Node]:
    """The ``require_exact`` calls in the re-layouts that ``fused`` reads."""
    seen: set[fx.Node] = set()
    stack = [node for node in fused.all_input_nodes if PREPARED in node.meta]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += node.all_input_nodes
    return [node for node in seen if node.target is torch.ops.fp4_inductor.require_exact.default]


def _compute(node: fx.Node, computed: dict[fx.Node, Any]) -> bool:
    """Add the value of ``node``, and of what it reads, to ``computed``; False where an input has no value."""
    if node in computed:
        return True
    if node.op != "call_function" or not all(_compute(source, computed) for source in node.all_input_nodes):
        return False
    args: Any = fx.map_arg(node.args, computed.__getitem__)
    kwargs: Any = fx.map_arg(node.kwargs, computed.__getitem__)
    assert callable(node.target), "a call_function node"
    computed[node] = node.target(*args, **kwargs)
    return True
