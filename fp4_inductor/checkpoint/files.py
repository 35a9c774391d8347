"""The files of a checkpoint, safetensors or GGUF: headers first, then tensor by tensor through a memory map."""

from __future__ import annotations

import json
import mmap
import re
from pathlib import Path
from typing import Any, NoReturn

import torch

from ..errors import CheckpointError
from .gguf_header import is_gguf, read_gguf_header
from .headers import Header, StoredTensor, read_header

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_DROP_EVERY = 64 << 20
"""Bytes after which pages of the maps are given back, so that the file does not stay in memory beside the model."""


class CheckpointFiles:
    """One file, the shards that an index names, or the parts of a split GGUF file.

    Attributes:
        folder: where they are.
        tensors: where each is, by name.
        metadata: text that the writer added, of all files.
        is_gguf: whether the files are GGUF.
        config: ``config.json``, empty where there is none.
        quantization: what ``config.json`` and ``hf_quant_config.json`` say of it, the latter in ``config.json``'s keys.

    Raises:
        CheckpointError: no such folder, neither safetensors nor GGUF, or a file that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.folder = folder = path.parent if path.is_file() else path
        self.tensors: dict[str, StoredTensor] = {}
        self.metadata: dict[str, str] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        self._bytes_mapped = 0
        index = None if path.is_file() else self._index()
        names = [path.name] if path.is_file() else self._names_without_index() if index is None else index.values()
        parts = []
        for file in sorted({folder / name for name in names}):
            gguf = is_gguf(file)
            header = read_gguf_header(file) if gguf else read_header(file)
            if gguf:
                parts.append(header)
            if twice := sorted(self.tensors.keys() & header.tensors.keys()):
                files = f"{self.tensors[twice[0]].file.name} and {file.name}"
                now = "download the checkpoint again; the folder may hold files of two"
                self._refuse("each tensor once", f"{twice[0]} in two files, {files}", now)
            self.tensors |= header.tensors
            self.metadata |= header.metadata
        if index is not None and (lost := sorted(index.keys() - self.tensors.keys())):
            self._refuse("every tensor that the index names", f"{len(lost)} missing, such as {lost[0]}", "")
        self.is_gguf = bool(parts)
        if parts:
            self._check_parts(parts)
        self.config = self._read_json(folder / "config.json")
        self.quantization = self._quantization()

    def read(self, key: str) -> torch.Tensor:
        """A tensor of its own memory, in the dtype and shape of the file."""
        stored = self.tensors[key]
        if not stored.nbytes:
            return torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        if stored.file not in self._maps:
            with stored.file.open("rb") as stream:
                # A private map is writable, which torch asks of memory; nothing writes to it.
                self._maps[stored.file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        mapped = self._maps[stored.file]
        read = torch.empty(stored.nbytes, dtype=torch.uint8, device="cpu")
        for begin in range(0, stored.nbytes, _DROP_EVERY):
            part = read[begin : begin + _DROP_EVERY]
            part.copy_(torch.frombuffer(mapped, dtype=torch.uint8, count=len(part), offset=stored.begin + begin))
            self._bytes_mapped += len(part)
            if self._bytes_mapped >= _DROP_EVERY:
                self._drop_pages()
        return read.view(stored.dtype).reshape(stored.shape)

    def _drop_pages(self) -> None:
        self._bytes_mapped = 0
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapped in self._maps.values():
                mapped.madvise(mmap.MADV_DONTNEED)

    def _index(self) -> dict[str, str] | None:
        """Tensor names to file names, None where there is no index."""
        indices = sorted(self.folder.glob("*.safetensors.index.json"))
        path = self.folder / _INDEX if len(indices) != 1 else indices[0]
        if not path.exists():
            return None
        weight_map = self._read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            self._refuse(f"a readable {path.name}", "no weight_map from names to files", "")
        for name in weight_map.values():
            if Path(name).name != name or not name.endswith(".safetensors"):
                self._refuse("an index of safetensors files in its own folder", repr(name), "")
        if (self.folder / _SINGLE).exists() and _SINGLE not in weight_map.values():
            self._refuse(
                "one checkpoint", f"two: {_SINGLE}, and the shards that {path.name} names", "move one of them away"
            )
        return weight_map

    def _names_without_index(self) -> list[str]:
        names = sorted(path.name for path in self.folder.glob("*.safetensors"))
        shards = [re.fullmatch(r"(.+)-(\d+)-of-(\d+)\.safetensors", name) for name in names]
        series = {(shard[1], int(shard[3])) for shard in shards if shard}
        complete = all(shards) and len(series) == 1 and len(names) == next(iter(series))[1]
        if not names:
            names = sorted(path.name for path in self.folder.glob("*") if path.is_file() and is_gguf(path))
            complete = bool(names)
        if _SINGLE in names:
            names = [_SINGLE]
        elif len(names) != 1 and not complete:
            entries = sorted(entry.name for entry in self.folder.iterdir())
            if any(entry.endswith(_PICKLES) for entry in entries):
                hint = "save it again as safetensors: pickles run code when they are opened, so none is"
            else:
                hint = "other formats can be saved again by transformers"
            self._refuse(f"{_SINGLE} or {_INDEX}", ", ".join(entries[:5]) or "nothing", hint)
        return names

    def _check_parts(self, headers: list[Header]) -> None:
        """Each part of a split GGUF file is there once, and no other file."""
        said = [tuple(header.metadata.get(f"split.{name}", "0") for name in ("no", "count")) for header in headers]
        if len(said) == 1 and said[0] in (("0", "0"), ("0", "1")):
            return
        if sorted(said) != sorted((str(number), str(len(said))) for number in range(len(said))):
            got = ", ".join(f"part {number} of {count}" for number, count in said[:5])
            now = "give the folder that holds all parts of one file and no other, or the path of a file that is whole"
            self._refuse("one GGUF file, or all parts of one", got, now)

    def _quantization(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        second = self._read_json(self.folder / "hf_quant_config.json").get("quantization")
        if isinstance(second, dict):
            found |= {"quant_method": "modelopt", **second}
        for part in (self.config, *(value for value in self.config.values() if isinstance(value, dict))):
            if isinstance(said := part.get("quantization_config"), dict):
                found |= said
                break
        return found

    def _read_json(self, path: Path) -> dict[str, Any]:
        if not path.exists():
            return {}
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            self._refuse(f"a readable {path.name}", f"{type(error).__name__}: {error}", "")
        if not isinstance(content, dict):
            self._refuse(f"a readable {path.name}", "no mapping", "")
        return content

    def _refuse(self, needed: str, got: str, now: str) -> NoReturn:
        raise CheckpointError("opening a checkpoint", needed=needed, got=got, where=str(self.folder), now=now)
