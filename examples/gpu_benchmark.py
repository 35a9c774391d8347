"""Whole models on a GPU: speed, memory and compile time of FP4 experts, beside plain Inductor and beside bf16.

    python examples/gpu_benchmark.py --json results.json
    python examples/gpu_benchmark.py --models gpt-oss-120b --variants bf16 fp4moe-mxfp4 --cases decode1 prefill
    python examples/gpu_benchmark.py --tiny --device cpu

Models have four layers of the widths they are named after, random weights and a small vocabulary. Variants:

bf16              unquantised, experts by grouped_mm, torch.compile(backend="inductor")
inductor-FORMAT   quantised, dequantised in the graph, torch.compile(backend="inductor")
fp4moe-FORMAT     the same model, torch.compile(backend="fp4moe") with fp4moe.release_original_weights

decodeB is a forward pass of one new token for each of B sequences over a static cache that holds 512 tokens of each
sequence; prefill one of 8 sequences of 1024 tokens without a cache. Logits of the last token only. All variants run
with CUDA graphs and static shapes. A call's time is that of 20 calls back to back on the wall clock, synchronised at
the end, over 20; the median of 5 such runs.

Every variant runs in a process of its own, and its first case starts with empty Inductor and Triton caches. "first
call" is that case's first call: compilation, one run and, for fp4moe, "prepare": re-laying the weights and moving the
originals to host memory, which is no compilation and grows with the weights. "peak" is the most memory allocated on
the device by the calls after the first of a case, among them those that capture CUDA graphs. "experts" is by how much
memory allocated falls in the end when, compiled code being thrown away already, the parameters of all experts modules
are: originals that are still on the device, and what was prepared from them. "kernels" counts the Triton kernels of
fp4_inductor that all cases of the process have compiled.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "intermediate_size": 6144,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
        },
    ),
    "gpt-oss-120b": (
        "gpt_oss",
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
        },
    ),
}
TINY = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
VARIANTS = ("bf16", "inductor-mxfp4", "fp4moe-mxfp4", "fp4moe-nvfp4")
ALL_VARIANTS = (*VARIANTS, "inductor-nvfp4")
CASES = ("decode1", "decode8", "decode64", "prefill")
FILLED, LONGEST = 512, 1024
"""Tokens of each sequence in the cache when a decode case begins, and the most that it can hold."""
PREFILL = (8, 1024)


def build_model(name: str, variant: str, args: argparse.Namespace) -> Any:
    """A random model in bf16, its experts quantised as the variant says."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import fp4_inductor

    torch.manual_seed(0)
    family, sizes = MODELS[name]
    if args.tiny:
        sizes = {key: TINY.get(key, value) for key, value in sizes.items()}
    config = AutoConfig.for_model(
        family, **sizes, num_hidden_layers=args.layers, vocab_size=4096, max_position_embeddings=4096, pad_token_id=0
    )
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    model.set_experts_implementation("grouped_mm")
    fmt = variant.partition("-")[2]
    return fp4_inductor.quantize_(model, fmt) if fmt else model


def compile_model(model: Any, variant: str, device: str) -> None:
    options: dict[str, Any] = {"triton.cudagraphs": True} if device == "cuda" else {}
    backend = "fp4moe" if variant.startswith("fp4moe") else "inductor"
    if backend == "fp4moe":
        options["fp4moe.strict"] = True
        options["fp4moe.release_original_weights"] = device == "cuda"
    model.compile(backend=backend, options=options, fullgraph=True, dynamic=False)


def decode_call(model: Any, batch: int, device: str) -> Callable[[], torch.Tensor]:
    """One new token for each sequence. Positions advance with every call, the work does not."""
    from transformers import StaticCache

    config = model.config
    cache = StaticCache(config=config, max_cache_len=LONGEST)
    cache.early_initialization(batch, config.num_key_value_heads, config.head_dim, torch.bfloat16, torch.device(device))
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
        layer.cumulative_length.fill_(FILLED)
    ids = torch.randint(3, config.vocab_size, (batch, 1), device=device)

    def call() -> torch.Tensor:
        for layer in cache.layers:
            if layer.is_sliding:
                layer.cumulative_length_int = FILLED  # it steers Python code, which would be compiled for every value
        logits: torch.Tensor = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
        return logits

    return call


def prefill_call(model: Any, shape: tuple[int, int], device: str) -> Callable[[], torch.Tensor]:
    ids = torch.randint(3, model.config.vocab_size, shape, device=device)

    def call() -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
        return logits

    return call


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(call: Callable[[], torch.Tensor], calls: int, device: str) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / calls


def allocated(device: str) -> int:
    gc.collect()
    synchronize(device)
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def take_peak(device: str) -> int:
    """The most memory allocated since the last time of asking."""
    if device != "cuda":
        return 0
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


