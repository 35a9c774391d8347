"""The closed catalogue of expert activations, filled with the numbers of a graph and compared with its values.

A gated activation is a product of one factor of gate and one of up. Every candidate of either factor is computed
once, on a few values, and only the pairs whose product agrees are tried in full.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import isfinite
from typing import Literal, TypeAlias

import torch

from ..reference import activate, gate_factor, split_gate_up, up_factor
from ..spec import RUNTIME, ActivationSpec, GateUpOrder, Runtime
from .steps import close, near

Kind: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
Bound: TypeAlias = Literal["clamp", "clamp_activated", "softcap"]
_KINDS: tuple[Kind, ...] = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
_BOUNDS: tuple[Bound, ...] = ("clamp", "clamp_activated", "softcap")
_FEW = 48
"""Pairs of gate and up on which factors are paired."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One probe: pre-activations ``[R, W]``, results ``[R, I]``, and the 0-d inputs by place."""

    inputs: torch.Tensor
    outputs: torch.Tensor
    scalars: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Knob:
    """A number that a formula may use: from the graph's text, or of the 0-d input at ``place`` of the piece."""

    value: float
    place: int | None = None

    def at(self, draw: Draw) -> float:
        return self.value if self.place is None else draw.scalars[self.place]

    @property
    def field(self) -> float | Runtime:
        return self.value if self.place is None else RUNTIME


_ONE, _ZERO = Knob(1.0), Knob(0.0)


@dataclass(frozen=True, slots=True)
class _Gate:
    """A candidate of the gate's factor."""

    kind: Kind
    alpha: Knob
    limit: Knob | None
    bound: Bound

    def __call__(self, gate: torch.Tensor, draw: Draw) -> torch.Tensor:
        limit = None if self.limit is None else self.limit.at(draw)
        return gate_factor(gate, ActivationSpec(self.kind, alpha=self.alpha.at(draw), limit=limit, bound=self.bound))


@dataclass(frozen=True, slots=True)
class _Up:
    """A candidate of up's factor."""

    beta: Knob
    limit: Knob | None
    bound: Bound

    def __call__(self, up: torch.Tensor, draw: Draw) -> torch.Tensor:
        limit = None if self.limit is None else self.limit.at(draw)
        return up_factor(up, ActivationSpec("silu", beta=self.beta.at(draw), limit=limit, bound=self.bound))


@dataclass(frozen=True, slots=True)
class Formula:
    """An activation of the catalogue; ``knobs`` by field of its spec, those that it leaves at rest included."""

    spec: ActivationSpec
    order: GateUpOrder
    knobs: Mapping[str, Knob]

    @property
    def places(self) -> tuple[tuple[str, int], ...]:
        """Fields that are RUNTIME, and the places of their inputs."""
        return tuple((name, knob.place) for name, knob in self.knobs.items() if knob.place is not None)

    def agrees(self, draw: Draw) -> bool:
        spec = replace(self.spec, **{name: knob.at(draw) for name, knob in self.knobs.items()})  # type: ignore[arg-type]
        want = activate(draw.inputs, spec, self.order)
        return close(draw.outputs, want, magnitude(draw.inputs, self.order, gated=spec.gated))


def find_formula(
    draws: Sequence[Draw], scalars: Sequence[int], constants: Sequence[float], *, gated: bool
) -> Formula | None:
    """The plainest formula that agrees with every draw.

    Args:
        scalars: places of the piece's 0-d inputs.
        constants: the sizes of the numbers that the piece mentions.
    """
    found = _gated(draws, scalars, constants) if gated else _plain(scalars, constants)
    return next((formula for formula in found if all(map(formula.agrees, draws))), None)


def _plain(scalars: Sequence[int], constants: Sequence[float]) -> Iterator[Formula]:
    for gate in _gates(scalars, constants):
        knobs = {"alpha": gate.alpha} | ({} if gate.limit is None else {"limit": gate.limit})
        if _distinct(knobs):
            yield _formula(gate.kind, gate.bound, False, knobs, GateUpOrder.GATE_UP)


def _gated(draws: Sequence[Draw], scalars: Sequence[int], constants: Sequence[float]) -> Iterator[Formula]:
    gates, ups = list(_gates(scalars, constants)), list(_ups(scalars, constants))
    for order in GateUpOrder:
        for gate, up in _pairs(draws, order, gates, ups):
            knobs = {"alpha": gate.alpha, "beta": up.beta}
            if gate.limit is not None:
                assert up.limit is not None
                knobs |= {"limit": gate.limit} | ({} if up.limit == gate.limit else {"up_limit": up.limit})
            if _distinct(knobs):
                yield _formula(gate.kind, gate.bound, True, knobs, order)


