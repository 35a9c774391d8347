"""Slots of no expert: masks over their rows and bounds on their ids are read for what they do, or refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from capture import Level, capture
from fp4_inductor.patterns.grouped_mm import read_grouped_mm
from fp4_inductor.patterns.proof import prove
from fp4_inductor.patterns.routed_rows import read_routed_rows
from fp4_inductor.patterns.signature import Memo
from moe_cases import random_weight
from moe_graphs import calls, operand_values, random_inputs, run
from torch import fx, nn

from fp4_inductor.formats import FORMATS
from fp4_inductor.matching import Match, NoMatch, find_matches
from fp4_inductor.quant import dequantize
from fp4_inductor.reference import moe_reference
from fp4_inductor.spec import Operand, RouterSpec

aten = torch.ops.aten
TOKENS, TOP_K, EXPERTS, HIDDEN, INTERMEDIATE = 12, 2, 5, 128, 96
TOLERANCE = 1.5e-2
Form = Literal["grouped_mm", "batched_mm"]
Place = Literal["hidden", "gate_up", "down", "weighted", "slots"]


@dataclass(frozen=True)
class Spelling:
    """How a block treats slots of no expert.

    Attributes:
        masks: where rows are masked: tokens, rows of a GEMM, weighted rows, or those back in slot order.
        threshold, fill, key: the first id that is masked, what with, and which ids are looked at.
        sense: whether the mask says what is dropped, what is kept, or (wrongly) drops what is to be kept.
        low, high: bounds of the ids that biases, and weights in the gathered form, are looked up by.
    """

    form: Form = "grouped_mm"
    fmt: str = "mxfp4"
    bias: bool = True
    k_first: bool = False
    routed: bool = False
    masks: tuple[Place, ...] = ("hidden", "gate_up", "down")
    threshold: int = EXPERTS
    fill: float = 0.0
    sense: Literal["drop", "keep", "inverted"] = "drop"
    key: Literal["sorted", "gathered", "slots", "shifted", "bounded"] = "sorted"
    low: int | None = None
    high: int | None = EXPERTS - 1


class Experts(nn.Module):
    """Experts in FP4 that leave out slots whose id is none of theirs."""

    def __init__(self, spelling: Spelling) -> None:
        super().__init__()
        self.spelling = spelling
        self.format = FORMATS[spelling.fmt]
        rng = torch.Generator().manual_seed(0)
        self.gate = nn.Parameter(torch.randn(EXPERTS, HIDDEN, generator=rng).bfloat16())
        for name, rows, columns in (("w13", 2 * INTERMEDIATE, HIDDEN), ("w2", HIDDEN, INTERMEDIATE)):
            for operand, value in random_weight(name, EXPERTS, rows, columns, self.format, rng, "expert").items():
                self.register_buffer(str(operand.value), value)
            self.register_buffer(f"{name}_bias", torch.randn(EXPERTS, rows, generator=rng).bfloat16())

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden ``[T, H]``, ids and weights ``[T, k]``; returns ``[T, H]``."""
        if self.spelling.routed:
            scores = nn.functional.linear(hidden, self.gate).float().softmax(-1)
            weights, ids = scores.topk(TOP_K, dim=-1)
        return getattr(self, self.spelling.form)(hidden, ids, weights)

    def grouped_mm(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        experts, order = ids.flatten().sort()
        ends = torch.histc(experts.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0, dtype=torch.int32)
        inside, mask = self.bounded(experts), self.mask(ids, experts, order)

        def gemm(name: str, rows: torch.Tensor) -> torch.Tensor:
            weight = self.weight(name)
            out = nn.functional.grouped_mm(rows, weight if self.spelling.k_first else weight.mT, offs=ends)
            return out + getattr(self, f"{name}_bias")[inside] if self.spelling.bias else out

        def masked(rows: torch.Tensor, place: Place) -> torch.Tensor:
            return self.masked(rows, mask) if place in self.spelling.masks else rows

        gate_up = masked(gemm("w13", masked(hidden[order // TOP_K], "hidden")), "gate_up")
        down = masked(gemm("w2", self.act(gate_up)), "down")
        weighted = masked(down * weights.flatten()[order].unsqueeze(-1), "weighted")
        slots = weighted[torch.empty_like(order).scatter(0, order, torch.arange(order.numel()))]
        if "slots" in self.spelling.masks:
            slots = slots.masked_fill((ids >= EXPERTS).reshape(-1, 1), 0)
        return slots.view(*ids.shape, HIDDEN).sum(1).to(hidden.dtype)

    def batched_mm(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        inside = self.bounded(ids.flatten())

        def gemm(name: str, rows: torch.Tensor) -> torch.Tensor:
            weight = self.weight(name)[inside]
            if self.spelling.k_first:
                out = torch.bmm(rows.unsqueeze(1), weight).squeeze(1)
            else:
                out = torch.bmm(weight, rows.unsqueeze(-1)).squeeze(-1)
            return out + getattr(self, f"{name}_bias")[inside] if self.spelling.bias else out

        down = gemm("w2", self.act(gemm("w13", hidden.repeat_interleave(TOP_K, dim=0))))
        weighted = down * weights.reshape(-1, 1)
        return weighted.view(*ids.shape, HIDDEN).sum(1).to(hidden.dtype)

    def weight(self, name: str) -> torch.Tensor:
        """``[E, N, K]``, or ``[E, K, N]`` where blocks store it so."""
        parts = getattr(self, name), getattr(self, f"{name}_scale"), getattr(self, f"{name}_global", None)
        weight = dequantize(*parts, self.format, torch.bfloat16)
        return weight.mT if self.spelling.k_first else weight

    def bounded(self, ids: torch.Tensor) -> torch.Tensor:
        low, high = self.spelling.low, self.spelling.high
        return ids if (low, high) == (None, None) else ids.clamp(low, high)

    def mask(self, ids: torch.Tensor, experts: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        flat = ids.flatten()
        keys = {
            "sorted": experts,
            "gathered": flat[order],
            "slots": flat,
            "shifted": experts.roll(1),
            "bounded": self.bounded(experts),
        }
        key = keys[self.spelling.key].unsqueeze(-1)
        return key >= self.spelling.threshold if self.spelling.sense == "drop" else key < self.spelling.threshold

    def masked(self, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.spelling.sense == "keep":
            return torch.where(mask, rows, self.spelling.fill)
        return rows.masked_fill(mask, self.spelling.fill)

    def act(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up


def graph_of(
    spelling: Spelling, *, tokens: int = TOKENS, level: Level = "inner", dynamic: bool = False
) -> fx.GraphModule:
    """The block with ids and weights as its inputs."""
    hidden, weights = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16), torch.zeros(tokens, TOP_K)
    ids = torch.zeros(tokens, TOP_K, dtype=torch.int64)
    return capture(Experts(spelling).eval(), hidden, ids, weights, level=level, dynamic=dynamic)


def check_numbers(gm: fx.GraphModule, match: Match, *, lowest_id: int = 0) -> None:
    """The graph computes what ``match`` says, for ids inside and outside."""
    inputs = random_inputs(gm)
    for place, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        if isinstance(node.meta["val"], torch.Tensor) and node.meta["val"].dtype is torch.int64:
            rng = torch.Generator().manual_seed(1)
            inputs[place] = torch.randint(lowest_id, EXPERTS + 4, inputs[place].shape, generator=rng)
            inputs[place][1:2] = EXPERTS
    values = run(gm, inputs)
    want = moe_reference(match.spec, operand_values(match, values))
    got = values[match.output].double()
    error = (got - want).norm(dim=-1)
    assert float(error.max() / want.norm(dim=-1).max()) < TOLERANCE
    assert torch.equal(error[want.norm(dim=-1) == 0].nonzero(), torch.empty(0, 1, dtype=torch.int64))


def the_match(gm: fx.GraphModule) -> Match:
    found = find_matches(gm.graph)
    assert [miss.reason for miss in found.near_misses] == []
    (match,) = found.matches
    return match


LAYOUTS = [("mxfp4", False, False), ("mxfp4", True, True), ("nvfp4", True, False), ("nvfp4", False, True)]


@pytest.mark.parametrize(("fmt", "bias", "k_first"), LAYOUTS)
def test_masked_rows_are_those_of_no_expert(fmt: str, bias: bool, k_first: bool) -> None:
    gm = graph_of(Spelling(fmt=fmt, bias=bias, k_first=k_first))
    match = the_match(gm)
    assert match.pattern == "grouped_mm"
    assert match.operands[Operand.TOPK_IDS].op == "placeholder"
    assert match.spec.has_w13_bias == bias
    check_numbers(gm, match)


@pytest.mark.parametrize(("fmt", "bias", "k_first"), LAYOUTS)
def test_bounded_ids_are_the_operand_where_they_may_be_outside(fmt: str, bias: bool, k_first: bool) -> None:
    gm = graph_of(Spelling("batched_mm", fmt, bias, k_first, low=0))
    match = the_match(gm)
    assert match.pattern == "batched_mm"
    assert match.spec.top_k == TOP_K
    assert match.operands[Operand.TOPK_IDS].op == "call_function"
    check_numbers(gm, match, lowest_id=-3)


@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
def test_ids_of_a_router_are_taken_as_they_are(form: Form) -> None:
    match = the_match(graph_of(Spelling(form, routed=True, low=0)))
    assert isinstance(match.spec.router, RouterSpec)
    ids = match.operands[Operand.TOPK_IDS]
    assert ids.all_input_nodes[0].target is aten.topk.default


@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize(("tokens", "level", "dynamic"), [(1, "inner", False), (12, "post_grad", True)])
def test_one_token_and_any_number(form: Form, tokens: int, level: Level, dynamic: bool) -> None:
    gm = graph_of(Spelling(form, low=0, routed=dynamic), tokens=tokens, level=level, dynamic=dynamic)
    check_numbers(gm, the_match(gm))


SAME = {
    "no mask on tokens": Spelling(masks=("gate_up", "down")),
    "no mask between": Spelling(masks=("hidden", "down")),
    "weighted rows masked": Spelling(masks=("hidden", "weighted")),
    "masked in slot order": Spelling(masks=("slots",)),
    "says what is kept": Spelling(sense="keep"),
    "ids gathered by the sort": Spelling(key="gathered"),
    "no lower bound and none needed": Spelling(low=-2),
}


@pytest.mark.parametrize("name", SAME)
def test_other_spellings_of_the_same(name: str) -> None:
    gm = graph_of(SAME[name])
    check_numbers(gm, the_match(gm))


def test_experts_counted_in_integers() -> None:
    """As on a GPU: a CPU cannot trace this."""
    gm = graph_of(Spelling())
    (histc,) = calls(gm.graph, aten.histc.default)
    cast = histc.args[0]
    cast.args = (cast.args[0], torch.int32)
    for node in (cast, histc):
        node.meta["val"] = node.meta["val"].to(torch.int32)
    assert the_match(gm).operands[Operand.TOPK_IDS].op == "placeholder"


def test_nothing_masked_and_nothing_bounded() -> None:
    for bias in (False, True):
        match = the_match(graph_of(Spelling(bias=bias, masks=(), high=None)))
        assert match.operands[Operand.TOPK_IDS].op == "placeholder"


OTHER = {
    "drops the last expert": (Spelling(threshold=EXPERTS - 1), "does not tell ids of 5 experts from others"),
    "keeps one id too many": (Spelling(threshold=EXPERTS + 1), "does not tell ids of 5 experts from others"),
    "fills with one": (Spelling(fill=1.0), "does not fill the rows of no expert with zeros"),
    "keeps what it should drop": (Spelling(sense="inverted"), "does not fill the rows of no expert with zeros"),
    "reads unsorted ids": (Spelling(key="slots"), "is not made from the expert ids of the rows"),
    "reads its neighbours' ids": (Spelling(key="shifted"), "is not made from the expert ids of the rows"),
    "reads bounded ids": (Spelling(key="bounded"), "is not made from the expert ids of the rows"),
    "bounds away the last expert": (Spelling(high=EXPERTS - 2), "bounds ids by others than those of 5 experts"),
    "bounds let one id too many in": (Spelling(high=EXPERTS), "bounds ids by others than those of 5 experts"),
    "bounds away the first expert": (Spelling(low=1), "bounds ids by others than those of 5 experts"),
    "sums unwritten rows": (Spelling(masks=("hidden", "gate_up")), "differs by nan"),
    "sums rows that meet no bias": (Spelling(masks=("hidden",), bias=False), "differs by nan"),
    "looks up biases outside": (Spelling(high=None), "out of bounds"),
    "gathers all but the last": (Spelling("batched_mm", low=0, high=EXPERTS - 2), "bounds ids by others than those"),
    "gathers all but the first": (Spelling("batched_mm", low=1), "bounds ids by others than those"),
}


@pytest.mark.parametrize("name", OTHER)
def test_anything_else_is_refused(name: str) -> None:
    spelling, reason = OTHER[name]
    found = find_matches(graph_of(spelling).graph)
    assert found.matches == ()
    assert len(found.near_misses) == 2
    assert reason in found.near_misses[0].reason


WRONG_MASKS = {
    "drops the last expert": lambda mask, where: mask.update_arg(1, EXPERTS - 1),
    "keeps one id too many": lambda mask, where: mask.update_arg(1, EXPERTS + 1),
    "keeps what it should drop": lambda mask, where: setattr(mask, "target", aten.lt.Scalar),
    "fills with one": lambda mask, where: where.args[1].update_arg(1, 1.0),
    "masks nothing": lambda mask, where: where.replace_all_uses_with(where.args[2]),
}


@pytest.mark.parametrize("name", [None, *WRONG_MASKS])
def test_numbers_alone_tell_a_wrong_mask(name: str | None) -> None:
    gm = graph_of(Spelling())
    gate_up, down = calls(gm.graph, aten._grouped_mm.default)
    block = read_routed_rows([read_grouped_mm(gate_up)], read_grouped_mm(down), Memo())
    if name is None:
        prove(block, Memo())
        return
    (mask,) = calls(gm.graph, aten.ge.Scalar)
    WRONG_MASKS[name](mask, calls(gm.graph, aten.where.self)[-1])
    with pytest.raises(NoMatch, match="does not compute what was read"):
        prove(block, Memo())
