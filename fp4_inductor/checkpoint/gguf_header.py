"""The header of a GGUF file: what it holds and where, checked before a byte of it is believed.

Nothing else is read here. Blocks of quantised numbers become bytes under one more axis, a block's size long.
Source: the format's own description, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NoReturn

import torch

from ..errors import CheckpointError
from .headers import Header, StoredTensor

MAGIC = b"GGUF"
BLOCK_SIZE = 32
MXFP4_BYTES = 17
"""A block of MXFP4: one e8m0 byte, then 32 codes."""
Q8_0_BYTES = 34
"""A block of Q8_0: one float16 scale, then 32 int8."""

_VERSIONS = (2, 3)
_LONGEST_HEADER = 100_000_000
_LONGEST_ALIGNMENT = 1 << 20
_MOST_DIMS = 4
_SMALLEST_ENTRY, _SMALLEST_TENSOR = 13, 32
_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_BLOCKS = {8: Q8_0_BYTES, 39: MXFP4_BYTES}
_TYPES = (
    "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL "
    "IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 Q4_0_4_4 Q4_0_4_8 Q4_0_8_8 TQ1_0 TQ2_0 IQ4_NL_4_4 IQ4_NL_4_8 "
    "IQ4_NL_8_8 MXFP4 NVFP4 Q1_0"
)
"""ggml's names of its types, in the order of their numbers."""
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_TEXT, _ARRAY = 8, 9


def is_gguf(file: Path) -> bool:
    """Whether ``file`` begins as GGUF files do."""
    try:
        with file.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_gguf_header(file: Path) -> Header:
    """The header of ``file``; numbers of its metadata as text, lists left out.

    Raises:
        CheckpointError: a file that cannot be read, whose header contradicts itself or the file's size, or that holds
            tensors of a type that is not read.
    """
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _read(_Cursor(file, content))
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        _refuse(file, f"{type(error).__name__}: {error}")


class _Cursor:
    """A place in a file that only moves forwards, and not beyond the end."""

    def __init__(self, file: Path, content: mmap.mmap) -> None:
        self.file, self.content, self.size, self.position = file, content, len(content), 0

    def skip(self, count: int) -> int:
        """Where the next ``count`` bytes begin."""
        start = self.position
        if count > min(self.size, _LONGEST_HEADER) - start:
            _refuse(self.file, f"{count} bytes from byte {start} on, in a file of {self.size}")
        self.position += count
        return start

    def number(self, layout: str) -> Any:
        return struct.unpack_from(layout, self.content, self.skip(struct.calcsize(layout)))[0]

    def count(self, what: str, smallest: int) -> int:
        """A number of things of at least ``smallest`` bytes each, no more than the file has room for."""
        found = int(self.number("<Q"))
        if found * smallest > self.size - self.position:
            _refuse(self.file, f"{found} {what} in a file of {self.size} bytes")
        return found

    def text(self) -> str:
        start = self.skip(self.number("<Q"))
        return self.content[start : self.position].decode("utf-8")


def _read(cursor: _Cursor) -> Header:
    file = cursor.file
    if cursor.content[: len(MAGIC)] != MAGIC:
        _refuse(file, "another file's beginning")
    cursor.skip(len(MAGIC))
    if (version := cursor.number("<I")) not in _VERSIONS:
        _refuse(file, f"version {version}, which is old, new, or of the other byte order")
    tensor_count = cursor.count("tensors", _SMALLEST_TENSOR)
    metadata: dict[str, str] = {}
    names: set[str] = set()
    for _ in range(cursor.count("entries", _SMALLEST_ENTRY)):
        name = cursor.text()
        if name in names:
            _refuse(file, f"{name} twice")
        names.add(name)
        value = _value(cursor, cursor.number("<I"))
        if value is not None:
            metadata[name] = str(value)
    entries = [_entry(cursor) for _ in range(tensor_count)]
    alignment = _alignment(file, metadata)
    tensors = _place(cursor, entries, alignment)
    return Header(tensors, metadata)


