"""Operands that a graph holds in parts: gate and up apart, or a tensor for each expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias

import torch
from torch import fx

from ..formats import BlockFormat
from ..matching import Assembled, NoMatch, PackedWeight, Source, nodes_of


@dataclass(frozen=True, slots=True)
class Bound:
    """``function`` with its first arguments, like ``functools.partial``, but equal to another where those are."""

    function: Callable[..., torch.Tensor]
    first: tuple[object, ...]

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.function(*self.first, *tensors)


def join_halves(parts: Sequence[PackedWeight]) -> PackedWeight:
    """w13 from one weight with the rows of gate and up, or from one for each, in this order.

    Raises:
        NoMatch: they are not alike.
    """
    if len(parts) == 1:
        return parts[0]
    first, second = parts
    if first.format != second.format or first.shape != second.shape:
        raise NoMatch("gate and up are packed as {} {} and as {} {}", first.format, first.shape, second.format,
                      second.shape)  # fmt: skip
    experts, rows, columns = first.shape
    block = first.format.block_size
    return replace(
        first,
        codes=_rows_of([first.codes, second.codes], (experts, rows, columns // 2), torch.uint8),
        scale=_rows_of([first.scale, second.scale], (experts, rows, columns // block), first.format.scale_dtype),
        global_scale=_global_rows(parts),
        shape=(experts, 2 * rows, columns),
    )


@dataclass(frozen=True, slots=True)
class Share:
    """What one expert reads of an operand: index ``index`` of a ``source`` that holds ``count`` experts."""

    source: Source
    index: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """FP4 weights ``[N, K]`` of one expert; ``transposed`` where the graph holds them as ``[K, N]``."""

    codes: Share
    scale: Share
    global_scale: Share | None
    format: BlockFormat
    shape: tuple[int, int]
    transposed: bool

    @property
    def index(self) -> int | None:
        """Which expert it is of tensors that hold several; None where the codes are its own."""
        return self.codes.index if self.codes.count > 1 else None


def stack_experts(experts: Sequence[ExpertWeight]) -> PackedWeight:
    """The weights of all experts, in the given order, from one weight for each.

    Tensors that hold exactly these experts in this order are taken as they are; others are stacked.

    Raises:
        NoMatch: they are not alike.
    """
    first = experts[0]
    for other in experts:
        if (other.format, other.shape) != (first.format, first.shape):
            raise NoMatch("experts are packed as {} {} and as {} {}", first.format, first.shape, other.format,
                          other.shape)  # fmt: skip
    (rows, columns), fmt = first.shape, first.format
    scales = [expert.global_scale for expert in experts if expert.global_scale is not None]
    return PackedWeight(
        _stacked([expert.codes for expert in experts], (rows, columns // 2), torch.uint8),
        _stacked([expert.scale for expert in experts], (rows, columns // fmt.block_size), fmt.scale_dtype),
        _stacked(scales, None, torch.float32) if scales else None,
        fmt,
        (len(experts), rows, columns),
    )


def join_expert_halves(parts: Sequence[ExpertWeight]) -> ExpertWeight:
    """One expert's w13 from its weights of gate and up, in this order.

    Raises:
        NoMatch: they are not alike, or not picked alike from tensors of all experts.
    """
    whole: list[PackedWeight] = []
    first = parts[0]
    for part in parts:
        factor = part.global_scale
        shares = [part.codes, part.scale, *([] if factor is None or holds_one(factor.source) else [factor])]
        if {(share.index, share.count) for share in shares} != {(first.codes.index, first.codes.count)}:
            raise NoMatch("gate and up are not picked alike from tensors of all experts")
        sources = part.codes.source, part.scale.source, None if factor is None else factor.source
        whole.append(PackedWeight(*sources, part.format, (part.codes.count, *part.shape)))
    joined, index, count = join_halves(whole), first.codes.index, first.codes.count
    factor = None if joined.global_scale is None else Share(joined.global_scale, index, count)
    scale, codes = Share(joined.scale, index, count), Share(joined.codes, index, count)
    return ExpertWeight(codes, scale, factor, first.format, joined.shape[1:], first.transposed)


def _stacked(shares: Sequence[Share], shape: tuple[int, int] | None, dtype: torch.dtype) -> Source:
    """Canonical ``[E, ...]`` of one operand; ``shape`` is one expert's, None for global scales."""
    sources = list(dict.fromkeys(share.source for share in shares))
    if len(sources) == 1 and shares[0].count in (1, len(shares)):
        whole = [share.index for share in shares] == list(range(len(shares)))
        if whole if shares[0].count == len(shares) else shape is None and holds_one(sources[0]):
            return sources[0]
    places = tuple((sources.index(share.source), share.index, share.count) for share in shares)
    return _assembled(sources, Bound(_stack, (_makers(sources), places, shape, dtype)))


