"""Spellings of routers as graphs of ATen, and a check that what is identified is what the graph computes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from fp4_inductor.patterns.probing import evaluate, shape_hint
from fp4_inductor.patterns.router import IdentifiedRouter, identify_router, router_reference
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fp4_inductor.matching import Assembled
from fp4_inductor.spec import Operand, RouterSpec

Tensor = torch.Tensor
Routed = tuple[Tensor, Tensor]
E, K, H = 16, 3, 24
BIAS = torch.randn(E)


def outputs(graph: fx.GraphModule) -> list[fx.Node]:
    (values,) = next(iter(reversed(graph.graph.nodes))).args
    return list(values)


def traced(fn: Callable[..., Routed], *inputs: Tensor, tokens: int = 6, columns: int = E) -> tuple[fx.Node, fx.Node]:
    """Ids and weights of ``fn(logits, *inputs)``."""
    functional = torch.func.functionalize(lambda *args: fn(*args), remove="mutations_and_views")
    ids, weights = outputs(make_fx(functional, tracing_mode="fake")(torch.randn(tokens, columns), *inputs))
    return ids, weights


def found(fn: Callable[..., Routed], *inputs: Tensor, tokens: int = 6, columns: int = E) -> IdentifiedRouter:
    """The router that ``fn`` is, held to its values on logits of its own."""
    ids, weights = traced(fn, *inputs, tokens=tokens, columns=columns)
    router = identify_router(ids, weights, E, K)
    hold_to_values(router, ids, weights, E, K)
    return router


def spec_of(fn: Callable[..., Routed], *inputs: Tensor, columns: int = E) -> RouterSpec:
    return found(fn, *inputs, columns=columns).spec


def hold_to_values(router: IdentifiedRouter, ids: fx.Node, weights: fx.Node, num_experts: int, top_k: int) -> None:
    """Run the graph behind the logits, and the router that was identified, in float64 on the same values."""
    generator = torch.Generator().manual_seed(17)
    for scale, shift in ((1.5, 0.0), (0.03, 3.0), (3.0, -2.0)):
        feeds: dict[fx.Node, Tensor] = {}
        given: dict[Operand, Tensor] = {}
        for operand, source in router.operands.items():
            parts = source.parts if isinstance(source, Assembled) else (source,)
            for part in parts:
                spread, middle = {Operand.ROUTER_LOGITS: (scale, shift), Operand.ROUTER_BIAS: (0.3, 0.0)}.get(
                    operand, (0.5, 1.5)
                )
                size = shape_hint(part) or ()
                feeds[part] = torch.randn(size, dtype=torch.float64, generator=generator) * spread + middle
            values = [feeds[part] for part in parts]
            given[operand] = source.function(*values) if isinstance(source, Assembled) else values[0]
        if router.spec.ids_given:
            size = shape_hint(ids) or ()
            feeds[ids] = torch.rand(*size[:-1], num_experts, generator=generator).topk(top_k, dim=-1).indices
        got_ids, got = (value.reshape(-1, top_k) for value in evaluate([ids, weights], feeds))
        want_ids, want = run(router.spec, given, top_k, got_ids if router.spec.ids_given else None)
        order, wanted = got_ids.argsort(dim=-1, stable=True), want_ids.argsort(dim=-1, stable=True)
        assert torch.equal(got_ids.gather(-1, order).long(), want_ids.gather(-1, wanted))
        torch.testing.assert_close(got.gather(-1, order), want.gather(-1, wanted), rtol=1e-6, atol=1e-12)


def run(spec: RouterSpec, given: dict[Operand, Tensor], top_k: int, ids: Tensor | None) -> Routed:
    logits, bias = given[Operand.ROUTER_LOGITS], given.get(Operand.ROUTER_BIAS)
    expert_scale, factor = given.get(Operand.ROUTER_EXPERT_SCALE), given.get(Operand.ROUTER_SCALE)
    return router_reference(
        spec,
        logits.reshape(-1, logits.shape[-1]),
        top_k,
        None if bias is None else bias.flatten(),
        None if factor is None else float(factor),
        expert_scale=None if expert_scale is None else expert_scale.flatten(),
        ids=ids,
    )


def softmax_topk(logits: Tensor) -> Routed:
    weights, ids = logits.softmax(-1, dtype=torch.float32).topk(K, -1)
    return ids, weights


def softmax_topk_renorm(logits: Tensor) -> Routed:
    ids, weights = softmax_topk(logits)
    return ids, weights / weights.sum(-1, keepdim=True)


def topk_softmax(logits: Tensor) -> Routed:
    values, ids = logits.topk(K, -1)
    return ids, values.softmax(-1)


def topk_sigmoid(logits: Tensor) -> Routed:
    values, ids = logits.topk(K, -1)
    return ids, values.sigmoid()


def sigmoid_bias(
    logits: Tensor, bias: Tensor, scale: float | Tensor = 2.5, eps: float = 1e-20, floor: float = 0.0
) -> Routed:
    scores = logits.sigmoid()
    ids = (scores + bias).topk(K, -1, sorted=False).indices
    weights = scores.gather(1, ids)
    total = weights.sum(-1, keepdim=True)
    return ids, weights / (total.clamp_min(floor) if floor else total + eps) * scale


def softmax_bias(logits: Tensor, bias: Tensor, floor: float = 1e-12, eps: float = 0.0) -> Routed:
    """As ernie does."""
    scores = logits.softmax(-1)
    ids = (scores + bias).topk(K, -1).indices
    weights = scores.gather(1, ids)
    total = weights.sum(-1, keepdim=True) + eps
    return ids, weights / (torch.clamp(total, min=floor) if floor else total)


def grouped(logits: Tensor, bias: Tensor, *, fill: float = float("-inf"), best: int = 2, kept: int = 2,
            scoring: Callable[[Tensor], Tensor] = torch.sigmoid) -> Routed:  # fmt: skip
    scores = scoring(logits)
    choice = scores + bias
    group_scores = choice.view(-1, 4, E // 4).topk(best, -1).values.sum(-1)
    mask = torch.zeros_like(group_scores).scatter(1, group_scores.topk(kept, -1, sorted=False).indices, 1)
    mask = mask.unsqueeze(-1).expand(-1, 4, E // 4).reshape(-1, E)
    ids = choice.masked_fill(~mask.bool(), fill).topk(K, -1, sorted=False).indices
    weights = scores.gather(1, ids)
    return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5


def sqrt_softplus(logits: Tensor, bias: Tensor) -> Routed:
    scores = F.softplus(logits).sqrt()
    ids = (scores + bias).topk(K, -1).indices
    weights = scores.gather(1, ids)
    return ids, weights / weights.sum(-1, keepdim=True) * 1.5


def biased_logits(logits: Tensor, bias: Tensor) -> Routed:
    """As kolibri1 does."""
    ids = (logits + bias).topk(K, -1).indices
    scores = logits.gather(1, ids).sigmoid()
    return ids, scores / scores.sum(-1, keepdim=True)


def scaled_by_expert(logits: Tensor, scales: Tensor) -> Routed:
    """As gemma4 does."""
    ids, weights = softmax_topk_renorm(logits)
    return ids, weights * scales[ids]


def hashed(logits: Tensor, table: Tensor, tokens: Tensor) -> Routed:
    """As the first layers of deepseek_v4 do."""
    scores = F.softplus(logits).sqrt()
    ids = table[tokens]
    weights = scores.gather(1, ids)
    return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * 1.5


def sparsemixer(logits: Tensor, jitter: float = 0.01) -> Routed:
    """As phimoe does, for as many slots as wanted."""
    left, ids, weights = logits, [], []
    for _ in range(K):
        best, chosen = left.max(dim=-1, keepdim=True)
        far = (best - logits) / logits.abs().clamp(min=best) > 2 * jitter
        weights.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(-1, chosen))
        ids.append(chosen)
        left = left.scatter(-1, chosen, float("-inf"))
    return torch.cat(ids, -1), torch.cat(weights, -1)


def with_shared(logits: Tensor, bias: Tensor, scale: float | Tensor = 1.5, shared: int = 2) -> Routed:
    """As inkling does: the experts that always run count in the sum."""
    routed = logits[:, :-shared]
    ids = (routed.sigmoid() + bias).topk(K, -1, sorted=False).indices
    every = F.logsigmoid(torch.cat((routed.gather(-1, ids), logits[:, -shared:]), -1))
    weights = torch.exp(every - every.logsumexp(-1, keepdim=True)) * scale
    return ids, weights[:, :K]


def with_null(logits: Tensor, bias: Tensor) -> Routed:
    """As zaya does: the last class is no expert."""
    scores = logits.softmax(-1)
    ids = (scores + bias).topk(K, -1).indices
    null = ids == E
    return ids.masked_fill(null, 0), scores.gather(-1, ids).masked_fill(null, 0)
