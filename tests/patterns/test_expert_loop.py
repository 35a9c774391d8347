"""Loops over experts, unrolled: which spellings are read, with which numbers, and what comes near them."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import loop_mutants
import loop_spellings as loops
import pytest
import torch
import torch.nn.functional as F
from capture import capture
from fp4_inductor.patterns import expert_loop
from loop_mutants import MUTANTS
from loop_spellings import DENSE, INNER, SPARSE, TOKENS, E, H, Loop, LoopMoE, Tensor
from moe_graphs import calls, error_of
from torch import fx

from fp4_inductor.formats import MXFP4, NVFP4
from fp4_inductor.matching import find_matches

aten = torch.ops.aten
TOLERANCE = 1.5e-2


@pytest.fixture(autouse=True)
def sizes_by_data() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def build(loop: Loop, **options: Any) -> LoopMoE:
    torch.manual_seed(0)
    return LoopMoE(loop, **options).eval().requires_grad_(False)


def hidden(tokens: int = TOKENS) -> Tensor:
    return torch.randn(tokens, H, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


@functools.cache
def _captured(loop: Loop, dynamic: bool, options: tuple[tuple[str, Any], ...]) -> fx.GraphModule:
    return capture(build(loop, **dict(options)), hidden(), dynamic=dynamic)


def graph_of(loop: Loop, *, dynamic: bool = True, **options: Any) -> fx.GraphModule:
    return copy.deepcopy(_captured(loop, dynamic, tuple(options.items())))


def check(gm: fx.GraphModule, top_k: int = 2) -> None:
    found = find_matches(gm.graph)
    assert not found.near_misses, found.near_misses[0].reason
    (match,) = found.matches
    assert (match.pattern, match.grade) == ("expert_loop", "full")
    spec = match.spec
    assert (spec.num_experts, spec.top_k, spec.hidden_size, spec.intermediate_size) == (E, top_k, H, INNER)
    assert error_of(gm, match) < TOLERANCE
    left = [node for node in gm.graph.nodes if node not in match.nodes]
    assert not [node for node in left if node.target in (aten.nonzero.default, aten._assert_scalar.default)]


@pytest.mark.parametrize("loop", SPARSE + DENSE, ids=lambda loop: loop.__name__)
def test_spelling(loop: Loop) -> None:
    check(graph_of(loop))


@pytest.mark.parametrize("loop", [loops.where_index_add, loops.nonzero_tokens, loops.masked_sum, loops.stacked_gather])
@pytest.mark.parametrize(("dynamic", "top_k"), [(False, 2), (True, 1), (False, 1)])
def test_spelling_at_other_sizes(loop: Loop, dynamic: bool, top_k: int) -> None:
    check(graph_of(loop, dynamic=dynamic, top_k=top_k), top_k)


@pytest.mark.parametrize(
    "options",
    [
        {"storage": "own", "apart": True},
        {"storage": "own", "fmt": NVFP4, "bias": True, "apart": True},
        {"storage": "own", "gated": False, "bias": True},
        {"storage": "picked", "fmt": NVFP4},
        {"bias": True},
    ],
    ids=str,
)
def test_storage(options: dict[str, Any]) -> None:
    gm = graph_of(loops.where_index_add, **options)
    check(gm)
    (match,) = find_matches(gm.graph).matches
    assert match.spec.activation.gated == options.get("gated", True)
    assert match.spec.has_w13_bias == match.spec.has_w2_bias == options.get("bias", False)
    assert match.spec.weight_format.name == options.get("fmt", MXFP4).name


@pytest.mark.parametrize("loop", [loops.where_index_add, loops.boolean_scores, loops.stacked_einsum])
def test_compiled(loop: Loop) -> None:
    model = build(loop, storage="own", apart=True)
    torch._dynamo.reset()
    options = {"fp4moe.expect_matches": 1}
    compiled = torch.compile(model, backend="fp4moe", fullgraph=True, dynamic=True, options=options)
    with torch.no_grad():
        compiled(hidden(11))
        with torch._dynamo.config.patch(error_on_recompile=True):
            for tokens in (2, 5, 40):
                x = hidden(tokens)
                got, want = compiled(x).double(), model.want(x)
                assert float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max()) < TOLERANCE


class ShapedHalves(LoopMoE):
    """Gate and up are taken apart by a view that needs the number of rows."""

    def activate(self, expert: int, rows: Tensor) -> Tensor:
        both = self.linear("w13", expert, rows)
        gate, up = both.view(*both.shape[:-1], 2, INNER).unbind(-2)
        return F.silu(gate) * up


def test_sizes_inside_an_activation() -> None:
    torch.manual_seed(0)
    check(capture(ShapedHalves(loops.where_index_add).eval(), hidden(), dynamic=True))


@pytest.mark.parametrize("loop", [loops.where_index_add, loops.boolean_rows])
def test_exported(loop: Loop) -> None:
    model = build(loop)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    exported = torch.export.export(model, (hidden(),), dynamic_shapes=({0: tokens},)).module()
    check(capture(exported, hidden(), dynamic=True))


class Experts(torch.nn.Module):
    """The loop alone: routing comes from outside."""

    def __init__(self, *, checked: bool) -> None:
        super().__init__()
        self.model, self.checked = build(loops.where_index_add), checked

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if self.checked:
            torch._check(ids.shape[0] == x.shape[0])
            torch._check(weights.shape[0] == x.shape[0])
        return self.model.loop(self.model, x, ids, weights)


@pytest.mark.parametrize("checked", [True, False])
def test_routing_from_outside(checked: bool) -> None:
    ids = torch.randint(0, E, (TOKENS, 2))
    given = hidden(), ids, torch.rand(TOKENS, 2).bfloat16()
    for value in given:
        torch._dynamo.maybe_mark_dynamic(value, 0)
    gm = capture(Experts(checked=checked), *given, dynamic=None)
    if checked:
        (match,) = find_matches(gm.graph).matches
        assert match.grade == "experts"
    else:
        assert "torch._check(ids.shape[0] == hidden.shape[0])" in refusal(gm)


def given_routing(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Ids that no top-k gives: a token may have one twice."""
    ids = (ids * 3 + 1) % self.experts
    return loops.where_index_add(self, x, ids // 2, weights)


def test_ids_may_repeat() -> None:
    gm = graph_of(given_routing)
    (match,) = find_matches(gm.graph).matches
    assert match.grade == "experts"
    assert error_of(gm, match) < TOLERANCE


@pytest.mark.parametrize("loop", MUTANTS, ids=lambda loop: loop.__name__)
def test_mutant(loop: Loop) -> None:
    found = find_matches(graph_of(loop).graph)
    assert not found.matches
    assert found.near_misses


def refusal(gm: fx.GraphModule) -> str:
    gm.graph.lint()
    found = find_matches(gm.graph)
    assert not found.matches
    return max(found.near_misses, key=lambda miss: miss.progress).reason


def test_tokens_of_another_expert() -> None:
    gm = graph_of(loops.where_index_add)
    first, second = calls(gm.graph, aten.index_add.default)[:2]
    second.update_arg(2, first.args[2])
    assert "does not add rows to the tokens they were read from" in refusal(gm)


def test_rows_of_another_expert() -> None:
    gm = graph_of(loops.where_index_add)
    sums = calls(gm.graph, aten.index_add.default)
    rows = [sum.args[3].args[0] for sum in sums]
    sums[1].args[3].update_arg(0, rows[2])
    sums[2].args[3].update_arg(0, rows[1])
    assert find_matches(gm.graph).matches == ()


def test_rows_that_are_also_read_elsewhere() -> None:
    gm = graph_of(loops.masked_sum)
    inner = calls(gm.graph, aten.mm.default)[-1].args[0]
    output = gm.graph.output_node()
    output.args = ((*output.args[0], inner),)
    assert "is also read by output" in refusal(gm)


def test_numbers_alone_tell_exchanged_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    read = expert_loop.read_share

    def exchanged(*args: Any) -> Any:
        share = read(*args)
        return dataclasses.replace(share, expert=loop_mutants.exchanged(share.expert))

    monkeypatch.setattr(expert_loop, "read_share", exchanged)
    reason = refusal(graph_of(loops.where_index_add, storage="own"))
    assert "does not compute what was read" in reason


@pytest.mark.parametrize("loop", [loop_mutants.experts_exchanged, loop_mutants.stacked_in_another_order])
def test_weights_of_their_own_in_any_order(loop: Loop) -> None:
    check(graph_of(loop, storage="own"))


def bounded(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(self.experts):
        token, slot = torch.where(ids == e)
        torch._check(token.shape[0] <= 5)
        out.index_add_(0, token, self.expert(e, x[token]) * weights[token, slot, None])
    return out


def test_an_assertion_that_says_something_stays() -> None:
    gm = graph_of(bounded)
    (match,) = find_matches(gm.graph).matches
    left = [node for node in gm.graph.nodes if node not in match.nodes]
    kept = [node.args[1] for node in left if node.target is aten._assert_scalar.default]
    assert sum("<= 5" in message for message in kept) == E
