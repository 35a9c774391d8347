"""Time per call, in microseconds: medians, so that a disturbed run does not count."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]


def cuda_graph_us(calls: Sequence[Call], replays: int = 20) -> float:
    """Median microseconds per call of one CUDA graph that makes all ``calls`` in turn.

    Calls with different inputs keep what they share, such as the weights of other experts, out of the L2 cache.
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
    times: list[float] = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)
