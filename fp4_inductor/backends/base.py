"""What a kernel backend is: three pure questions over (spec, device). A backend never touches FX."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from ..device import DeviceInfo
from ..plan import KernelPlan
from ..reasons import Verdict
from ..spec import MoESpec


@runtime_checkable
class KernelBackend(Protocol):
    name: str

    def check(self, spec: MoESpec, device: DeviceInfo) -> Verdict:
        """Every reason against running ``spec`` on ``device``. Never asks the hardware."""
        ...

    def rank(self, spec: MoESpec, device: DeviceInfo) -> int:
        """Preference among the willing, higher first; backed by a measurement."""
        ...

    def plan(self, spec: MoESpec, device: DeviceInfo) -> KernelPlan:
        """The call and its prepared weights. Only asked where ``check`` is ok."""
        ...
