"""Time and peak memory of the same mixture-of-experts layers in four modes, each in a process of its own.

    OMP_NUM_THREADS=2 python examples/cpu_benchmark.py --layers 4 --experts 32 --tokens 1 32 256

dense     bf16 weights, dequantised once, eager: four times the memory
eager     packed weights, dequantised in every call, eager
inductor  packed weights, torch.compile(backend="inductor")
fp4moe    packed weights, torch.compile(backend="fp4moe")
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

MODES = ("dense", "eager", "inductor", "fp4moe")


class Stack(nn.Module):
    """Qwen3-MoE blocks, each behind a norm and a residual."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        import fp4_inductor

        torch.manual_seed(0)
        self.layers = nn.ModuleList()
        for _ in range(args.layers):  # layer by layer, so that few dense weights exist at a time
            layer = moe_block(args)
            self.layers.append(layer if args.mode == "dense" else fp4_inductor.quantize_(layer, args.format))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [1, T, H], and the same back."""
        for layer in self.layers:
            hidden = hidden + layer(nn.functional.layer_norm(hidden, hidden.shape[-1:]))
        return hidden


def moe_block(args: argparse.Namespace) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        num_hidden_layers=1,
        hidden_size=args.hidden,
        moe_intermediate_size=args.intermediate,
        num_experts=args.experts,
        num_experts_per_tok=args.top_k,
        norm_topk_prob=True,
        vocab_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3MoeForCausalLM(config).eval().requires_grad_(False)
    torch.set_default_dtype(torch.float32)
    model.set_experts_implementation("grouped_mm")
    return model.model.layers[0].mlp


def reset_peak() -> None:
    """Let the kernel count peak memory from here on, so that building the weights does not show."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def peak_mib() -> float:
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        return int(fields["VmHWM"].split()[0]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Median seconds of a call for each token count, and the peak memory of all of them."""
    stack = Stack(args)
    reset_peak()
    if args.mode in ("inductor", "fp4moe"):
        stack.compile(backend=args.mode, fullgraph=True, dynamic=False)
    junk = torch.ones(96 << 18)
    seconds = {}
    with torch.no_grad():
        for tokens in args.tokens:
            hidden = torch.randn(1, tokens, args.hidden, dtype=torch.bfloat16)
            stack(hidden)
            times = []
            for _ in range(args.repeat):
                junk.sum()  # a real model reads other weights between two calls: start from a cold cache
                start = time.perf_counter()
                stack(hidden)
                times.append(time.perf_counter() - start)
            seconds[tokens] = statistics.median(times)
    return {"seconds": seconds, "peak_mib": peak_mib()}


def run_mode(mode: str, argv: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, __file__, *argv, "--mode", mode]
    done = subprocess.run(command, env=dict(os.environ), stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main(argv: Sequence[str] | None = None) -> None:
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--format", choices=("mxfp4", "nvfp4"), default="mxfp4")
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.mode:
        print(json.dumps(measure(args)))
        return
    print(f"{args.layers} layers, {args.experts} experts, top {args.top_k}, H={args.hidden} I={args.intermediate}")
    print(f"{args.format}, torch {torch.__version__}, {torch.get_num_threads()} threads; tokens per second:")
    print(f"{'':10}" + "".join(f"{f'T={tokens}':>10}" for tokens in args.tokens) + f"{'peak MiB':>12}")
    for mode in MODES:
        result = run_mode(mode, argv)
        rates = [tokens / result["seconds"][str(tokens)] for tokens in args.tokens]
        print(f"{mode:10}" + "".join(f"{rate:>10.1f}" for rate in rates) + f"{result['peak_mib']:>12.0f}")


if __name__ == "__main__":
    main()
