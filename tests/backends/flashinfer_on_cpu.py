"""Calls FlashInfer's CuTe-DSL functions on a CPU as if it were a GPU: its own Python checks what it is given and
compiles its kernels for that GPU; only launches are left out, and helpers in CUDA and Triton, which stand in.

    python flashinfer_on_cpu.py sm_100 flashinfer_cutedsl nvfp4:bf16:8 nvfp4:nvfp4:8

Each argument is a weight format, what activations may be rounded to, and a number of tokens; "bias" behind them gives
the experts biases. Prints a line of JSON for
each: names of the kernels that were compiled, and of those that would have been launched. CUTE_DSL_ARCH must be set.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from flashinfer_stand_in import fp4_quantize, mxfp8_quantize
from moe_cases import make_case
from torch.overrides import TorchFunctionMode

from fp4_inductor import DeviceInfo
from fp4_inductor.backends import get_backend
from fp4_inductor.formats import FORMATS
from fp4_inductor.layouts.scale_128x4 import mma_scale_view
from fp4_inductor.plan import run_plan

LIBRARIES = (("flashinfer-python", "0.7.2.post1"), ("triton", "3.6.0"))
_SM12X = "flashinfer.fused_moe.cute_dsl.blackwell_sm12x.moe_dispatch"
_DEVICE, _IS_CUDA = torch.Tensor.device.__get__, torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
compiled: list[str] = []
launched: list[str] = []


class OnGpu(TorchFunctionMode):
    """Tensors say that they are on a GPU, and new ones are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DEVICE:
            return torch.device("cuda:0")
        if func == _IS_CUDA:
            return True
        kwargs = {
            key: "cpu" if key == "device" and value is not None else value for key, value in (kwargs or {}).items()
        }
        return func(*args, **kwargs)


class Anything:
    """A stream, an event, or a module of helpers: has every method, and none does anything."""

    cuda_stream = 0

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def __getitem__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class Compile:
    """``cute.compile``, whose results are not launched."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def __getitem__(self, options: Any) -> Compile:
        return Compile(self.real[options])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = self.real(function, *args, **kwargs)
        name = type(getattr(function, "__self__", function)).__name__
        compiled.append(name)
        return Launch(kernel, name)


class Launch:
    def __init__(self, kernel: Any, name: str) -> None:
        self.kernel, self.name = kernel, name

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        launched.append(self.name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)


def pretend(arch: str) -> None:
    """A GPU of ``arch`` with a driver, for FlashInfer."""
    device = DeviceInfo.parse(arch)
    capability, count = device.capability, device.sm_count
    properties = SimpleNamespace(
        multi_processor_count=count,
        shared_memory_per_block_optin=device.shared_memory,
        shared_memory_per_multiprocessor=device.shared_memory + 1024,
        regs_per_multiprocessor=1 << 16,
        max_threads_per_multi_processor=1536,
    )
    for name, value in (
        ("get_device_capability", lambda *args: capability),
        ("get_device_properties", lambda *args: properties),
        ("current_stream", lambda *args: Anything()),
        ("stream", lambda stream: contextlib.nullcontext()),
    ):
        setattr(torch.cuda, name, value)
    torch.Tensor.record_stream = lambda *args: None  # type: ignore[method-assign,assignment]
    cute = importlib.import_module("cutlass.cute")
    cute.compile = Compile(cute.compile)
    driver = importlib.import_module("cuda.bindings.driver")
    importlib.import_module("triton.runtime.jit").JITFunction.run = lambda *args, **kwargs: None
    importlib.import_module("flashinfer.fused_moe.cute_dsl.blackwell.moe_w4a16")
    importlib.import_module(_SM12X)
    streams = dict.fromkeys(("aux_stream", "main_event", "memset_event"), Anything())
    _replace_everywhere(
        get_compute_capability=lambda device: capability,
        get_cuda_version=lambda: SimpleNamespace(major=13),
        get_num_sm=lambda device: count,
        get_max_active_clusters=lambda size: count // size,
        current_cuda_stream=lambda: driver.CUstream(0),
        moe_unpermute=lambda **given: launched.append("moe_unpermute"),
        _get_moe_utils_module=Anything,
        _get_cuda_graph_resources=lambda: streams,
    )
    for name in ("static", "micro", "dynamic"):
        getter = f"_get_{name}_kernel"
        setattr(sys.modules[_SM12X], getter, _not_launched(getattr(sys.modules[_SM12X], getter), name))
    flashinfer: Any = sys.modules["flashinfer"]
    flashinfer.fp4_quantize, flashinfer.mxfp8_quantize = fp4_quantize, mxfp8_quantize
    flashinfer.scaled_fp4_grouped_quantize = _quantize_rows
    gemm = importlib.import_module("flashinfer.gemm")
    for module, name in (
        (flashinfer.fused_moe, "cute_dsl_fused_moe"),
        (flashinfer.fused_moe, "b12x_fused_moe"),
        (gemm, "grouped_gemm_nt_masked"),
    ):
        setattr(module, name, _on_gpu(getattr(module, name)))


def _replace_everywhere(**functions: Callable[..., Any]) -> None:
    for module in [module for name, module in sys.modules.items() if name.startswith("flashinfer")]:
        for name, function in functions.items():
            if name in vars(module):
                setattr(module, name, function)


def _not_launched(get: Callable[..., Any], name: str) -> Callable[..., Any]:
    """These come through a cache of compiled kernels, which loads them in its own way."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        kernel, *rest = get(*args, **kwargs)
        return (Launch(kernel, name), *rest)

    return wrapped


def _on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with OnGpu():
            return function(*args, **kwargs)

    return wrapped


def _quantize_rows(rows: torch.Tensor, counts: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    experts, room, columns = rows.shape
    tiles = torch.zeros(experts, -(-room // 128) * 128, -(-columns // 64) * 4, dtype=torch.uint8)
    codes = torch.zeros(experts, room, columns // 2, dtype=torch.uint8)
    return codes.permute(1, 2, 0), mma_scale_view(tiles).view(torch.float8_e4m3fn)


def main(arch: str, name: str, *blocks: str) -> None:
    assert os.environ["CUTE_DSL_ARCH"] == f"{arch}a"
    pretend(arch)
    backend, device = get_backend(name), replace(DeviceInfo.parse(arch), libraries=LIBRARIES)
    for block in blocks:
        weights, activations, tokens, *bias = block.split(":")
        made = make_case(
            FORMATS[weights],
            hidden_size=1888,
            intermediate_size=736,
            num_experts=6,
            global_scale="expert",
            num_tokens=int(tokens),
            bias=bool(bias),
        )
        spec = replace(made.spec, activation_format=None if activations == "bf16" else activations)
        assert backend.check(spec, device).ok
        compiled.clear()
        launched.clear()
        out = run_plan(backend.plan(spec, device), made.operands)
        assert (out.shape, out.dtype) == ((int(tokens), 1888), torch.bfloat16)
        print(json.dumps({"block": block, "compiled": compiled, "launched": launched}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
