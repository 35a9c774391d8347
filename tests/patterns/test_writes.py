"""Writes into tensors: recognition reads graphs as functional, so a block of which anything is written is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from moe_graphs import calls, moe_graph
from torch import fx

from fp4_inductor.matching import find_matches
from fp4_inductor.spec import Operand

aten = torch.ops.aten

pytest.importorskip("transformers", reason="needs transformers' models")


def write(node: fx.Node, behind: fx.Node) -> fx.Node:
    """Double ``node`` in place, right behind another node."""
    with node.graph.inserting_after(behind):
        call = node.graph.call_function(aten.mul_.Tensor, (node, 2))
    call.meta["val"] = node.meta["val"]
    return call


def weight_bytes(graph: fx.Graph) -> fx.Node:
    return calls(graph, aten.__rshift__.Scalar)[0]


def seen_through_a_view(graph: fx.Graph) -> fx.Node:
    hidden = find_matches(graph).matches[0].node(Operand.HIDDEN)
    return hidden.all_input_nodes[0]


WRITTEN: dict[str, Callable[[fx.Graph], fx.Node]] = {
    "hidden states": lambda graph: find_matches(graph).matches[0].node(Operand.HIDDEN),
    "what hidden states view": seen_through_a_view,
    "routing weights": lambda graph: find_matches(graph).matches[0].node(Operand.TOPK_WEIGHTS),
    "scores of the router": lambda graph: calls(graph, aten.exp.default)[0],
    "half of a weight": weight_bytes,
    "rows": lambda graph: calls(graph, aten._grouped_mm.default)[0],
}


@pytest.mark.parametrize("what", list(WRITTEN))
def test_a_block_is_refused_if_something_of_it_is_written(what: str) -> None:
    gm = moe_graph("mixtral", "grouped_mm", layers=1)
    node = WRITTEN[what](gm.graph)
    write(node, behind=next(iter(node.users)))
    gm.graph.lint()
    found = find_matches(gm.graph)
    assert found.matches == ()
    assert len(found.near_misses) == 2
    # What is written to rows of experts may as well be told as one more reader of theirs.
    assert what == "rows" or any("mul_" in miss.reason for miss in found.near_misses)
    assert all(miss.reason for miss in found.near_misses)


def test_updates_behind_the_output_do_no_harm() -> None:
    gm = moe_graph("mixtral", "grouped_mm", layers=1)
    hidden = find_matches(gm.graph).matches[0].node(Operand.HIDDEN)
    write(hidden, behind=gm.graph.output_node().prev)
    assert len(find_matches(gm.graph).matches) == 1


def test_a_write_elsewhere_does_no_harm() -> None:
    gm = moe_graph("mixtral", "grouped_mm", layers=2)
    (first, _) = find_matches(gm.graph).matches
    write(first.node(Operand.TOPK_WEIGHTS), behind=next(iter(first.node(Operand.TOPK_WEIGHTS).users)))
    found = find_matches(gm.graph)
    assert [match.output for match in found.matches] != [first.output]
    assert len(found.matches) == 1
