"""The floor of a block on a CPU, measured: reading the packed bytes of the routed experts and nothing else."""

from __future__ import annotations

import ctypes

import torch

from ..backends import get_backend
from ..device import DeviceInfo
from ..kernels.cpu_build import Library, load_libraries, processor_isas
from ..plan import prepare
from ..random_layer import random_weights, route
from ..spec import MoESpec, Operand
from .layers import Layer


def read_layer(spec: MoESpec) -> Layer | None:
    """A call that reads what a layer would, and returns the hidden states as they are; None where ``cpu`` refuses."""
    device = DeviceInfo.parse("cpu")
    if not get_backend("cpu").check(spec, device).ok:
        return None
    prepared = prepare(get_backend("cpu").plan(spec, device), random_weights(spec, torch.device("cpu")))
    names = [f"{weight}{part}_cpu" for weight in (Operand.W13, Operand.W2) for part in ("", "_scale")]
    tensors = [prepared[name] for name in names]
    pointers = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
    words = (ctypes.c_int64 * len(tensors))(*(tensor.nbytes // spec.num_experts // 8 for tensor in tensors))
    read = load_libraries(Library("read", processor_isas()[0]))[0].fp4_read
    read.argtypes = [*[ctypes.c_void_p] * 2, ctypes.c_int64, ctypes.c_void_p, *[ctypes.c_int64] * 2, ctypes.c_int32]
    read.restype = ctypes.c_uint64

    def layer(hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        ids, _ = route(logits, spec.top_k)
        threads = torch.get_num_threads()
        read(pointers, words, len(tensors), ids.data_ptr(), ids.numel(), len(tensors[0]), threads)
        return hidden

    return layer
