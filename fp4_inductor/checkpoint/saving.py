"""``save_pretrained`` of a model with packed weights: compressed-tensors' layout, every matrix by itself.

``X.weight_packed uint8 [N, K/2]``, ``X.weight_scale [N, K/bs]``, and for NVFP4 ``X.weight_global_scale float32 [1]``,
which divides to dequantise: what ``load`` here, compressed-tensors and vLLM read. Experts leave their stack under the
names of the unquantised model's original checkpoints.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from tqdm import tqdm

from ..errors import CheckpointError
from ..formats import BlockFormat
from ..modules import CarriedWeight, carried_weights, gate_before_up, global_scale_of
from .weights import divisor

_NUMBERS = torch.float64
"""Of the numbers that stand for rows: no parameter has this dtype, and it counts to 2^53."""
_CARRIER = 2**32
"""Distance of one parameter's row numbers from the next one's."""
_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def saves_packed(model: nn.Module) -> nn.Module:
    """Make ``model.save_pretrained`` write packed weights, if it is a model of transformers; in place."""
    transformers = sys.modules.get("transformers")
    # By its class: a compiled model only looks like one.
    if transformers is not None and issubclass(type(model), transformers.PreTrainedModel):
        base: Any = type(model)
        model.__class__ = base if issubclass(base, SavesPacked) else _saving_class(base)
    return model


class SavesPacked(nn.Module):
    """What ``saves_packed`` adds to a model's class."""

    _plain_class: type = nn.Module

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *, max_shard_size: int | str = "4GB", **kwargs: Any
    ) -> None:
        """Write config, generation config and weights, packed ones in compressed-tensors' layout.

        Args:
            max_shard_size: bytes of a file, or a number before "MB" or "GB".

        Raises:
            CheckpointError: an option that only unpacked models have, or weights that the layout has no place for.
        """
        if given := sorted(name for name, value in kwargs.items() if value):
            _refuse("an option that applies to packed weights", ", ".join(given), "upload the folder once it is saved")
        folder = Path(save_directory)
        tensors, config = compressed_tensors_of(self)
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            if _SHARD.fullmatch(old.name):
                old.unlink()
        _write_config(self, folder, config)
        _write_shards(folder, tensors, _bytes(max_shard_size))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """The dynamic class has no importable name: pickle what it is made of."""
        reduced: tuple[Any, ...] = tuple(super().__reduce_ex__(protocol))
        return (_new_model, (self._plain_class,), *reduced[2:])


@functools.cache
def _saving_class(base: type) -> type[SavesPacked]:
    namespace = {"__module__": base.__module__, "__doc__": base.__doc__, "_plain_class": base}
    return type(base.__name__, (SavesPacked, base), namespace)


def _new_model(base: type) -> SavesPacked:
    cls = _saving_class(base)
    return cls.__new__(cls)


