"""Gate and up rows of w13: interleaved (g0, u0, g1, u1, ...), in halves (all gate, then all up), or in granules.

Granules are eight gate rows, then their eight up rows. A thread of a matrix instruction holds rows r and r + 8 of
its sixteen, so it holds the gate and the up that its activation needs.

All directions move whole rows only, so one function serves codes, block scales, biases and global
scales alike, in any dtype.
"""

from __future__ import annotations

import torch

from ..spec import GateUpOrder

GRANULE = 8
"""Rows of gate, or of up, that stay together in granules."""


def to_gate_up_halves(rows: torch.Tensor) -> torch.Tensor:
    """Rows in the order of ``GateUpOrder.GATE_UP`` from ``INTERLEAVED`` ones.

    Args:
        rows: [E, 2I, ...] codes, block scales, biases or per-row global scales; or [E, 1] global
            scales, which have no row order.

    Returns:
        A new contiguous tensor of the same shape and dtype.
    """
    if rows.shape[1] == 1:
        return rows.clone(memory_format=torch.contiguous_format)
    pairs: torch.Tensor = rows.unflatten(1, (-1, 2))
    return pairs.transpose(1, 2).flatten(1, 2).contiguous()


def to_interleaved(rows: torch.Tensor) -> torch.Tensor:
    """Rows in the order of ``GateUpOrder.INTERLEAVED`` from ``GATE_UP`` ones: the inverse of ``to_gate_up_halves``.

    Args:
        rows: [E, 2I, ...], or [E, 1] global scales.

    Returns:
        A new contiguous tensor of the same shape and dtype.
    """
    if rows.shape[1] == 1:
        return rows.clone(memory_format=torch.contiguous_format)
    halves: torch.Tensor = rows.unflatten(1, (2, -1))
    return halves.transpose(1, 2).flatten(1, 2).contiguous()


def to_granules(rows: torch.Tensor, order: GateUpOrder) -> torch.Tensor:
    """Rows in granules (g0..g7, u0..u7, g8..g15, u8..u15, ...).

    Args:
        rows: [E, 2I, ...] in ``order``; I a multiple of 8.

    Returns:
        A new contiguous tensor of the same shape and dtype.
    """
    if order is GateUpOrder.INTERLEAVED:
        gate, up = rows[:, ::2], rows[:, 1::2]
    else:
        gate, up = rows.chunk(2, dim=1)
        if order is GateUpOrder.UP_GATE:
            gate, up = up, gate
    granules = [half.unflatten(1, (-1, GRANULE)) for half in (gate, up)]
    return torch.stack(granules, dim=2).flatten(1, 3)


def from_granules(rows: torch.Tensor, order: GateUpOrder) -> torch.Tensor:
    """Rows in ``order`` from granules: the inverse of ``to_granules``.

    Args:
        rows: [E, 2I, ...]; I a multiple of 8.

    Returns:
        A new contiguous tensor of the same shape and dtype.
    """
    gate, up = (half.flatten(1, 2) for half in rows.unflatten(1, (-1, 2, GRANULE)).unbind(2))
    if order is GateUpOrder.INTERLEAVED:
        return torch.stack((gate, up), dim=2).flatten(1, 2)
    return torch.cat((up, gate) if order is GateUpOrder.UP_GATE else (gate, up), dim=1)
