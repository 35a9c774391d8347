"""Gate and up rows of w13: in which order they stand, and from any order to any other.

An order is a number of rows of one, then as many of the other, in turn. In halves, that is all of them; interleaved
(g0, u0, g1, u1, ...), it is one. Granules are eight gate rows, then their eight up rows: a thread of a matrix
instruction holds rows r and r + 8 of its sixteen, so it holds the gate and the up that its activation needs.

All directions move whole rows only, so one function serves codes, block scales, biases and global
scales alike, in any dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..spec import GateUpOrder


@dataclass(frozen=True, slots=True)
class RowOrder:
    """``block`` rows of gate and ``block`` rows of up in turn, or first of up; None: halves."""

    block: int | None
    up_first: bool = False


GRANULE = 8
"""Rows of gate, or of up, that stay together in granules."""
GRANULES = RowOrder(GRANULE)
GATE_UP = RowOrder(None)
UP_GATE = RowOrder(None, up_first=True)
INTERLEAVED = RowOrder(1)
_ORDERS = {GateUpOrder.GATE_UP: GATE_UP, GateUpOrder.UP_GATE: UP_GATE, GateUpOrder.INTERLEAVED: INTERLEAVED}


def row_order(order: GateUpOrder) -> RowOrder:
    """The order in which a model stores w13."""
    return _ORDERS[order]


def split_gate_up(rows: torch.Tensor, order: RowOrder) -> tuple[torch.Tensor, torch.Tensor]:
    """The gate rows and the up rows, [E, I, ...] each, of rows [E, 2I, ...] in ``order``; they may be views."""
    block = order.block or rows.shape[1] // 2
    blocks: torch.Tensor = rows.unflatten(1, (-1, 2, block))
    first, second = blocks[:, :, 0].flatten(1, 2), blocks[:, :, 1].flatten(1, 2)
    return (second, first) if order.up_first else (first, second)


def join_gate_up(gate: torch.Tensor, up: torch.Tensor, order: RowOrder) -> torch.Tensor:
    """Rows [E, 2I, ...] in ``order`` from gate and up rows [E, I, ...]; the inverse of ``split_gate_up``.

    Returns:
        A new contiguous tensor.
    """
    halves = (up, gate) if order.up_first else (gate, up)
    if order.block is None:
        return torch.cat(halves, dim=1)
    return torch.stack([half.unflatten(1, (-1, order.block)) for half in halves], dim=2).flatten(1, 3)


def reorder_gate_up(rows: torch.Tensor, source: RowOrder, target: RowOrder) -> torch.Tensor:
    """Rows in the order ``target`` from ``source``; the other way round is the inverse.

    Args:
        rows: [E, 2I, ...] codes, block scales, biases or per-row global scales; or [E, 1] global
            scales, which have no row order. I is a multiple of the blocks of both orders.

    Returns:
        A new contiguous tensor of the same shape and dtype.
    """
    if rows.shape[1] == 1:
        return rows.clone(memory_format=torch.contiguous_format)
    return join_gate_up(*split_gate_up(rows, source), target)


def to_gate_up_halves(rows: torch.Tensor) -> torch.Tensor:
    """Rows in the order of ``GateUpOrder.GATE_UP`` from ``INTERLEAVED`` ones."""
    return reorder_gate_up(rows, INTERLEAVED, GATE_UP)


def to_interleaved(rows: torch.Tensor) -> torch.Tensor:
    """Rows in the order of ``GateUpOrder.INTERLEAVED`` from ``GATE_UP`` ones: the inverse of ``to_gate_up_halves``."""
    return reorder_gate_up(rows, GATE_UP, INTERLEAVED)


def to_granules(rows: torch.Tensor, order: GateUpOrder) -> torch.Tensor:
    """Rows in granules (g0..g7, u0..u7, g8..g15, u8..u15, ...) from ``order``; I is a multiple of 8."""
    return reorder_gate_up(rows, row_order(order), GRANULES)


def from_granules(rows: torch.Tensor, order: GateUpOrder) -> torch.Tensor:
    """Rows in ``order`` from granules: the inverse of ``to_granules``."""
    return reorder_gate_up(rows, GRANULES, row_order(order))
