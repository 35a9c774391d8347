"""The safetensors files of a checkpoint folder."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

from ..errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class SafetensorsFiles:
    """One file, or the shards that an index names.

    Attributes:
        folder: where they are.
        keys: name of each tensor, to the file that holds it.
        shapes: of each tensor.

    Raises:
        CheckpointError: no such folder, no safetensors, or a file that cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.folder = Path(path)
        if not self.folder.is_dir():
            hint = "download a model of the Hub with huggingface_hub.snapshot_download and load its folder"
            self._refuse("a local folder", "no such folder", hint)
        index = self.folder / _INDEX
        names = sorted(set(self._read_index(index).values())) if index.exists() else [_SINGLE]
        if not index.exists() and not (self.folder / _SINGLE).exists():
            found = ", ".join(sorted(entry.name for entry in self.folder.iterdir())[:5]) or "nothing"
            self._refuse(f"{_SINGLE} or {_INDEX}", found, "other formats can be saved again by transformers")
        self.keys: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name in names:
            with self._open(name) as file:
                in_file: list[str] = file.keys()
                for key in in_file:
                    self.keys[key] = name
                    self.shapes[key] = tuple(file.get_slice(key).get_shape())
        if index.exists() and (lost := sorted(self._read_index(index).keys() - self.keys.keys())):
            self._refuse("every tensor that the index names", f"{len(lost)} missing, such as {lost[0]}", "")

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor, file by file. They may share memory with the file: copy what is kept."""
        by_file = defaultdict(list)
        for key, name in self.keys.items():
            by_file[name].append(key)
        for name, keys in by_file.items():
            with self._open(name) as file:
                for key in keys:
                    yield key, file.get_tensor(key)

    def _read_index(self, index: Path) -> dict[str, str]:
        try:
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError) as error:
            self._refuse(f"a readable {index.name}", f"{type(error).__name__}: {error}", "")
        return weight_map

    def _open(self, name: str) -> Any:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            self._refuse("the safetensors package", "none", 'pip install "fp4_inductor[hf]"')
        try:
            return safe_open(self.folder / name, framework="pt")
        except (SafetensorError, OSError) as error:
            self._refuse(f"a readable {name}", str(error), "download it again")

    def _refuse(self, needed: str, got: str, now: str) -> NoReturn:
        raise CheckpointError("opening a checkpoint", needed=needed, got=got, where=str(self.folder), now=now)
