"""Recognise the expert activation, with its split into gate and up, by what it computes.

Candidates take their numbers from the graph: literals and constants give alpha, beta and limit, and
0-d inputs may be any of them at run time. Each is compared in float64 with the piece of the graph, on
values small and large and around every number that the piece mentions; then every comparison, clamp
and selection in the piece must be one that the accepted formula makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isinf, prod
from typing import Any

import torch
from torch import fx

from ..matching import NoMatch
from ..spec import ACTIVATION_KNOBS, RUNTIME, ActivationSpec, GateUpOrder, Operand
from .activation_catalogue import Draw, Formula, find_formula, resemblance
from .probing import WIDE_FLOATS, cone, constant_value, dtype_of, evaluate, isolated, shape_hint
from .resizing import op_name, probe_shapes
from .signature import Memo, signature
from .steps import CLAMPS, CUTTING, LAYOUT, LOGICAL, SELECTING, numbers

_MAX_NODES = 100
_ROWS = 64
_MIN_PAIRS = 8192
"""Pairs of gate and up that every accepted formula has been tried on."""
_AMPLITUDES = (0.05, 1.0, 12.0, 1000.0)
_MAX_POINT = 1e4
"""Values and their reciprocals are probed up to here; a number beyond must be one of the formula's own."""
_MAX_CONSTANTS = 12


@dataclass(frozen=True, slots=True)
class IdentifiedActivation:
    """What a piece of a graph between two expert GEMMs computes.

    ``scalars`` are the 0-d inputs behind the spec's RUNTIME fields.
    """

    spec: ActivationSpec
    order: GateUpOrder
    scalars: Mapping[Operand, fx.Node]


def identify_activation(
    result: fx.Node, gemm_outputs: Sequence[fx.Node], intermediate_size: int, memo: Memo | None = None
) -> IdentifiedActivation:
    """The activation that computes ``result`` from ``gemm_outputs``.

    Args:
        result: ``[..., I]``.
        gemm_outputs: one of ``[..., 2I]``, or ``[..., I]`` if not gated; or gate and up apart, in either order,
            ``[..., I]`` each. Biases are already added.
        intermediate_size: I.
        memo: remembers what equal pieces are.

    Raises:
        NoMatch: it is none of the catalogue, or has steps that the formula found does not explain.
    """
    given = list(gemm_outputs)
    nodes = [*given, *cone([result], given)]
    for output in given:
        if not any(output in node.all_input_nodes for node in nodes):
            raise NoMatch("{} does not depend on {}", result, output, node=result)
    if len(nodes) > _MAX_NODES:
        raise NoMatch("{} nodes between two expert GEMMs are no activation", len(nodes), node=result)

    def identify() -> Formula:
        return _identify(nodes, len(given), intermediate_size)

    key = ("activation", intermediate_size, signature(nodes, inputs=len(given)))
    found = identify() if memo is None else memo.get(key, identify)
    operands = {ACTIVATION_KNOBS[name]: nodes[place] for name, place in found.places}
    return IdentifiedActivation(found.spec, found.order, operands)


def _identify(nodes: Sequence[fx.Node], given: int, intermediate_size: int) -> Formula:
    """``nodes`` are the ``given`` pre-activations, then the piece in topological order, the result last."""
    width = sum((shape_hint(node) or (0,))[-1] for node in nodes[:given])
    if width not in (intermediate_size, 2 * intermediate_size) or width % given:
        raise NoMatch("{} is neither {} nor twice as wide", nodes[0], intermediate_size, node=nodes[0])
    scalars = _check_steps(nodes, given)
    constants = sorted({abs(number) for node in nodes[given:] for number in numbers(node)})
    if len(constants) > _MAX_CONSTANTS:
        raise NoMatch("{} mentions {} different numbers: no activation", nodes[-1], len(constants), node=nodes[-1])
    with isolated():
        draws = _draw(nodes, given, scalars, constants, intermediate_size)
        found = find_formula(draws, scalars, constants, gated=width != intermediate_size)
        if found is None:
            near = resemblance(draws[0], constants)
            raise NoMatch("the activation at {} is none that is known{}", nodes[-1], near, node=nodes[-1])
    unread = set(scalars) - {place for _, place in found.places}
    if unread:
        raise NoMatch(
            "the scalar input {} plays no part in {}", nodes[min(unread)], found.spec, node=nodes[min(unread)]
        )
    _audit(nodes[given:], found.spec)
    return found


def _check_steps(nodes: Sequence[fx.Node], given: int) -> list[int]:
    """Places of the 0-d inputs; refuses steps that are not elementwise."""
    scalars = []
    for place, node in enumerate(nodes[given:], start=given):
        if node.op == "call_function":
            target: Any = node.target
            aten = isinstance(target, torch._ops.OpOverload)
            name = op_name(target) if aten else getattr(target, "__name__", str(target))
            size = isinstance(node.meta.get("val"), (int, torch.SymInt))
            if not (size or name in LAYOUT or (aten and torch.Tag.pointwise in target.tags)):
                raise NoMatch("{} ({}) is no step of an activation", node, target, node=node)
            if dtype_of(node) not in (None, torch.bool, *WIDE_FLOATS):
                raise NoMatch("{} ({}) makes {} of the activation", node, target, dtype_of(node), node=node)
        elif constant_value(node) is None and dtype_of(node) is not None:
            if shape_hint(node) != ():
                raise NoMatch("the activation reads {}, which is no scalar", node, node=node)
            scalars.append(place)
    return scalars