def _formula(kind: Kind, bound: Bound, gated: bool, knobs: Mapping[str, Knob], order: GateUpOrder) -> Formula:
    fields = {name: knob.field for name, knob in knobs.items()}
    return Formula(ActivationSpec(kind, gated, bound=bound, **fields), order, knobs)


def _distinct(knobs: Mapping[str, Knob]) -> bool:
    """Whether no input plays two parts."""
    places = [knob.place for knob in knobs.values() if knob.place is not None]
    return len(set(places)) == len(places)


def _gates(scalars: Sequence[int], constants: Sequence[float]) -> Iterator[_Gate]:
    """Every factor of gate that the numbers can fill, the plainest first."""
    positive = [Knob(number) for number in constants if number > 0 and isfinite(number)]
    runtime = [Knob(0.0, place) for place in scalars]
    for limit, kind in product([None, *positive, *runtime], _KINDS):
        alphas = [_ONE, *(knob for knob in positive if knob != _ONE), *runtime] if kind == "silu" else [_ONE]
        for alpha, bound in product(alphas, _BOUNDS[: 1 if limit is None else None]):
            yield _Gate(kind, alpha, limit, bound)


def _ups(scalars: Sequence[int], constants: Sequence[float]) -> Iterator[_Up]:
    """Every factor of up that the numbers can fill, the plainest first."""
    positive = [Knob(number) for number in constants if number > 0 and isfinite(number)]
    runtime = [Knob(0.0, place) for place in scalars]
    # A beta of one need not stand in the graph: ``glu * up + glu``.
    signed = dict.fromkeys([_ONE, *positive, *(Knob(-knob.value) for knob in positive)])
    betas = [_ZERO, *signed, *runtime]
    for limit, beta in product([None, *positive, *runtime], betas):
        for bound in ("clamp",) if limit is None else ("clamp", "softcap"):
            yield _Up(beta, limit, bound)  # type: ignore[arg-type]


def _pairs(
    draws: Sequence[Draw], order: GateUpOrder, gates: Sequence[_Gate], ups: Sequence[_Up]
) -> Iterator[tuple[_Gate, _Up]]:
    """The pairs that agree with every draw on a few values."""
    groups: list[tuple[list[_Gate], list[_Up]]] = [
        ([g for g in gates if g.limit is None], [u for u in ups if u.limit is None])
    ]
    for bound in _BOUNDS:
        of_up = "softcap" if bound == "softcap" else "clamp"
        bounded = [g for g in gates if g.limit is not None and g.bound == bound]
        groups.append((bounded, [u for u in ups if u.limit is not None and u.bound == of_up]))
    for some_gates, some_ups in groups:
        if not some_gates or not some_ups:
            continue
        alike = torch.ones(len(some_gates), len(some_ups), dtype=torch.bool)
        for draw in draws:
            gate, up = (half[:, :_FEW].flatten()[-_FEW:] for half in split_gate_up(draw.inputs, order))
            out, size = draw.outputs[:, :_FEW].flatten()[-_FEW:], (1 + gate.abs()) * (1 + up.abs())
            left = torch.stack([g(gate, draw) for g in some_gates])
            right = torch.stack([u(up, draw) for u in some_ups])
            alike &= near(left[:, None] * right, out, size).all(-1)
        for i, j in alike.nonzero().tolist():
            yield some_gates[i], some_ups[j]


def magnitude(inputs: torch.Tensor, order: GateUpOrder, *, gated: bool) -> torch.Tensor:
    """How large the factors of each result may be: bounds what cancellation costs in float64."""
    sizes = 1 + inputs.abs()
    if not gated:
        return sizes.square()
    gate, up = split_gate_up(sizes, order)
    return gate * up


def resemblance(draw: Draw, constants: Sequence[float]) -> str:
    """What a piece nearly is, for the message."""
    named = {
        "the gate clamped on both sides": lambda act, gate, up, c: act(gate.clamp(-c, c)) * up.clamp(-c, c),
        "only the gate clamped": lambda act, gate, up, c: act(gate.clamp(max=c)) * up,
        "only up clamped": lambda act, gate, up, c: act(gate) * up.clamp(-c, c),
        "only up capped": lambda act, gate, up, c: act(gate) * torch.tanh(up / c) * c,
        "the gate capped before it": lambda act, gate, up, c: act(torch.tanh(gate / c) * c) * torch.tanh(up / c) * c,
        "interleaved, up first": lambda act, gate, up, c: act(gate) * up,
    }
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
            if close(draw.outputs, want, magnitude(draw.inputs, order, gated=True)):
                return f": it is {kind} with {name}"
    return ""
