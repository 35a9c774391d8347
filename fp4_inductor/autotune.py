"""Choose the fastest of some candidates by timing them, once per device, library versions and shape.

Pure Python: what a candidate is and how it is timed is the caller's. Choices are kept in memory and on disk, one
small file each, which says in full what it was measured for.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

Key = Mapping[str, "str | int"]
"""What a choice depends on. Two keys are the same where all their entries are."""

_GAIN = 0.98
"""Of the first candidate's time: what another must stay below to replace it, so that noise does not choose."""


class CandidateFailedError(Exception):
    """A candidate that cannot run here, such as one that needs more shared memory than there is."""


class Choices:
    """Choices made before, in ``directory``; it need not exist."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._known: dict[str, str] = {}

    def get(self, key: Key) -> str | None:
        """The choice for ``key``; a file that cannot be read, or is for another key, is as none, with a warning."""
        text = _text(key)
        if text not in self._known and (choice := self._read(key)) is not None:
            self._known[text] = choice
        return self._known.get(text)

    def put(self, key: Key, choice: str) -> None:
        """Keep a choice; where the disk refuses, in memory only, with a warning."""
        self._known[_text(key)] = choice
        try:
            self._write(self._path(key), {"key": dict(key), "choice": choice})
        except OSError as error:
            logger.warning("autotuning is not kept for the next process: %s", error)

    def _write(self, path: Path, content: object) -> None:
        """Others may read at any time: the file appears whole or not at all."""
        self.directory.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=self.directory, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)

    def _path(self, key: Key) -> Path:
        return self.directory / f"{hashlib.sha256(_text(key).encode()).hexdigest()[:32]}.json"

    def _read(self, key: Key) -> str | None:
        path = self._path(key)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("ignoring %s, which cannot be read: %s", path, error)
            return None
        if not isinstance(found, dict) or found.get("key") != dict(key) or not isinstance(found.get("choice"), str):
            logger.warning("ignoring %s, which was not written for %s", path, _text(key))
            return None
        choice: str = found["choice"]
        return choice


def tune(key: Key, candidates: Sequence[str], time: Callable[[str], float], choices: Choices) -> str:
    """The fastest candidate, or the one chosen for ``key`` before.

    Args:
        candidates: the first is what is used without tuning, and stays unless another is clearly faster.
        time: any measure; raises ``CandidateFailedError`` for a candidate that cannot run.

    Returns:
        The first candidate where none can run; that is not kept.
    """
    kept = choices.get(key)
    if kept is not None and kept in candidates:
        return kept
    times = {candidate: _time(candidate, time) for candidate in candidates}
    best = min(times, key=lambda candidate: times[candidate] * (_GAIN if candidate == candidates[0] else 1.0))
    if math.isinf(times[best]):
        logger.warning("autotuning found no candidate that runs for %s", _text(key))
        return candidates[0]
    choices.put(key, best)
    return best


def _time(candidate: str, time: Callable[[str], float]) -> float:
    try:
        return time(candidate)
    except CandidateFailedError as error:
        logger.debug("skipping %s: %s", candidate, error)
        return math.inf


def _text(key: Key) -> str:
    return json.dumps(dict(key), sort_keys=True)
