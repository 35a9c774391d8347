"""What must hold of weights so that a kernel's form of them is exact, as an op: graphs that have it refuse others."""

from __future__ import annotations

import torch

from ..errors import Fp4InductorError


class InexactWeightsError(Fp4InductorError, ValueError):
    """Weights that a kernel's form cannot hold exactly; another kernel can run them."""


_library = torch.library.Library("fp4_inductor", "FRAGMENT")
_library.define("require_exact(Tensor value, Tensor holds, str needed) -> Tensor")


def require_exact(value: torch.Tensor, holds: torch.Tensor, needed: str) -> torch.Tensor:
    """``value``, a new tensor, where the condition holds everywhere.

    Args:
        holds: bool [E, ...], by expert.
        needed: the condition in words, for people.

    Raises:
        InexactWeightsError: when it runs on real tensors, if an expert does not meet the condition.
    """
    checked: torch.Tensor = torch.ops.fp4_inductor.require_exact.default(value, holds, needed)
    return checked


def _check(value: torch.Tensor, holds: torch.Tensor, needed: str) -> torch.Tensor:
    if not bool(holds.all()):
        failed = (~holds).flatten(1).any(dim=1) if holds.dim() > 1 else ~holds
        experts = failed.nonzero().flatten().tolist()
        more = ", ..." if len(experts) > 8 else ""
        raise InexactWeightsError(
            "preparing FP4 weights for a kernel",
            needed=needed,
            got=f"other values in expert {', '.join(map(str, experts[:8]))}{more} of {len(failed)}",
            now="let another backend run this layer",
        )
    return value.clone()


_library.impl("require_exact", _check, "CompositeExplicitAutograd")


torch.library.register_fake(
    "fp4_inductor::require_exact", lambda value, holds, needed: torch.empty_like(value), lib=_library
)
