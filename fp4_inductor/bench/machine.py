"""What a measurement was taken on: device, versions, and the clocks that it ran at."""

from __future__ import annotations

import ctypes
import importlib.metadata
import statistics
from dataclasses import dataclass

import torch

from ..device import DeviceInfo

_LIBRARIES = ("fp4_inductor", "triton", "vllm", "flashinfer-python")
_CLOCK_SM = 1  # nvmlClockType_t


@dataclass(frozen=True, slots=True)
class Clock:
    """SM clock in MHz while one thing was timed: long runs are throttled to the power limit."""

    least: int
    median: float


class Nvml:
    """The few calls of the management library, which comes with the driver, that a benchmark needs."""

    def __init__(self, library: ctypes.CDLL, device: ctypes.c_void_p) -> None:
        self._library, self._device = library, device
        self._seen: list[int] = []

    @classmethod
    def of(cls, device: torch.device) -> Nvml | None:
        """None where the device has no such library, or is not known to it."""
        if device.type != "cuda":
            return None
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return None
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        handle = ctypes.c_void_p()
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)):
            return None
        return cls(library, handle)

    def driver(self) -> str:
        text = ctypes.create_string_buffer(80)
        failed = self._library.nvmlSystemGetDriverVersion(text, len(text))
        return "not read" if failed else text.value.decode()

    def sample(self) -> None:
        """Read the SM clock, for the next ``clock``."""
        mhz = ctypes.c_uint()
        if not self._library.nvmlDeviceGetClockInfo(self._device, _CLOCK_SM, ctypes.byref(mhz)):
            self._seen.append(mhz.value)

    def clock(self) -> Clock | None:
        """What was sampled since the last call of this; None if nothing was."""
        seen, self._seen = self._seen, []
        return Clock(min(seen), statistics.median(seen)) if seen else None


def environment(device: torch.device, nvml: Nvml | None) -> dict[str, str]:
    """Device, driver and versions, each by its name."""
    found = {"device": str(DeviceInfo.current(device))}
    if device.type == "cuda":
        found["driver"] = "not read" if nvml is None else nvml.driver()
        found["CUDA"] = str(torch.version.cuda)
    else:
        found["threads"] = str(torch.get_num_threads())
    found["torch"] = torch.__version__
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
