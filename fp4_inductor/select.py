"""Choose a kernel backend for a block: every backend is asked, and every answer is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from .backends import BACKENDS
from .backends.base import KernelBackend
from .device import DeviceInfo
from .errors import NoBackendError, UnknownNameError
from .options import Options
from .plan import KernelPlan
from .reasons import Reason, Verdict
from .spec import MoESpec

Probe: TypeAlias = Callable[[KernelBackend, MoESpec], "Reason | None"]
"""Why a willing backend does not run a block after all, found by trying it."""


@dataclass(frozen=True, slots=True)
class Selection:
    """``chosen`` and ``plan`` are None where no backend is willing."""

    spec: MoESpec
    device: DeviceInfo
    chosen: str | None
    plan: KernelPlan | None
    verdicts: tuple[Verdict, ...]


def select(
    spec: MoESpec, device: DeviceInfo, options: Options, where: str = "", probe: Probe | None = None
) -> Selection:
    """The best willing backend for ``spec`` on ``device``.

    A backend that ``options`` names is used or refused, never replaced. Otherwise the willing ones
    compete by rank; a rank of 0 or less is for backends that run only when named. The spec they are asked for, which
    the selection holds, says which activations ``options`` allows. With a ``probe`` the best is tried first: one that
    fails is as unwilling as if it had said so itself, and the next best is tried.

    Raises:
        UnknownNameError: ``options.backend`` does not exist.
        NoBackendError: the named backend refuses, or none is willing and ``on_unsupported="error"``.
    """
    by_name = {backend.name: backend for backend in BACKENDS}
    if options.backend is not None and options.backend not in by_name:
        raise UnknownNameError("reading option fp4moe.backend", options.backend, by_name)
    if options.activation_format is not None:
        spec = replace(spec, activation_format=options.activation_format)
    answers = {backend.name: backend.check(spec, device) for backend in BACKENDS}
    willing = [backend for backend in BACKENDS if answers[backend.name].ok]
    if options.backend is not None:
        willing = [backend for backend in willing if backend.name == options.backend]
    else:
        willing = [backend for backend in willing if backend.rank(spec, device) > 0]
    for backend in sorted(willing, key=lambda backend: backend.rank(spec, device), reverse=True):
        failure = None if probe is None else probe(backend, spec)
        if failure is None:
            plan = backend.plan(spec, device)
            return Selection(spec, device, backend.name, plan, tuple(answers.values()))
        answers[backend.name] = Verdict(backend.name, (failure,))
    verdicts = tuple(answers.values())
    if options.backend is not None or options.on_unsupported == "error":
        raise NoBackendError(
            f"choosing a kernel backend for {spec}",
            needed=f"backend {options.backend!r} to run it" if options.backend else "a willing backend",
            got="\n    ".join(["refusals:", *map(str, verdicts)]),
            where=where,
            now="name another fp4moe.backend, or leave it out and set fp4moe.on_unsupported='keep'",
        )
    return Selection(spec, device, None, None, verdicts)
