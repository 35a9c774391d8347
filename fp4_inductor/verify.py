"""``verify="first_call"``: the block as written beside the fused op, on the same real inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .errors import VerificationError
from .matching import Match
from .spec import MoESpec, Operand

# (whole output, worst token), relative. Both sides round: an eager bfloat16 block is up to 8e-3 and a token
# 1.5e-2 away from exact arithmetic, a fused one too, and weights dequantised by bfloat16 arithmetic add 7e-3.
# The smallest error that a real fault makes is 3e-2 of the whole, or most of one token.
_TOLERANCES = {
    torch.bfloat16: (2.4e-2, 6e-2),
    torch.float16: (4e-3, 1e-2),
    torch.float32: (1e-3, 3e-3),
}


@dataclass(frozen=True)
class _Site:
    where: str
    backend: str
    spec: MoESpec


class Verification:
    """A copy of a rewritten graph, before clean-up, that returns each block's two results.

    Every block as written reads what the blocks before it computed fused, so an error shows at the
    block that makes it and is not carried on.
    """

    def __init__(self, graph: fx.Graph, sites: Sequence[tuple[Match, fx.Node, str]]) -> None:
        """``sites``: each match, the node that now stands for its output, the backend's name."""
        copy = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        copy.graph_copy(graph, env)
        copy.output(tuple((env[m.output], env[result], env[m.node(Operand.TOPK_IDS)]) for m, result, _ in sites))
        # Updates of the caller's tensors (a cache, a counter) end the graph: the call itself will make them.
        copy.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
        owner = graph.owning_module
        self._run = fx.GraphModule(owner if owner is not None else {}, copy)
        self._sites = [_Site(str(match.where), backend, match.spec) for match, _, backend in sites]

    def __call__(self, args: Sequence[Any]) -> None:
        """Run both sides on a call's arguments.

        Raises:
            VerificationError: naming the block, the token, its experts and the error.
        """
        with torch.no_grad():
            results = self._run(*args)
        for site, (expected, got, ids) in zip(self._sites, results, strict=True):
            _compare(site, expected, got, ids.reshape(-1, site.spec.top_k))


def _compare(site: _Site, expected: torch.Tensor, got: torch.Tensor, ids: torch.Tensor) -> None:
    spec = site.spec
    want = expected.reshape(-1, spec.hidden_size).double()
    if want.shape[0] == 0:
        return
    error = got.reshape(-1, spec.hidden_size).double() - want
    size = want.norm(dim=-1)
    # A token whose output nearly cancels is measured against the typical one.
    per_token = error.norm(dim=-1) / size.clamp(min=0.1 * float(size.square().mean().sqrt()) + 1e-30)
    whole = float(error.norm() / want.norm().clamp(min=1e-30))
    # NaN sorts first in argmax, and compares false below.
    token = int(per_token.argmax())
    worst = float(per_token[token])
    whole_limit, token_limit = _TOLERANCES[spec.act_dtype]
    if whole <= whole_limit and worst <= token_limit:
        return
    raise VerificationError(
        f"verifying backend {site.backend!r} on {spec}",
        needed=f"a relative error of at most {whole_limit:g} in all and {token_limit:g} in each token",
        got=f"{whole:.3g} in all and {worst:.3g} in token {token}, which went to experts {ids[token].tolist()}",
        where=site.where,
        now="name another fp4moe.backend for this model, and report this message",
    )
