"""How close a fused block must come to ``moe_reference`` in float64: one table for every backend's tests.

Derivation (8 experts, H = I = 512, 256 tokens, top-2, weights N(0, 1/K), exact float64 reference). Rounding
only the output to bfloat16 costs 1.7e-3 in relative Frobenius norm, rounding every intermediate 4.3e-3 (worst
token 5.6e-3), an eager graph on bfloat16-rounded NVFP4 weights 5.5e-3 (6.7e-3); float16 is eight times finer.
The bounds leave twice that. Above them lie the bugs: one scale byte off is 3.2e-2 for its worst token, a 3 %
fault of a global scale 3.0e-2, a misrouted or dead token about 1. float32 keeps sums of up to 8192 products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """Bounds on ``|out - ref| / |ref|``: over the whole result, and over each token."""

    frobenius: float
    worst_token: float


TOLERANCES = {
    torch.bfloat16: Tolerance(8e-3, 1.5e-2),
    torch.float16: Tolerance(1.5e-3, 3e-3),
    torch.float32: Tolerance(1e-5, 3e-5),
}


def assert_close_per_token(out: torch.Tensor, ref: torch.Tensor, dtype: torch.dtype) -> None:
    """Assert that ``out`` [T, H] meets ``TOLERANCES[dtype]`` against ``ref`` [T, H] float64.

    ``dtype`` is the coarsest in which the block keeps an intermediate or its result. A token that is zero in
    ``ref`` must be exactly zero; one that is not must be alive; nothing may be NaN or infinite.
    """
    assert out.shape == ref.shape, f"shape {tuple(out.shape)}, expected {tuple(ref.shape)}"
    if out.numel() == 0:
        return
    bound = TOLERANCES[dtype]
    got, ref = out.detach().to(ref.device, torch.float64), ref.to(torch.float64)
    assert ref.isfinite().all(), "the reference itself is not finite"
    bad = (~got.isfinite()).any(dim=-1).nonzero().flatten().tolist()
    assert not bad, f"{len(bad)} of {len(got)} tokens are not finite, first {bad[:5]}"
    size = ref.norm(dim=-1)
    error = (got - ref).norm(dim=-1)
    assert not error[size == 0].any(), "tokens without an expert must be exactly zero"
    dead = ((got == 0).all(dim=-1) & (size > 0)).nonzero().flatten().tolist()
    assert not dead, f"{len(dead)} of {len(got)} tokens are zero, first {dead[:5]}"
    relative = torch.where(size > 0, error / size, 0)
    worst = int(relative.argmax())
    assert relative[worst] <= bound.worst_token, (
        f"token {worst} of {len(got)} is {relative[worst]:.2e} off, at most {bound.worst_token:.1e} allowed"
    )
    frobenius = float(error.norm() / size.norm().clamp(min=1e-300))
    assert frobenius <= bound.frobenius, f"the result is {frobenius:.2e} off, at most {bound.frobenius:.1e} allowed"
