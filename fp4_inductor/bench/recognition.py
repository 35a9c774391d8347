"""What recognition costs: CPU seconds to find the blocks of a deep model, beside those to trace and compile it.

The model is Qwen3-MoE with random FP4 experts: 128 of them, top 8, sorted tokens, a dynamic token count. It is
narrow, so that it compiles anywhere; its graph has the nodes of the real one. ``--wide`` takes the real widths on
the meta device, where it is traced and searched and no code is generated.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from .. import lowering_pass
from .._explain import explain
from ..matching import Recognition, find_matches
from ..quantize import quantize_

_NARROW: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 64, "num_attention_heads": 4, "head_dim": 32,
                           "num_key_value_heads": 4, "vocab_size": 256}  # fmt: skip
_WIDE: dict[str, Any] = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32, "head_dim": 128,
                         "num_key_value_heads": 4, "vocab_size": 151936}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds of one model; ``compile`` is None where no code was generated."""

    layers: int
    blocks: int
    nodes: int
    recognition: float
    trace: float
    compile: float | None

    @property
    def share(self) -> float:
        """Recognition's part of the whole time."""
        return self.recognition / (self.trace if self.compile is None else self.compile)

    def __str__(self) -> str:
        compiled = "        -" if self.compile is None else f"{self.compile:9.1f}"
        each = 1000 * self.recognition / self.layers
        return (
            f"{self.layers:6} {self.blocks:6} {self.nodes:7} {self.recognition:12.2f} {each:9.1f}"
            f" {self.trace:8.1f} {compiled} {100 * self.share:7.1f} %"
        )


def qwen3_moe(layers: int, fmt: str, *, wide: bool) -> nn.Module:
    """A random Qwen3-MoE model with ``layers`` layers and FP4 experts; on the meta device if ``wide``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3_moe",
        num_hidden_layers=layers,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        use_cache=False,
        intermediate_size=128,
        **(_WIDE if wide else _NARROW),
    )
    with torch.device("meta" if wide else "cpu"):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model: nn.Module = made.eval().requires_grad_(False)
    made.set_experts_implementation("grouped_mm")
    return quantize_(model, fmt)


@contextmanager
def _timed_recognition() -> Iterator[list[tuple[float, int, int]]]:
    """Seconds, blocks and nodes of every graph that is searched meanwhile."""
    found: list[tuple[float, int, int]] = []

    def timed(graph: fx.Graph) -> Recognition:
        start = _cpu_seconds()
        recognition = find_matches(graph)
        found.append((_cpu_seconds() - start, len(recognition.matches), len(graph.nodes)))
        return recognition

    with mock.patch.object(lowering_pass, "find_matches", timed):
        yield found


def _cpu_seconds() -> float:
    """Of this process and of the compilers that it has run."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measure(layers: int, fmt: str, *, wide: bool, compile: bool) -> Cost:
    """Trace a model of ``layers`` layers, and compile it too, from nothing."""
    model = qwen3_moe(layers, fmt, wide=wide)
    tokens = torch.zeros(1, 64, dtype=torch.int64, device="meta" if wide else "cpu")
    torch._dynamo.reset()
    start = _cpu_seconds()
    with _timed_recognition() as found:
        explain(model, tokens, device="cpu")
    trace = _cpu_seconds() - start
    seconds, blocks, nodes = (sum(column) for column in zip(*found, strict=True))
    total = None
    if compile and not wide:
        torch._dynamo.reset()
        start = _cpu_seconds()
        with torch.no_grad():
            torch.compile(model, backend="fp4moe", options={"force_disable_caches": True, "compile_threads": 1})(tokens)
        total = _cpu_seconds() - start
    return Cost(layers, int(blocks), int(nodes), seconds, trace, total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="12,24,48,96")
    parser.add_argument("--format", default="mxfp4", help="mxfp4 or nvfp4")
    parser.add_argument("--wide", action="store_true", help="the real widths, on the meta device")
    parser.add_argument("--compile", action="store_true", help="generate code too; without it shares are of the trace")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {'real' if args.wide else 'narrow'} widths")
    print("layers blocks   nodes  recognise s  ms/layer  trace s compile s     share")
    for layers in map(int, args.layers.split(",")):
        print(measure(layers, args.format, wide=args.wide, compile=args.compile), flush=True)


if __name__ == "__main__":
    main()
