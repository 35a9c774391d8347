"""Calls captured in CUDA graphs, for tests of what replays follow."""

from __future__ import annotations

from collections.abc import Callable

import torch


class CapturedCall:
    """A call in a CUDA graph, and where it writes."""

    def __init__(self, call: Callable[[], torch.Tensor]) -> None:
        call()  # compiles
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = call()

    def replay(self) -> torch.Tensor:
        """The result for the inputs that stand in memory now, which the next replay overwrites; NaN if unwritten."""
        self.out.fill_(float("nan"))
        self.graph.replay()
        return self.out
