"""Recognise the expert activation, with its split into gate and up, by what it computes.

Candidates take their numbers from the graph: literals and constants give alpha, beta and limit, and
0-d inputs may be any of them at run time. Each is compared in float64 with the piece of the graph, on
values small and large and around every number that the piece mentions; then every comparison, clamp
and selection in the piece must be one that the accepted formula makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import isfinite
from typing import Any, Literal

import torch
from torch import fx

from ..matching import NoMatch
from ..reference import activate
from ..spec import RUNTIME, ActivationSpec, GateUpOrder, Operand, Runtime
from .probing import WIDE_FLOATS, cone, constant_value, dtype_of, evaluate, isolated, shape_hint
from .resizing import op_name, probe_shapes
from .signature import Memo, signature

Kind = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
_KINDS: tuple[Kind, ...] = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
_KNOBS = {"alpha": Operand.ALPHA, "beta": Operand.BETA, "limit": Operand.LIMIT}

_MAX_NODES = 100
_ROWS = 64
_MIN_PAIRS = 8192
"""Pairs of gate and up that every accepted formula has been tried on."""
_RELATIVE, _ABSOLUTE = 1e-7, 1e-12
"""Constants that were float32 once differ by 6e-8; gelu and gelu_tanh by 1e-4."""
_AMPLITUDES = (0.05, 1.0, 12.0, 1000.0)
_MAX_POINT = 1e4
"""Values and their reciprocals are probed up to here; a number beyond must be one of the formula's own."""
_MAX_CONSTANTS = 12

CUTTING = {
    "clamp", "clamp_min", "clamp_max", "clip", "minimum", "maximum", "hardtanh", "relu", "where", "masked_fill", "lt",
    "le", "gt", "ge",
}  # fmt: skip
"""The selecting operations that a formula of the catalogue may be spelled with."""

SELECTING = CUTTING | {
    "fmin", "fmax", "relu6", "threshold", "hardsigmoid", "hardswish", "leaky_relu", "eq", "ne", "isfinite", "isnan",
    "isinf", "nan_to_num", "sign", "sgn", "signbit", "abs", "floor", "ceil", "round", "trunc", "fmod", "remainder",
    "copysign", "heaviside", "elu", "celu", "selu", "softplus", "softshrink", "hardshrink",
}  # fmt: skip
"""Operations that treat some values unlike others, so that no finite number of probes speaks for all."""

_LOGICAL = {
    "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not", "__and__", "__or__",
}  # fmt: skip

