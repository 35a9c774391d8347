"""How finely global scales differ: by how the graph holds them, whatever values they have in one model."""

from __future__ import annotations

import torch

from ..matching import Assembled, PackedWeight, nodes_of
from ..reference import split_gate_up
from ..spec import GateUpOrder, GlobalGrain


def global_grain(weight: PackedWeight, order: GateUpOrder | None = None) -> GlobalGrain:
    """Which rows of ``weight`` share a global scale.

    Every stored number becomes another one, and what its canonical form then repeats is shared.

    Args:
        order: of gate and up rows; None where there are none.
    """
    source = weight.global_scale
    if source is None:
        return GlobalGrain.EXPERT
    experts, rows, _ = weight.shape
    rng = torch.Generator().manual_seed(0)
    nodes = nodes_of(source)
    stored = {node: torch.rand(node.meta["val"].shape, generator=rng) + 0.5 for node in dict.fromkeys(nodes)}
    values = [stored[node] for node in nodes]
    scales = source.function(*values) if isinstance(source, Assembled) else values[0]
    if scales.numel() != experts * rows:
        return GlobalGrain.EXPERT
    by_row = scales.reshape(experts, rows)
    if _uniform(by_row):
        return GlobalGrain.EXPERT
    halves = order is not None and all(map(_uniform, split_gate_up(by_row, order)))
    return GlobalGrain.HALF if halves else GlobalGrain.ROW


def _uniform(rows: torch.Tensor) -> bool:
    return bool((rows == rows[:, :1]).all())
