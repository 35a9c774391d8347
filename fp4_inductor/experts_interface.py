"""The ``fp4moe`` door in transformers: experts written so that they are recognised at once.

>>> model.set_experts_implementation("fp4moe")        # or from_pretrained(..., experts_implementation="fp4moe")

``import fp4_inductor`` adds the name to transformers' registry if transformers was imported before. Where it comes
later, the first ``quantize_``, ``load`` or ``explain`` adds it, or whoever needs it sooner calls ``register``.
Nothing here imports transformers unless somebody else did.

One form serves every number of tokens, so ``generate`` keeps it for decoding too, where it would replace
"grouped_mm" by a form that gathers the weights of every slot.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

NAME = "fp4moe"


def register() -> bool:
    """Add ``fp4moe`` to the experts implementations of transformers. May be called any number of times.

    Returns:
        Whether it is there now: False where transformers was not imported, or is a release without them.
    """
    if "transformers" not in sys.modules:
        return False
    try:
        interface = importlib.import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
    except (ImportError, AttributeError):
        return False
    interface.register(NAME, experts_forward)
    return True


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts of a module under ``use_experts_implementation``, over slots sorted by expert.

    Args:
        self: holds the weights ``[E, N, K]``, or ``[E, K, N]`` if ``is_transposed``, packed or not.
        hidden_states: ``[T, H]``.
        top_k_index: ids, integers ``[T, k]``; under expert parallelism those of absent experts are E or more.
        top_k_weights: ``[T, k]``; the sum over k is taken in their dtype if it is wider.

    Returns:
        ``[T, H]`` in the dtype of ``hidden_states``.
    """
    top_k = top_k_index.shape[-1]
    ids, slots = top_k_index.reshape(-1).sort()
    rows = _Rows(self, ids)
    out = rows.present(hidden_states[slots // top_k])
    out = rows.project("gate_up_proj" if self.has_gate else "up_proj", out)
    out = self._apply_gate(out) if self.has_gate else self.act_fn(out)
    out = rows.project("down_proj", out)
    if getattr(self, "has_post_expert_norm", False):
        out = self.post_expert_norm(out)
    out = out * top_k_weights.reshape(-1)[slots].unsqueeze(-1)
    row_of_slot = torch.empty_like(slots).scatter(0, slots, torch.arange(len(slots), device=slots.device))
    out = out[row_of_slot].reshape(-1, top_k, hidden_states.shape[-1]).sum(dim=1)
    return out.to(hidden_states.dtype)


class _Rows:
    """The rows of the expert GEMMs, ``[T*k, ...]`` in the order of their experts."""

    def __init__(self, experts: Any, ids: torch.Tensor) -> None:
        """``ids``: int ``[T*k]``, ascending."""
        count = experts.num_experts
        self.experts = experts
        self.offsets = (ids.unsqueeze(-1) == torch.arange(count, device=ids.device)).sum(0).cumsum(0, dtype=torch.int32)
        # Releases that have no such mark always take care of absent experts.
        parallel = getattr(experts, "_is_expert_parallel", True)
        self.absent = (ids >= count).unsqueeze(-1) if parallel else None
        self.ids = ids.clamp(max=count - 1) if parallel else ids

    def project(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` ``[T*k, K]`` by each one's expert in the weight ``name``, with its bias: ``[T*k, N]``."""
        weight = getattr(self.experts, name)
        if not self.experts.is_transposed:
            weight = weight.transpose(-2, -1)
        out = _grouped_mm(rows.to(weight.dtype), weight, self.offsets)
        if self.experts.has_bias:
            out = out + getattr(self.experts, f"{name}_bias")[self.ids]
        return self.present(out)

    def present(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` with zeros in those of absent experts, which a grouped GEMM and its gradient leave unwritten."""
        return rows if self.absent is None else rows.masked_fill(self.absent, 0.0)


def _grouped_mm(rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """rows ``[S, K]`` by weight ``[E, K, N]``, group by group of ``offsets`` int32 ``[E]``."""
    if weight.dtype is torch.bfloat16 or not torch.compiler.is_compiling():
        return torch.nn.functional.grouped_mm(rows, weight, offs=offsets)
    # Compilers take torch's own op in bfloat16 only.
    fallback: torch.Tensor = torch.ops.transformers.grouped_mm_fallback(rows, weight, offsets)
    return fallback
