"""``python -m fp4_inductor.bench.loading``: memory and time that ``load`` takes.

Without a folder it writes a checkpoint of a large model's layers, as many as ``--gigabytes`` hold, and removes it
again. Its files are holes, which take no room on a disk, so that ``load`` holds what it would of a real one, while its
rate is that of memory; ``--written`` fills them.

The peak is that of ``load`` alone, in a process of its own, above what the model holds in the end. Pages of the files
that are mapped count as memory of the process. It should stay under one layer's weights and 256 MB.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import load
from ..checkpoint.files import CheckpointFiles
from ..checkpoint.model import build_on_meta, model_config
from ..errors import CheckpointError, UnknownNameError

ALLOWANCE = 256_000_000
"""Bytes above one layer's weights that ``load`` may take for a moment."""
_SHARD = 4_500_000_000
_CHUNK = 64 << 20

_HEADS = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 8192}
MODELS: dict[str, dict[str, Any]] = {
    "gpt-oss-120b": {
        **_HEADS, "model_type": "gpt_oss", "num_local_experts": 128, "num_experts_per_tok": 4, "hidden_size": 2880,
        "intermediate_size": 2880,
    },
    "qwen3-235b-a22b": {
        **_HEADS, "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "hidden_size": 4096,
        "moe_intermediate_size": 1536,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "n_routed_experts": 256, "num_experts_per_tok": 8, "hidden_size": 7168,
        "moe_intermediate_size": 2048, "vocab_size": 8192, "first_k_dense_replace": 0,
    },
}  # fmt: skip
"""Sizes of a layer. gpt-oss is written as published, in MXFP4; others as ModelOpt writes NVFP4, experts one by one."""


@dataclass(frozen=True, slots=True)
class Loading:
    """What one ``load`` took: bytes and seconds.

    Attributes:
        held: what the loaded model holds.
        host_peak: above what the process held before; None where the system does not say.
        device_peak: of the GPU, above ``held``; None on a CPU.
    """

    held: int
    seconds: float
    host_peak: int | None
    device_peak: int | None

    def above(self, device: torch.device) -> int | None:
        """Bytes in memory of the host, beside the model's own, at the worst moment."""
        if self.host_peak is None:
            return None
        return self.host_peak - (self.held if device.type == "cpu" else 0)


def measure(folder: Path, device: torch.device) -> Loading:
    """Load ``folder`` in a process of its own."""
    command = [sys.executable, "-m", __spec__.name, str(folder), "--device", str(device), "--child"]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Loading(**json.loads(result.stdout.splitlines()[-1]))


def _load_here(folder: Path, device: torch.device) -> Loading:
    files = CheckpointFiles(folder)
    build_on_meta(model_config(files, {}), torch.bfloat16, "grouped_mm", {})  # imports what loading imports
    del files
    if device.type == "cuda":
        torch.zeros(1, device=device)
        torch.cuda.reset_peak_memory_stats(device)
    before = _forget_peak()
    start = time.perf_counter()
    model = load(folder, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    host_peak = None if before is None else _status("VmHWM") - before
    tensors = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}
    held = sum(tensor.nbytes for tensor in tensors.values())
    device_peak = torch.cuda.max_memory_allocated(device) - held if device.type == "cuda" else None
    return Loading(held, seconds, host_peak, device_peak)


