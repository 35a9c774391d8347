"""Loops over experts that are no mixture, each one step from a right one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from loop_spellings import H, LoopMoE, Tensor, put_back, scattered_scores


def exchanged(expert: int) -> int:
    """Another order of the experts."""
    return (1, 0, 2)[expert]


def expert_missing(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(self.experts - 1):
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.expert(e, x[token]) * weights[token, slot, None])
    return out


def first_expert_missing(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(1, self.experts):
        out = out + (weights * (ids == e)).sum(-1, keepdim=True) * self.expert(e, x)
    return out


def score_of_no_expert(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    scores = torch.zeros(x.shape[0], self.experts + 1, dtype=x.dtype).scatter(1, ids, weights)
    return sum(scores[:, e, None] * self.expert(e, x) for e in range(self.experts))  # type: ignore[return-value]


def expert_twice(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in (*range(self.experts), 1):
        out = out + (weights * (ids == e)).sum(-1, keepdim=True) * self.expert(e, x)
    return out


def weights_of_another_slot(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(self.experts):
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.expert(e, x[token]) * weights[token, 1 - slot, None])
    return out


def weights_of_another_expert(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(self.experts):
        token = torch.where((ids == e).any(-1))[0]
        score = (weights * (ids == (e + 1) % self.experts)).sum(-1)
        out = out.index_add(0, token, self.expert(e, x[token]) * score[token, None])
    return out


def experts_from(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(self.experts):
        out = out + (weights * (ids >= e)).sum(-1, keepdim=True) * self.expert(e, x)
    return out


def some_tokens_left_out(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    early = torch.arange(x.shape[0])[:, None] < 1000
    out = torch.zeros_like(x)
    for e in range(self.experts):
        out = out + (weights * ((ids == e) & early)).sum(-1, keepdim=True) * self.expert(e, x)
    return out


def small_weights_left_out(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(self.experts):
        score = (weights * (ids == e)).sum(-1, keepdim=True)
        out = out + torch.where(score > 1e-9, score, 0.0) * self.expert(e, x)
    return out


def start_not_zero(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = x.clone()
    for e in range(self.experts):
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.expert(e, x[token]) * weights[token, slot, None])
    return out


def put_without_adding(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(self.experts):
        token, slot = torch.where(ids == e)
        out[token] = self.expert(e, x[token]) * weights[token, slot, None]
    return out


def put_back_repeated(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return put_back(self, x, ids // 2, weights)


def scattered_repeated(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return scattered_scores(self, x, ids // 2, weights)


def w2_of_another_expert(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(self.experts):
        inner = self.activate(e, x)
        out = out + (weights * (ids == e)).sum(-1, keepdim=True) * self.linear("w2", exchanged(e), inner)
    return out


def experts_exchanged(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(self.experts):
        out = out + (weights * (ids == e)).sum(-1, keepdim=True) * self.expert(exchanged(e), x)
    return out


def another_activation(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(self.experts):
        gate, up = self.linear("w13", e, x).chunk(2, dim=-1)
        inner = (F.gelu(gate) if e == 1 else F.silu(gate)) * up
        out = out + (weights * (ids == e)).sum(-1, keepdim=True) * self.linear("w2", e, inner)
    return out


def another_limit(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(self.experts):
        limit = 7.0 if e else 8.0
        gate, up = self.linear("w13", e, x).chunk(2, dim=-1)
        inner = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        out = out + (weights * (ids == e)).sum(-1, keepdim=True) * self.linear("w2", e, inner)
    return out


def one_expert_scaled(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(self.experts):
        score = (weights * (ids == e)).sum(-1, keepdim=True)
        out = out + (score * 1.5 if e == 2 else score) * self.expert(e, x)
    return out


def one_weight_scaled(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(self.experts):
        own = weights * 1.5 if e == 2 else weights
        out = out + (own * (ids == e)).sum(-1, keepdim=True) * self.expert(e, x)
    return out


def other_tokens_for_one(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(self.experts):
        out = out + (weights * (ids == e)).sum(-1, keepdim=True) * self.expert(e, x.flip(0) if e == 1 else x)
    return out


def scaled_and_stacked(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    scores = torch.zeros(x.shape[0], self.experts, dtype=x.dtype).scatter(1, ids, weights)
    results = torch.stack([self.expert(e, x) * scores[:, e, None] for e in range(self.experts)], dim=1)
    return torch.einsum("te,teh->th", scores, results)


def stacked_in_another_order(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    results = torch.stack([self.expert(exchanged(e), x) for e in range(self.experts)], dim=1)
    return (results.gather(1, ids[..., None].expand(-1, -1, H)) * weights[..., None]).sum(1)


MUTANTS = (
    expert_missing,
    first_expert_missing,
    score_of_no_expert,
    expert_twice,
    weights_of_another_slot,
    weights_of_another_expert,
    experts_from,
    some_tokens_left_out,
    small_weights_left_out,
    start_not_zero,
    put_without_adding,
    put_back_repeated,
    scattered_repeated,
    w2_of_another_expert,
    experts_exchanged,
    another_activation,
    another_limit,
    one_expert_scaled,
    one_weight_scaled,
    other_tokens_for_one,
    scaled_and_stacked,
    stacked_in_another_order,
)
"""No mixture of these experts."""
