"""Ways to write a loop over experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from fp4_inductor.formats import MXFP4, BlockFormat
from fp4_inductor.quant import dequantize

E, H, INNER, TOKENS = 3, 128, 96, 14
"""As few experts as have a first, a last and one between: every further one makes a loop's graph a third larger."""
Tensor = torch.Tensor
Loop = Callable[["LoopMoE", Tensor, Tensor, Tensor], Tensor]
"""``(model, hidden [T, H], ids [T, k], weights [T, k])`` to ``[T, H]``."""


class LoopMoE(nn.Module):
    """A router and packed experts that ``loop`` runs one by one.

    ``storage`` is "whole" for tensors ``[E, ...]`` that are dequantised at once, "picked" if each expert's part
    is picked first, and "own" for tensors of each expert. ``apart``: w1 and w3 instead of w13.
    """

    def __init__(
        self,
        loop: Loop,
        *,
        top_k: int = 2,
        storage: str = "whole",
        fmt: BlockFormat = MXFP4,
        apart: bool = False,
        gated: bool = True,
        bias: bool = False,
        experts: int = E,
    ) -> None:
        super().__init__()
        self.loop, self.top_k, self.storage, self.fmt, self.experts = loop, top_k, storage, fmt, experts
        self.gated, self.apart = gated, apart
        self.gate = nn.Linear(H, experts, bias=False, dtype=torch.bfloat16)
        rows = {"w1": INNER, "w3": INNER} if apart else {"w13": 2 * INNER if gated else INNER}
        for name, count, columns in (*((name, n, H) for name, n in rows.items()), ("w2", H, INNER)):
            codes = torch.randint(0, 256, (experts, count, columns // 2), dtype=torch.uint8)
            low = 121 if fmt is MXFP4 else 40
            scale = torch.randint(low, low + 4, (experts, count, columns // fmt.block_size), dtype=torch.uint8)
            self.hold(name, codes)
            self.hold(f"{name}_scale", scale.view(fmt.scale_dtype))
            self.hold(f"{name}_global", torch.rand(experts, 1) * 0.05 + 0.02 if fmt.has_global_scale else None)
            self.hold(f"{name}_bias", torch.randn(experts, count).bfloat16() if bias else None)

    def hold(self, name: str, value: Tensor | None) -> None:
        if value is None:
            setattr(self, name, None)
        elif self.storage != "own":
            self.register_buffer(name, value)
        else:
            for expert, own in enumerate(value):
                self.register_buffer(f"{name}_{expert}", own.clone())

    def part(self, name: str, expert: int) -> Tensor | None:
        if hasattr(self, name):
            value = getattr(self, name)
            return None if value is None else value[expert]
        return getattr(self, f"{name}_{expert}")  # type: ignore[no-any-return]

    def weight(self, name: str, expert: int) -> Tensor:
        """``[N, K]``"""
        if self.storage == "whole":
            parts = (getattr(self, name), getattr(self, f"{name}_scale"), getattr(self, f"{name}_global"))
            return dequantize(*parts, self.fmt)[expert]
        codes, scale = self.part(name, expert), self.part(f"{name}_scale", expert)
        return dequantize(codes, scale, self.part(f"{name}_global", expert), self.fmt)

    def linear(self, name: str, expert: int, rows: Tensor) -> Tensor:
        return F.linear(rows, self.weight(name, expert), self.part(f"{name}_bias", expert))

    def activate(self, expert: int, rows: Tensor) -> Tensor:
        if not self.gated:
            return F.relu(self.linear("w13", expert, rows)).square()
        if self.apart:
            return F.silu(self.linear("w1", expert, rows)) * self.linear("w3", expert, rows)
        gate, up = self.linear("w13", expert, rows).chunk(2, dim=-1)
        return F.silu(gate) * up

    def expert(self, expert: int, rows: Tensor) -> Tensor:
        return self.linear("w2", expert, self.activate(expert, rows))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = torch.softmax(self.gate(x).float(), dim=-1).topk(self.top_k, dim=-1)
        return ids, (weights / weights.sum(-1, keepdim=True)).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.loop(self, x, *self.route(x))

    def want(self, x: Tensor) -> Tensor:
        """The mixture in float64, token by token."""
        ids, weights = self.route(x)
        out = torch.zeros(x.shape, dtype=torch.float64)
        for token in range(x.shape[0]):
            for slot in range(self.top_k):
                result = _in_float64(self, int(ids[token, slot]), x[token].double())
                out[token] += weights[token, slot].double() * result
        return out


def _in_float64(model: LoopMoE, expert: int, row: Tensor) -> Tensor:
    def project(name: str, value: Tensor) -> Tensor:
        bias = model.part(f"{name}_bias", expert)
        product = model.weight(name, expert).double() @ value
        return product if bias is None else product + bias.double()

    if not model.gated:
        inner = F.relu(project("w13", row)).square()
    elif model.apart:
        inner = F.silu(project("w1", row)) * project("w3", row)
    else:
        gate, up = project("w13", row).chunk(2)
        inner = F.silu(gate) * up
    return project("w2", inner)


def where_index_add(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(self.experts):
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.expert(e, x[token]) * weights[token, slot, None])
    return out


def one_hot_masks(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = x.new_zeros(x.shape[0], H)
    masks = F.one_hot(ids, self.experts).permute(2, 1, 0)
    for e in range(self.experts):
        slot, token = torch.where(masks[e])
        rows = self.expert(e, x[None, token].reshape(-1, H)) * weights[token, slot, None]
        out.index_add_(0, token, rows.to(x.dtype))
    return out


def put_back(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(self.experts):
        token, slot = torch.where(ids == e)
        out[token] += self.expert(e, x[token]) * weights[token, slot].unsqueeze(-1)
    return out


def put_accumulated(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x, dtype=torch.float32)
    for e in range(self.experts):
        token, slot = torch.where(ids == e)
        rows = self.expert(e, x[token]).float() * weights[token, slot][:, None].float()
        out = out.index_put((token,), rows, accumulate=True)
    return out.to(x.dtype)


def nonzero_tokens(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(self.experts):
        mask = ids == e
        token = mask.any(-1).nonzero().squeeze(-1)
        rows = self.expert(e, x.index_select(0, token)) * (weights * mask).sum(-1)[token, None]
        out = out.index_add(0, token, rows)
    return out


def first_of_where(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(self.experts):
        scores = weights.masked_fill(ids != e, 0).sum(-1)
        token = torch.where((ids == e).any(-1))[0]
        out = out.index_add(0, token, self.expert(e, x[token]) * scores[token].unsqueeze(-1))
    return out


def boolean_rows(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(self.experts):
        mask = ids == e
        rows = mask.any(-1)
        out[rows] += self.expert(e, x[rows]) * (weights * mask).sum(-1)[rows].unsqueeze(-1)
    return out


def boolean_scores(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    scores = x.new_zeros(x.shape[0], self.experts).scatter(1, ids, weights)
    out = torch.zeros_like(x)
    for e in range(self.experts):
        rows = (ids == e).any(-1)
        out[rows] += self.expert(e, x[rows]) * scores[rows, e].unsqueeze(-1)
    return out


def places_index_add(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(self.experts):
        place = torch.where(ids.flatten() == e)[0]
        token = place // self.top_k
        out = out.index_add(0, token, self.expert(e, x[token]) * weights.flatten()[place, None])
    return out


def scatter_added(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(self.experts):
        token, slot = torch.where(ids == e)
        rows = self.expert(e, x[token]) * weights[token, slot, None]
        out = out.scatter_add(0, token[:, None].expand(-1, H), rows)
    return out


def masked_sum(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(self.experts):
        out = out + (weights * (ids == e)).sum(-1, keepdim=True) * self.expert(e, x)
    return out


def scattered_scores(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    scores = x.new_zeros(x.shape[0], self.experts).scatter_(1, ids, weights)
    return sum(scores[:, e, None] * self.expert(e, x) for e in range(self.experts))  # type: ignore[return-value]


def added_scores(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    scores = x.new_zeros(x.shape[0], self.experts).scatter_add(1, ids, weights)
    out = torch.zeros_like(x)
    for e, score in enumerate(scores.unbind(1)):
        out = out + self.expert(e, x) * score[:, None]
    return out


def one_hot_scores(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    scores = (F.one_hot(ids, self.experts) * weights.unsqueeze(-1)).sum(1)
    out = torch.zeros_like(x)
    for e in range(self.experts):
        out = out + self.expert(e, x) * scores[:, e : e + 1]
    return out


def one_hot_product(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    scores = torch.einsum("tk,tke->te", weights, F.one_hot(ids, self.experts).to(x.dtype))
    out = torch.zeros_like(x)
    for e in range(self.experts):
        out += scores[:, e].unsqueeze(1) * self.expert(e, x)
    return out


def chosen_rows(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(self.experts):
        score = torch.where(ids == e, weights, 0.0).sum(-1)
        taken = (ids == e).any(-1)
        out = out + torch.where(taken[:, None], self.expert(e, x) * score[:, None], 0.0)
    return out


def batched_rows(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    pairs = x.reshape(1, -1, H)
    ids, weights = (value.reshape(1, -1, value.shape[-1]) for value in (ids, weights))
    out = torch.zeros_like(pairs)
    for e in range(self.experts):
        out = out + self.expert(e, pairs) * (weights * (ids == e)).sum(-1, keepdim=True)
    return out.reshape(-1, H)


def stacked_gather(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    results = torch.stack([self.expert(e, x) for e in range(self.experts)], dim=1)
    return (results.gather(1, ids[..., None].expand(-1, -1, H)) * weights[..., None]).sum(1)


def stacked_einsum(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    scores = x.new_zeros(x.shape[0], self.experts).scatter(1, ids, weights)
    results = torch.stack([self.expert(e, x) for e in range(self.experts)], dim=1)
    return torch.einsum("te,teh->th", scores, results)


def stacked_product(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    scores = x.new_zeros(x.shape[0], self.experts).scatter(1, ids, weights)
    results = torch.stack([self.expert(e, x) for e in range(self.experts)])
    return (results * scores.t()[..., None]).sum(0)


def stacked_terms(self: LoopMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    scores = [(weights * (ids == e)).sum(-1, keepdim=True) for e in range(self.experts)]
    return torch.stack([score * self.expert(e, x) for e, score in enumerate(scores)]).sum(0)


SPARSE = (
    where_index_add,
    one_hot_masks,
    put_back,
    put_accumulated,
    nonzero_tokens,
    first_of_where,
    boolean_rows,
    boolean_scores,
    places_index_add,
    scatter_added,
)
"""With sizes that only the router's choice decides."""

DENSE = (
    masked_sum,
    scattered_scores,
    added_scores,
    one_hot_scores,
    one_hot_product,
    chosen_rows,
    batched_rows,
    stacked_gather,
    stacked_einsum,
    stacked_product,
    stacked_terms,
)
"""Every expert runs on every token."""