def _forget_peak() -> int | None:
    """Make the peak that the system remembers what is held now, and return that; None where it cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    except OSError:
        return None


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def layer_bytes(files: CheckpointFiles) -> int:
    """Bytes of the largest layer."""
    sizes: dict[str, int] = defaultdict(int)
    for name, stored in files.tensors.items():
        if match := re.search(r"(?:layers|block|blk)\.(\d+)\.", name):
            sizes[match[1]] += stored.nbytes
    return max(sizes.values(), default=0)


def read_rate(files: CheckpointFiles) -> float:
    """Bytes a second at which the same files are read, one after the other, into one buffer."""
    buffer, total = bytearray(_CHUNK), 0
    start = time.perf_counter()
    for file in sorted({stored.file for stored in files.tensors.values()}):
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                total += count
    return total / (time.perf_counter() - start)


def write_checkpoint(folder: Path, sizes: Mapping[str, Any], num_bytes: int, *, written: bool = False) -> int:
    """Write a checkpoint of as many layers as ``num_bytes`` hold, one at least; returns their number.

    Args:
        sizes: of the model's config, with "model_type".
        written: fill the files with random bytes, instead of leaving holes.
    """
    from transformers import AutoConfig

    settings = dict(sizes)
    model_type = settings.pop("model_type")
    one = AutoConfig.for_model(model_type, num_hidden_layers=1, **settings)
    per_layer = sum(_nbytes(*entry) for name, entry in _tensors(one) if ".layers." in name)
    layers = max(1, num_bytes // per_layer)
    config = AutoConfig.for_model(model_type, num_hidden_layers=layers, **settings)
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    shards: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    size = 0
    for name, entry in _tensors(config):
        if size > _SHARD:
            shards.append({})
            size = 0
        shards[-1][name] = entry
        size += _nbytes(*entry)
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard, written)
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return layers


def _tensors(config: Any) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Names, dtypes and shapes as they are in files, of the model that ``config`` describes."""
    for name, tensor in build_on_meta(config, torch.bfloat16, "grouped_mm", {}).state_dict().items():
        shape = tuple(tensor.shape)
        stem, _, last = name.rpartition(".")
        if last not in ("gate_up_proj", "down_proj") or not stem.endswith("experts"):
            yield name, ("F32" if tensor.dtype == torch.float32 else "BF16", shape)
        elif config.model_type == "gpt_oss":
            experts, k, n = shape
            yield f"{name}_blocks", ("U8", (experts, n, k // 32, 16))
            yield f"{name}_scales", ("U8", (experts, n, k // 32))
        else:
            experts, n, k = shape
            parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
            for linear in (f"{stem}.{expert}.{part}" for expert in range(experts) for part in parts):
                yield f"{linear}.weight", ("U8", (n // len(parts), k // 2))
                yield f"{linear}.weight_scale", ("F8_E4M3", (n // len(parts), k // 16))
                yield f"{linear}.weight_scale_2", ("F32", ())


_ITEM = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4}


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return _ITEM[dtype] * math.prod(shape)


def _write_file(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], written: bool) -> None:
    """A safetensors file: a header, then holes, then ones in the float32 tensors."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: item[1][0] == "F32"):
        begin, end = end, end + _nbytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    ones = sum(_nbytes(*entry) for entry in tensors.values() if entry[0] == "F32")
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        if written:
            # Numbers as scales of every format, and as codes anything.
            chunk = torch.randint(64, 80, (_CHUNK,), dtype=torch.uint8).numpy().tobytes()
            for begin in range(0, end - ones, _CHUNK):
                stream.write(chunk[: end - ones - begin])
        stream.seek(8 + len(text) + end - ones)
        stream.write(torch.ones(ones // 4).numpy().tobytes())
        stream.truncate(8 + len(text) + end)


def report(folder: Path, device: torch.device) -> Iterator[str]:
    """What loading ``folder`` took, line by line."""
    files = CheckpointFiles(folder)
    layer, stored = layer_bytes(files), sum(tensor.nbytes for tensor in files.tensors.values())
    count = len({tensor.file for tensor in files.tensors.values()})
    yield f"{folder}: {len(files.tensors)} tensors in {count} files"
    yield f"  stored    {stored / 1e9:.2f} GB, the largest layer {layer / 1e6:.0f} MB"
    found = measure(folder, device)
    yield f"  held      {found.held / 1e9:.2f} GB on {device}"
    above = found.above(device)
    if above is None:
        yield "  peak      not measured: needs Linux, and /proc/self/clear_refs that can be written"
    else:
        fits = "under" if above < layer + ALLOWANCE else "OVER"
        yield f"  peak      {above / 1e6:.0f} MB more of host memory, {fits} a layer and {ALLOWANCE / 1e6:.0f} MB"
    if found.device_peak is not None:
        yield f"            {found.device_peak / 1e6:.0f} MB more of device memory"
    rate = stored / found.seconds
    yield f"  time      {found.seconds:.1f} s, {rate / 1e9:.2f} GB/s; reading alone {read_rate(files) / 1e9:.2f} GB/s"


def main(argv: list[str] | None = None) -> None:
    """Measure a folder, or one written for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="a checkpoint; by default one is written")
    parser.add_argument("--model", default="gpt-oss-120b", help=f"whose layers are written, of {', '.join(MODELS)}")
    parser.add_argument("--gigabytes", type=float, default=4, help="of the checkpoint that is written (default: 4)")
    parser.add_argument("--written", action="store_true", help="fill it with bytes, so that the rate is a disk's")
    parser.add_argument("--device", default="cpu", help="where to load it (default: cpu)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if args.child:
        print(json.dumps(asdict(_load_here(args.folder, device))))
        return
    try:
        if args.folder is not None:
            _say(report(args.folder, device))
            return
        if args.model not in MODELS:
            raise UnknownNameError("reading --model", args.model, list(MODELS))
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(Path(folder), MODELS[args.model], int(args.gigabytes * 1e9), written=args.written)
            _say(report(Path(folder), device))
    except (CheckpointError, UnknownNameError) as error:
        parser.exit(2, f"{error}\n")


def _say(lines: Iterator[str]) -> None:
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
