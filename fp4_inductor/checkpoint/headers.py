"""The header of a safetensors file: what it holds and where, checked before a byte of it is believed.

Nothing else is read here, and nothing is executed: a header is JSON. Source: the format's own description,
https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from ..errors import CheckpointError

_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000
"""The format's own limit."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_PAIRS = "F4"
"""Two e2m1 codes a byte under a shape that counts codes: read as the bytes they are."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is: its file, its bytes there from ``begin`` to ``end``, and what they mean."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """A file's tensors by name, and the text that its writer added."""

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]


def read_header(file: Path) -> Header:
    """The header of ``file``.

    Raises:
        CheckpointError: a file that cannot be read, or whose header contradicts itself or the file's size.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if not 2 <= length <= min(_LONGEST_HEADER, size - _LENGTH_BYTES):
                _refuse(file, f"a header of {length} bytes in a file of {size}")
            raw = stream.read(length)
        content = json.loads(raw, object_pairs_hook=_without_duplicates)
    except (OSError, ValueError, RecursionError) as error:
        _refuse(file, f"{type(error).__name__}: {error}")
    if not isinstance(content, dict):
        _refuse(file, "a header that is no mapping")
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _refuse(file, "metadata that is no mapping of strings")
    start = _LENGTH_BYTES + length
    tensors = {name: _stored(file, name, entry, start) for name, entry in content.items()}
    _check_coverage(file, tensors, start, size)
    return Header(tensors, metadata)


def _stored(file: Path, name: str, entry: Any, start: int) -> StoredTensor:
    try:
        tag, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        _refuse(file, f"no dtype, shape and data_offsets for {name}")
    numbers = [*shape, begin, end] if isinstance(shape, list) else [None]
    if not all(type(number) is int and number >= 0 for number in numbers) or begin > end:
        _refuse(file, f"shape {shape} and data_offsets {[begin, end]} for {name}")
    if tag == _PAIRS:
        if not shape or shape[-1] % 2:
            _refuse(file, f"an odd number of 4-bit values a row, shape {shape}, for {name}")
        tag, shape = "U8", [*shape[:-1], shape[-1] // 2]
    if tag not in DTYPES:
        _refuse(file, f"dtype {tag!r} for {name}, which torch has no name for")
    if math.prod(shape) * DTYPES[tag].itemsize != end - begin:
        _refuse(file, f"{end - begin} bytes for {name}, {tag} of shape {shape}")
    return StoredTensor(file, DTYPES[tag], tuple(shape), start + begin, start + end)


def _check_coverage(file: Path, tensors: dict[str, StoredTensor], start: int, size: int) -> None:
    """Every byte belongs to one tensor: the format allows neither gaps nor overlaps."""
    reached = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != reached:
            _refuse(file, f"{name} at byte {tensor.begin}, where {reached} is the next free one")
        reached = tensor.end
    if reached != size:
        _refuse(file, f"{size} bytes where its tensors end at {reached}")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name that stands twice")
    return found


def _refuse(file: Path, got: str) -> NoReturn:
    raise CheckpointError(
        "opening a checkpoint", needed=f"a readable {file.name}", got=got, where=str(file), now="download it again"
    )
