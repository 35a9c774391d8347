"""``DeviceInfo``: a device as a value, so that kernels are chosen for hardware that is not present."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch

from .errors import UnknownNameError

_LIBRARIES = ("triton", "flashinfer-python")
_COMPILERS = ("g++", "c++", "clang++")


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A compute device.

    Attributes:
        family: "cuda" or "cpu".
        capability: CUDA compute capability, ``(9, 0)`` for sm_90; None on a CPU.
        name: marketing name or architecture.
        sm_count: streaming multiprocessors (0 on a CPU).
        shared_memory: bytes of shared memory one block may use (0 on a CPU).
        libraries: installed kernel libraries as ``(distribution, version)``, and ``("c++", path)`` of a compiler.
    """

    family: Literal["cuda", "cpu"]
    capability: tuple[int, int] | None = None
    name: str = ""
    sm_count: int = 0
    shared_memory: int = 0
    libraries: tuple[tuple[str, str], ...] = ()

    @property
    def arch(self) -> int | None:
        """10 * major + minor: 90 for sm_90. Compare with explicit sets of families, never with >=."""
        return None if self.capability is None else self.capability[0] * 10 + self.capability[1]

    @property
    def arch_name(self) -> str:
        return "cpu" if self.arch is None else f"sm_{self.arch}"

    def library(self, name: str) -> str | None:
        """Version of a kernel library, None if it is not installed."""
        return dict(self.libraries).get(name)

    def __str__(self) -> str:
        return f"{self.name} ({self.arch_name})" if self.name and self.name != self.arch_name else self.arch_name

    @classmethod
    def parse(cls, text: str) -> DeviceInfo:
        """The device called ``"cpu"`` or ``"sm_90"``, with the libraries of this environment.

        Raises:
            UnknownNameError: not a known architecture.
        """
        if text not in _KNOWN:
            raise UnknownNameError("choosing a target device", text, _KNOWN)
        return replace(_KNOWN[text], libraries=_installed_libraries())

    @classmethod
    def current(cls, device: torch.device) -> DeviceInfo:
        """The device that ``device`` names on this machine."""
        if device.type != "cuda":
            return cls.parse("cpu")
        properties = torch.cuda.get_device_properties(device)
        return cls(
            family="cuda",
            capability=(properties.major, properties.minor),
            name=properties.name,
            sm_count=properties.multi_processor_count,
            shared_memory=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
            libraries=_installed_libraries(),
        )


@cache
def _installed_libraries() -> tuple[tuple[str, str], ...]:
    found = []
    for name in _LIBRARIES:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    if (compiler := cxx_compiler()) is not None:
        found.append(("c++", compiler))
    return tuple(found)


def cxx_compiler() -> str | None:
    """Path of the C++ compiler that ``CXX`` names, or of one that is installed; None if there is none."""
    named = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, (named,) if named else _COMPILERS)), None)


def _cuda(major: int, minor: int, name: str, sm_count: int, shared_kib: int) -> DeviceInfo:
    return DeviceInfo("cuda", (major, minor), name, sm_count, shared_kib * 1024)


# Shared memory per block (opt-in): CUDA C++ programming guide, table of technical specifications.
_KNOWN = {
    "cpu": DeviceInfo("cpu", name="cpu"),
    "sm_80": _cuda(8, 0, "A100", 108, 163),
    "sm_86": _cuda(8, 6, "RTX 3090", 82, 99),
    "sm_89": _cuda(8, 9, "L40S", 142, 99),
    "sm_90": _cuda(9, 0, "H200", 132, 227),
    "sm_100": _cuda(10, 0, "B200", 148, 227),
    "sm_103": _cuda(10, 3, "B300", 148, 227),
    "sm_120": _cuda(12, 0, "RTX PRO 6000", 188, 99),
    "sm_121": _cuda(12, 1, "GB10", 48, 99),
}
