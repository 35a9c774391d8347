"""``python -m fp4_inductor inspect PATH``: what a checkpoint holds and what would run it, from headers alone."""

from __future__ import annotations

import argparse
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..device import DeviceInfo
from ..options import Options
from ..select import select
from ..spec import ActivationSpec, GateUpOrder, MoESpec
from .detect import find_weights
from .files import CheckpointFiles
from .source import resolve_path
from .weights import Fp4Weight, Weight

_EXPERT = re.compile(r"(.*\.experts)\.(?:(\d+)\.)?(\w+?)(?:\.weight)?")
_BIAS = r"experts\.(\d+\.)?down_proj[_.]bias$|mlp2_bias$|ffn_down_exps\.bias$"
_DOWN = ("down_proj", "w2", "linear_2")


def add_parser(commands: Any) -> None:
    """Add ``inspect`` to the command line."""
    parser = commands.add_parser("inspect", help="what an FP4 checkpoint holds, from its headers")
    parser.add_argument("path", help="folder of a checkpoint, a GGUF file, or a model of the Hub")
    parser.add_argument("--device", help='"sm_90", "sm_100", "cpu" ...; by default this machine\'s')
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    files = CheckpointFiles(resolve_path(args.path, {}))
    device = DeviceInfo.parse(args.device) if args.device else DeviceInfo.current(_here())
    print("\n".join(describe(files, device)))


def _here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def describe(files: CheckpointFiles, device: DeviceInfo) -> list[str]:
    """The page that ``inspect`` prints.

    Raises:
        CheckpointError: what ``load`` would refuse by the headers.
    """
    weights = find_weights(files)
    fp4 = [weight for weight in weights if isinstance(weight, Fp4Weight)]
    packed_bytes = sum(files.tensors[key].nbytes for weight in fp4 for key in weight.keys)
    all_bytes = sum(tensor.nbytes for tensor in files.tensors.values())
    count = sum(math.prod(weight.shape) for weight in fp4)
    return [
        str(files.folder),
        f"  model     {_model_name(files)}",
        f"  layout    {'; '.join(sorted({weight.layout for weight in fp4}))}",
        f"  format    {', '.join(sorted({str(weight.format) for weight in fp4}))}",
        f"  producer  {_producer(files.quantization)}",
        f"  files     {len({stored.file for stored in files.tensors.values()})}, {_size(all_bytes)}",
        f"  packed    {_size(packed_bytes)}: {count:,} weights in {8 * packed_bytes / count:.2f} bits each",
        f"  other     {_size(all_bytes - packed_bytes)}",
        "",
        *_aligned([("layers", "weight", "shape", "format", "size"), *_rows(files, weights)]),
        "",
        *_runs_on(files, fp4, device),
    ]


def _model_name(files: CheckpointFiles) -> str:
    names = files.config.get("architectures")
    name = names[0] if isinstance(names, list) and names else files.config.get("model_type")
    return str(name or "unknown: no architectures in config.json")


def _producer(quantization: dict[str, Any]) -> str:
    producer = quantization.get("producer")
    if isinstance(producer, dict):
        return " ".join(str(value) for value in producer.values())
    method, version = quantization.get("quant_method"), quantization.get("version")
    return " ".join(str(part) for part in (method, version) if part) or "not said"


def _rows(files: CheckpointFiles, weights: Sequence[Weight]) -> Iterator[tuple[str, ...]]:
    """Weights that differ in their layer or expert alone stand in one row."""
    alike: dict[tuple[str, tuple[int, ...], str], list[Weight]] = defaultdict(list)
    for weight in weights:
        kind = str(weight.format) if isinstance(weight, Fp4Weight) else str(weight.dtype).removeprefix("torch.")
        alike[re.sub(r"\d+", "*", weight.name), weight.shape, kind].append(weight)
    for (name, shape, kind), group in sorted(alike.items()):
        if len(shape) < 2 and kind not in ("mxfp4", "nvfp4"):
            continue
        layers = sorted({int(number) for weight in group for number in re.findall(r"\d+", weight.name)[:1]})
        size = sum(files.tensors[key].nbytes for weight in group for key in weight.keys)
        count = f"{len(group) // max(1, len(layers))} x " if len(group) > max(1, len(layers)) else ""
        yield _ranges(layers), name, f"{count}{' x '.join(map(str, shape))}", kind, _size(size)


def _ranges(numbers: list[int]) -> str:
    """ "0-3, 5" of [0, 1, 2, 3, 5]."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "-"


@dataclass(frozen=True, slots=True)
class _Experts:
    weight: Fp4Weight
    num_experts: int


def _down(fp4: Sequence[Fp4Weight]) -> list[_Experts]:
    """The down projection of each layer with experts, and how many experts it is of."""
    by_layer: dict[str, list[Fp4Weight]] = defaultdict(list)
    for weight in fp4:
        match = _EXPERT.fullmatch(weight.name)
        if match and match[3] in _DOWN:
            by_layer[match[1]].append(weight)
    return [
        _Experts(weights[0], weights[0].shape[0] if len(weights[0].shape) == 3 else len(weights))
        for weights in by_layer.values()
    ]


def _blocks(files: CheckpointFiles, fp4: Sequence[Fp4Weight]) -> list[MoESpec]:
    """Each kind of block by its sizes: a SwiGLU, with biases where the file has them, and routing that is given."""
    parts = [files.config, *(part for part in files.config.values() if isinstance(part, dict))]
    names = ("num_experts_per_tok", "experts_per_token", "moe_top_k", "top_k_experts")
    top_k = next((part[name] for part in parts for name in names if isinstance(part.get(name), int)), None)
    limit = next((part["swiglu_limit"] for part in parts if isinstance(part.get("swiglu_limit"), (int, float))), None)
    has_bias = any(re.search(_BIAS, key) for key in files.tensors)
    activation = ActivationSpec("silu", limit=limit)
    if has_bias:  # so far gpt-oss alone has them
        activation = ActivationSpec("silu", alpha=1.702, beta=1.0, limit=limit)
    sizes = {
        (experts.num_experts, experts.weight.shape[-2], experts.weight.shape[-1], experts.weight.format)
        for experts in _down(fp4)
    }
    if top_k is None:
        return []
    return [
        MoESpec(
            num_experts,
            top_k,
            hidden_size,
            intermediate_size,
            weight_format=fmt,
            activation=activation,
            weights_dtype=torch.bfloat16,
            w13_order=GateUpOrder.INTERLEAVED if has_bias else GateUpOrder.GATE_UP,
            has_w13_bias=has_bias,
            has_w2_bias=has_bias,
        )
        for num_experts, hidden_size, intermediate_size, fmt in sorted(sizes, key=str)
    ]


def _runs_on(files: CheckpointFiles, fp4: Sequence[Fp4Weight], device: DeviceInfo) -> Iterator[str]:
    """What every backend answers for the checkpoint's blocks."""
    blocks = _blocks(files, fp4)
    for spec in blocks:
        selection = select(spec, device, Options())
        yield f"On {device}, {spec}:"
        yield f"  runs on {selection.chosen or 'no kernel: experts are dequantised in every call'}"
        for verdict in selection.verdicts:
            if not verdict.ok:
                yield f"  not {verdict.backend}: {'; '.join(str(reason) for reason in verdict.reasons)}"
    if blocks:
        yield "A model's code decides what its blocks are: fp4_inductor.explain(model, *args) tells of each."
    else:
        yield "No FP4 experts, or no number of experts per token in config.json: nothing to choose a kernel for."


def _size(number: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.2f} GB"


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    cells = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return [f"  {'  '.join(row)}".rstrip() for row in cells]