def _value(cursor: _Cursor, kind: int) -> Any:
    """A value of the metadata, None for lists: of those nothing here is of use."""
    if kind == _TEXT:
        return cursor.text()
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind])
    if kind != _ARRAY:
        _refuse(cursor.file, f"metadata of type {kind}")
    element = cursor.number("<I")
    if element == _TEXT:
        for _ in range(cursor.count("texts", struct.calcsize("<Q"))):
            cursor.skip(cursor.number("<Q"))
    elif element in _SCALARS:
        size = struct.calcsize(_SCALARS[element])
        cursor.skip(size * cursor.count("numbers", size))
    else:
        _refuse(cursor.file, f"a list of type {element}")
    return None


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """A tensor's name, shape, type and offset."""
    name, dims = cursor.text(), cursor.number("<I")
    if not 1 <= dims <= _MOST_DIMS:
        _refuse(cursor.file, f"{dims} axes for {name}")
    shape = tuple(int(cursor.number("<Q")) for _ in range(dims))[::-1]  # the file counts axes from the last
    if 0 in shape:
        _refuse(cursor.file, f"shape {list(shape)} for {name}")
    return name, shape, int(cursor.number("<I")), int(cursor.number("<Q"))


def _alignment(file: Path, metadata: dict[str, str]) -> int:
    said = metadata.get("general.alignment", "32")
    value = int(said) if said.isdecimal() else 0
    if not 0 < value <= _LONGEST_ALIGNMENT or value & (value - 1):
        _refuse(file, f"alignment {said}")
    return value


def _place(
    cursor: _Cursor, entries: list[tuple[str, tuple[int, ...], int, int]], alignment: int
) -> dict[str, StoredTensor]:
    """Tensors one after the other, each at the next multiple of ``alignment``, up to the end of the file."""
    file = cursor.file
    _refuse_types(file, entries)
    start = reached = _aligned(cursor.position, alignment)
    tensors: dict[str, StoredTensor] = {}
    for name, shape, kind, offset in sorted(entries, key=lambda entry: entry[3]):
        if name in tensors:
            _refuse(file, f"{name} twice")
        begin = start + offset
        if begin != _aligned(reached, alignment):
            _refuse(file, f"{name} at byte {begin}, where {_aligned(reached, alignment)} is the next free one")
        if kind in _BLOCKS:
            if shape[-1] % BLOCK_SIZE:
                _refuse(file, f"rows of {shape[-1]} for {name}, which are no whole blocks of {BLOCK_SIZE}")
            shape = (*shape[:-1], shape[-1] // BLOCK_SIZE, _BLOCKS[kind])
        dtype = _PLAIN.get(kind, torch.uint8)
        reached = begin + math.prod(shape) * dtype.itemsize
        if reached > cursor.size:
            _refuse(file, f"{cursor.size} bytes where {name} ends at {reached}")
        tensors[name] = StoredTensor(file, dtype, shape, begin, reached)
    if cursor.size not in (reached, _aligned(reached, alignment)):
        _refuse(file, f"{cursor.size} bytes where its tensors end at {reached}")
    return tensors


def _refuse_types(file: Path, entries: list[tuple[str, tuple[int, ...], int, int]]) -> None:
    known = _TYPES.split()
    for name, _, kind, _ in entries:
        if kind not in _PLAIN and kind not in _BLOCKS:
            raise CheckpointError(
                "reading a GGUF file",
                needed="tensors of type MXFP4, Q8_0, BF16, F16 or F32",
                got=f"{known[kind] if kind < len(known) else f'type {kind}'}: {name}",
                where=str(file),
                now="load the checkpoint in safetensors that it was converted from, or convert it with --outtype bf16",
            )


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _refuse(file: Path, got: str) -> NoReturn:
    raise CheckpointError(
        "opening a checkpoint", needed=f"a readable {file.name}", got=got, where=str(file), now="download it again"
    )
