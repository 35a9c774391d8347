"""``torch.compile`` backend that runs mixture-of-experts models with FP4 expert weights on fused kernels.

>>> model = fp4_inductor.load(path)                     # or fp4_inductor.quantize_(model, "nvfp4")
>>> model.compile(backend="fp4moe")
>>> print(fp4_inductor.explain(model, input_ids))
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._explain import explain as explain
    from .backends import list_backends as list_backends
    from .checkpoint import load as load
    from .device import DeviceInfo as DeviceInfo
    from .errors import CheckpointError as CheckpointError
    from .errors import Fp4InductorError as Fp4InductorError
    from .errors import InvalidOptionError as InvalidOptionError
    from .errors import NoBackendError as NoBackendError
    from .errors import QuantizationError as QuantizationError
    from .errors import UnknownNameError as UnknownNameError
    from .errors import UnmatchedError as UnmatchedError
    from .errors import VerificationError as VerificationError
    from .options import Options as Options
    from .post_grad_pass import Fp4MoEPass as Fp4MoEPass
    from .quantize import quantize_ as quantize_
    from .report import LoweringReport as LoweringReport

_HOMES = {
    "explain": "_explain",
    "list_backends": "backends",
    "load": "checkpoint",
    "DeviceInfo": "device",
    "CheckpointError": "errors",
    "Fp4InductorError": "errors",
    "InvalidOptionError": "errors",
    "NoBackendError": "errors",
    "QuantizationError": "errors",
    "UnknownNameError": "errors",
    "UnmatchedError": "errors",
    "VerificationError": "errors",
    "Options": "options",
    "Fp4MoEPass": "post_grad_pass",
    "quantize_": "quantize",
    "LoweringReport": "report",
}

__all__ = [
    *_HOMES,
]


def __getattr__(name: str) -> Any:
    """Import a public name where it lives, so that importing the package stays cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)


if "transformers" in sys.modules:
    importlib.import_module(".experts_interface", __name__).register()
