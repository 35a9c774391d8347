"""Capture the MoE layers of tiny models, edit the graphs, and run them beside what a match says they compute."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from capture import Level, capture
from fp4_inductor.patterns.probing import size_hint
from models import MoEStack, hidden_states, pack_experts, tiny_model
from torch import fx
from torch._guards import detect_fake_mode

from fp4_inductor.matching import Assembled, Match, nodes_of
from fp4_inductor.reference import moe_reference
from fp4_inductor.spec import Operand

aten = torch.ops.aten
_MAX_BLOCKS = 8
"""The tiny models have at most this many blocks in a row; codes have more bytes."""


@functools.cache
def _captured(
    family: str, form: str, fmt: str, tokens: int, dynamic: bool, level: Level, layers: int
) -> fx.GraphModule:
    model = pack_experts(tiny_model(family, layers=layers, experts_implementation=form), fmt)
    return capture(MoEStack(model), hidden_states(tokens), dynamic=dynamic, level=level)


def moe_graph(
    family: str,
    form: str,
    fmt: str = "mxfp4",
    *,
    tokens: int = 16,
    dynamic: bool = False,
    level: Level = "inner",
    layers: int = 2,
) -> fx.GraphModule:
    """The MoE layers of a family, as one graph that the caller may edit."""
    return copy.deepcopy(_captured(family, form, fmt, tokens, dynamic, level, layers))


def calls(graph: fx.Graph, target: Any) -> list[fx.Node]:
    """The nodes that call ``target``, in order."""
    return list(graph.find_nodes(op="call_function", target=target))


def insert_after(
    node: fx.Node, target: Any, *args: Any, into: Sequence[fx.Node] | None = None, **kwargs: Any
) -> fx.Node:
    """Add a call behind ``node``, and let the users of ``node`` (or those in ``into``) read it instead."""
    users = list(node.users) if into is None else list(into)
    last = max([node, *(arg for arg in args if isinstance(arg, fx.Node))], key=list(node.graph.nodes).index)
    with node.graph.inserting_after(last):
        new = node.graph.call_function(target, args, kwargs)
    value = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    mode = detect_fake_mode([n.meta["val"] for n in new.all_input_nodes])
    assert mode is not None
    with mode:
        new.meta["val"] = target(*value[0], **value[1])
    for user in users:
        user.replace_input_with(node, new)
    return new


def random_inputs(gm: fx.GraphModule, seed: int = 0) -> list[Any]:
    """A value for every input of a graph, at the sizes it was traced with; weights decode to about 1/sqrt(K)."""
    generator = torch.Generator().manual_seed(seed)
    return [_random(node, generator) for node in gm.graph.find_nodes(op="placeholder")]


def _random(node: fx.Node, generator: torch.Generator) -> Any:
    val = node.meta["val"]
    if not isinstance(val, torch.Tensor):
        return size_hint(val)  # int() would specialise the graph
    size, dtype = [size_hint(s) for s in val.shape], val.dtype
    if dtype is torch.float64:
        return torch.tensor(1.3, dtype=dtype)
    if dtype.is_floating_point and dtype.itemsize == 1:
        return (torch.rand(size, generator=generator) * 3 + 0.5).to(dtype)
    if dtype.is_floating_point:
        positive = len(size) == 1 or size[-1] == 1  # norms, biases, global scales
        value = (
            torch.rand(size, generator=generator) * 0.03 + 0.02 if positive else torch.randn(size, generator=generator)
        )
        return value.to(dtype)
    low, high = (0, 256) if dtype is torch.uint8 else (0, 60)
    if dtype is torch.uint8 and size[-1] <= _MAX_BLOCKS:
        low, high = 121, 125
    return torch.randint(low, high, size, generator=generator).to(dtype)


class _Recorder(fx.Interpreter):
    """Keeps the value of every node."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)


def run(gm: fx.GraphModule, inputs: Sequence[Any]) -> dict[fx.Node, Any]:
    """The value of every node of a graph."""
    recorder = _Recorder(gm)
    with torch.no_grad():
        recorder.run(*inputs)
    return dict(recorder.env)


def operand_values(match: Match, values: dict[fx.Node, Any]) -> dict[Operand, torch.Tensor]:
    """What a match's operands hold, in canonical shapes."""
    spec = match.spec
    shapes = {
        Operand.HIDDEN: (-1, spec.hidden_size),
        Operand.TOPK_IDS: (-1, spec.top_k),
        Operand.TOPK_WEIGHTS: (-1, spec.top_k),
    }
    found = {}
    for operand, source in match.operands.items():
        parts = [values[node] for node in nodes_of(source)]
        value = source.function(*parts) if isinstance(source, Assembled) else parts[0]
        if operand in (Operand.W13_GLOBAL, Operand.W2_GLOBAL):
            value = value.reshape(1, 1) if value.numel() == 1 else value.reshape(spec.num_experts, -1)
        found[operand] = value.reshape(shapes[operand]) if operand in shapes else value
    return found


def error_of(gm: fx.GraphModule, match: Match, seed: int = 0) -> float:
    """Worst relative error, over tokens, between the graph as it is and what ``match`` says it computes."""
    values = run(gm, random_inputs(gm, seed))
    want = moe_reference(match.spec, operand_values(match, values))
    got = values[match.output].double().reshape(want.shape)
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())