_LAYOUT = {
    "split", "split_with_sizes", "chunk", "unbind", "slice", "select", "view", "reshape", "_unsafe_view", "clone",
    "expand", "unsqueeze", "squeeze", "permute", "transpose", "_to_copy", "convert_element_type", "lift_fresh_copy",
    "alias", "detach", "full", "scalar_tensor", "getitem", "copy", "masked_fill", "where", "fma", "contiguous",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class IdentifiedActivation:
    """What a piece of a graph between two expert GEMMs computes.

    ``scalars`` are the 0-d inputs behind the spec's RUNTIME fields.
    """

    spec: ActivationSpec
    order: GateUpOrder
    scalars: Mapping[Operand, fx.Node]


@dataclass(frozen=True, slots=True)
class _Knob:
    """A number the formula may use: from the graph's text, or of the 0-d input at ``place`` of the piece."""

    value: float
    place: int | None = None


@dataclass(frozen=True, slots=True)
class _Found:
    spec: ActivationSpec
    order: GateUpOrder
    places: tuple[tuple[Operand, int], ...]


@dataclass(frozen=True, slots=True)
class _Draw:
    """One probe: pre-activations ``[R, W]``, results ``[R, I]``, and the 0-d inputs by place."""

    inputs: torch.Tensor
    outputs: torch.Tensor
    scalars: dict[int, float]


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

    def identify() -> _Found:
        return _identify(nodes, len(given), intermediate_size)

    key = ("activation", intermediate_size, signature(nodes, inputs=len(given)))
    found = identify() if memo is None else memo.get(key, identify)
    return IdentifiedActivation(found.spec, found.order, {operand: nodes[place] for operand, place in found.places})


def _identify(nodes: Sequence[fx.Node], given: int, intermediate_size: int) -> _Found:
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
        found = _search(draws, scalars, constants, gated=width != intermediate_size)
        if found is None:
            raise NoMatch(
                "the activation at {} is none that is known{}",
                nodes[-1],
                _resemblance(draws, constants),
                node=nodes[-1],
            )
    unread = set(scalars) - {place for _, place in found.places}
    if unread:
        raise NoMatch(
            "the scalar input {} plays no part in {}", nodes[min(unread)], found.spec, node=nodes[min(unread)]
        )
    _audit(nodes[given:], found)
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
            if not (size or name in _LAYOUT or (aten and torch.Tag.pointwise in target.tags)):
                raise NoMatch("{} ({}) is no step of an activation", node, target, node=node)
            if dtype_of(node) not in (None, torch.bool, *WIDE_FLOATS):
                raise NoMatch("{} ({}) makes {} of the activation", node, target, dtype_of(node), node=node)
        elif constant_value(node) is None and dtype_of(node) is not None:
            if shape_hint(node) != ():
                raise NoMatch("the activation reads {}, which is no scalar", node, node=node)
            scalars.append(place)
    return scalars


def numbers(node: fx.Node) -> list[float]:
    """The numbers that a node mentions, sizes and axes left out."""
    value = constant_value(node)
    if value is not None:
        return [float(item) for item in value.detach().flatten().tolist()] if value.numel() <= 16 else []
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    name = op_name(node.target)
    pointwise = torch.Tag.pointwise in node.target.tags or name in ("masked_fill", "where")
    if name in ("full", "scalar_tensor"):
        args: Sequence[Any] = node.args[-1:]
    elif pointwise and name not in ("clone", "convert_element_type"):
        args = (*node.args, *(item for key, item in node.kwargs.items() if key in ("min", "max", "other", "alpha")))
    else:
        return []
    return [float(item) for item in args if isinstance(item, (int, float)) and not isinstance(item, bool)]


def _draw(
    nodes: Sequence[fx.Node], given: int, scalars: Sequence[int], constants: Sequence[float], intermediate_size: int
) -> list[_Draw]:
    generator = torch.Generator().manual_seed(0)
    draws: list[_Draw] = []
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
) -> _Draw:
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
        return _Draw(inputs.reshape(-1, inputs.shape[-1]), out.reshape(-1, intermediate_size), scalars)
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


def _search(
    draws: Sequence[_Draw], scalars: Sequence[int], constants: Sequence[float], *, gated: bool
) -> _Found | None:
    """The first formula that agrees with every draw: on a few rows, then on all."""
    orders = list(GateUpOrder) if gated else [GateUpOrder.GATE_UP]
    for spec, places in _candidates(scalars, constants, gated=gated):
        for order in orders:
            if all(_agrees(draw, spec, order, places, few=True) for draw in draws) and all(
                _agrees(draw, spec, order, places, few=False) for draw in draws
            ):
                return _Found(spec, order, tuple((_KNOBS[name], place) for name, place in places.items()))
    return None


def _candidates(
    scalars: Sequence[int], constants: Sequence[float], *, gated: bool
) -> Iterator[tuple[ActivationSpec, dict[str, int]]]:
    """Every formula that numbers of the graph can fill, the plainest first; RUNTIME knobs by place."""
    runtime = [_Knob(0.0, place) for place in scalars]
    literals = [_Knob(number) for number in constants if isfinite(number)]
    positive = [knob for knob in literals if knob.value > 0]
    signed = [*literals, *(_Knob(-knob.value) for knob in positive)]
    limits: list[_Knob | None] = [None, *positive, *runtime] if gated else [None]
    for limit in limits:
        for beta in [_Knob(0.0), *(k for k in signed if k.value != 0), *runtime] if gated else [_Knob(0.0)]:
            for kind in _KINDS:
                alphas = [_Knob(1.0), *(k for k in positive if k.value != 1), *runtime] if kind == "silu" else []
                for alpha in alphas or [_Knob(1.0)]:
                    used = {"alpha": alpha, "beta": beta, "limit": limit}
                    places = {name: knob.place for name, knob in used.items() if knob and knob.place is not None}
                    if len(set(places.values())) == len(places):
                        spec = ActivationSpec(
                            kind, gated, _field(alpha), _field(beta), None if limit is None else _field(limit)
                        )
                        yield spec, places


def _field(knob: _Knob) -> float | Runtime:
    return knob.value if knob.place is None else RUNTIME


