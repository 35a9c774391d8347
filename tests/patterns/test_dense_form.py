"""Tokens that run over all experts, or over gathered weights: every spelling is read, every wrong one refused."""

from __future__ import annotations

import branch_spellings as spellings
import pytest
import torch
from branch_spellings import (
    DENSE,
    GATHERED,
    WEIGHTED_BEFORE,
    BranchMoE,
    E,
    H,
    Routing,
    Spelling,
    Tensor,
    all_experts,
    clamped,
    scattered,
    scored,
    swiglu,
)
from capture import capture
from moe_graphs import error_of

from fp4_inductor.matching import Recognition, find_matches
from fp4_inductor.spec import GateUpOrder, TokenRange

TOLERANCE = 1.5e-2


def find(
    spelling: Spelling, top_k: int, dtype: torch.dtype, *, dynamic: bool, tokens: int = 9
) -> tuple[Recognition, float]:
    """What is found, and the worst error of a match against what it says it computes."""
    gm = capture(BranchMoE(spelling, top_k, dtype), torch.randn(2, tokens, H).to(dtype), dynamic=dynamic)
    found = find_matches(gm.graph)
    return found, max((error_of(gm, match) for match in found.matches), default=0.0)


@pytest.mark.parametrize(("top_k", "dynamic", "dtype"), [(1, False, torch.bfloat16), (3, True, torch.float32)])
@pytest.mark.parametrize("spelling", [*DENSE, *GATHERED], ids=lambda spelling: spelling.__name__)
def test_spellings_match(spelling: Spelling, top_k: int, dynamic: bool, dtype: torch.dtype) -> None:
    found, error = find(spelling, top_k, dtype, dynamic=dynamic)
    assert [miss.reason for miss in found.near_misses] == []
    (match,) = found.matches
    assert match.pattern == ("dense" if spelling in DENSE else "batched_mm")
    assert (match.spec.top_k, match.spec.num_tokens.static) == (top_k, not dynamic)
    assert match.spec.weight_on_input == (spelling in WEIGHTED_BEFORE)
    assert match.spec.w13_order is (GateUpOrder.INTERLEAVED if match.spec.has_w13_bias else GateUpOrder.GATE_UP)
    assert match.where.file.endswith("branch_spellings.py")
    assert error < (TOLERANCE if dtype is torch.bfloat16 else 1e-4)


