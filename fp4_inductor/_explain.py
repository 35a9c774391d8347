"""``explain``: what would happen to a model, here or on a device that is not here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import experts_interface
from .device import DeviceInfo
from .errors import Fp4InductorError
from .options import Options, split_options
from .report import LoweringReport


def explain(
    model: Callable[..., Any],
    *args: Any,
    device: str | torch.device | DeviceInfo | None = None,
    options: dict[str, Any] | Options | None = None,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> LoweringReport:
    """Trace ``model(*args, **kwargs)`` once and report what the ``fp4moe`` backend makes of it.

    The graphs run as written (no kernel is compiled), so a model may be explained on a CPU for a GPU, and a
    model too large for this machine on the meta device.

    Args:
        model: module or function, uncompiled.
        device: "sm_90", "sm_100", "cpu" ..., a ``DeviceInfo``, or a ``torch.device`` of this machine; by default
            the device of the activations. A device by name is taken to have the kernel libraries of this environment;
            ``dataclasses.replace(DeviceInfo.parse("sm_100"), libraries=(("triton", "3.6.0"),))`` has others.
        options: as for ``torch.compile``, only ``fp4moe.*`` keys; or an ``Options``.
        dynamic: as for ``torch.compile``.

    Returns:
        Blocks found, each with what every backend answered, the weights as the chosen one reads them, and bytes; and
        near misses. ``print`` it, or take ``to_json()``.

    Raises:
        UnknownNameError: unknown device, option or backend.
        NoBackendError, UnmatchedError: a wish in ``options`` that cannot be met.
    """
    from torch._dynamo.exc import BackendCompilerFailed

    from .dynamo_backend import compile_with

    experts_interface.register()
    if isinstance(device, str):
        device = DeviceInfo.parse(device)
    target = DeviceInfo.current(device) if isinstance(device, torch.device) else device
    chosen = options if isinstance(options, Options) else split_options(options)[0]
    report = LoweringReport(target)

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any], **_unused: Any) -> Callable[..., Any]:
        return compile_with(gm, example_inputs, chosen, device=target, on_report=report.add, generate_code=False)

    # A model that was compiled in place would run its own compiled code inside our trace.
    function = model.forward if isinstance(model, torch.nn.Module) else model
    traced = torch.compile(function, backend=backend, dynamic=dynamic)
    try:
        with torch.no_grad():
            traced(*args, **kwargs)
    except BackendCompilerFailed as failure:
        if isinstance(failure.inner_exception, Fp4InductorError):
            raise failure.inner_exception from None
        raise
    if not (report.sites or report.near_misses or report.linear_layers or report.notes):
        report.notes.append("no FP4 weights reached a graph: is the model quantised, and do its experts trace?")
    return report
