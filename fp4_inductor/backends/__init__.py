"""Kernel backends. A new one is a file here and a line in ``BACKENDS``."""

from __future__ import annotations

import torch

from ..device import DeviceInfo
from ..errors import UnknownNameError
from ..formats import FORMATS
from ..reasons import ReasonCode
from ..spec import ActivationSpec, MoESpec
from .base import KernelBackend
from .cpu import CpuBackend
from .cpu_aten import CpuAtenBackend
from .flashinfer_b12x import FlashinferB12xBackend
from .flashinfer_cutedsl import FlashinferCutedslBackend
from .flashinfer_cutlass import FlashinferCutlassBackend
from .flashinfer_trtllm import FlashinferTrtllmBackend
from .reference import ReferenceBackend
from .triton_w4a16 import TritonW4A16Backend

BACKENDS: tuple[KernelBackend, ...] = (
    TritonW4A16Backend(),
    FlashinferTrtllmBackend(),
    FlashinferCutlassBackend(),
    FlashinferCutedslBackend(),
    FlashinferB12xBackend(),
    CpuBackend(),
    CpuAtenBackend(),
    ReferenceBackend(),
)
"""Asked in this order; rank decides among the willing."""


def get_backend(name: str) -> KernelBackend:
    """The kernel backend called ``name``.

    Raises:
        UnknownNameError: no such backend; the message shows the nearest name.
    """
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    raise UnknownNameError("choosing a kernel backend", name, [backend.name for backend in BACKENDS])


def list_backends(device: DeviceInfo | None = None) -> tuple[str, ...]:
    """Names of the kernel backends; with a ``device``, of those that device and its libraries can run."""
    return tuple(backend.name for backend in BACKENDS if device is None or _runs_on(backend, device))


def _runs_on(backend: KernelBackend, device: DeviceInfo) -> bool:
    """Whether nothing but the block itself could make ``backend`` refuse, asked with a plain block of each format."""
    against = {ReasonCode.CAPABILITY, ReasonCode.LIBRARY}
    return any(
        against.isdisjoint(reason.code for reason in backend.check(_plain_block(name), device).reasons)
        for name in FORMATS
    )


def _plain_block(weight_format: str) -> MoESpec:
    return MoESpec(
        num_experts=64,
        top_k=8,
        hidden_size=2048,
        intermediate_size=1024,
        weight_format=FORMATS[weight_format],
        activation=ActivationSpec("silu"),
        act_dtype=torch.bfloat16,
    )
