"""Tell by numbers what a piece of a graph decodes: run it on random bytes and compare with every reading of them.

The piece starts at its origins (see ``provenance``) and ends in the float weight. Nothing depends on which
operations spell it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import fx

from ..formats import E8M0_BIAS, MXFP4, NVFP4, BlockFormat
from ..matching import NoMatch
from .packing import TABLES, Codes, Globals, Lay, Scales, grains, may_scale, standard_table
from .probing import WIDE_FLOATS, constant_value, dtype_of, evaluate, isolated, shape_hint
from .provenance import Origin

_MAX_FULL_PROBE = 1 << 25
"""Weights that are probed at full size where the graph does not let itself be shrunk."""
_MIN_BLOCKS = 768
"""Blocks to look at: every scale byte three times, and 4096 codes or more."""

_TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 2e-3}
"""Three roundings, of global scale, scale and product; float32 has 1e-6. Only a global scale needs any."""


@dataclass(frozen=True, slots=True)
class Roles:
    """Which of the nodes that a piece reads holds what. Numbers are places in its list of nodes."""

    codes: int
    scale: int
    global_scale: int | None = None
    table: int | None = None


@dataclass(frozen=True, slots=True)
class Picks:
    """Where expert ``index`` is picked from what is computed for ``count`` of them: ``nodes`` from ``bases``."""

    nodes: tuple[fx.Node, ...]
    bases: tuple[fx.Node, ...]
    count: int
    index: int


@dataclass(frozen=True, slots=True)
class Decoded:
    """One reading of a piece: ``W[e, n, k] = e2m1 * scale * global_scale``, each by a function of what is stored.

    Attributes:
        shape: E, N, K.
        transposed: the piece ends in ``[..., K, N]``.
    """

    roles: Roles
    codes: Codes
    scale: Scales
    global_scale: Globals | None
    format: BlockFormat
    shape: tuple[int, int, int]
    transposed: bool


@dataclass(frozen=True, slots=True)
class _Sample:
    """A weight's factors, float64, broadcastable to ``[E, N, K]``."""

    codes: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Probe:
    """What a piece gave for random bytes, and how far that may be off."""

    feeds: dict[int, torch.Tensor]
    got: torch.Tensor
    tolerance: float

    def excess(self, reading: Decoded, size: tuple[int, int], lowest: torch.dtype) -> float:
        """The error of a reading where it is not tolerated, else 0."""
        error = _error(self.got, _read(self.feeds, reading, *size), lowest)
        return error if error > self.tolerance else 0.0


def decoded(node: fx.Node, origins: Sequence[Origin], rest: Sequence[fx.Node], picks: Picks | None = None) -> Decoded:
    """The one reading under which ``node`` is what the formats say.

    Args:
        node: float weight ``[E, N, K]`` or ``[E, K, N]``, or of one expert, ``[N, K]`` or ``[K, N]``.
        origins: where the piece starts.
        rest: the nodes from there to ``node``, constants among them.
        picks: what picks the one expert that ``node`` is of, where the origins are of all.

    Raises:
        NoMatch: there is none; the furthest refusal.
    """
    nodes = [*(origin.node for origin in origins), *rest]
    miss: NoMatch | None = None
    for reading in _placements(node, origins, nodes, picks):
        try:
            return _verified(node, nodes, reading, picks)
        except NoMatch as error:
            if miss is None or error.progress > miss.progress:
                miss = error
    raise miss or NoMatch("{} has no shape that its codes could fill", node, node=node, progress=0.2)


