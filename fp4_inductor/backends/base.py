"""What a kernel backend is: three pure questions over (spec, device). A backend never touches FX."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

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


@runtime_checkable
class ProbedBackend(KernelBackend, Protocol):
    """A backend whose library builds, fetches or loads code when it is first called, any of which may fail.

    Where its device is at hand, its plan is tried on a small layer before a graph is rewritten for it.
    """

    def probe_errors(self) -> tuple[type[Exception], ...]:
        """What its library raises where it cannot do that, and where a launch fails; may import the library."""
        ...


@runtime_checkable
class AheadBackend(KernelBackend, Protocol):
    """A backend that can compile kernels before they are called."""

    ops: tuple[str, ...]
    """Its own, by qualified name."""

    def compile_call(self, op: str, args: tuple[Any, ...]) -> None:
        """Compile for the current device what a call of ``op`` launches, and launch nothing.

        ``args``: with tensors on the meta device, but for scalars on the host.
        """
        ...
