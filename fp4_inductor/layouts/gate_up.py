"""Gate and up rows of w13: interleaved (g0, u0, g1, u1, ...) or in halves (all gate, then all up).

Both directions move whole rows only, so one function serves codes, block scales, biases and global
scales alike, in any dtype.
"""

from __future__ import annotations

import torch


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
