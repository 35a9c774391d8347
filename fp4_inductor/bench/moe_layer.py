"""Microseconds of one MoE layer call on a GPU: FP4 experts beside bfloat16 ``grouped_mm``, and the floor.

Both get ids and weights of the routed experts and return [T, H]. Times are CUDA-graph replays over several
inputs, so that weights come from memory. The floor is the larger of the packed bytes of the experts that are
expected to be routed over the memory bandwidth, and the operations over the matrix rate.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ..backends import get_backend
from ..device import DeviceInfo
from ..formats import BlockFormat, get_format
from ..plan import KernelPlan, prepare, run_plan
from ..spec import ActivationSpec, MoESpec, Operand
from ..timing import cuda_graph_us

SHAPES = {  # experts, top_k, hidden size, intermediate size
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "gpt-oss-120b": (128, 4, 2880, 2880),
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "deepseek-v3": (256, 8, 7168, 2048),
}
_ROTATED = 8
"""Inputs of one graph, up to 1024 tokens; beyond, every expert is read and one input does."""

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates that the floor is computed from."""

    bytes_per_us: float
    flops_per_us: float


def floor_us(spec: MoESpec, num_tokens: int, machine: Machine) -> float:
    """Time in which no kernel can be faster: weights of the expected distinct experts, or operations."""
    untouched = (1 - spec.top_k / spec.num_experts) ** num_tokens
    flops = 2 * num_tokens * spec.top_k * spec.hidden_size * (spec.w13_rows + spec.intermediate_size)
    return max(spec.packed_bytes * (1 - untouched) / machine.bytes_per_us, flops / machine.flops_per_us)


def layer_spec(shape: str, fmt: BlockFormat) -> MoESpec:
    num_experts, top_k, hidden_size, intermediate_size = SHAPES[shape]
    return MoESpec(num_experts, top_k, hidden_size, intermediate_size, fmt, ActivationSpec("silu"))


def random_operands(spec: MoESpec) -> dict[Operand, torch.Tensor]:
    """Canonical weights of ``spec`` on the GPU, all bytes random."""
    operands = {}
    sizes = (("w13", spec.w13_rows, spec.hidden_size), ("w2", spec.hidden_size, spec.intermediate_size))
    for name, rows, columns in sizes:
        shape = (spec.num_experts, rows)
        operands[Operand(name)] = _bytes(0, 256, *shape, columns // 2)
        low, high = (118, 122) if spec.weight_format.scale_encoding == "e8m0" else (0x28, 0x48)
        scale = _bytes(low, high, *shape, columns // spec.weight_format.block_size)
        operands[Operand(f"{name}_scale")] = scale.view(spec.weight_format.scale_dtype)
        if spec.weight_format.has_global_scale:
            factor = torch.full((spec.num_experts, 1), 0.5 / math.sqrt(columns), device="cuda")
            operands[Operand(f"{name}_global")] = factor
    return operands


def _bytes(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda")


def fp4_layer(spec: MoESpec, plan: KernelPlan) -> Layer:
    """The planned call on prepared random weights; the canonical ones are freed."""
    prepared = prepare(plan, random_operands(spec))

    def layer(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        operands = {Operand.HIDDEN: hidden, Operand.TOPK_IDS: ids, Operand.TOPK_WEIGHTS: weights}
        return run_plan(plan, operands, prepared)

    return layer


def bf16_layer(spec: MoESpec) -> Layer:
    """Sorted tokens through ``grouped_mm`` on unquantised weights: what a user has before quantising."""
    shape = (spec.num_experts, spec.w13_rows, spec.hidden_size)
    w13 = torch.randn(shape, dtype=torch.bfloat16, device="cuda").mul_(0.02)
    w2 = torch.randn(shape[0], shape[2], spec.intermediate_size, dtype=torch.bfloat16, device="cuda").mul_(0.02)

    @torch.compile(dynamic=True)
    def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def layer(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        order = ids.flatten().argsort()
        token = order // spec.top_k
        counts = torch.histc(ids.float(), bins=spec.num_experts, min=0, max=spec.num_experts - 1)
        ends = counts.cumsum(0).to(torch.int32)
        h = swiglu(torch._grouped_mm(hidden[token], w13.transpose(-2, -1), offs=ends))
        y = torch._grouped_mm(h, w2.transpose(-2, -1), offs=ends)
        y = y * weights.flatten()[order].unsqueeze(-1).to(y.dtype)
        return torch.zeros_like(hidden).index_add_(0, token, y)

    return layer


def inputs(spec: MoESpec, num_tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Hidden states with routed experts, drawn evenly."""
    rng = torch.Generator("cuda").manual_seed(num_tokens)
    for _ in range(_ROTATED if num_tokens <= 1024 else 1):
        hidden = torch.randn(num_tokens, spec.hidden_size, generator=rng, device="cuda").mul_(0.1)
        logits = torch.randn(num_tokens, spec.num_experts, generator=rng, device="cuda")
        values, ids = logits.topk(spec.top_k, dim=-1)
        yield hidden.to(spec.act_dtype), ids, values.softmax(-1)


def time_layer(layer: Layer, spec: MoESpec, num_tokens: int) -> float:
    calls = [lambda args=args: layer(*args) for args in inputs(spec, num_tokens)]
    return cuda_graph_us(calls, replays=20 if num_tokens <= 1024 else 7)


def run(
    shapes: list[str], tokens: list[int], formats: list[str], machine: Machine, bf16: bool
) -> list[dict[str, object]]:
    """One row a shape and token count, printed as it comes."""
    device = DeviceInfo.current(torch.device("cuda"))
    backend = get_backend("triton_w4a16")
    rows: list[dict[str, object]] = []
    columns = [*formats, *(["bf16"] if bf16 else [])]
    print(f"{device}, torch {torch.__version__}, triton {device.library('triton')}; microseconds a layer call")
    print(f"{'shape':14} {'tokens':>6} {'floor':>8}" + "".join(f" {column:>9}" for column in columns))
    for shape in shapes:
        measured: dict[str, list[float]] = {}
        for column in columns:
            spec = layer_spec(shape, get_format(column if column != "bf16" else formats[0]))
            layer = bf16_layer(spec) if column == "bf16" else fp4_layer(spec, backend.plan(spec, device))
            measured[column] = [time_layer(layer, spec, count) for count in tokens]
            del layer
            torch.cuda.empty_cache()
        spec = layer_spec(shape, get_format(formats[0]))
        for i, count in enumerate(tokens):
            floor = floor_us(spec, count, machine)
            times = {column: measured[column][i] for column in columns}
            rows.append({"shape": shape, "tokens": count, "floor": floor, **times})
            print(f"{shape:14} {count:6} {floor:8.1f}" + "".join(f" {t:9.1f}" for t in times.values()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="1,4,16,64,256,1024,4096,16384")
    parser.add_argument("--formats", default="mxfp4", help="mxfp4, nvfp4 or both; the floor is the first one's")
    parser.add_argument("--no-bf16", action="store_true", help="leave out grouped_mm on bfloat16 weights")
    parser.add_argument("--bandwidth", type=float, default=4.27, help="memory bandwidth in TB/s (default: an H200's)")
    parser.add_argument("--tflops", type=float, default=730, help="bfloat16 matrix rate (default: an H200's)")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    args = parser.parse_args()
    machine = Machine(bytes_per_us=args.bandwidth * 1e6, flops_per_us=args.tflops * 1e6)
    tokens = [int(count) for count in args.tokens.split(",")]
    rows = run(args.shapes.split(","), tokens, args.formats.split(","), machine, not args.no_bf16)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
