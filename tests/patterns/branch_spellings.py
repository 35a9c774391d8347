"""Own model code in which tokens run over all experts at once, or over gathered weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from fp4_inductor.formats import MXFP4
from fp4_inductor.quant import dequantize

E, H, INNER = 8, 128, 96
Tensor = torch.Tensor


class Routing(NamedTuple):
    """ids, weights: ``[T, k]``; probs, logits: ``[T, E]``."""

    ids: Tensor
    weights: Tensor
    probs: Tensor
    logits: Tensor


Spelling = Callable[["BranchMoE", Tensor, Routing], Tensor]


class BranchMoE(nn.Module):
    """A linear router, packed experts whose weights are ``dtype`` in the graph, and a ``spelling`` that runs them."""

    def __init__(self, spelling: Spelling, top_k: int = 3, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.spelling, self.top_k, self.dtype = spelling, top_k, dtype
        self.gate = nn.Linear(H, E, bias=False, dtype=dtype)
        shapes = {"w13": (2 * INNER, H), "w1": (INNER, H), "w3": (INNER, H), "w2": (H, INNER)}
        for name, (rows, columns) in shapes.items():
            self.register_buffer(name, torch.randint(0, 256, (E, rows, columns // 2), dtype=torch.uint8))
            self.register_buffer(f"{name}_scale", torch.randint(120, 124, (E, rows, columns // 32), dtype=torch.uint8))
        self.register_buffer("b13", torch.randn(E, 2 * INNER).to(dtype))
        self.register_buffer("b2", torch.randn(E, H).to(dtype))

    def weight(self, name: str) -> Tensor:
        """``[E, N, K]``"""
        return dequantize(getattr(self, name), getattr(self, f"{name}_scale"), None, MXFP4, self.dtype)

    def route(self, tokens: Tensor) -> Routing:
        logits = self.gate(tokens).float()
        probs = torch.softmax(logits, dim=-1)
        weights, ids = probs.topk(self.top_k, dim=-1)
        return Routing(ids, weights.to(tokens.dtype), probs, logits)

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.reshape(-1, H)
        return hidden + self.spelling(self, tokens, self.route(tokens)).reshape(hidden.shape)

    @torch.no_grad()
    def exact(self, hidden: Tensor) -> Tensor:
        """``forward`` with everything behind the router in float64."""
        tokens = hidden.reshape(-1, H)
        ids, *values = self.route(tokens)
        dtype, b13, b2 = self.dtype, self.b13, self.b2
        self.dtype, self.b13, self.b2 = torch.float64, b13.double(), b2.double()
        out = self.spelling(self, tokens.double(), Routing(ids, *(value.double() for value in values)))
        self.dtype, self.b13, self.b2 = dtype, b13, b2
        return hidden.double() + out.reshape(hidden.shape)


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def clamped(x: Tensor) -> Tensor:
    """gpt-oss: gate and up interleaved."""
    gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def scattered(r: Routing) -> Tensor:
    return r.weights.new_zeros(r.ids.shape[0], E).scatter(1, r.ids, r.weights)


def all_experts(self: BranchMoE, x: Tensor) -> Tensor:
    """``[E, T, H]``"""
    inner = swiglu(torch.matmul(x[None], self.weight("w13").mT))
    return torch.matmul(inner, self.weight("w2").mT)


def scored(self: BranchMoE, x: Tensor, scores: Tensor) -> Tensor:
    out = all_experts(self, x)
    return (out * scores.T[..., None].to(out.dtype)).sum(0)


def einsum(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    inner = swiglu(torch.einsum("th,enh->etn", x, self.weight("w13")))
    return torch.einsum("etn,ehn,te->th", inner, self.weight("w2"), scattered(r))


def einsum_tokens_first(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    inner = swiglu(torch.einsum("th,enh->ten", x, self.weight("w13")))
    out = torch.einsum("ten,ehn->teh", inner, self.weight("w2"))
    return torch.einsum("te,teh->th", scattered(r), out)


def einsum_in_batches(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    batched, scores = x.view(2, -1, H), scattered(r).view(2, -1, E)
    inner = swiglu(torch.einsum("bsh,enh->bsen", batched, self.weight("w13")))
    out = torch.einsum("bsei,ehi->bseh", inner, self.weight("w2"))
    return torch.einsum("bseh,bse->bsh", out, scores).reshape(-1, H)


def gpt_oss(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    rows = x.repeat(E, 1).view(E, -1, H)
    inner = clamped(torch.bmm(rows, self.weight("w13").mT) + self.b13[..., None, :])
    out = torch.bmm(inner, self.weight("w2").mT) + self.b2[..., None, :]
    return (out.view(E, 1, -1, H) * scattered(r).transpose(0, 1).view(E, 1, -1)[..., None]).sum(0)


def gate_and_up_apart(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    scores = r.weights.new_zeros(x.shape[0], E).scatter_add(1, r.ids, r.weights)
    gate = torch.einsum("th,eih->eti", x, self.weight("w1"))
    up = torch.einsum("th,eih->eti", x, self.weight("w3"))
    out = torch.einsum("eti,ehi->eth", F.silu(gate) * up, self.weight("w2"))
    return torch.einsum("eth,te->th", out, scores)


def one_matrix(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    scores = r.weights.new_zeros(x.shape[0], E, dtype=torch.float32).scatter(1, r.ids, r.weights.float())
    inner = swiglu((x @ self.weight("w13").reshape(-1, H).T).view(-1, E, 2 * INNER))
    out = torch.einsum("tei,ehi->teh", inner, self.weight("w2"))
    return (out * scores[..., None]).sum(1).to(x.dtype)


def put(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    scores = r.weights.new_zeros(x.shape[0], E)
    scores[torch.arange(x.shape[0], device=x.device)[:, None], r.ids] = r.weights
    return scored(self, x, scores)


def one_hot(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    return scored(self, x, (F.one_hot(r.ids, E).to(r.weights.dtype) * r.weights[..., None]).sum(1))


def one_hot_contracted(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    out = all_experts(self, x)
    return torch.einsum("tke,tk,eth->th", F.one_hot(r.ids, E).to(r.weights.dtype), r.weights, out)


def chosen(r: Routing) -> Tensor:
    """``[T, k, E]``"""
    return r.ids[..., None] == torch.arange(E, device=r.ids.device)


def one_hot_chosen(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    return scored(self, x, torch.where(chosen(r), r.weights[..., None], 0).sum(1))


def masked(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    return scored(self, x, r.probs * torch.zeros_like(r.probs).scatter(1, r.ids, 1.0))


def mask_of(r: Routing) -> Tensor:
    return torch.zeros_like(r.probs, dtype=torch.bool).scatter(1, r.ids, True)


def masked_and_normalised(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    scores = r.probs.masked_fill(~mask_of(r), 0.0)
    return scored(self, x, scores / scores.sum(-1, keepdim=True))


def masked_logits(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    return scored(self, x, r.logits.masked_fill(~mask_of(r), float("-inf")).softmax(-1))


def masked_where_not(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    others = torch.ones_like(r.probs, dtype=torch.bool).scatter(1, r.ids, False)
    return scored(self, x, torch.where(others, 0.0, r.probs))


def counted_mask(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    return scored(self, x, r.probs * F.one_hot(r.ids, E).sum(1))


def any_mask(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    return scored(self, x, torch.where(chosen(r).any(1), r.probs, 0))


def picked(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    out = all_experts(self, x).transpose(0, 1).gather(1, r.ids[..., None].expand(-1, -1, H))
    return (out * r.weights[..., None]).sum(1)


def picked_by_index(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    out = all_experts(self, x)[r.ids, torch.arange(x.shape[0], device=x.device)[:, None]]
    return torch.einsum("tkh,tk->th", out, r.weights)


def llama4(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    scores = torch.full_like(r.logits, float("-inf")).scatter_(1, r.ids, r.logits.gather(1, r.ids))
    scores = torch.sigmoid(scores).to(x.dtype)
    rows = x.repeat(E, 1) * scores.transpose(0, 1).reshape(-1, 1)
    inner = swiglu(torch.bmm(rows.view(E, -1, H), self.weight("w13").mT))
    return torch.bmm(inner, self.weight("w2").mT).reshape(E, -1, H).sum(0)


def weighted_inside(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    """Scores multiply what goes into the last projection, as an optimised order of contractions has it."""
    inner = swiglu(torch.einsum("th,enh->ten", x, self.weight("w13"))) * scattered(r)[..., None]
    return torch.einsum("ten,ehn->th", inner, self.weight("w2"))


def gathered_weighted_inside(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    inner = swiglu(torch.einsum("th,tknh->tkn", x, self.weight("w13")[r.ids])) * r.weights[..., None]
    return torch.einsum("tki,tkhi->tkh", inner, self.weight("w2")[r.ids]).sum(1)


def gpt_fast(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    inner = swiglu(torch.einsum("ti,taoi->tao", x, self.weight("w13")[r.ids]))
    out = torch.einsum("tao,taio->tai", inner, self.weight("w2")[r.ids])
    return torch.einsum("tai,ta->ti", out, r.weights)


def gathered_apart(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    gate = torch.einsum("th,tkih->tki", x, self.weight("w1")[r.ids])
    up = torch.einsum("th,tkih->tki", x, self.weight("w3")[r.ids])
    out = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, self.weight("w2")[r.ids])
    return (out * r.weights[..., None]).sum(1)


def gathered_biases(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    inner = clamped(torch.einsum("th,tkoh->tko", x, self.weight("w13")[r.ids]) + self.b13[r.ids])
    out = torch.einsum("tko,tkho->tkh", inner, self.weight("w2")[r.ids]) + self.b2[r.ids]
    return torch.einsum("tkh,tk->th", out, r.weights)


def gathered_matmul(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    inner = swiglu(torch.matmul(self.weight("w13")[r.ids], x[:, None, :, None]).squeeze(-1))
    out = torch.matmul(self.weight("w2")[r.ids], inner[..., None]).squeeze(-1)
    return (out * r.weights[..., None]).sum(1)


def columns(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    """Column vectors all the way: gate and up are split along the middle."""
    ids = r.ids.flatten()
    rows = x.repeat_interleave(r.ids.shape[1], 0)[..., None]
    gate, up = torch.bmm(self.weight("w13")[ids], rows).chunk(2, 1)
    out = torch.bmm(self.weight("w2")[ids], F.silu(gate) * up)
    return (out.view(-1, r.ids.shape[1], H) * r.weights[..., None]).sum(1)


def selected(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    w13 = self.weight("w13").index_select(0, r.ids.flatten()).view(*r.ids.shape, -1, H)
    w2 = self.weight("w2").index_select(0, r.ids.flatten()).view(*r.ids.shape, H, -1)
    out = torch.einsum("tao,taio->tai", swiglu(torch.einsum("ti,taoi->tao", x, w13)), w2)
    return torch.einsum("tai,ta->ti", out, r.weights)


def gathered_weighted_before(self: BranchMoE, x: Tensor, r: Routing) -> Tensor:
    inner = swiglu(torch.einsum("tkh,tknh->tkn", x[:, None] * r.weights[..., None], self.weight("w13")[r.ids]))
    return torch.einsum("tki,tkhi->tkh", inner, self.weight("w2")[r.ids]).sum(1)


DENSE: tuple[Spelling, ...] = (
    einsum, einsum_tokens_first, einsum_in_batches, gpt_oss, gate_and_up_apart, one_matrix, put, one_hot,
    one_hot_contracted, one_hot_chosen, masked, masked_and_normalised, masked_logits, masked_where_not, counted_mask,
    any_mask, picked, picked_by_index, weighted_inside, llama4,
)  # fmt: skip
GATHERED: tuple[Spelling, ...] = (
    gpt_fast, gathered_apart, gathered_biases, gathered_matmul, columns, selected, gathered_weighted_inside,
    gathered_weighted_before,
)  # fmt: skip
WEIGHTED_BEFORE = (llama4, gathered_weighted_before)
