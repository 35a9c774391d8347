"""``verify="first_call"``: the block as written beside the fused op, on the same real inputs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from .errors import VerificationError
from .matching import Match
from .patterns.router_formulas import group_scores, scores_of
from .select import Selection
from .spec import MoESpec, Operand, RouterSpec

logger = logging.getLogger(__name__)

# (whole output, worst token), relative. Both sides round: an eager bfloat16 block is up to 8e-3 and a token
# 1.5e-2 away from exact arithmetic, a fused one too, and weights dequantised by bfloat16 arithmetic add 7e-3.
# The smallest error that a real fault makes is 3e-2 of the whole, or most of one token.
_TOLERANCES = {
    torch.bfloat16: (2.4e-2, 6e-2),
    torch.float16: (4e-3, 1e-2),
    torch.float32: (1e-3, 3e-3),
}
# Where the op rounds activations, before each GEMM: of random layers' results, mxfp8 takes 5e-2 of the whole and 8e-2
# of the worst token away, nvfp4 16e-2 and 27e-2, mxfp4 22e-2 and 29e-2. Rows in a wrong order leave nothing right.
_ROUNDED = {"mxfp8": (1e-1, 2.5e-1), "nvfp4": (3e-1, 7e-1), "mxfp4": (4e-1, 8e-1)}
_EQUAL = 1e-6
"""Scores this near may change places where they are computed in float32 in another order."""


def tolerances(spec: MoESpec, activations: str | None) -> tuple[float, float]:
    """Relative errors of the whole output and of a token that an op may have which rounds to ``activations``."""
    return _TOLERANCES[spec.act_dtype] if activations is None else _ROUNDED[activations]


@dataclass(frozen=True)
class _Site:
    where: str
    backend: str
    spec: MoESpec
    activations: str | None


class Verification:
    """A copy of a rewritten graph, before clean-up, that returns each block's two results.

    Every block as written reads what the blocks before it computed fused, so an error shows at the
    block that makes it and is not carried on.
    """

    def __init__(self, graph: fx.Graph, sites: Sequence[tuple[Match, fx.Node, Selection]]) -> None:
        """``sites``: each match, the node that now stands for its output, and what was selected for it."""
        copy = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        copy.graph_copy(graph, env)
        outputs = []
        for match, result, selection in sites:
            nodes = [match.output, result, match.node(Operand.TOPK_IDS)]
            if selection.plan is not None and Operand.ROUTER_LOGITS in selection.plan.operands:
                routed_by = (Operand.ROUTER_LOGITS, Operand.ROUTER_BIAS)
                nodes += [match.node(operand) for operand in routed_by if operand in match.operands]
            outputs.append(tuple(env[node] for node in nodes))
        copy.output(tuple(outputs))
        # Updates of the caller's tensors (a cache, a counter) end the graph: the call itself will make them.
        copy.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
        owner = graph.owning_module
        self._run = fx.GraphModule(owner if owner is not None else {}, copy)
        self._sites = [
            _Site(
                str(match.where),
                selection.chosen or "",
                match.spec,
                None if selection.plan is None else selection.plan.activations,
            )
            for match, _, selection in sites
        ]

    def __call__(self, args: Sequence[Any]) -> None:
        """Run both sides on a call's arguments.

        Raises:
            VerificationError: naming the block, the token, its experts and the error.
        """
        with torch.no_grad():
            results = self._run(*args)
        for site, (expected, got, ids, *routed_by) in zip(self._sites, results, strict=True):
            undecided = _undecided(site.spec, *routed_by) if routed_by else None
            _compare(site, expected, got, ids.reshape(-1, site.spec.top_k), undecided)


def _undecided(spec: MoESpec, logits: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Tokens, bool [T], that equal scores leave a choice of experts: both sides may choose rightly and differ."""
    router, logits = spec.router, logits.reshape(-1, logits.shape[-1]).double()
    assert isinstance(router, RouterSpec), "only a recognised router is fused"
    bias = None if bias is None else bias.reshape(-1).double()
    undecided = _tied(scores_of(router, logits, bias)[1], spec.top_k)
    if router.num_groups > 1:
        _, ungrouped = scores_of(replace(router, num_groups=1), logits, bias)
        undecided |= _tied(group_scores(router, ungrouped), router.topk_groups)
    return undecided


def _tied(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Rows, bool [T], of ``scores`` [T, N] whose best ``count`` are not far above the next."""
    if count >= scores.shape[-1]:
        return scores.new_zeros(scores.shape[0], dtype=torch.bool)
    last, following = scores.topk(count + 1, dim=-1).values[:, -2:].unbind(-1)
    return (last == following) | (last - following <= _EQUAL * last.abs().clamp(min=1))


def _compare(
    site: _Site, expected: torch.Tensor, got: torch.Tensor, ids: torch.Tensor, undecided: torch.Tensor | None
) -> None:
    spec = site.spec
    want, have = (side.reshape(-1, spec.hidden_size).double() for side in (expected, got))
    if want.shape[0] == 0:
        return
    whole, per_token = relative_errors(want, have)
    whole_limit, token_limit = tolerances(spec, site.activations)
    if undecided is not None and bool((other := undecided & (per_token > token_limit)).any()):
        count = int(other.sum())
        logger.warning(
            "%s: %d of %d tokens have experts with equal scores, and were routed to others of them than as written; "
            "they were not compared",
            site.where,
            count,
            want.shape[0],
        )
        if count == want.shape[0]:
            return
        # Their results are equal from here on, so that tokens keep their numbers.
        want, have = (side.masked_fill(other.unsqueeze(-1), 0) for side in (want, have))
        whole, per_token = relative_errors(want, have)
    # NaN sorts first in argmax, and compares false below.
    token = int(per_token.argmax())
    worst = float(per_token[token])
    if whole <= whole_limit and worst <= token_limit:
        return
    raise VerificationError(
        f"verifying backend {site.backend!r} on {spec}",
        needed=f"a relative error of at most {whole_limit:g} in all and {token_limit:g} in each token",
        got=f"{whole:.3g} in all and {worst:.3g} in token {token}, which went to experts {ids[token].tolist()}",
        where=site.where,
        now="name another fp4moe.backend for this model, and report this message",
    )


def relative_errors(want: torch.Tensor, have: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Relative error of all of ``have`` [T, H], and of each token [T]; NaN where it is not finite."""
    error, size = have - want, want.norm(dim=-1)
    # A token whose output nearly cancels is measured against the typical one.
    per_token = error.norm(dim=-1) / size.clamp(min=0.1 * float(size.square().mean().sqrt()) + 1e-30)
    return float(error.norm() / want.norm().clamp(min=1e-30)), per_token
