"""Spellings of routing and combining outside transformers, in both forms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from capture import capture
from moe_graphs import error_of
from torch import nn

from fp4_inductor.formats import MXFP4
from fp4_inductor.matching import find_matches
from fp4_inductor.quant import dequantize
from fp4_inductor.spec import GateUpOrder, TokenRange

E, H, INNER = 8, 128, 96
TOLERANCE = 1.5e-2
Tensor = torch.Tensor
Experts = Callable[["UserMoE", Tensor, Tensor, Tensor], Tensor]


class UserMoE(nn.Module):
    """Own model code: a linear router, packed experts, and ``experts`` to run them."""

    def __init__(self, experts: Experts, top_k: int = 2) -> None:
        super().__init__()
        self.experts, self.top_k = experts, top_k
        self.gate = nn.Linear(H, E, bias=False, dtype=torch.bfloat16)
        for name, rows, columns in (("w13", 2 * INNER, H), ("w2", H, INNER)):
            self.register_buffer(name, torch.randint(0, 256, (E, rows, columns // 2), dtype=torch.uint8))
            self.register_buffer(f"{name}_scale", torch.randint(120, 124, (E, rows, columns // 32), dtype=torch.uint8))

    def weight(self, name: str) -> Tensor:
        """``[E, N, K]``"""
        return dequantize(getattr(self, name), getattr(self, f"{name}_scale"), None, MXFP4)

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.reshape(-1, H)
        weights, ids = torch.softmax(self.gate(tokens).float(), dim=-1).topk(self.top_k, dim=-1)
        return hidden + self.experts(self, tokens, ids, weights.to(hidden.dtype)).reshape(hidden.shape)


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def counts_by_histc(ids: Tensor) -> Tensor:
    return torch.histc(ids.float(), bins=E, min=0, max=E - 1)


def counts_by_one_hot(ids: Tensor) -> Tensor:
    return (ids[:, None] == torch.arange(E, device=ids.device)).sum(0)


def scatter_add_rows(rows: Tensor, token: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).index_add(0, token, rows.to(like.dtype))


def put_rows(rows: Tensor, token: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).index_put((token,), rows.to(like.dtype), accumulate=True)


def sorted_experts(
    counts: Callable[[Tensor], Tensor], combine: Callable[[Tensor, Tensor, Tensor], Tensor], *, count_sorted: bool
) -> Experts:
    """Argsort, grouped GEMMs, scatter by token."""

    def run(self: UserMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        flat = ids.flatten()
        perm = flat.argsort(stable=True)
        token = perm // self.top_k
        offs = counts(flat[perm] if count_sorted else flat).cumsum(0).to(torch.int32)
        inner = swiglu(F.grouped_mm(x[token], self.weight("w13").mT, offs=offs))
        out = F.grouped_mm(inner, self.weight("w2").mT, offs=offs)
        return combine(out * weights.flatten()[perm, None], token, x)

    return run


def unsorted_by_argsort(self: UserMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Weights multiply after the rows are back in slot order; the inverse is an argsort."""
    values, perm = ids.flatten().sort()
    offs = counts_by_histc(values).cumsum(0).to(torch.int32)
    rows = x.repeat_interleave(self.top_k, dim=0)[perm]
    inner = swiglu(F.grouped_mm(rows, self.weight("w13").mT, offs=offs))
    out = F.grouped_mm(inner, self.weight("w2").mT, offs=offs)[perm.argsort()]
    return (out.reshape(-1, self.top_k, H) * weights[..., None]).sum(1)


