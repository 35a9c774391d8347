"""Errors. Each says what was done, what was needed, what was got, where, and what to do now."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class Fp4InductorError(Exception):
    """Base of every error this package raises on purpose."""

    def __init__(self, did: str, *, needed: str, got: str, where: str = "", now: str = "") -> None:
        self.did, self.needed, self.got, self.where, self.now = did, needed, got, where, now
        lines = [f"{did}: needed {needed}, got {got}."]
        if where:
            lines.append(f"  Where: {where}")
        if now:
            lines.append(f"  What now: {now}")
        super().__init__("\n".join(lines))


class UnknownNameError(Fp4InductorError, ValueError):
    """An option, format or backend name that does not exist."""

    def __init__(self, did: str, name: object, known: Iterable[str], *, where: str = "") -> None:
        names = sorted(known)
        near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
        super().__init__(
            did,
            needed="one of " + ", ".join(names),
            got=repr(name),
            where=where,
            now=f"did you mean {near[0]!r}?" if near else "",
        )


class InvalidOptionError(Fp4InductorError, ValueError):
    """An option whose name exists but whose value cannot be used."""


class QuantizationError(Fp4InductorError, ValueError):
    """A tensor or model that cannot be quantised; nothing was changed."""


class CheckpointError(Fp4InductorError, ValueError):
    """A checkpoint that cannot be loaded exactly."""


class NoBackendError(Fp4InductorError, RuntimeError):
    """No kernel backend takes a matched block; the message holds every backend's reasons."""


class UnmatchedError(Fp4InductorError, RuntimeError):
    """FP4 weights were left in a graph that was asked to be lowered completely."""


class VerificationError(Fp4InductorError, RuntimeError):
    """A fused op and the graph it replaced disagree."""
