"""Names that people know for the inputs of a graph: ``layers.0.experts.w13_packed`` instead of ``arg5_1``.

Dynamo knows where each input of its graph comes from, AOTAutograd says which of them each input of its own
graph is. For messages only: where one of them does not tell, an input keeps the name it has.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import fx

from .patterns.near_misses import INPUT_NAME

_HOLDERS = re.compile(r"\._(?:modules|parameters|buffers)(?=\[)")
_ITEM = re.compile(r"\['?([^'\]]+)'?\]")


def names_of_inputs(gm: fx.GraphModule) -> tuple[str, ...]:
    """The name of each placeholder of a Dynamo graph, in order; "" where it has none."""
    return tuple(_name(node) for node in gm.graph.find_nodes(op="placeholder"))


def _name(node: fx.Node) -> str:
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    text = str(name() if callable(name) else name)
    return readable(text)


def readable(source: str) -> str:
    """``L['self']._modules['layers']._modules['0']._parameters['w']`` as ``layers.0.w``; other locals by name."""
    holders = _HOLDERS.sub("", source)
    path = _ITEM.sub(r".\1", holders.removeprefix("L")).lstrip(".")
    return path.partition(".")[2] if holders != source else path


def name_inputs(graph: fx.Graph, names: Sequence[str]) -> None:
    """Tell the placeholders of an AOTAutograd graph what the inputs of the Dynamo graph are called."""
    for node in graph.find_nodes(op="placeholder"):
        place = getattr(node.meta.get("desc"), "idx", None)
        if isinstance(place, int) and place < len(names) and names[place]:
            node.meta[INPUT_NAME] = names[place]
