"""Keys by which pieces of a graph are identified once: equal for equal layers, different for all that computes else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from capture import capture
from fp4_inductor.patterns import proof
from fp4_inductor.patterns.signature import Memo, signature
from moe_graphs import moe_graph
from torch import fx

from fp4_inductor.matching import NoMatch, find_matches

Piece = Callable[..., torch.Tensor]


def key_of(piece: Piece, *inputs: torch.Tensor, constants: dict[str, torch.Tensor] | None = None, **options: bool):  # type: ignore[no-untyped-def]
    gm = capture(piece, *inputs, **options) if constants is None else with_constants(piece, inputs[0], constants)
    nodes = [node for node in gm.graph.nodes if node.op != "output"]
    return signature(nodes, inputs=sum(node.op == "placeholder" for node in nodes))


def with_constants(piece: Piece, value: torch.Tensor, constants: dict[str, torch.Tensor]) -> fx.GraphModule:
    """``piece(x, c)`` as a graph in which c is held by the module."""
    graph = fx.Graph()
    x, c = graph.placeholder("x"), graph.get_attr("c")
    x.meta["val"], c.meta["val"] = value, constants["c"]
    out = graph.call_function(torch.ops.aten.add.Tensor, (x, c))
    out.meta["val"] = piece(value, constants["c"])
    graph.output(out)
    return fx.GraphModule(constants, graph)


@pytest.mark.parametrize("elements", [16, 5000, 200_000])
def test_constants_are_told_apart_by_value(elements: int) -> None:
    x, c = torch.randn(elements), torch.randn(elements)
    other = c.clone()
    other[-1] += 1
    keys = [key_of(torch.add, x, constants={"c": constant}) for constant in (c, c.clone(), other)]
    assert keys[0] == keys[1]
    assert keys[0] != keys[2]


def test_dynamic_sizes_are_told_apart_by_formula() -> None:
    """Both rows of each pair have the same sizes at the 6 tokens they were traced with."""
    x = torch.randn(6, 8)

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(2 * x.shape[0]) + x.sum()

    def more(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(x.shape[0] + 6) + x.sum()

    def fixed(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(12) + x.sum()

    keys = [key_of(piece, x, dynamic=True) for piece in (doubled, more, fixed)]
    assert len(set(keys)) == 3


def test_steps_and_numbers_count() -> None:
    x = torch.randn(6, 8)
    pieces: list[Piece] = [
        lambda x: (x * 2).relu(),
        lambda x: (x * 2.5).relu(),
        lambda x: (x + 2).relu(),
        lambda x: x.relu() * 2,
        lambda x: (x * 2).relu().to(torch.bfloat16),
    ]
    assert len({key_of(piece, x) for piece in pieces}) == len(pieces)
    assert key_of(pieces[0], x) == key_of(lambda y: torch.relu(y * 2), x)


def test_a_remembered_refusal_names_no_node_of_another_piece() -> None:
    memo, node = Memo(), fx.Graph().placeholder("of_the_first")

    def refuse() -> None:
        raise NoMatch("{} is wrong", "it", node=node, progress=0.5)

    with pytest.raises(NoMatch) as first:
        memo.get("key", refuse)
    with pytest.raises(NoMatch, match="it is wrong") as second:
        memo.get("key", refuse)
    assert first.value.node is node
    assert second.value.node is None
    assert second.value.progress == 0.5


@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
def test_equal_layers_are_proven_once(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="needs transformers' models")
    proven: list[object] = []
    prove = proof._prove
    monkeypatch.setattr(proof, "_prove", lambda block, small: proven.append(block) or prove(block, small))
    gm = moe_graph("qwen3_moe", form, layers=4)
    assert len(find_matches(gm.graph).matches) == 4
    assert len(proven) == 1
