"""Recognise FP4 weights behind any spelling of their dequantisation.

The float weight of a GEMM is followed back to its roots, the packed codes and scales. What lies
between is run bit by bit on random bytes and compared with the decode of the formats in
``formats.py``; nothing depends on which operations spell it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import fx

from ..formats import E2M1_VALUES, E8M0_BIAS, MXFP4, NVFP4, BlockFormat
from ..matching import NoMatch, PackedWeight
from .probing import cone, constant_value, dtype_of, evaluate, isolated, shape_hint
from .signature import Memo, signature

_CODES = (torch.uint8, torch.int8)
_SCALES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_MAX_CONE = 4000
_MAX_FULL_PROBE = 1 << 25
"""Weights that are probed at full size where the graph does not let itself be shrunk."""
_MIN_BLOCKS = 768
"""Blocks to look at: every scale byte three times, and 4096 codes or more."""

_TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 2e-3}
"""Three roundings, of global scale, scale and product; float32 has 1e-6. Only a global scale needs any."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """One way to take the roots: which is what, and how the weight lies. Roots are places in the cone."""

    codes: int
    scale: int
    global_scale: int | None
    format: BlockFormat
    shape: tuple[int, int, int]
    transposed: bool


@dataclass(frozen=True, slots=True)
class _Sample:
    """Random roots by place in the cone, and their decoded factors, float64, broadcastable to ``[E, N, K]``."""

    roots: dict[int, torch.Tensor]
    codes: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor


def identify_packed_weight(node: fx.Node, memo: Memo | None = None) -> PackedWeight:
    """The packed weight that ``node`` dequantises; see ``identify``."""
    return identify(node, memo)[0]


def identify(node: fx.Node, memo: Memo | None = None) -> tuple[PackedWeight, bool]:
    """The packed weight that ``node`` dequantises, and whether ``node`` holds it transposed.

    Args:
        node: float weight of a GEMM, ``[E, N, K]``, or ``[E, K, N]`` (transposed).
        memo: remembers what equal cones are.

    Raises:
        NoMatch: ``node`` is not FP4 codes and scales decoded as one of the formats is.
    """
    shape = shape_hint(node)
    if shape is None or len(shape) != 3 or dtype_of(node) not in _FLOATS:
        raise NoMatch("{} is not a float tensor of rank 3", node, node=node)
    nodes = cone([node], ())
    if len(nodes) > _MAX_CONE:
        raise NoMatch("{} depends on {} nodes: no weight", node, len(nodes), node=node)
    found = _identify(node, nodes) if memo is None else memo.get(signature(nodes), lambda: _identify(node, nodes))
    global_scale = None if found.global_scale is None else nodes[found.global_scale]
    packed = PackedWeight(nodes[found.codes], nodes[found.scale], global_scale, found.format, found.shape)
    return packed, found.transposed


def _identify(node: fx.Node, nodes: Sequence[fx.Node]) -> _Reading:
    miss: NoMatch | None = None
    for reading in _readings(node, nodes):
        try:
            _verify(node, nodes, reading)
        except NoMatch as error:
            if miss is None or error.progress > miss.progress:
                miss = error
        else:
            return reading
    raise miss or NoMatch("{} has no shape that its codes could fill", node, node=node, progress=0.2)


def _readings(node: fx.Node, nodes: Sequence[fx.Node]) -> Iterator[_Reading]:
    """Every assignment of roles to roots whose shapes fit."""
    codes, scale, floats = _roots(node, nodes)
    experts, first, second = shape_hint(node) or (0, 0, 0)
    scale_dtype = dtype_of(scale)
    for transposed, (rows, columns) in enumerate(((first, second), (second, first))):
        if not _leads(codes, experts, rows) or prod(shape_hint(codes) or ()) * 2 != experts * rows * columns:
            continue
        blocks, rest = divmod(prod(shape_hint(scale) or ()), experts * rows)
        if not _leads(scale, experts, rows) or rest or not blocks or columns % blocks:
            raise NoMatch(
                "the scales {} {} of {} do not lie as [E, N, K/bs]", scale, shape_hint(scale), node, progress=0.3
            )
        for base in (MXFP4, NVFP4):
            if scale_dtype not in (torch.uint8, _scale_dtype(base)):
                continue
            for global_scale in floats:
                yield _Reading(
                    nodes.index(codes),
                    nodes.index(scale),
                    None if global_scale is None else nodes.index(global_scale),
                    _variant(base, columns // blocks, global_scale is not None),
                    (experts, rows, columns),
                    bool(transposed),
                )


def _roots(node: fx.Node, nodes: Sequence[fx.Node]) -> tuple[fx.Node, fx.Node, list[fx.Node | None]]:
    """Codes, scales, and what may be the global scale (None: nothing is)."""
    packed: list[fx.Node] = []
    inputs: list[fx.Node] = []
    constants: list[fx.Node] = []
    for leaf in nodes:
        dtype = dtype_of(leaf)
        if leaf.op == "call_function" or dtype is None:
            continue
        if dtype in (*_CODES, *_SCALES):
            packed.append(leaf)
        elif dtype in _FLOATS:
            (inputs if constant_value(leaf) is None else constants).append(leaf)
        elif constant_value(leaf) is None:
            raise NoMatch("{} reads {} ({}), which is no part of a packed weight", node, leaf, dtype, node=leaf)
    packed.sort(key=lambda leaf: -prod(shape_hint(leaf) or ()))
    if len(packed) != 2 or dtype_of(packed[0]) not in _CODES or dtype_of(packed[1]) not in _SCALES:
        raise NoMatch("{} comes from {} byte tensors, not from codes and scales", node, len(packed), node=node)
    if len(inputs) > 1:
        _refuse_tables(node, inputs)
        raise NoMatch("{} reads the float inputs {}, not one global scale", node, inputs, node=node, progress=0.3)
    candidates: list[fx.Node | None] = list(inputs) if inputs else [None, *constants]
    return packed[0], packed[1], candidates


def _refuse_tables(node: fx.Node, inputs: Sequence[fx.Node]) -> None:
    for leaf in inputs:
        if shape_hint(leaf) in ((8,), (16,), (256,), (256, 2)):
            raise NoMatch(
                "the table {} of e2m1 values is an input of the graph, so its values are not known; "
                "write it as a constant of the graph",
                leaf,
                node=leaf,
                progress=0.4,
            )


def _leads(root: fx.Node, experts: int, rows: int) -> bool:
    shape = shape_hint(root) or ()
    return len(shape) >= 2 and (shape[:2] == (experts, rows) or shape[0] == experts * rows)


def _scale_dtype(fmt: BlockFormat) -> torch.dtype:
    return torch.float8_e8m0fnu if fmt.scale_encoding == "e8m0" else torch.float8_e4m3fn


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


def _verify(node: fx.Node, nodes: Sequence[fx.Node], reading: _Reading) -> None:
    """Run the cone on random roots, small if it can be, and compare."""
    experts, rows, _ = reading.shape
    sizes = [(min(experts, 2), min(rows, 24)), (min(experts, 2), rows)]
    if prod(reading.shape) <= _MAX_FULL_PROBE:
        sizes.append((experts, rows))
    with isolated():
        for attempt, size in enumerate(sizes):
            try:
                _compare(node, nodes, reading, *size)
            except NoMatch as miss:
                if miss.progress > 0 or attempt == len(sizes) - 1:  # it ran, and differed
                    raise
            else:
                return


def _compare(node: fx.Node, nodes: Sequence[fx.Node], reading: _Reading, experts: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lowest = _lowest_precision(nodes)
    blocks = experts * rows * (reading.shape[2] // reading.format.block_size)
    for _ in range(-(-_MIN_BLOCKS // blocks)):
        sample = _sample(nodes, reading, experts, rows, generator, narrow=lowest is torch.float16)
        (out,) = evaluate([node], {nodes[place]: root for place, root in sample.roots.items()}, exact=True)
        got = out.mT if reading.transposed else out
        if got.shape != sample.codes.shape:
            raise NoMatch("{} has shape {} in a probe of {}", node, tuple(got.shape), tuple(sample.codes.shape))
        tolerance = 0.0 if reading.global_scale is None else _TOLERANCE.get(lowest, 1e-6)
        error = _error(got, sample, lowest)
        if error > tolerance:
            reason = _known_difference(got, sample, lowest, tolerance)
            raise NoMatch(
                "{} does not decode as {}: {}",
                node,
                reading.format,
                reason or f"it differs by {error:.2g} of a weight",
                node=node,
                progress=0.5,
            )


def _lowest_precision(nodes: Sequence[fx.Node]) -> torch.dtype:
    """float16 if the cone passes through it, else bfloat16 if through that, else float32."""
    dtypes = {dtype_of(node) for node in nodes}
    return next((dtype for dtype in (torch.float16, torch.bfloat16) if dtype in dtypes), torch.float32)


def _sample(
    nodes: Sequence[fx.Node], reading: _Reading, experts: int, rows: int, generator: torch.Generator, *, narrow: bool
) -> _Sample:
    columns, fmt = reading.shape[2], reading.format
    codes = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, generator=generator)
    blocks = experts * rows * (columns // fmt.block_size)
    order = torch.randperm(256 * -(-blocks // 256), generator=generator)[:blocks] % 256
    bits = order.to(torch.uint8).reshape(experts, rows, -1)
    roots = {
        reading.codes: _as_root(codes, nodes[reading.codes], reading, experts, rows),
        reading.scale: _as_root(bits, nodes[reading.scale], reading, experts, rows),
    }
    factor = torch.ones(1, 1, 1)
    if reading.global_scale is not None:
        root = nodes[reading.global_scale]
        per_expert, per_row = _global_axes(root, reading)
        size = (experts if per_expert else 1, rows if per_row else 1, 1)
        factor = torch.empty(size).uniform_(*((-3, 3) if narrow else (-8, 4)), generator=generator).exp2()
        factor = factor.to(dtype_of(root) or torch.float32)
        axes = iter([size[axis] for axis, kept in enumerate((per_expert, per_row)) if kept])
        shape = shape_hint(root) or ()
        roots[reading.global_scale] = factor.reshape([1 if axis == 1 else next(axes) for axis in shape])
    scale = _decode_scale(bits, fmt).repeat_interleave(fmt.block_size, dim=-1)
    return _Sample(roots, _decode_codes(codes), scale, factor.double())


def _as_root(value: torch.Tensor, root: fx.Node, reading: _Reading, experts: int, rows: int) -> torch.Tensor:
    shape = shape_hint(root) or ()
    lead = (experts, rows) if shape[:2] == reading.shape[:2] else (experts * rows,)
    return value.reshape(*lead, *shape[len(lead) :]).view(dtype_of(root) or torch.uint8)


def _global_axes(root: fx.Node, reading: _Reading) -> tuple[bool, bool]:
    """Whether a global scale differs by expert, and whether by row."""
    experts, rows, _ = reading.shape
    axes = [size for size in shape_hint(root) or () if size != 1]
    for per_expert, per_row in ((False, False), (True, False), (False, True), (True, True)):
        if axes == [size for size, kept in ((experts, per_expert), (rows, per_row)) if kept and size != 1]:
            return per_expert and experts != 1, per_row and rows != 1
    _refuse_tables(root, [root])
    raise NoMatch("{} {} is no global scale of {} experts", root, shape_hint(root), experts, node=root, progress=0.3)


def _decode_scale(bits: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    if fmt.scale_encoding == "e8m0":
        exponent = bits.to(torch.int32) - E8M0_BIAS
        return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent)
    return bits.view(torch.float8_e4m3fn).to(torch.float64)


def _decode_codes(codes: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=torch.float64)
    return table[torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).to(torch.int64)]


def _error(got: torch.Tensor, sample: _Sample, lowest: torch.dtype) -> float:
    """Worst relative difference where no dtype of the graph over- or underflows; NaN scales are left out.

    Without a global scale every product is exact, and the reference is rounded as the graph rounds.
    """
    info = torch.finfo(lowest)
    least, most = info.tiny * 4, info.max / 16
    scale = sample.scale * sample.global_scale
    decoded = sample.codes * scale
    inside = (scale == 0) | (scale.abs() >= least) & (scale.abs() <= most)
    inside &= (decoded == 0) | (decoded.abs() >= least) & (decoded.abs() <= most)
    want = decoded.to(got.dtype).double() if bool((sample.global_scale == 1).all()) else decoded
    difference = (got.double() - want).abs() / decoded.abs().clamp_min(least)
    difference = torch.where(difference.isnan(), float("inf"), difference)
    return float(torch.where(inside, difference, 0.0).max())


def _known_difference(got: torch.Tensor, sample: _Sample, lowest: torch.dtype, tolerance: float) -> str:
    """A difference that has a name, for the message."""
    swapped = sample.codes.reshape(*sample.codes.shape[:-1], -1, 2).flip(-1).flatten(-2)
    half, double = (replace(sample, scale=sample.scale * factor) for factor in (0.5, 2.0))
    named = {
        "it takes the high nibble of a byte first": replace(sample, codes=swapped),
        "it divides by its global scale": replace(sample, global_scale=1 / sample.global_scale),
        "it ignores its global scale": replace(sample, global_scale=torch.ones_like(sample.global_scale)),
        "its scales are halved": half,
        "its scales are doubled": double,
    }
    return next((name for name, other in named.items() if _error(got, other, lowest) <= tolerance), "")
