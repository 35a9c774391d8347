"""``Options``: every ``fp4moe.*`` key of ``torch.compile(..., options={...})`` in one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .errors import InvalidOptionError, UnknownNameError
from .formats import ACTIVATION_FORMATS

PREFIX = "fp4moe."


@dataclass(frozen=True, slots=True)
class Options:
    """How blocks are lowered.

    Attributes:
        backend: name of the kernel backend to use. Honoured, or refused with every reason; never
            replaced in silence. None chooses by rank.
        on_unsupported: "keep" leaves a block that no backend takes as written and warns once;
            "error" raises ``NoBackendError`` with every verdict.
        strict: raise ``UnmatchedError`` where FP4 weights feed no recognised block, but for linear layers that every
            token goes through (attention, shared experts): these run dequantised.
        expect_matches: number of blocks that must be recognised in each graph that holds FP4 weights.
        max_sites: lower at most this many blocks of a graph, in graph order; bisects a wrong block.
        verify: "first_call" runs the replaced graph beside the fused op on the first real input
            and raises ``VerificationError`` where they part.
        release_original_weights: move packed weights that a compiled graph reads only re-laid to page-locked
            host memory, once the first call has re-laid them, so that the GPU holds them once. Parameters stay
            what they are: ``state_dict``, ``deepcopy``, updates and eager calls work on, at the speed of the bus.
            Weights that share their storage with another tensor stay, with a warning, as do weights on a CPU.
            A CUDA graph captured earlier that reads a weight's old address must be captured anew.
        autotune: time a backend's configurations on the device while compiling, for each layer's sizes and numbers
            of tokens, instead of going by the table that comes with it; takes about a minute for each kind of layer,
            once: choices are kept on disk, beside Inductor's cache.
        activation_format: "mxfp8", "nvfp4" or "mxfp4", to which kernels may round activations, with less accuracy than
            the graph has. A kernel that does so needs this permission; none is forced to by it. None keeps activations
            in the graph's dtype.
    """

    backend: str | None = None
    on_unsupported: str = "keep"
    strict: bool = False
    expect_matches: int | None = None
    max_sites: int | None = None
    verify: str = "never"
    release_original_weights: bool = False
    autotune: bool = False
    activation_format: str | None = None

    def __post_init__(self) -> None:
        _require("backend", self.backend, "a backend's name or None", isinstance(self.backend, str | None))
        _require("on_unsupported", self.on_unsupported, '"keep" or "error"', self.on_unsupported in ("keep", "error"))
        for name in ("strict", "release_original_weights", "autotune"):
            value = getattr(self, name)
            _require(name, value, "a bool", isinstance(value, bool))
        for name in ("expect_matches", "max_sites"):
            value = getattr(self, name)
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            _require(name, value, "an int >= 0 or None", value is None or is_count)
        allowed = self.activation_format is None or self.activation_format in ACTIVATION_FORMATS
        needed = f"{' or '.join(map(repr, ACTIVATION_FORMATS))} or None"
        _require("activation_format", self.activation_format, needed, allowed)
        _require("verify", self.verify, '"never" or "first_call"', self.verify in ("never", "first_call"))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Options:
        """Options from ``{"fp4moe.backend": "cpu"}``.

        Raises:
            UnknownNameError: a key that does not exist; the nearest one is shown.
            InvalidOptionError: a value that cannot be used.
        """
        known = {PREFIX + field.name: field.name for field in fields(cls)}
        for key in values:
            if key not in known:
                raise UnknownNameError("reading torch.compile options", key, known)
        return cls(**{known[key]: value for key, value in values.items()})


def _require(name: str, value: object, needed: str, ok: bool) -> None:
    if not ok:
        raise InvalidOptionError(f"reading option {PREFIX}{name}", needed=needed, got=repr(value))


def split_options(options: Mapping[str, Any] | None) -> tuple[Options, dict[str, Any]]:
    """Our options, and those that are Inductor's.

    Raises:
        UnknownNameError, InvalidOptionError: see ``Options.from_dict``; also for a key that lacks our prefix.
    """
    options = options or {}
    names = {field.name for field in fields(Options)}
    ours = {key: value for key, value in options.items() if key.startswith(PREFIX) or key in names}
    return Options.from_dict(ours), {key: value for key, value in options.items() if key not in ours}