def gathered(self: UserMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    rows = x[:, None].expand(-1, self.top_k, -1).reshape(-1, H, 1)
    up = torch.bmm(self.weight("w13")[ids.flatten()], rows).squeeze(-1)
    out = torch.bmm(self.weight("w2")[ids.flatten()], swiglu(up)[..., None]).squeeze(-1)
    return (out.reshape(-1, self.top_k, H) * weights[..., None]).sum(1)


def gathered_by_token_index(self: UserMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    token = torch.arange(x.shape[0], device=x.device)[:, None].expand(-1, self.top_k).reshape(-1)
    flat = ids.flatten()
    up = torch.bmm(x[token][:, None], self.weight("w13")[flat].mT)[:, 0]
    out = torch.bmm(swiglu(up)[:, None], self.weight("w2")[flat].mT)[:, 0]
    return scatter_add_rows(out * weights.flatten()[:, None], token, x)


def gathered_and_contracted(self: UserMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    rows = x.repeat_interleave(self.top_k, dim=0)[..., None]
    up = torch.bmm(self.weight("w13")[ids.flatten()], rows)[..., 0]
    out = torch.bmm(self.weight("w2")[ids.flatten()], swiglu(up)[..., None])
    return torch.bmm(weights[:, None], out.reshape(-1, self.top_k, H))[:, 0]


def _sorted_rows(self: UserMoE, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The permutation, the token of each row, and where each expert's rows end."""
    perm = ids.flatten().argsort(stable=True)
    return perm, perm // self.top_k, counts_by_histc(ids.flatten()).cumsum(0).to(torch.int32)


def _grouped(self: UserMoE, rows: Tensor, offs: Tensor) -> Tensor:
    return F.grouped_mm(swiglu(F.grouped_mm(rows, self.weight("w13").mT, offs=offs)), self.weight("w2").mT, offs=offs)


def weighted_before(self: UserMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    perm, token, offs = _sorted_rows(self, x, ids)
    rows = (x[token].float() * weights.flatten()[perm].reshape(-1, 1)).to(x.dtype)
    index = token[:, None].expand(-1, H)
    return torch.zeros_like(x).scatter_add(0, index, _grouped(self, rows, offs))


def weighted_before_and_put_back(self: UserMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    perm, token, offs = _sorted_rows(self, x, ids)
    out = _grouped(self, x[token] * weights.flatten()[perm][:, None], offs)
    back = torch.empty_like(out)
    back[perm] = out
    return back.view(-1, self.top_k, H).sum(1)


def gathered_along_rows(self: UserMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Weights are widened after they are gathered: they multiply in float32."""
    perm, token, offs = _sorted_rows(self, x, ids)
    index = token.reshape(-1, 1).expand(-1, H)
    out = _grouped(self, x.gather(0, index), offs).float() * weights.flatten()[perm].reshape(-1, 1).float()
    return torch.zeros_like(x).scatter_add(0, index, out.to(x.dtype))


def reduced(self: UserMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    perm, token, offs = _sorted_rows(self, x, ids)
    out = _grouped(self, x[token], offs) * weights.flatten().gather(0, perm)[:, None]
    return torch.zeros_like(x).scatter_reduce(0, token[:, None].expand(-1, H), out, "sum")


def put_back_and_contracted(self: UserMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    perm, token, offs = _sorted_rows(self, x, ids)
    out = _grouped(self, x[token], offs)
    back = torch.empty_like(out)
    back[perm] = out
    return torch.einsum("tkh,tk->th", back.view(-1, self.top_k, H), weights)


def masked_by_a_factor(self: UserMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    perm, token, offs = _sorted_rows(self, x, ids)
    served = (~(ids.flatten()[perm] >= E)).to(x.dtype)
    out = _grouped(self, x[token], offs) * served[:, None] * weights.flatten()[perm][:, None]
    return torch.zeros_like(x).index_add(0, token, out)


FORMS: dict[str, tuple[str, Experts]] = {
    "weighted before": ("grouped_mm", weighted_before),
    "weighted before and put back": ("grouped_mm", weighted_before_and_put_back),
    "gathered along rows": ("grouped_mm", gathered_along_rows),
    "reduced": ("grouped_mm", reduced),
    "put back and contracted": ("grouped_mm", put_back_and_contracted),
    "masked by a factor": ("grouped_mm", masked_by_a_factor),
    "index_add": ("grouped_mm", sorted_experts(counts_by_histc, scatter_add_rows, count_sorted=True)),
    "index_put": ("grouped_mm", sorted_experts(counts_by_one_hot, put_rows, count_sorted=False)),
    "argsort of the permutation": ("grouped_mm", unsorted_by_argsort),
    "gathered": ("batched_mm", gathered),
    "gathered by token index": ("batched_mm", gathered_by_token_index),
    "gathered and contracted": ("batched_mm", gathered_and_contracted),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("name", list(FORMS))
def test_own_spellings_match(name: str, top_k: int, dynamic: bool) -> None:
    form, experts = FORMS[name]
    gm = capture(UserMoE(experts, top_k), torch.randn(2, 9, H).bfloat16(), dynamic=dynamic)
    found = find_matches(gm.graph)
    assert [miss.reason for miss in found.near_misses] == []
    (match,) = found.matches
    assert match.pattern == form
    assert match.spec.top_k == top_k
    assert match.spec.w13_order is GateUpOrder.GATE_UP
    assert match.spec.num_tokens.static != dynamic
    assert match.where.file.endswith("test_moe_forms.py")
    assert match.spec.weight_on_input == name.startswith("weighted before")
    assert error_of(gm, match) < TOLERANCE


def normalised(rows: Tensor) -> Tensor:
    return (rows.float() * torch.rsqrt(rows.float().square().mean(-1, keepdim=True) + 1e-6)).to(rows.dtype)


def normalised_experts(self: UserMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    perm, token, offs = _sorted_rows(self, x, ids)
    out = normalised(_grouped(self, x[token], offs))
    return torch.zeros_like(x).index_add(0, token, out * weights.flatten()[perm][:, None])


def added_to_a_residual(self: UserMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    perm, token, offs = _sorted_rows(self, x, ids)
    return x.index_add(0, token, _grouped(self, x[token], offs) * weights.flatten()[perm][:, None])


def scaled_tokens(self: UserMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """One factor a token, before the experts, is no routing weight: only for one slot do they look alike."""
    _, token, offs = _sorted_rows(self, x, ids)
    rows = x[token] * weights.sum(-1)[token][:, None]
    return torch.zeros_like(x).index_add(0, token, _grouped(self, rows, offs))


def weighted_twice(self: UserMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    perm, token, offs = _sorted_rows(self, x, ids)
    factor = weights.flatten()[perm][:, None]
    return torch.zeros_like(x).index_add(0, token, _grouped(self, x[token] * factor, offs) * factor)


def other_slots_weights(self: UserMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    _, token, offs = _sorted_rows(self, x, ids)
    return torch.zeros_like(x).index_add(0, token, _grouped(self, x[token] * weights.flatten()[:, None], offs))


def reduced_by_the_largest(self: UserMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    perm, token, offs = _sorted_rows(self, x, ids)
    out = _grouped(self, x[token], offs) * weights.flatten()[perm][:, None]
    return torch.zeros_like(x).scatter_reduce(0, token[:, None].expand(-1, H), out, "amax")


@pytest.mark.parametrize(
    ("experts", "reason"),
    [
        (normalised_experts, "a norm of what each expert gives"),
        (added_to_a_residual, "as an addition of its own"),
        (scaled_tokens, ""),
        (weighted_twice, ""),
        (other_slots_weights, ""),
        (reduced_by_the_largest, ""),
    ],
)
def test_what_is_no_mixture_is_refused(experts: Experts, reason: str) -> None:
    found = find_matches(capture(UserMoE(experts, 3), torch.randn(2, 9, H).bfloat16()).graph)
    assert found.matches == ()
    assert all(reason in miss.reason for miss in found.near_misses)


def mixed(self: UserMoE, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    scores = torch.softmax(self.gate(x), dim=-1)
    up = torch.einsum("th,enh->etn", x, self.weight("w13"))
    return torch.einsum("etn,ehn,te->th", swiglu(up), self.weight("w2"), scores)


def test_a_mixture_of_all_experts_is_a_near_miss() -> None:
    gm = capture(UserMoE(mixed), torch.randn(2, 9, H).bfloat16())
    found = find_matches(gm.graph)
    assert found.matches == ()
    assert {miss.packed_bytes for miss in found.near_misses} == {E * 2 * INNER * H // 2, E * H * INNER // 2}
    assert all(miss.where.file.endswith("test_moe_forms.py") and miss.reason for miss in found.near_misses)


def test_a_packed_dense_layer_is_no_block() -> None:
    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.randint(0, 256, (INNER, H // 2), dtype=torch.uint8))
            self.register_buffer("scale", torch.full((INNER, H // 32), 120, dtype=torch.uint8))

        def forward(self, x: Tensor) -> Tensor:
            return x @ dequantize(self.codes, self.scale, None, MXFP4).T

    found = find_matches(capture(Dense(), torch.randn(4, H).bfloat16()).graph)
    (layer,) = found.linear_layers
    assert layer.packed_bytes == INNER * H // 2
    assert found.near_misses == ()


def test_tokens_of_a_static_graph() -> None:
    gm = capture(UserMoE(gathered), torch.randn(2, 9, H).bfloat16())
    assert find_matches(gm.graph).matches[0].spec.num_tokens == TokenRange(18, 18)
