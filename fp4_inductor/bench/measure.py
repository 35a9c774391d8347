"""Time our backends and the peers on the same inputs, shape by shape, one layer in memory at a time."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..backends import get_backend
from ..backends.base import KernelBackend
from ..device import DeviceInfo
from ..errors import NoBackendError
from ..formats import BlockFormat, get_format
from ..options import Options
from ..random_layer import ROTATED_UP_TO, inputs, random_weights
from ..select import select
from ..spec import MoESpec
from ..timing import cuda_graph_us, wall_clock_us
from .cpu import read_us
from .floor import Rates, floor_us
from .layers import Layer, planned_layer
from .machine import Nvml
from .peers import Peer
from .results import Column, Results, Row, Timing
from .shapes import Shape


@dataclass(frozen=True, slots=True)
class Contender:
    """Who fills a column.

    Attributes:
        fmt: weight format of the spec that ``layer`` gets.
        logits_dtype: dtype of the logits that it wants; None for the activation dtype.
        tolerated: failures that become a note instead of ending the run.
    """

    column: Column
    fmt: BlockFormat
    layer: Callable[[MoESpec], Layer]
    logits_dtype: torch.dtype | None
    tolerated: tuple[type[Exception], ...]


def default_backend(shape: Shape, fmt: BlockFormat, device: DeviceInfo) -> str:
    """The backend that a compiled model would get on this device."""
    chosen = select(shape.spec(fmt), device, Options(on_unsupported="error")).chosen
    assert chosen is not None
    return chosen


def our_contenders(
    names: Sequence[str], formats: Sequence[BlockFormat], shapes: Sequence[Shape], device: torch.device
) -> list[Contender]:
    """A contender a backend and weight format.

    Raises:
        UnknownNameError: no such backend.
        NoBackendError: one that does not take one of the shapes, with every reason.
    """
    info = DeviceInfo.current(device)
    found = []
    for name in names:
        backend = get_backend(name)
        for fmt in formats:
            refused: dict[str, list[str]] = {}
            for shape in shapes:
                verdict = backend.check(shape.spec(fmt), info)
                if not verdict.ok:
                    refused.setdefault(str(verdict), []).append(shape.name)
            if refused:
                got = "\n    ".join(["refusals:", *(_note(text, names) for text, names in refused.items())])
                needed = f"backend {name!r} to take every shape in {fmt} on {info}"
                raise NoBackendError("choosing what to time", needed=needed, got=got)
            layer = partial(_our_layer, backend, info, device)
            column = Column(name, fmt.name, ours=True)
            found.append(Contender(column, fmt, layer, None, (torch.OutOfMemoryError,)))
    return found


def _our_layer(backend: KernelBackend, info: DeviceInfo, device: torch.device, spec: MoESpec) -> Layer:
    return planned_layer(spec, backend.plan(spec, info), random_weights(spec, device))


def peer_contenders(
    peers: Sequence[Peer], formats: Sequence[BlockFormat], device: DeviceInfo
) -> tuple[list[Contender], list[str]]:
    """A contender a peer and weight format that both have, and a note for each peer that cannot run here."""
    found, notes = [], []
    for peer in peers:
        try:
            reason = peer.missing(device)
        except (ImportError, OSError, RuntimeError, AttributeError) as error:  # a library that does not load
            reason = _said(error)
        if reason:
            notes.append(f"{peer.name}: {reason}")
            continue
        for weights in peer.weights:
            if weights == "bf16" or weights in [fmt.name for fmt in formats]:
                fmt = formats[0] if weights == "bf16" else get_format(weights)
                column = Column(peer.name, weights, ours=False)
                found.append(Contender(column, fmt, peer.layer, peer.logits_dtype, _failures()))
    return found, notes


def _failures() -> tuple[type[Exception], ...]:
    """What the kernels of others may raise where they cannot run: whatever Python raises, and Triton."""
    found: tuple[type[Exception], ...] = (
        ArithmeticError,
        AssertionError,
        AttributeError,
        ImportError,
        LookupError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    )
    if importlib.util.find_spec("triton") is not None:
        found += (importlib.import_module("triton.errors").TritonError,)
    return found


def measure(
    results: Results,
    contenders: Sequence[Contender],
    shapes: Sequence[Shape],
    tokens: Sequence[int],
    rates: Rates,
    device: torch.device,
    nvml: Nvml | None,
) -> Iterator[list[Row]]:
    """Add rows and notes to ``results``; yields the rows of each shape when they are complete."""
    failed: dict[str, list[str]] = {}
    try:
        for shape in shapes:
            timings: dict[int, dict[str, Timing]] = {count: {} for count in tokens}
            floors = _floors(shape, contenders, tokens, rates, device)
            rows = [Row(shape.name, shape.sizes, count, floors[count], timings[count]) for count in tokens]
            results.rows.extend(rows)
            for contender in contenders:
                start = time.perf_counter()
                for message, where in _time(contender, shape, timings, device, nvml):
                    failed.setdefault(f"{contender.column.label}: {message}", []).append(where)
                _free(device)
                times = " ".join(_brief(timings[count].get(contender.column.label)) for count in tokens)
                seconds = time.perf_counter() - start
                print(f"{shape.name} {contender.column.label}: {times} ({seconds:.0f} s)", file=sys.stderr, flush=True)
            yield rows
    finally:
        results.notes.extend(_note(message, places) for message, places in failed.items())


def _time(
    contender: Contender,
    shape: Shape,
    timings: dict[int, dict[str, Timing]],
    device: torch.device,
    nvml: Nvml | None,
) -> list[tuple[str, str]]:
    """Fill the column for one shape; returns what failed, and where."""
    spec = shape.spec(contender.fmt)
    try:
        layer = contender.layer(spec)
    except contender.tolerated as error:
        return [(_said(error), shape.name)]
    failed = []
    for count, found in timings.items():
        _free(device)  # raises where the device is lost: nothing after it could be trusted
        try:
            found[contender.column.label] = _timing(layer, contender, spec, count, device, nvml)
        except contender.tolerated as error:
            failed.append((_said(error), f"{shape.name} T={count}"))
    return failed


@torch.no_grad()
def _timing(
    layer: Layer, contender: Contender, spec: MoESpec, count: int, device: torch.device, nvml: Nvml | None
) -> Timing:
    given = inputs(spec, count, device)
    if contender.logits_dtype is not None:
        given = [(hidden, logits.to(contender.logits_dtype)) for hidden, logits in given]
    calls = [partial(layer, hidden, logits) for hidden, logits in given]
    if device.type != "cuda":
        return Timing(wall_clock_us(calls))
    during = None if nvml is None else nvml.sample
    us = cuda_graph_us(calls, replays=20 if count <= ROTATED_UP_TO else 7, during=during)
    return Timing(us, None if nvml is None else nvml.clock())


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _floors(
    shape: Shape, contenders: Sequence[Contender], tokens: Sequence[int], rates: Rates, device: torch.device
) -> dict[int, dict[str, float]]:
    """By token count, the floor of each weight format of our columns; on a CPU without rates it is measured."""
    formats = {contender.fmt.name: contender.fmt for contender in contenders if contender.column.ours}
    found: dict[int, dict[str, float]] = {count: {} for count in tokens}
    for name, fmt in formats.items():
        spec = shape.spec(fmt)
        measured = read_us(spec, tokens) if device.type == "cpu" and rates == Rates() else {}
        for count in tokens:
            us = measured.get(count, floor_us(spec, count, rates))
            if us is not None:
                found[count][name] = us
    return found


def _said(error: Exception) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"[:300]


def _note(message: str, places: list[str]) -> str:
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return f"{message} (at {places[0]}{more})"


def _brief(timing: Timing | None) -> str:
    return "-" if timing is None else f"{timing.us:.1f}"
