"""How FP4 operands lie in what a graph stores, and how they become canonical (see ``Operand``).

Probes and re-layouts run the same functions: what is proved is what is emitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, TypeAlias

import torch

from ..formats import E2M1_VALUES
from ..quant.tables import e2m1_codes

Axis: TypeAlias = Literal["experts", "rows", "halves", "pairs"]
"""What an axis of a global scale tells apart; gate and up lie as two halves of the rows, or in pairs of rows."""


@dataclass(frozen=True, slots=True)
class Lay:
    """Bytes of ``[E, N, X]`` stored with the rows before what runs along K, or behind it (``k_first``)."""

    experts: int
    rows: int
    k_first: bool = False

    def __call__(self, stored: torch.Tensor) -> torch.Tensor:
        """stored ``[E, N, ...]`` or ``[E, ..., N]``, leading axes merged or not; returns ``[E, N, X]``."""
        if self.k_first:
            return stored.reshape(self.experts, -1, self.rows).mT
        return stored.reshape(self.experts, self.rows, -1)

    def shape_for(self, shape: tuple[int, ...], experts: int, rows: int) -> tuple[int, ...] | None:
        """``shape`` with fewer experts and rows; None where it is not stored in this way."""
        if self.k_first:
            if len(shape) > 2 and (shape[0], shape[-1]) == (self.experts, self.rows):
                return experts, *shape[1:-1], rows
            return (*shape[:-1], rows) if self.experts == 1 and len(shape) > 1 and shape[-1] == self.rows else None
        if shape[:2] == (self.experts, self.rows):
            return experts, rows, *shape[2:]
        merged = self.experts * self.rows
        if shape and shape[0] and shape[0] % merged == 0:
            return shape[0] // merged * experts * rows, *shape[1:]
        return None


@dataclass(frozen=True, slots=True)
class Codes:
    """Codes as stored to ``uint8 [E, N, K/2]``, low nibble first."""

    lay: Lay
    high_first: bool = False

    @property
    def is_canonical(self) -> bool:
        return not (self.lay.k_first or self.high_first)

    def sized(self, experts: int, rows: int) -> Codes:
        return replace(self, lay=replace(self.lay, experts=experts, rows=rows))

    def __call__(self, stored: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        """stored bytes, two codes each; table: the values of the codes ``[8]`` (magnitudes), ``[16]`` or of bytes
        ``[256, 2]``, whose e2m1 codes the result has then."""
        codes = self.lay(stored.view(torch.uint8))
        if self.high_first:
            codes = (codes << 4) | (codes >> 4)
        return (codes if table is None else _looked_up(codes, table)).contiguous()


def _looked_up(codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    known = e2m1_codes(table.reshape(-1))
    if known.numel() == 8:
        known = torch.cat((known, known ^ 8))
    if known.numel() == 16:
        low, high = known[(codes & 15).int()], known[(codes >> 4).int()]
        return low | (high << 4)
    pairs = known.reshape(256, 2)
    return (pairs[:, 0] | (pairs[:, 1] << 4))[codes.int()]


@dataclass(frozen=True, slots=True)
class Scales:
    """Block scales as stored to ``[E, N, K/bs]`` of ``dtype``."""

    lay: Lay
    dtype: torch.dtype

    @property
    def is_canonical(self) -> bool:
        return not self.lay.k_first

    def sized(self, experts: int, rows: int) -> Scales:
        return replace(self, lay=replace(self.lay, experts=experts, rows=rows))

    def __call__(self, stored: torch.Tensor) -> torch.Tensor:
        return self.lay(stored.view(torch.uint8)).contiguous().view(self.dtype)


@dataclass(frozen=True, slots=True)
class Globals:
    """A global scale as stored to ``float32 [E or 1, N or 1]`` that multiplies."""

    experts: int
    rows: int
    axes: tuple[Axis, ...]
    inverse: bool = False

    @property
    def is_canonical(self) -> bool:
        return self.axes in ((), ("experts",), ("experts", "rows")) and not self.inverse

    def sized(self, experts: int, rows: int) -> Globals:
        return replace(self, experts=experts, rows=rows)

    def sizes(self) -> tuple[int, ...]:
        size = {"experts": self.experts, "rows": self.rows, "halves": 2, "pairs": 2}
        return tuple(size[axis] for axis in self.axes)

    def __call__(self, stored: torch.Tensor) -> torch.Tensor:
        scale = stored.to(torch.float32).reshape(self.sizes())
        if self.axes[1:] == ("experts",):
            scale = scale.mT
        if self.axes[:1] != ("experts",) and self.axes[1:] != ("experts",):
            scale = scale.unsqueeze(0)
        if scale.dim() == 1:
            scale = scale.unsqueeze(1)
        if "halves" in self.axes:
            scale = scale.repeat_interleave(self.rows // 2, dim=1)
        if "pairs" in self.axes:
            scale = scale.repeat(1, self.rows // 2)
        if self.axes and "experts" not in self.axes:
            scale = scale.expand(self.experts, -1)  # kernels take one for each row of each expert
        return (1 / scale if self.inverse else scale).contiguous()

    def shape_for(self, shape: tuple[int, ...], experts: int, rows: int) -> tuple[int, ...]:
        """``shape`` with fewer experts and rows."""
        small = iter(self.sized(experts, rows).sizes())
        kept = [size for size in shape if size != 1]
        if tuple(kept) != tuple(size for size in self.sizes() if size != 1):  # its axes are merged
            return tuple(prod(small) if size != 1 else 1 for size in shape)
        wanted = iter([s for s, old in zip(small, self.sizes(), strict=True) if old != 1])
        return tuple(next(wanted) if size != 1 else 1 for size in shape)


def grains(shape: tuple[int, ...], experts: int, rows: int) -> Iterator[tuple[Axis, ...]]:
    """What the axes of a global scale may tell apart, the likeliest first."""
    every: Sequence[tuple[Axis, ...]] = (
        (), ("experts",), ("experts", "rows"), ("rows",), ("experts", "halves"), ("experts", "pairs"),
        ("halves", "experts"), ("pairs", "experts"), ("halves",), ("pairs",),
    )  # fmt: skip
    kept = tuple(size for size in shape if size != 1)
    for axes in every:
        if rows % 2 and {"halves", "pairs"}.intersection(axes):
            continue
        sizes = tuple(size for size in Globals(experts, rows, axes).sizes() if size != 1)
        if kept in (sizes, (prod(sizes),) if sizes else ()) and (experts != 1 or "experts" not in axes):
            yield axes


def may_scale(shape: tuple[int, ...], experts: int, rows: int) -> bool:
    return next(grains(shape, experts, rows), None) is not None


TABLES = ((8,), (16,), (256, 2), (512,))
"""Shapes of tables of e2m1 values: by magnitude, by code, by byte."""


@dataclass(frozen=True, slots=True)
class Relayout:
    """A stored operand's canonical form: every part made (None: it is as it stands), then laid out.

    Attributes:
        makers: how each part is made, and from how many tensors.
    """

    makers: tuple[tuple[Callable[..., torch.Tensor] | None, int], ...]
    layout: Codes | Scales | Globals

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        parts, start = [], 0
        for maker, count in self.makers:
            given = tensors[start : start + count]
            parts.append(given[0] if maker is None else maker(*given))
            start += count
        return self.layout(*parts)


def standard_table() -> torch.Tensor:
    return torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=torch.float64)