def _placements(
    node: fx.Node, origins: Sequence[Origin], nodes: Sequence[fx.Node], picks: Picks | None
) -> Iterator[Decoded]:
    """Every way to take the origins whose shapes fit; the format, the order of nibbles and inverses are left open."""
    codes, scale, floats = _roles(node, origins, nodes)
    experts, *matrix = (1, *(shape_hint(node) or ()))[-3:]
    experts = experts if picks is None else picks.count
    codes_shape, scale_shape = shape_hint(nodes[codes]) or (), shape_hint(nodes[scale]) or ()
    misplaced: NoMatch | None = None
    for transposed, (rows, columns) in enumerate((matrix, matrix[::-1])):
        if prod(codes_shape) * 2 != experts * rows * columns:
            continue
        ways = [
            [lay for k_first in (False, True) if (lay := Lay(experts, rows, k_first)).shape_for(shape, 1, 1)]
            for shape in (codes_shape, scale_shape)
        ]
        if codes_shape[-2:] == (rows // 2, columns) and (shape_hint(nodes[scale]) or ())[-2:-1] == (rows,):
            misplaced = NoMatch(
                "a byte of {} pairs rows of {}, not neighbours along K", nodes[codes], node, progress=0.35
            )
            continue
        blocks, left = divmod(prod(scale_shape), experts * rows)
        if not ways[0]:
            continue
        if not ways[1] or left or not blocks or columns % blocks:
            misplaced = misplaced or NoMatch(
                "the scales {} {} of {} do not lie as [E, N, K/bs]", nodes[scale], scale_shape, node, progress=0.3
            )
            continue
        fmt = replace(NVFP4, block_size=columns // blocks)
        for lays in ((a, b) for a in ways[0] for b in ways[1]):
            for global_place, table in _factors(floats, nodes, experts, rows):
                axes = [None] if global_place is None else grains(shape_hint(nodes[global_place]) or (), experts, rows)
                for grain in axes:
                    yield Decoded(
                        Roles(codes, scale, global_place, table),
                        Codes(lays[0]),
                        Scales(lays[1], torch.uint8),
                        None if grain is None else Globals(experts, rows, grain),
                        fmt,
                        (experts, rows, columns),
                        bool(transposed),
                    )
    if misplaced is not None:
        raise misplaced


def _roles(node: fx.Node, origins: Sequence[Origin], nodes: Sequence[fx.Node]) -> tuple[int, int, list[int | None]]:
    """Places of codes and scales, and of what may be a factor (None: nothing is)."""
    packed = [place for place, origin in enumerate(origins) if origin.kind == "bytes"]
    inputs: list[int | None] = [place for place, origin in enumerate(origins) if origin.kind == "floats"]
    if len(packed) != 2:
        raise NoMatch("{} comes from {} byte tensors, not from codes and scales", node, len(packed), node=node)
    packed.sort(key=lambda place: -prod(shape_hint(nodes[place]) or ()))
    if len(inputs) > 2:
        named = [nodes[place] for place in inputs if place is not None]
        raise NoMatch("{} reads the float inputs {}, not one global scale", node, named, node=node, progress=0.3)
    if not inputs:
        rest = enumerate(nodes)
        inputs = [None, *(i for i, n in rest if dtype_of(n) in WIDE_FLOATS and constant_value(n) is not None)]
    return packed[0], packed[1], inputs


def _factors(
    floats: Sequence[int | None], nodes: Sequence[fx.Node], experts: int, rows: int
) -> Iterator[tuple[int | None, int | None]]:
    """Which float is the global scale, and which a table of e2m1 values."""
    given = [place for place in floats if place is not None and nodes[place].op != "get_attr"]
    if not given:
        yield from ((place, None) for place in floats)
        return
    shapes = {place: shape_hint(nodes[place]) or () for place in given}
    for table in (None, *(place for place in given if shapes[place] in TABLES)):
        others = [place for place in given if place != table]
        if len(others) > 1:
            continue
        yield (others[0] if others else None), table
    for place, shape in shapes.items():
        if shape not in TABLES and not may_scale(shape, experts, rows):
            raise NoMatch("{} {} is no global scale of {} experts", nodes[place], shape, experts, progress=0.3)


def _verified(node: fx.Node, nodes: Sequence[fx.Node], reading: Decoded, picks: Picks | None) -> Decoded:
    """Run the piece on random bytes, small if it can be, and compare."""
    experts, rows, _ = reading.shape
    sizes = [(min(experts, 2), min(rows, 24)), (min(experts, 2), rows)]
    if prod(reading.shape) <= _MAX_FULL_PROBE:
        sizes.append((experts, rows))
    with isolated():
        for attempt, size in enumerate(sizes):
            try:
                return _compared(node, nodes, reading, picks, *size)
            except NoMatch as miss:
                if miss.progress > 0 or attempt == len(sizes) - 1:  # it ran, and differed
                    raise
    raise AssertionError("every size was tried")


def _compared(
    node: fx.Node, nodes: Sequence[fx.Node], reading: Decoded, picks: Picks | None, experts: int, rows: int
) -> Decoded:
    """``reading`` with all that was open decided; on a probe of so many experts and rows."""
    generator = torch.Generator().manual_seed(0)
    lowest = _lowest_precision(nodes)
    blocks = experts * rows * (reading.shape[2] // reading.format.block_size)
    probes: list[_Probe] = []
    for run in range(max(-(-_MIN_BLOCKS // blocks), 3 if reading.roles.table is not None else 2)):
        exact = reading.global_scale is None or run == 0
        feeds = _feeds(nodes, reading, experts, rows, generator, narrow=lowest is torch.float16, exact=exact)
        out = _run(node, {nodes[place]: value for place, value in feeds.items()}, picks, experts)
        got = out.mT if reading.transposed else out
        want = (experts, rows, reading.shape[2])
        if got.shape != want:
            raise NoMatch("{} has shape {} in a probe of {}", node, tuple(got.shape), want)
        probes.append(_Probe(feeds, got, 0.0 if exact else _TOLERANCE.get(lowest, 1e-6)))
    size, errors = (experts, rows), dict[Decoded, float]()
    for other in _variants(reading, dtype_of(nodes[reading.roles.scale])):
        errors[other] = next((error for probe in probes if (error := probe.excess(other, size, lowest))), 0.0)
        if not errors[other]:
            return other
    nearest = min(errors, key=lambda other: errors[other])
    difference = _known_difference(probes[0], list(errors), size, lowest)
    raise NoMatch(
        "{} does not decode as {}: {}",
        node,
        nearest.format,
        difference or f"it differs by {errors[nearest]:.2g} of a weight",
        node=node,
        progress=0.5,
    )


def _run(node: fx.Node, feeds: dict[fx.Node, torch.Tensor], picks: Picks | None, experts: int) -> torch.Tensor:
    """The weight that the piece computes; where one expert is picked, what it computes for each."""
    if picks is None:
        (out,) = evaluate([node], feeds, exact=True)
        return out if out.dim() == 3 else out.unsqueeze(0)
    of_all = evaluate(picks.bases, feeds, exact=True)
    outs = []
    for index in range(experts):
        pairs = zip(picks.nodes, of_all, strict=True)
        picked = {n: v[index] if n.meta["val"].dim() < v.dim() else v[index : index + 1] for n, v in pairs}
        (out,) = evaluate([node], picked, exact=True)
        outs.append(out.reshape(out.shape[-2:]))
    return torch.stack(outs)


def _variants(reading: Decoded, stored: torch.dtype | None) -> Iterator[Decoded]:
    """``reading`` in every format, order of nibbles and direction of the global scale, the usual first."""
    directions = [reading.global_scale]
    if reading.global_scale is not None:
        directions.append(replace(reading.global_scale, inverse=True))
    for high_first in (False, True):
        for factor in directions:
            for base in (NVFP4, MXFP4) if stored is torch.float8_e4m3fn else (MXFP4, NVFP4):
                fmt = _variant(base, reading.format.block_size, factor is not None)
                yield replace(
                    reading,
                    codes=replace(reading.codes, high_first=high_first),
                    scale=replace(reading.scale, dtype=fmt.scale_dtype),
                    global_scale=factor,
                    format=fmt,
                )


def _variant(base: BlockFormat, block_size: int, has_global_scale: bool) -> BlockFormat:
    """``base``, or a format of another name that differs from it as the graph does."""
    if block_size == base.block_size and has_global_scale == base.has_global_scale:
        return base
    name = base.name
    if block_size != base.block_size:
        name += f"_b{block_size}"
    if has_global_scale != base.has_global_scale:
        name += "_global" if has_global_scale else "_no_global"
    return replace(base, name=name, block_size=block_size, has_global_scale=has_global_scale)


def _lowest_precision(nodes: Sequence[fx.Node]) -> torch.dtype:
    """float16 if the piece passes through it, else bfloat16 if through that, else float32."""
    dtypes = {dtype_of(node) for node in nodes}
    return next((dtype for dtype in (torch.float16, torch.bfloat16) if dtype in dtypes), torch.float32)


def _feeds(
    nodes: Sequence[fx.Node],
    reading: Decoded,
    experts: int,
    rows: int,
    generator: torch.Generator,
    *,
    narrow: bool,
    exact: bool,
) -> dict[int, torch.Tensor]:
    """Random values for what the piece reads, by place, as it is stored.

    With ``exact`` global scales are powers of two: no product is rounded then, and the least factor shows.
    """
    roles = reading.roles
    feeds: dict[int, torch.Tensor] = {}
    for place, lay in ((roles.codes, reading.codes.lay), (roles.scale, reading.scale.lay)):
        shape = lay.shape_for(shape_hint(nodes[place]) or (), experts, rows) or ()
        count = prod(shape)
        order = torch.randperm(256 * -(-count // 256), generator=generator)[:count] % 256
        value = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        if place == roles.scale:
            value = order.to(torch.uint8).reshape(shape)
        feeds[place] = value.view(dtype_of(nodes[place]) or torch.uint8)
    if roles.global_scale is not None and reading.global_scale is not None:
        node = nodes[roles.global_scale]
        shape = reading.global_scale.shape_for(shape_hint(node) or (), experts, rows)
        power = torch.empty(shape).uniform_(*((-3, 3) if narrow else (-8, 4)), generator=generator)
        factor = (power.round() if exact else power).exp2()
        feeds[roles.global_scale] = factor.to(dtype_of(node) or torch.float32)
    if roles.table is not None:
        node = nodes[roles.table]
        shape = shape_hint(node) or ()
        drawn = standard_table()[torch.randint(0, 16, shape, generator=generator)]
        feeds[roles.table] = drawn.to(dtype_of(node) or torch.float32)
    return feeds


def _read(feeds: dict[int, torch.Tensor], reading: Decoded, experts: int, rows: int) -> _Sample:
    """What a reading takes the feeds for."""
    roles = reading.roles
    codes_of, scale_of = reading.codes.sized(experts, rows), reading.scale.sized(experts, rows)
    codes = codes_of(feeds[roles.codes], None if roles.table is None else feeds[roles.table])
    bits = scale_of(feeds[roles.scale]).view(torch.uint8)
    factor = torch.ones(1, 1)
    if reading.global_scale is not None and roles.global_scale is not None:
        factor = reading.global_scale.sized(experts, rows)(feeds[roles.global_scale])
    scale = _decode_scale(bits, reading.format).repeat_interleave(reading.format.block_size, dim=-1)
    return _Sample(_decode_codes(codes), scale, factor.double().unsqueeze(-1))


def _decode_scale(bits: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    if fmt.scale_encoding == "e8m0":
        exponent = bits.to(torch.int32) - E8M0_BIAS
        return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent)
    return bits.view(torch.float8_e4m3fn).to(torch.float64)


def _decode_codes(codes: torch.Tensor) -> torch.Tensor:
    return standard_table()[torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).to(torch.int64)]


def _error(got: torch.Tensor, sample: _Sample, lowest: torch.dtype) -> float:
    """Worst relative difference where no dtype of the graph over- or underflows; NaN scales are left out.

    Without a global scale every product is exact, and the reference is rounded as the graph rounds.
    """
    info = torch.finfo(lowest)
    least, most = info.tiny * 4, info.max / 16
    decoded = sample.codes * sample.scale * sample.global_scale
    inside = torch.ones_like(decoded, dtype=torch.bool)
    for step in (sample.scale, sample.scale * sample.global_scale, sample.codes * sample.scale, decoded):
        inside &= (step == 0) | (step.abs() >= least) & (step.abs() <= most)
    want = decoded.to(got.dtype).double() if bool((sample.global_scale == 1).all()) else decoded
    difference = (got.double() - want).abs() / decoded.abs().clamp_min(least)
    difference = torch.where(difference.isnan(), float("inf"), difference)
    return float(torch.where(inside, difference, 0.0).max())


def _known_difference(probe: _Probe, readings: Sequence[Decoded], size: tuple[int, int], lowest: torch.dtype) -> str:
    """A difference that has a name, for the message."""
    for reading in readings:
        sample = _read(probe.feeds, reading, *size)
        named = {
            "it ignores its global scale": replace(sample, global_scale=torch.ones_like(sample.global_scale)),
            "its scales are halved": replace(sample, scale=sample.scale * 0.5),
            "its scales are doubled": replace(sample, scale=sample.scale * 2.0),
        }
        for name, other in named.items():
            if _error(probe.got, other, lowest) <= probe.tolerance:
                return name
    return ""
