"""Time our backends and the peers on the same inputs, shape by shape.

On a GPU one layer is in memory at a time. On a CPU all are, and take turns: what else runs there changes by the minute.
"""

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
from .cpu import read_layer
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
            rows = _rows(shape, contenders, tokens, rates)
            results.rows.extend(rows)
            if device.type == "cuda":
                timed = _one_by_one(contenders, shape, rows, device, nvml)
            else:
                timed = _in_turn(contenders, shape, rows, read=rates == Rates())
            for column, message, where in timed:
                failed.setdefault(f"{column.label}: {message}", []).append(where)
            yield rows
    finally:
        results.notes.extend(_note(message, places) for message, places in failed.items())


def _rows(shape: Shape, contenders: Sequence[Contender], tokens: Sequence[int], rates: Rates) -> list[Row]:
    """A row a token count, with the floors of our columns' formats as far as rates tell them, and no times."""
    rows = []
    for count in tokens:
        known = ((fmt.name, floor_us(shape.spec(fmt), count, rates)) for fmt in _our_formats(contenders))
        rows.append(Row(shape.name, shape.sizes, count, {name: us for name, us in known if us is not None}, {}))
    return rows


def _our_formats(contenders: Sequence[Contender]) -> list[BlockFormat]:
    return list(dict.fromkeys(contender.fmt for contender in contenders if contender.column.ours))


def _one_by_one(
    contenders: Sequence[Contender], shape: Shape, rows: Sequence[Row], device: torch.device, nvml: Nvml | None
) -> Iterator[tuple[Column, str, str]]:
    """Fill in times by CUDA-graph replay; yields what failed, and where."""
    for contender in contenders:
        start = time.perf_counter()
        for message, where in _alone(contender, shape, rows, device, nvml):
            yield contender.column, message, where
        _free(device)
        _show(contender, rows, time.perf_counter() - start)


def _alone(
    contender: Contender, shape: Shape, rows: Sequence[Row], device: torch.device, nvml: Nvml | None
) -> Iterator[tuple[str, str]]:
    spec = shape.spec(contender.fmt)
    try:
        layer = contender.layer(spec)
    except contender.tolerated as error:
        yield _said(error), shape.name
        return
    during = None if nvml is None else nvml.sample
    for row in rows:
        _free(device)  # raises where the device is lost: nothing after it could be trusted
        replays = 20 if row.tokens <= ROTATED_UP_TO else 7
        try:
            with torch.no_grad():
                us = cuda_graph_us(
                    _calls(layer, spec, row.tokens, device, contender.logits_dtype), replays=replays, during=during
                )
        except contender.tolerated as error:
            yield _said(error), f"{shape.name} T={row.tokens}"
        else:
            row.timings[contender.column.label] = Timing(us, None if nvml is None else nvml.clock())


@torch.no_grad()
def _in_turn(
    contenders: Sequence[Contender], shape: Shape, rows: Sequence[Row], read: bool
) -> Iterator[tuple[Column, str, str]]:
    """Fill in times by the wall clock and, where ``read``, reading as the floors; yields what failed, and where."""
    start, device, layers = time.perf_counter(), torch.device("cpu"), []
    for contender in contenders:
        try:
            layers.append((contender, contender.layer(shape.spec(contender.fmt))))
        except contender.tolerated as error:
            yield contender.column, _said(error), shape.name
    formats = _our_formats(contenders) if read else []
    readers = [(fmt, layer) for fmt in formats if (layer := read_layer(shape.spec(fmt))) is not None]
    for row in rows:
        running: dict[str, list[Callable[[], object]]] = {}
        for contender, layer in layers:
            calls = _calls(layer, shape.spec(contender.fmt), row.tokens, device, contender.logits_dtype)
            try:
                calls[0]()
            except contender.tolerated as error:
                yield contender.column, _said(error), f"{shape.name} T={row.tokens}"
            else:
                running[contender.column.label] = calls
        for fmt, layer in readers:
            running[fmt.name] = _calls(layer, shape.spec(fmt), row.tokens, device)
        times = dict(zip(running, wall_clock_us(list(running.values())), strict=True))
        row.floors.update({fmt.name: times.pop(fmt.name) for fmt, _ in readers})
        row.timings.update({label: Timing(us) for label, us in times.items()})
    for contender, _ in layers:
        _show(contender, rows, time.perf_counter() - start)


def _calls(
    layer: Layer, spec: MoESpec, count: int, device: torch.device, logits_dtype: torch.dtype | None = None
) -> list[Callable[[], object]]:
    """Calls of a layer on inputs that take turns; ``logits_dtype``: as in ``Contender``."""
    given = inputs(spec, count, device)
    if logits_dtype is not None:
        given = [(hidden, logits.to(logits_dtype)) for hidden, logits in given]
    return [partial(layer, hidden, logits) for hidden, logits in given]


def _show(contender: Contender, rows: Sequence[Row], seconds: float) -> None:
    label = contender.column.label
    times = " ".join(_brief(row.timings.get(label)) for row in rows)
    print(f"{rows[0].shape} {label}: {times} ({seconds:.0f} s)", file=sys.stderr, flush=True)


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _said(error: Exception) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}"[:300]


def _note(message: str, places: list[str]) -> str:
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return f"{message} (at {places[0]}{more})"


def _brief(timing: Timing | None) -> str:
    return "-" if timing is None else f"{timing.us:.1f}"