def _agrees(draw: _Draw, spec: ActivationSpec, order: GateUpOrder, places: Mapping[str, int], *, few: bool) -> bool:
    rows = slice(0, max(1, 512 // draw.outputs.shape[-1])) if few else slice(None)
    given: dict[str, Any] = {name: draw.scalars[place] for name, place in places.items()}
    want = activate(draw.inputs[rows], replace(spec, **given), order)
    return close(draw.outputs[rows], want, _magnitude(draw.inputs[rows], order, gated=spec.gated))


def _magnitude(inputs: torch.Tensor, order: GateUpOrder, *, gated: bool) -> torch.Tensor:
    """How large the factors of each result may be: bounds what cancellation costs in float64."""
    sizes = 1 + inputs.abs()
    if not gated:
        return sizes.square()
    if order is GateUpOrder.INTERLEAVED:
        return sizes[..., ::2] * sizes[..., 1::2]
    gate, up = torch.tensor_split(sizes, 2, dim=-1)
    return gate * up


def close(got: torch.Tensor, want: torch.Tensor, magnitude: torch.Tensor | float = 1.0) -> bool:
    """Whether two float64 tensors are one formula's values up to rounding."""
    error = (got - want).abs()
    near = want.isfinite() & (error <= _RELATIVE * want.abs() + _ABSOLUTE * magnitude)  # all is near to infinity
    return bool((near | (got == want)).all())


def _audit(nodes: Sequence[fx.Node], found: _Found) -> None:
    """Every step that selects or cuts must use a number of the accepted formula, and so must the far-out ones.

    Raises:
        NoMatch: one does not.
    """
    known = {0.0} if found.spec.kind in ("relu", "relu2") else set()
    if isinstance(found.spec.limit, float):
        known |= {found.spec.limit, -found.spec.limit}
    for node in nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        name = op_name(node.target)
        if name not in SELECTING and not (dtype_of(node) is torch.bool and name not in _LOGICAL | _LAYOUT):
            continue
        mentioned = [0.0] if name == "relu" else numbers(node)
        for source in node.all_input_nodes:
            mentioned += [] if source.all_input_nodes else numbers(source)
        by_value = name in ("where", "masked_fill") or bool(mentioned) or found.spec.limit is RUNTIME
        if name not in CUTTING or not by_value or not known.issuperset(mentioned):
            raise NoMatch("{} ({}) is no step of {}", node, node.target, found.spec, node=node)
    own = {
        0.0,
        *(abs(knob) for knob in (found.spec.alpha, found.spec.beta, found.spec.limit) if isinstance(knob, float)),
    }
    for node in nodes:
        for number in map(abs, numbers(node)):
            if number not in own and not 1 / _MAX_POINT <= number <= _MAX_POINT:
                raise NoMatch("{} is no number of {}", number, found.spec, node=node)


def _resemblance(draws: Sequence[_Draw], constants: Sequence[float]) -> str:
    """What the piece nearly is, for the message."""
    named = {
        "clamped after the activation": lambda act, gate, up, c: act(gate).clamp(max=c) * up.clamp(-c, c),
        "the gate clamped on both sides": lambda act, gate, up, c: act(gate.clamp(-c, c)) * up.clamp(-c, c),
        "only the gate clamped": lambda act, gate, up, c: act(gate.clamp(max=c)) * up,
        "only up clamped": lambda act, gate, up, c: act(gate) * up.clamp(-c, c),
        "interleaved, up first": lambda act, gate, up, c: act(gate) * up,
    }
    draw = draws[0]
    if draw.inputs.shape[-1] == draw.outputs.shape[-1]:
        return ""
    half = draw.outputs.shape[-1]
    splits = {
        GateUpOrder.GATE_UP: (draw.inputs[:, :half], draw.inputs[:, half:]),
        GateUpOrder.INTERLEAVED: (draw.inputs[:, 1::2], draw.inputs[:, ::2]),
    }
    for kind, (name, formula), number in product(_KINDS, named.items(), constants or (1.0,)):
        spec = ActivationSpec(kind, gated=False)
        for order, (gate, up) in splits.items():
            want = formula(partial(activate, activation=spec, order=order), gate, up, number)
            if close(draw.outputs, want, _magnitude(draw.inputs, order, gated=True)):
                return f": it is {kind} with {name}"
    return ""
