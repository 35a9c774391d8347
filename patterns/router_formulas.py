"""What a ``RouterSpec`` computes, in plain torch: the catalogue's formulas."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..spec import RouterSpec, Scoring


def router_reference(
    spec: RouterSpec,
    logits: torch.Tensor,
    top_k: int,
    bias: torch.Tensor | None = None,
    scaling_factor: float | None = None,
    *,
    expert_scale: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route tokens as ``spec`` says, in the dtype of ``logits``.

    Args:
        spec: the router.
        logits: ``[T, E]``, and its further columns where it has some.
        top_k: experts per token.
        bias: ``[E]``, where the spec has one, with null experts ``[E + n]``.
        scaling_factor: stands for a RUNTIME factor.
        expert_scale: ``[E]``, where the spec has one.
        ids: ``[T, k]``, where the spec has them given.

    Returns:
        ids int64 ``[T, k]``, weights ``[T, k]``, by falling selection score.
    """
    scores, selection = scores_of(spec, logits, bias)
    assert (ids is not None) == spec.ids_given, "ids are given exactly where the spec says so"
    chosen = selection.topk(top_k, dim=-1).indices if ids is None else ids
    factor = spec.scaling_factor if isinstance(spec.scaling_factor, float) else scaling_factor
    assert factor is not None, "a RUNTIME scaling factor must be given"
    weights = weights_of(spec, scores, chosen) * factor
    if spec.has_expert_scale:
        assert expert_scale is not None, "the experts' scales must be given"
        weights = weights * expert_scale[chosen]
    return without_null(spec, chosen, weights, logits.shape[-1])


def scores_of(spec: RouterSpec, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores that become weights, as many as logits, and those that experts are selected by, without shared ones."""
    late = spec.topk_before_scoring or spec.scoring is Scoring.SPARSEMIXER
    scores = logits if late else score(spec.scoring, logits)
    selection = scores[..., : logits.shape[-1] - spec.num_shared_experts]
    if bias is not None:
        selection = selection + bias
    if spec.num_groups == 1:
        return scores, selection
    groups = selection.reshape(*selection.shape[:-1], spec.num_groups, -1)
    best = group_scores(spec, selection)
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept.scatter_(-1, best.topk(spec.topk_groups, dim=-1).indices, True)
    return scores, torch.where(kept[..., None], groups, spec.group_fill).flatten(-2)


def group_scores(spec: RouterSpec, selection: torch.Tensor) -> torch.Tensor:
    """How good each group ``[T, G]`` is, by what its experts ``[T, E]`` are selected by."""
    groups = selection.reshape(*selection.shape[:-1], spec.num_groups, -1)
    return groups.topk(min(2, groups.shape[-1]) if spec.group_score == "top2_sum" else 1, dim=-1).values.sum(-1)


def score(scoring: Scoring, logits: torch.Tensor) -> torch.Tensor:
    if scoring is Scoring.SOFTMAX:
        return logits.softmax(-1)
    return logits.sigmoid() if scoring is Scoring.SIGMOID else F.softplus(logits).sqrt()


def weights_of(spec: RouterSpec, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Weights of the chosen experts ``[T, k]``, before scaling; ``scores`` as ``scores_of`` gives them."""
    if spec.scoring is Scoring.SPARSEMIXER:
        return _mixed(scores, ids, spec.sparsity_threshold)
    weights = scores.gather(-1, ids)
    if spec.topk_before_scoring:
        weights = score(spec.scoring, weights)
    if not spec.renormalize:
        return weights
    total = weights.sum(-1, keepdim=True)
    if spec.num_shared_experts:
        total = total + scores[..., -spec.num_shared_experts :].sum(-1, keepdim=True)
    if spec.renormalize_min:
        total = total.clamp_min(spec.renormalize_min)
    return weights / (total + spec.renormalize_eps)


def _mixed(logits: torch.Tensor, ids: torch.Tensor, threshold: float) -> torch.Tensor:
    """The sparsemixer's weights ``[T, k]``: each slot's softmax is over the experts that earlier slots left."""
    left, weights = logits, []
    for chosen in ids.split(1, dim=-1):
        best = logits.gather(-1, chosen)
        far = (best - logits) / logits.abs().maximum(best) > threshold
        weights.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(-1, chosen))
        left = left.scatter(-1, chosen, float("-inf"))
    return torch.cat(weights, dim=-1)


def without_null(
    spec: RouterSpec, ids: torch.Tensor, weights: torch.Tensor, num_classes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights with those of null experts, the last of ``num_classes``, set to zero."""
    if not spec.num_null_experts:
        return ids, weights
    null = ids >= num_classes - spec.num_null_experts
    return ids.masked_fill(null, 0), weights.masked_fill(null, 0)