def _draw(
    nodes: Sequence[fx.Node], given: int, scalars: Sequence[int], constants: Sequence[float], intermediate_size: int
) -> list[Draw]:
    generator = torch.Generator().manual_seed(0)
    draws: list[Draw] = []
    pairs = 0
    while pairs < _MIN_PAIRS or len(draws) < (3 if scalars else 1):
        values = {place: 0.5 + 2 * float(torch.rand((), generator=generator)) for place in scalars}
        draw = _run(nodes, given, values, [*constants, *values.values()], intermediate_size, generator)
        draws.append(draw)
        pairs += draw.outputs.numel()
    return draws


def _run(
    nodes: Sequence[fx.Node],
    given: int,
    scalars: dict[int, float],
    constants: Sequence[float],
    intermediate_size: int,
    generator: torch.Generator,
) -> Draw:
    miss: NoMatch | None = None
    *leading, width = shape_hint(nodes[0]) or (0,)
    for small in probe_shapes((*leading, width * given), _ROWS):
        inputs = probe_values(small, constants, generator)
        feeds = {nodes[place]: torch.tensor(value, dtype=torch.float64) for place, value in scalars.items()}
        feeds |= dict(zip(nodes[:given], inputs.chunk(given, dim=-1), strict=True))
        try:
            (out,) = evaluate([nodes[-1]], feeds)
        except NoMatch as error:
            miss = error
            continue
        if out.numel() * inputs.shape[-1] != inputs.numel() * intermediate_size or out.shape[-1] != intermediate_size:
            raise NoMatch("{} has shape {}, not {} columns", nodes[-1], tuple(out.shape), intermediate_size)
        return Draw(inputs.reshape(-1, inputs.shape[-1]), out.reshape(-1, intermediate_size), scalars)
    raise miss or NoMatch("{} has no rows", nodes[0], node=nodes[0])


def probe_values(shape: Sequence[int], constants: Sequence[float], generator: torch.Generator) -> torch.Tensor:
    """float64 values of many amplitudes, and around each of ``constants`` on both sides of zero."""
    points = [0.0]
    for number in constants:
        for size in {abs(number), 1 / abs(number)} if number else ():
            if 1 / _MAX_POINT <= size <= _MAX_POINT:
                points += [size * factor for factor in (1.5, 1.001, 0.999, 1.0, 3.0)]
    scales = torch.tensor(_AMPLITUDES, dtype=torch.float64)
    normal = torch.randn(*shape, dtype=torch.float64, generator=generator)
    scale = scales[torch.randint(0, len(scales), tuple(shape), generator=generator)]
    near = torch.tensor(points, dtype=torch.float64)[torch.randint(0, len(points), tuple(shape), generator=generator)]
    return torch.where(torch.rand(*shape, generator=generator) < 0.4, near * normal.sign(), normal * scale)


def _audit(nodes: Sequence[fx.Node], spec: ActivationSpec) -> None:
    """Every step that selects or cuts must use a number of the accepted formula, and so must the far-out ones.

    Raises:
        NoMatch: one does not.
    """
    known: set[float] = {0.0} if spec.kind in ("relu", "relu2") else set()
    limits = [limit for limit in (spec.limit, spec.up_limit) if limit is not None and spec.bound != "softcap"]
    known |= {sign * limit for limit in limits if isinstance(limit, float) for sign in (1, -1)}
    fixed = _fixed(nodes)
    for node in nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            _check_selection(node, spec, known, fixed, runtime=RUNTIME in limits)
    own = {abs(knob) for knob in (getattr(spec, name) for name in ACTIVATION_KNOBS) if isinstance(knob, float)}
    for node in nodes:
        for number in map(abs, numbers(node)):
            unbounded = isinf(number) and _clamps(node)
            if not (number == 0 or number in own or unbounded or 1 / _MAX_POINT <= number <= _MAX_POINT):
                raise NoMatch("{} is no number of {}", number, spec, node=node)


def _fixed(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[float]]:
    """The values of the nodes that depend on constants alone."""
    fixed: dict[fx.Node, list[float]] = {}
    for node in nodes:
        shape = shape_hint(node)
        if shape is None or not all(source in fixed for source in node.all_input_nodes):
            continue
        if node.all_input_nodes and prod(shape) <= _MAX_CONSTANTS:
            fixed[node] = evaluate([node], {})[0].flatten().tolist()
        elif mentioned := numbers(node):
            fixed[node] = mentioned
    return fixed


def _check_selection(
    node: fx.Node, spec: ActivationSpec, known: set[float], fixed: Mapping[fx.Node, list[float]], *, runtime: bool
) -> None:
    """Refuse a step that selects by anything but ``known`` numbers, or limits that come at run time."""
    target: Any = node.target
    name = op_name(target)
    if name not in SELECTING and not (dtype_of(node) is torch.bool and name not in LOGICAL | LAYOUT):
        return
    mentioned = [0.0] if name == "relu" else numbers(node)
    for source in node.all_input_nodes:
        mentioned += fixed.get(source, [])
    by_value = name in ("where", "masked_fill") or bool(mentioned) or runtime
    if name in CLAMPS:  # which at infinity do nothing
        mentioned = [number for number in mentioned if not isinf(number)]
    if name not in CUTTING or not by_value or not known.issuperset(mentioned):
        raise NoMatch("{} ({}) is no step of {}", node, target, spec, node=node)


def _clamps(node: fx.Node) -> bool:
    """Whether ``node`` clamps, or is a constant that only clamps read."""
    reads = [node] if node.all_input_nodes else list(node.users)
    return all(isinstance(n.target, torch._ops.OpOverload) and op_name(n.target) in CLAMPS for n in reads)
