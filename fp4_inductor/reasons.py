"""Why a kernel backend refuses a block: a closed list of codes, so that tests and tools never parse text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ReasonCode(Enum):
    CAPABILITY = "capability"
    """The device is of the wrong kind or generation."""
    LIBRARY = "library"
    """A library is missing or has the wrong version."""
    FORMAT = "format"
    """The weight format or activation format is not one the kernel reads."""
    ACTIVATION = "activation"
    """The kernel has no knob for the activation that the graph computes."""
    ROUTING = "routing"
    """The kernel cannot route as the graph does."""
    SHAPE = "shape"
    """A size or alignment the kernel cannot take, also with padding."""
    BIAS = "bias"
    """The kernel adds no expert biases."""
    PARALLEL = "parallel"
    """The kernel cannot run a subset of the experts."""
    DTYPE = "dtype"
    """The activation, combine or output dtype is not supported."""
    PROBE_FAILED = "probe_failed"
    """The kernel was tried at compile time and failed."""


@dataclass(frozen=True, slots=True)
class Reason:
    code: ReasonCode
    need: str
    got: str
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.code.name}: needs {self.need}, got {self.got}"
        return f"{text} ({self.hint})" if self.hint else text


@dataclass(frozen=True, slots=True)
class Verdict:
    """A backend's answer: willing exactly when there is no reason against. All reasons, never the first only."""

    backend: str
    reasons: tuple[Reason, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        return f"{self.backend}: ok" if self.ok else f"{self.backend}: " + "; ".join(map(str, self.reasons))
