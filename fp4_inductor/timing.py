"""Time per call, in microseconds: medians, so that a disturbed run does not count."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]


def cuda_graph_us(calls: Sequence[Call], replays: int = 20, during: Call | None = None) -> float:
    """Median microseconds per call of one CUDA graph that makes all ``calls`` in turn.

    Calls with different inputs keep what they share, such as the weights of other experts, out of the L2 cache.
    ``during`` is called while each replay runs: to read clocks.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in (*calls, *calls):  # compile, then warm up
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    times: list[float] = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        if during is not None:
            during()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def wall_clock_us(contestants: Sequence[Sequence[Call]], repeats: int = 5) -> list[float]:
    """Median microseconds per call of each contestant's calls, in ``repeats`` rounds after one that warms up.

    They take turns, so that a machine that is slower for a while is so for all.
    """
    times: list[list[float]] = [[] for _ in contestants]
    for _ in range(1 + repeats):
        for calls, found in zip(contestants, times, strict=True):
            start = time.perf_counter()
            for call in calls:
                call()
            found.append((time.perf_counter() - start) * 1e6 / len(calls))
    return [statistics.median(found[1:]) for found in times]