def other_tokens_scores(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    return scored(self, x, scattered(r).flip(0))


def scattered_along_tokens(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    return scored(self, x, torch.zeros(x.shape[0], E, dtype=x.dtype).scatter(0, r.ids, r.weights))


def clamped_scores(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    return scored(self, x, scattered(r).clamp(max=0.2))


def shifted_scores(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    return scored(self, x, scattered(r) + 0.01)


def masked_by_size(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    return scored(self, x, r.probs * (r.probs > 0.1))


def filled(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    return scored(self, x, torch.full((x.shape[0], E), 0.01, dtype=x.dtype).scatter(1, r.ids, r.weights))


def masked_with_a_rest(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    return scored(self, x, torch.where(spellings.mask_of(r), r.probs, 0.01))


def masked_the_other_way(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    return scored(self, x, torch.where(spellings.mask_of(r), 0.0, r.probs))


def masked_twice_over(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    """A slot that comes twice weighs once in the mask."""
    mask = torch.zeros_like(r.probs).scatter(1, r.ids // 2, 1.0)
    return scored(self, x, r.probs * mask)


def scattered_twice_over(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    return scored(self, x, torch.zeros_like(r.probs).scatter(1, r.ids // 2, r.weights.float()))


def masked_before_sigmoid(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    """sigmoid(0) is 0.5."""
    return scored(self, x, torch.sigmoid(torch.where(spellings.mask_of(r), r.logits, 0.0)))


def summed_over_tokens(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    """As many tokens as experts: sizes alone do not tell."""
    out = all_experts(self, x)
    return (out * scattered(r).T[..., None]).sum(1)


def scores_not_transposed(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    return (all_experts(self, x) * scattered(r)[..., None]).sum(0)


def tokens_biases(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    rows = torch.matmul(x[None], self.weight("w13").mT) + self.b13[None]
    out = torch.matmul(swiglu(rows), self.weight("w2").mT)
    return (out * scattered(r).T[..., None]).sum(0)


def experts_in_other_order(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    return (all_experts(self, x).flip(0) * scattered(r).T[..., None]).sum(0)


def tokens_for_experts(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    """Token i through expert i alone."""
    inner = swiglu(torch.bmm(x[:, None], self.weight("w13").mT))
    return (torch.bmm(inner, self.weight("w2").mT) * scattered(r)[..., None]).sum(1)


def averaged(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    return (all_experts(self, x) * scattered(r).T[..., None]).mean(0)


def unweighted(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    return all_experts(self, x).sum(0)


def weighted_twice(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    scores = scattered(r).T[..., None]
    return (all_experts(self, x) * scores * scores).sum(0)


def weighted_before_and_after(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    scores = scattered(r).T[..., None]
    inner = swiglu(torch.bmm(x[None] * scores, self.weight("w13").mT))
    return (torch.bmm(inner, self.weight("w2").mT) * scores).sum(0)


def weighted_before_a_bias(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    """Experts that a token has not chosen give their bias all the same."""
    rows = torch.bmm(x[None] * scattered(r).T[..., None], self.weight("w13").mT)
    return (torch.bmm(swiglu(rows), self.weight("w2").mT) + self.b2[:, None]).sum(0)


def joined_by_a_weight(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    inner = clamped(torch.bmm(x[None] * scattered(r).T[..., None], self.weight("w13").mT) + self.b13[:, None])
    return torch.bmm(inner, self.weight("w2").mT).sum(0)


def other_slots_experts(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    inner = swiglu(torch.einsum("ti,taoi->tao", x, self.weight("w13")[r.ids]))
    return torch.einsum("tao,taio,ta->ti", inner, self.weight("w2")[r.ids.flip(1)], r.weights)


def other_slots_weights(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    inner = swiglu(torch.einsum("ti,taoi->tao", x, self.weight("w13")[r.ids]))
    return torch.einsum("tao,taio,ta->ti", inner, self.weight("w2")[r.ids].flip(1), r.weights)


def other_slots_biases(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    inner = clamped(torch.einsum("ti,taoi->tao", x, self.weight("w13")[r.ids]) + self.b13[r.ids.flip(1)])
    return torch.einsum("tao,taio,ta->ti", inner, self.weight("w2")[r.ids], r.weights)


def swapped_picks(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    out = all_experts(self, x).gather(1, r.ids[..., None].expand(-1, -1, H))
    return (out * r.weights[..., None]).sum(1)


def inner_rows(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    """``[T, k, I]``, times routing weights."""
    inner = swiglu(torch.einsum("th,tknh->tkn", x, self.weight("w13")[r.ids]))
    return inner * r.weights[..., None]


def biased_behind_the_weights(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    rows = torch.einsum("tki,tkhi->tkh", inner_rows(self, x, r), self.weight("w2")[r.ids]) + self.b2[r.ids]
    return rows.sum(1)


def weighted_inside_and_behind(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    rows = torch.einsum("tki,tkhi->tkh", inner_rows(self, x, r), self.weight("w2")[r.ids])
    return (rows * r.weights[..., None]).sum(1)


def scaled_inside(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    inner = swiglu(torch.einsum("th,enh->etn", x, self.weight("w13"))) * 1.003
    return (torch.einsum("eti,ehi->teh", inner, self.weight("w2")) * scattered(r)[..., None]).sum(1)


WRONG: tuple[Spelling, ...] = (
    scaled_inside,
    biased_behind_the_weights, weighted_inside_and_behind, other_tokens_scores, scattered_along_tokens,
    clamped_scores, shifted_scores, masked_by_size, filled,
    masked_with_a_rest, masked_the_other_way, masked_twice_over, scattered_twice_over, masked_before_sigmoid,
    summed_over_tokens, scores_not_transposed, tokens_biases, experts_in_other_order, tokens_for_experts, averaged,
    unweighted, weighted_twice, weighted_before_and_after, weighted_before_a_bias, joined_by_a_weight,
    other_slots_experts, other_slots_weights, other_slots_biases, swapped_picks,
)  # fmt: skip


@pytest.mark.parametrize("spelling", WRONG, ids=lambda spelling: spelling.__name__)
def test_wrong_spellings_are_refused(spelling: Spelling) -> None:
    """There are as many tokens as experts, so that every shape fits."""
    found, _ = find(spelling, 3, torch.bfloat16, dynamic=False, tokens=E // 2)
    assert found.matches == ()
    assert found.near_misses
    assert all(miss.reason and miss.where.file for miss in found.near_misses)


@pytest.mark.parametrize("spelling", [*DENSE[:4], *GATHERED[:3]], ids=lambda spelling: spelling.__name__)
def test_sizes_that_are_equal_mislead_nobody(spelling: Spelling) -> None:
    found, error = find(spelling, 3, torch.bfloat16, dynamic=False, tokens=E // 2)
    (match,) = found.matches
    assert match.spec.num_tokens == TokenRange(E, E)
    assert error < TOLERANCE


@pytest.mark.parametrize(
    "spelling",
    [spellings.gpt_oss, spellings.masked_and_normalised, spellings.llama4, spellings.gathered_weighted_before],
    ids=lambda spelling: spelling.__name__,
)
def test_the_whole_way(spelling: Spelling) -> None:
    torch.manual_seed(0)
    model, hidden = BranchMoE(spelling), torch.randn(2, 9, H).bfloat16()
    want = model.exact(hidden)
    options = {"fp4moe.backend": "reference", "fp4moe.expect_matches": 1}
    compiled = torch.compile(model, backend="fp4moe", dynamic=True, fullgraph=True, options=options)
    with torch.no_grad():
        errors = [((run(hidden) - want).norm(dim=-1) / want.norm(dim=-1)).max() for run in (compiled, model)]
    torch._dynamo.reset()
    assert errors[0] <= 1.25 * errors[1] + 1e-3
    assert errors[0] < TOLERANCE