class Preparing(logging.Handler):
    """Adds up what fp4_inductor logs about re-laying weights, which other variants have no need of."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        log = logging.getLogger("fp4_inductor.fold")
        log.addHandler(self)
        log.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        if match := re.search(r"ready after ([\d.]+) s", record.getMessage()):
            self.seconds += float(match[1])


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One result a case, then one with what the experts hold on the device."""
    from torch._dynamo.utils import counters

    name, variant, device = args.models[0], args.variants[0], args.device
    start = time.perf_counter()
    model = build_model(name, variant, args)
    print(f"{name} {variant}: built in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    compile_model(model, variant, device)
    preparing = Preparing()
    for case in args.cases:
        if case == "prefill":
            shape = (2, 16) if args.tiny else PREFILL
            call, tokens = prefill_call(model, shape, device), shape[0] * shape[1]
        else:
            tokens = int(case.removeprefix("decode"))
            call = decode_call(model, tokens, device)
        preparing.seconds = 0.0
        take_peak(device)
        first = seconds_of(call, 1, device)
        setup_peak = take_peak(device)
        finite = bool(call().isfinite().all())
        seconds_of(call, 3, device)  # CUDA graphs are captured
        seconds = statistics.median(seconds_of(call, args.calls, device) for _ in range(args.repeats))
        yield {
            "model": name,
            "variant": variant,
            "case": case,
            "tokens": tokens,
            "milliseconds": 1e3 * seconds,
            "tokens_per_second": tokens / seconds,
            "peak_bytes": take_peak(device),
            "setup_peak_bytes": setup_peak,
            "first_call_seconds": first,
            "prepare_seconds": preparing.seconds,
            "kernels": compiled_kernels(),
            "without_cuda_graphs": counters["inductor"].pop("cudagraph_skips", 0),
            "finite": finite,
        }
        del call
        torch.compiler.reset()  # cases share nothing but caches on disk
    before = allocated(device)
    experts = [module for path, module in model.named_modules() if path.endswith(".experts")]
    for module in experts:
        module._parameters.clear()
    yield {"model": name, "variant": variant, "experts_bytes": before - allocated(device)}


def compiled_kernels() -> int:
    """How many variants of its own Triton kernels fp4_inductor has had compiled in this process."""
    modules = [module for path, module in sys.modules.items() if path.startswith("fp4_inductor.kernels.")]
    found = {id(value): value for module in modules for value in vars(module).values()}
    caches = [getattr(value, "device_caches", {}) for value in found.values()]
    return sum(len(of_device[0]) for cache in caches for of_device in cache.values())


def run(name: str, variant: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure in another process, with empty caches."""
    command = [sys.executable, __file__, "--worker", "--models", name, "--variants", variant, "--cases", *args.cases]
    command += ["--device", args.device, "--layers", str(args.layers), "--calls", str(args.calls)]
    command += ["--repeats", str(args.repeats), *(["--tiny"] if args.tiny else [])]
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        done = subprocess.run(command, env={**os.environ, **caches}, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(f"{name} {variant} failed", file=sys.stderr)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def table(results: Sequence[dict[str, Any]]) -> str:
    """A line for each model and variant; the first case's first call stands for compilation."""
    lines = []
    for name in dict.fromkeys(result["model"] for result in results):
        own = [result for result in results if result["model"] == name]
        cases = list(dict.fromkeys(result["case"] for result in own if "case" in result))
        head = f"{name + ', tokens/s':28}" + "".join(f"{case:>12}" for case in cases)
        lines.append(f"{head}{'peak MiB':>12}{'experts MiB':>12}{'first call s':>14}{'prepare s':>11}{'kernels':>9}")
        for variant in dict.fromkeys(result["variant"] for result in own):
            rows = [result for result in own if result["variant"] == variant and "case" in result]
            rates = {row["case"]: row["tokens_per_second"] for row in rows}
            experts = [
                result["experts_bytes"] for result in own if result["variant"] == variant and "case" not in result
            ]
            line = f"{variant:28}" + "".join(f"{rates.get(case, float('nan')):>12.1f}" for case in cases)
            line += f"{max((row['peak_bytes'] for row in rows), default=0) / 2**20:>12.0f}"
            line += f"{(experts[0] if experts else 0) / 2**20:>12.0f}"
            if rows:
                line += f"{rows[0]['first_call_seconds']:>14.1f}{rows[0]['prepare_seconds']:>11.1f}"
                line += f"{rows[-1]['kernels']:>9}"
            if skipped := [row["case"] for row in rows if row["without_cuda_graphs"]]:
                line += f"  without CUDA graphs: {', '.join(skipped)}"
            lines.append(line)
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--variants", nargs="+", choices=ALL_VARIANTS, help="default: all but inductor-nvfp4")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tiny", action="store_true", help="tiny widths, to try this script out")
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results there, too")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    # transformers caches its version checks, which Dynamo traces through as it should.
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    if args.worker:
        with torch.no_grad():
            for result in measure(args):
                print(json.dumps(result), flush=True)
        return
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{device}, torch {torch.__version__}, {args.layers} layers")
    results = []
    for name in args.models:
        # gpt-oss is trained in MXFP4.
        default = [variant for variant in VARIANTS if name != "gpt-oss-120b" or not variant.endswith("nvfp4")]
        for variant in args.variants or default:
            results += run(name, variant, args)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1))
    print(table(results))
    if not results or not all(result.get("finite", True) for result in results):
        raise SystemExit("a variant failed, or its logits are not finite")


if __name__ == "__main__":
    main()
