"""``python -m fp4_inductor inspect PATH``: what a checkpoint holds and what would run it, from headers alone."""

from __future__ import annotations

import argparse
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..device import DeviceInfo
from ..formats import BlockFormat
from ..options import Options
from ..select import select
from ..spec import ActivationSpec, GateUpOrder, MoESpec
from .detect import find_weights
from .files import CheckpointFiles
from .source import resolve_path
from .weights import Fp4Weight, Weight

_EXPERT = re.compile(r"(.*\.experts)\.(.+)")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""Of a layer or an expert: a whole part of a name."""
_BIAS = r"experts\.(\d+\.)?down_proj[_.]bias$|mlp2_bias$|ffn_down_exps\.bias$"
_DOWN = ("down_proj", "w2", "linear_2")
_GATED = ("gate_proj", "gate_up_proj", "w1", "w13", "mlp1")
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ACTS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "relu2": "relu2"}


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
        alike[_NUMBER.sub("*", weight.name), weight.shape, kind].append(weight)
    for (name, shape, kind), group in sorted(alike.items()):
        if len(shape) < 2 and kind not in ("mxfp4", "nvfp4"):
            continue
        layers = sorted({int(number) for weight in group for number in _NUMBER.findall(weight.name)[:1]})
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


def _expert_parts(fp4: Sequence[Fp4Weight]) -> Iterator[tuple[str, str, Fp4Weight]]:
    """Of each weight of experts: the layer, "down_proj" or whatever its projection is called, and the weight."""
    for weight in fp4:
        if match := _EXPERT.fullmatch(weight.name):
            words = [word for word in match[2].split(".") if not word.isdigit() and word != "weight"]
            yield match[1], ".".join(words).removesuffix("_weight"), weight


def _sizes(fp4: Sequence[Fp4Weight], parts: Sequence[dict[str, Any]]) -> Iterator[tuple[int, int, int, BlockFormat]]:
    """E, H, I and the format of each layer with experts, by its down projection."""
    by_layer: dict[str, list[Fp4Weight]] = defaultdict(list)
    for layer, projection, weight in _expert_parts(fp4):
        if projection in _DOWN:
            by_layer[layer].append(weight)
    for weights in by_layer.values():
        first, said = weights[0], _said(parts, _COUNTS)
        rows, intermediate_size = first.shape[-2:]
        if len(first.shape) == 3:
            yield first.shape[0], rows, intermediate_size, first.format
        elif len(weights) > 1 or not said:
            yield len(weights), rows, intermediate_size, first.format
        else:  # all of them, under one another
            yield said, rows // said, intermediate_size, first.format


def _said(parts: Sequence[dict[str, Any]], names: Sequence[str]) -> int | None:
    return next((part[name] for part in parts for name in names if isinstance(part.get(name), int)), None)


def _activation(parts: Sequence[dict[str, Any]], is_gated: bool, has_bias: bool) -> ActivationSpec:
    """What the config says of it; so far gpt-oss alone has biases."""
    limit = next((part["swiglu_limit"] for part in parts if isinstance(part.get("swiglu_limit"), (int, float))), None)
    if has_bias:
        return ActivationSpec("silu", alpha=1.702, beta=1.0, limit=limit)
    names = ("mlp_hidden_act", "hidden_activation", "hidden_act")
    said = [part.get(name) for part in parts for name in names]
    kind: Any = next((_ACTS[name] for name in said if isinstance(name, str) and name in _ACTS), "silu")
    return ActivationSpec(kind, gated=is_gated, limit=limit)


def _blocks(files: CheckpointFiles, fp4: Sequence[Fp4Weight]) -> list[MoESpec]:
    """Each kind of block by its sizes, with biases where the file has them, and routing that is given."""
    parts = [files.config, *(part for part in files.config.values() if isinstance(part, dict))]
    top_k = _said(parts, ("num_experts_per_tok", "experts_per_token", "moe_top_k", "top_k_experts"))
    has_bias = any(re.search(_BIAS, key) for key in files.tensors)
    is_gated = any(projection in _GATED for _, projection, _ in _expert_parts(fp4))
    if top_k is None:
        return []
    return [
        MoESpec(
            num_experts,
            top_k,
            hidden_size,
            intermediate_size,
            weight_format=fmt,
            activation=_activation(parts, is_gated, has_bias),
            weights_dtype=torch.bfloat16,
            w13_order=GateUpOrder.INTERLEAVED if has_bias else GateUpOrder.GATE_UP,
            has_w13_bias=has_bias,
            has_w2_bias=has_bias,
        )
        for num_experts, hidden_size, intermediate_size, fmt in sorted(set(_sizes(fp4, parts)), key=str)
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
