"""What a peer is, and what several of them need."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from ...device import DeviceInfo
from ...reference import activate
from ...spec import ActivationSpec, GateUpOrder, MoESpec
from ..layers import Layer

CUDA = torch.device("cuda")


class Peer(Protocol):
    """Somebody else's block.

    Attributes:
        weights: the formats that it can read its weights in.
        logits_dtype: dtype that it wants the router's logits in; None for the activation dtype.
    """

    name: str
    weights: tuple[str, ...]
    logits_dtype: torch.dtype | None

    def missing(self, device: DeviceInfo) -> str:
        """Why it cannot run here; empty if it can."""
        ...

    def layer(self, spec: MoESpec) -> Layer:
        """The block on random weights in ``spec.weight_format``, or in the only format that it reads."""
        ...


@cache
def compiled_activation(activation: ActivationSpec) -> Any:
    """One kernel for rows [R, 2I], halves gate and up, their bias [E, 2I] and expert [R], to [R, I]."""

    def act(rows: torch.Tensor, bias: torch.Tensor | None, expert: torch.Tensor | None) -> torch.Tensor:
        gate_up = rows.float() if bias is None else rows.float() + bias[expert]
        return activate(gate_up, activation, GateUpOrder.GATE_UP).to(rows.dtype)

    return torch.compile(act, dynamic=True)


def vllm_files(pattern: str) -> list[Path]:
    """Files of an installed vLLM, found without importing it."""
    found = importlib.util.find_spec("vllm")
    folders = [] if found is None else found.submodule_search_locations or []
    return sorted(path for folder in folders for path in Path(folder).glob(pattern))