def holds_one(source: Source) -> bool:
    """Whether a global scale is one number for everything."""
    return isinstance(source, fx.Node) and source.meta["val"].numel() == 1


def check_fit(w13: PackedWeight, w2: PackedWeight, gemm: fx.Node) -> None:
    """Refuse projections that are not those of one block; ``gemm`` is where.

    Raises:
        NoMatch: they have other formats, experts or sizes.
    """
    if w13.format != w2.format:
        raise NoMatch("the projections are packed as {} and as {}", w13.format, w2.format, node=gemm)
    (experts, rows, columns), (experts_2, width, intermediate) = w13.shape, w2.shape
    if experts != experts_2 or columns != width or rows not in (intermediate, 2 * intermediate):
        raise NoMatch("weights {} and {} do not fit together", w13.shape, w2.shape, node=gemm)


def join_sources(parts: Sequence[fx.Node | None]) -> Source | None:
    """The biases ``[E, N]`` of gate and up, in one; None where there are none.

    Raises:
        NoMatch: only one of them has a bias.
    """
    present = [part for part in parts if part is not None]
    if not present:
        return None
    if len(present) != len(parts):
        raise NoMatch("one of gate and up has a bias, the other has none", node=present[0])
    return present[0] if len(present) == 1 else Assembled(concatenated_rows, tuple(present))


def concatenated_rows(*parts: torch.Tensor) -> torch.Tensor:
    """``[E, N, ...]`` of every part to one with all their rows."""
    return torch.cat(parts, dim=1)


def _rows_of(parts: Sequence[Source], shape: tuple[int, int, int], dtype: torch.dtype) -> Assembled:
    return _assembled(parts, Bound(_joined_rows, (_makers(parts), shape, dtype)))


def _global_rows(parts: Sequence[PackedWeight]) -> Source | None:
    """The global scales ``[E, 2N]``: every half keeps its own."""
    scales = [part.global_scale for part in parts if part.global_scale is not None]
    if not scales:
        return None
    experts, rows, _ = parts[0].shape
    return _assembled(scales, Bound(_joined_globals, (_makers(scales), experts, rows)))


_Maker: TypeAlias = "tuple[Callable[..., torch.Tensor] | None, int]"
"""How one part is made canonical (None: it is, but for its shape), and from how many tensors."""


def _makers(parts: Sequence[Source]) -> tuple[_Maker, ...]:
    return tuple((part.function if isinstance(part, Assembled) else None, len(nodes_of(part))) for part in parts)


def _assembled(parts: Sequence[Source], function: Callable[..., torch.Tensor]) -> Assembled:
    return Assembled(function, tuple(node for part in parts for node in nodes_of(part)))


def _made(makers: tuple[_Maker, ...], tensors: tuple[torch.Tensor, ...]) -> Iterator[torch.Tensor]:
    rest = iter(tensors)
    for function, count in makers:
        given = tuple(islice(rest, count))
        yield given[0] if function is None else function(*given)


def _joined_rows(
    makers: tuple[_Maker, ...], shape: tuple[int, int, int], dtype: torch.dtype, *tensors: torch.Tensor
) -> torch.Tensor:
    """Bytes of every part ``shape``, one below the other: ``[E, 2N, ...]`` of ``dtype``."""
    parts = [part.view(torch.uint8).reshape(shape) for part in _made(makers, tensors)]
    return torch.cat(parts, dim=1).view(dtype)


def _joined_globals(makers: tuple[_Maker, ...], experts: int, rows: int, *tensors: torch.Tensor) -> torch.Tensor:
    parts = [part.to(torch.float32) for part in _made(makers, tensors)]
    wide = [part.reshape(-1, rows if part.numel() == experts * rows else 1).expand(experts, rows) for part in parts]
    return torch.cat(wide, dim=1)


def _stack(
    makers: tuple[_Maker, ...],
    places: tuple[tuple[int, int, int], ...],
    shape: tuple[int, int] | None,
    dtype: torch.dtype,
    *tensors: torch.Tensor,
) -> torch.Tensor:
    """One expert after another: every place says from which part, at which index, of how many."""
    made = list(_made(makers, tensors))
    if shape is not None:
        wide = [part.view(torch.uint8).reshape(-1, *shape) for part in made]
        return torch.stack([wide[part][index] for part, index, _ in places]).view(dtype)
    rows = [made[part].to(dtype).reshape(count, -1)[index] for part, index, count in places]
    width = max(row.numel() for row in rows)
    return torch.stack([row.expand(width) for row in rows])