def compressed_tensors_of(model: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Names and tensors of ``model`` in compressed-tensors' layout, and the ``quantization_config`` that says so.

    Packed tensors are views of the model's where rows stand together.

    Raises:
        CheckpointError: nothing packed, two formats, or a matrix whose rows have different global scales.
    """
    from transformers.core_model_loading import revert_weight_conversion

    carriers = [(path, module, weight) for path, module in model.named_modules() for weight in carried_weights(module)]
    formats = {weight.format for *_, weight in carriers}
    if len(formats) != 1:
        _refuse("weights packed in one format", ", ".join(sorted(map(str, formats))) or "none that are packed", "")
    packed = {f"{path}.{name}" for path, _, weight in carriers for name in weight.tensor_names}
    tied = set(model.all_tied_weights_keys) if getattr(model.config, "tie_word_embeddings", False) else set()
    named = {name: value.detach() for name, value in model.state_dict().items() if name not in packed | tied}
    # transformers takes stacked experts apart and knows their names. In place of packed weights it gets the numbers
    # of their rows, which say afterwards what went where.
    tensors: dict[str, torch.Tensor] = {}
    rows: dict[str, torch.Tensor] = {}
    turned = _turned_in_files(model)
    for number, (path, module, weight) in enumerate(carriers):
        name = f"{path}.{weight.name}"
        of_file = rows if any(part in name for part in turned) else named
        of_file[name] = _row_numbers(module, weight) + number * _CARRIER
    for name, value in revert_weight_conversion(model, named).items():
        if value.dtype != _NUMBERS:
            tensors[name] = value
            continue
        path, module, weight = carriers[int(value.flatten()[0] // _CARRIER)]
        # Experts that stay stacked under the name of a module come apart under the model's own names.
        is_stack = value.dim() == 3 and value.shape == _row_numbers(module, weight).shape
        renamed = is_stack and name.rpartition(".")[2] != weight.name
        rows[f"{path}.{weight.name}" if renamed else name] = value
    matrices: dict[str, tuple[nn.Module, CarriedWeight, torch.Tensor]] = {}
    for name, numbers in rows.items():
        _, module, weight = carriers[int(numbers.flatten()[0] // _CARRIER)]
        for matrix, of_matrix in _matrices(module, weight, name, numbers % _CARRIER, tensors):
            matrices[matrix] = (module, weight, of_matrix)
    ignored = sorted(name.removesuffix(".weight") for name, value in tensors.items() if value.dim() == 2)
    for matrix, (module, weight, of_matrix) in matrices.items():
        tensors |= _parts(matrix.removesuffix(".weight"), module, weight, of_matrix)
    (fmt,) = formats
    return tensors, _quantization_config(fmt, ignored)


def _turned_in_files(model: Any) -> list[str]:
    """Parts of names whose parameters transformers stores with their axes swapped, by the shape of a parameter that a
    packed model does not have: they keep their names."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    table = get_model_conversion_mapping(model, add_legacy=False)
    return [
        pattern
        for entry in table
        if any(type(operation).__name__ == "Transpose" for operation in getattr(entry, "operations", ()))
        for pattern in entry.target_patterns
    ]


def _row_numbers(module: nn.Module, weight: CarriedWeight) -> torch.Tensor:
    """``[N, 2]``, ``[E, N, 2]`` or ``[E, 2, N]``: a parameter with K of two, its rows counted over all experts."""
    shape = module.get_parameter(weight.codes_name).shape[:-1]
    numbers = torch.arange(math.prod(shape), dtype=_NUMBERS, device="cpu").reshape(shape)
    numbers = torch.stack((numbers, numbers), dim=-1)  # an axis of one would be squeezed away
    return numbers.mT if weight.transposed else numbers


def _matrices(
    module: nn.Module, weight: CarriedWeight, name: str, numbers: torch.Tensor, tensors: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The matrices that a parameter goes into, and the numbers of their rows; experts still stacked come apart here,
    and their biases in ``tensors`` with them."""
    if numbers.dim() == 2:
        yield name, numbers[:, 0]
        return
    of_experts = numbers[:, 0] if weight.transposed else numbers[..., 0]
    stem, _, last = name.rpartition(".")
    parts = [slice(None)]
    names = [last]
    if last == "gate_up_proj":
        concatenated = gate_before_up(module)
        if concatenated is None:
            needed = "a class that says which rows are gate's and which up's"
            _refuse(needed, type(module).__name__, "the layout has no place for the two in one matrix")
        names, half = ["gate_proj", "up_proj"], of_experts.shape[1] // 2
        parts = [slice(half), slice(half, None)] if concatenated else [slice(0, None, 2), slice(1, None, 2)]
    biases = tensors.pop(f"{name}_bias", None)
    for expert, of_expert in enumerate(of_experts):
        for part, of_part in zip(names, parts, strict=True):
            yield f"{stem}.{expert}.{part}.weight", of_expert[of_part]
            if biases is not None:
                tensors[f"{stem}.{expert}.{part}.bias"] = biases[expert, of_part]


def _parts(base: str, module: nn.Module, weight: CarriedWeight, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the layout stores of one matrix, rows ``numbers`` of a parameter."""
    rows = numbers.long()
    together = len(rows) == 1 or bool((rows.diff() == 1).all())

    def take(values: torch.Tensor) -> torch.Tensor:
        flat = values.detach().flatten(0, -2)
        return flat[rows[0] : rows[-1] + 1] if together else flat[rows.to(flat.device)]

    codes = module.get_parameter(weight.codes_name)
    parts = {
        f"{base}.weight_packed": take(codes),
        f"{base}.weight_scale": take(module.get_parameter(weight.scale_name)),
    }
    every = global_scale_of(module, weight)
    if every is not None:
        numbers_of_rows = take(every.detach().float().cpu().expand(codes.shape[:-1]).unsqueeze(-1)).flatten().unique()
        if len(numbers_of_rows) != 1:
            _refuse("one global scale for each matrix", f"{len(numbers_of_rows)} in {base}", "")
        parts[f"{base}.weight_global_scale"] = divisor(numbers_of_rows)
    return parts


def _quantization_config(fmt: BlockFormat, ignored: list[str]) -> dict[str, Any]:
    """What compressed-tensors writes into ``config.json`` for weights of ``fmt`` and unquantised activations."""
    name = f"{fmt.name}-pack-quantized"
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "dynamic": False,
        "strategy": "tensor_group" if fmt.has_global_scale else "group",
        "group_size": fmt.block_size,
        "scale_dtype": str(fmt.scale_dtype),
    }
    group = {"format": name, "targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": name,
        "config_groups": {"group_0": group},
        "ignore": ignored,
    }


def _write_config(model: Any, folder: Path, quantization: Mapping[str, Any]) -> None:
    weight, module = next((w, m) for m in model.modules() for w in carried_weights(m))
    model.config.save_pretrained(folder)
    path = folder / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["architectures"] = [type(model).__name__]
    content["dtype"] = str(getattr(module, weight.dtype_name)).removeprefix("torch.")
    content["quantization_config"] = quantization
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _write_shards(folder: Path, tensors: Mapping[str, torch.Tensor], limit: int) -> None:
    """One file, or shards under ``limit`` bytes and their index. Holds one file's tensors beside the model."""
    from safetensors.torch import save_file

    shards: list[list[str]] = [[]]
    size = 0
    for name in sorted(tensors):
        if shards[-1] and size + tensors[name].nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensors[name].nbytes
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = ["model.safetensors"]
    for file, names in zip(files, tqdm(shards, desc="Saving", unit="file", disable=None), strict=True):
        # A copy each: views of one stack share memory, which the format has no way to say.
        part = {name: tensors[name].to("cpu", copy=True).contiguous() for name in names}
        save_file(part, folder / file, metadata={"format": "pt"})
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _bytes(size: int | str) -> int:
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([MG])B", size)
    if match is None:
        _refuse("max_shard_size as bytes, or like '500MB' or '4GB'", repr(size), "")
    return int(float(match[1]) * {"M": 10**6, "G": 10**9}[match[2]])


def _refuse(needed: str, got: str, now: str) -> NoReturn:
    raise CheckpointError("saving packed weights", needed=needed, got=got, now=now)
