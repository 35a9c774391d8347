"""Who is timed and what becomes of failures, on a CPU; the clocks, on a stand-in for the driver's library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp4_inductor import timing
from fp4_inductor.backends import get_backend
from fp4_inductor.bench import machine, measure
from fp4_inductor.bench.floor import Rates, floor_us
from fp4_inductor.bench.layers import Layer
from fp4_inductor.bench.machine import Clock, Nvml, environment
from fp4_inductor.bench.measure import Contender, default_backend, our_contenders, peer_contenders
from fp4_inductor.bench.results import Column, Results
from fp4_inductor.bench.shapes import parse_shape
from fp4_inductor.device import DeviceInfo
from fp4_inductor.errors import NoBackendError, UnknownNameError
from fp4_inductor.formats import MXFP4, NVFP4
from fp4_inductor.spec import MoESpec

CPU, HERE = torch.device("cpu"), DeviceInfo.parse("cpu")
SHAPE = parse_shape("4x2x64x64")


class StubPeer:
    """A peer that copies its input."""

    name = "stub"

    def __init__(
        self, weights: tuple[str, ...], layer: Callable[[MoESpec], Layer] | None = None, missing: str = ""
    ) -> None:
        self.weights, self.reason, self.make = weights, missing, layer or (lambda spec: lambda hidden, logits: hidden)
        self.logits_dtype: torch.dtype | None = None

    def missing(self, device: DeviceInfo) -> str:
        return self.reason

    def layer(self, spec: MoESpec) -> Layer:
        return self.make(spec)


def run(contenders: list[Contender], tokens: tuple[int, ...] = (1, 3), rates: Rates | None = None) -> Results:
    results = Results({}, tuple(contender.column for contender in contenders))
    for _ in measure.measure(results, contenders, [SHAPE], tokens, rates or Rates(), CPU, None):
        pass
    return results


def test_every_backend_and_format_fills_its_column() -> None:
    ours = our_contenders(["cpu", "reference"], [MXFP4, NVFP4], [SHAPE], CPU)
    peers, notes = peer_contenders([StubPeer(("bf16",))], [MXFP4, NVFP4], HERE)
    rates = Rates(bandwidth=1e-3)
    results = run([*ours, *peers], rates=rates)
    assert not notes + results.notes
    labels = ["cpu/mxfp4", "cpu/nvfp4", "reference/mxfp4", "reference/nvfp4", "stub/bf16"]
    assert [column.label for column in results.columns] == labels
    assert [row.tokens for row in results.rows] == [1, 3]
    for row in results.rows:
        assert sorted(row.timings) == labels
        copying = row.timings["stub/bf16"].us
        assert all(0 < copying < row.timings[label].us for label in labels[:-1]), "copying is faster than computing"
        expected = {fmt.name: floor_us(SHAPE.spec(fmt), row.tokens, rates) for fmt in (MXFP4, NVFP4)}
        assert row.floors == expected


def test_a_peer_that_fails_becomes_a_note() -> None:
    def fails_beyond_one(spec: MoESpec) -> Layer:
        def layer(hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            if len(hidden) > 1:
                raise RuntimeError("no kernel for this\nand more lines")
            return hidden

        return layer

    def cannot_be_made(spec: MoESpec) -> Layer:
        raise AttributeError("module has no attribute 'gemm'")

    peers = [StubPeer(("mxfp4",), fails_beyond_one), StubPeer(("nvfp4",), cannot_be_made)]
    contenders, _ = peer_contenders(peers, [MXFP4, NVFP4], HERE)
    results = run(contenders, tokens=(1, 3, 5, 6))
    assert [list(row.timings) for row in results.rows] == [["stub/mxfp4"], [], [], []]
    assert results.notes == [
        "stub/nvfp4: AttributeError: module has no attribute 'gemm' (at 4x2x64x64)",
        "stub/mxfp4: RuntimeError: no kernel for this (at 4x2x64x64 T=3 and 2 more)",
    ]


def test_a_bug_of_ours_is_not_swallowed() -> None:
    def broken(spec: MoESpec) -> Layer:
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        run([Contender(Column("ours", "mxfp4", ours=True), MXFP4, broken, None, (torch.OutOfMemoryError,))])


def test_notes_survive_a_run_cut_short() -> None:
    def fails(spec: MoESpec) -> Layer:
        raise RuntimeError("no kernel")

    def stops(spec: MoESpec) -> Layer:
        raise KeyboardInterrupt

    contenders, _ = peer_contenders([StubPeer(("mxfp4",), fails), StubPeer(("bf16",), stops)], [MXFP4], HERE)
    results = Results({}, ())
    with pytest.raises(KeyboardInterrupt):
        list(measure.measure(results, contenders, [SHAPE], (1,), Rates(), CPU, None))
    assert results.notes == ["stub/mxfp4: RuntimeError: no kernel (at 4x2x64x64)"]


def test_one_layer_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are timed one by one."""
    alive: set[str] = set()

    class Weights:
        def __init__(self, name: str) -> None:
            assert not alive, f"{alive} were still there when {name} was made"
            self.name = name
            alive.add(name)

        def __call__(self, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            return hidden

        def __del__(self) -> None:
            alive.discard(self.name)

    peers = [StubPeer((weights,), lambda spec: Weights(str(spec.weight_format))) for weights in ("mxfp4", "nvfp4")]
    contenders, _ = peer_contenders(peers, [MXFP4, NVFP4], HERE)
    monkeypatch.setattr(measure, "cuda_graph_us", lambda calls, replays, during: float(len(calls)))
    rows = measure._rows(SHAPE, contenders, (1, 3), Rates())
    assert not list(measure._one_by_one(contenders, SHAPE, rows, CPU, None))
    assert [len(row.timings) for row in rows] == [2, 2]


def test_reading_is_the_floor_of_a_cpu_whose_rates_are_not_known() -> None:
    contenders = our_contenders(["cpu"], [MXFP4, NVFP4], [SHAPE], CPU)
    for row in run(contenders).rows:
        assert sorted(row.floors) == ["mxfp4", "nvfp4"]
        assert all(0 < row.floors[name] < row.timings[f"cpu/{name}"].us for name in row.floors)


def test_peers_get_the_logits_that_they_want() -> None:
    seen: set[torch.dtype] = set()

    def looks(spec: MoESpec) -> Layer:
        def layer(hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            seen.add(logits.dtype)
            return hidden

        return layer

    peer = StubPeer(("mxfp4",), looks)
    run(peer_contenders([peer], [MXFP4], HERE)[0])
    peer.logits_dtype = torch.float32
    run(peer_contenders([peer], [MXFP4], HERE)[0])
    assert seen == {torch.bfloat16, torch.float32}


def test_peers_only_of_the_formats_asked_for_and_present() -> None:
    peers = [StubPeer(("mxfp4", "nvfp4")), StubPeer(("bf16",)), StubPeer(("mxfp4",), missing="is not installed")]
    contenders, notes = peer_contenders(peers, [NVFP4], HERE)
    assert [contender.column.label for contender in contenders] == ["stub/nvfp4", "stub/bf16"]
    assert [contender.fmt for contender in contenders] == [NVFP4, NVFP4]
    assert notes == ["stub: is not installed"]


def test_a_library_that_does_not_load_is_a_note() -> None:
    class Broken(StubPeer):
        def missing(self, device: DeviceInfo) -> str:
            raise OSError("libcudart.so.13: cannot open shared object file")

    contenders, notes = peer_contenders([Broken(("mxfp4",))], [MXFP4], HERE)
    assert not contenders
    assert notes == ["stub: OSError: libcudart.so.13: cannot open shared object file"]


def test_backends_that_do_not_exist_or_refuse() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'reference'"):
        our_contenders(["referense"], [MXFP4], [SHAPE], CPU)
    odd = parse_shape("4x2x72x64")
    with pytest.raises(NoBackendError) as refused:
        our_contenders(["cpu"], [MXFP4], [SHAPE, odd, parse_shape("8x2x72x64")], CPU)
    assert str(get_backend("cpu").check(odd.spec(MXFP4), HERE)) in str(refused.value)
    assert "(at 4x2x72x64 and 1 more)" in str(refused.value)


def test_the_default_backend_is_the_compiled_models() -> None:
    assert default_backend(SHAPE, MXFP4, HERE) == "cpu"
    assert default_backend(
        SHAPE, MXFP4, DeviceInfo("cuda", (9, 0), "H200", 132, 227 * 1024, (("triton", "3.6.0"),))
    ) == ("triton_w4a16")


def test_the_wall_clock_is_a_median_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now, made = 0.0, []

    def call(seconds: float) -> Callable[[], None]:
        def work() -> None:
            nonlocal now
            made.append(seconds)
            now += seconds * (100 if len(made) in (1, 3) else 1)  # the warm-up and one round are disturbed

        return work

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    assert timing.wall_clock_us([[call(1e-3), call(3e-3)]], repeats=3) == pytest.approx([2000])
    assert made == [1e-3, 3e-3] * 4
    made.clear()
    assert timing.wall_clock_us([[call(1e-3)], [call(3e-3)] * 2], repeats=5) == pytest.approx([1000, 3000])
    assert made == [1e-3, 3e-3, 3e-3] * 6, "they take turns"


class StubNvml:
    """The driver's library, with clocks that it goes through."""

    def __init__(self, *mhz: int, unknown: bool = False) -> None:
        self.mhz, self.unknown = list(mhz), unknown

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        assert uuid == b"GPU-0123-45"
        return 6 if self.unknown else 0

    def nvmlDeviceGetClockInfo(self, handle: ctypes.c_void_p, kind: int, out: Any) -> int:
        assert kind == 1, "the SM clock"
        if not self.mhz:
            return 3
        out._obj.value = self.mhz.pop(0)
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, size: int) -> int:
        text.value = b"580.95.05"
        return 0


def open_nvml(monkeypatch: pytest.MonkeyPatch, library: StubNvml | None) -> Nvml | None:
    def load(name: str) -> StubNvml:
        if library is None:
            raise OSError(f"{name}: cannot open shared object file")
        return library

    class Properties:
        uuid = "0123-45"

    monkeypatch.setattr(machine.ctypes, "CDLL", load)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    return Nvml.of(torch.device("cuda", 0))


def test_clocks_are_of_one_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = open_nvml(monkeypatch, StubNvml(1980, 1500, 1600, 1700))
    assert nvml is not None
    assert nvml.driver() == "580.95.05"
    for _ in range(3):
        nvml.sample()
    assert nvml.clock() == Clock(1500, 1600)
    nvml.sample()
    nvml.sample()  # not read
    assert nvml.clock() == Clock(1700, 1700)
    assert nvml.clock() is None


def test_clocks_where_nothing_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_nvml(monkeypatch, None) is None
    assert open_nvml(monkeypatch, StubNvml(unknown=True)) is None
    assert Nvml.of(CPU) is None


def test_environment_of_a_cpu() -> None:
    found = environment(CPU, None)
    assert found["device"] == "cpu"
    assert found["torch"] == torch.__version__
    assert found["threads"] == str(torch.get_num_threads())
    assert "driver" not in found
