"""What ``triton_w4a16`` compiles for a device that is not here, and what each compiled kernel takes of it.

The backend's plan runs on the CPU, on weights that were never written. Triton binds every launch as it would on the
device and comes to the point where it compiles; there the launch is written down, and nothing runs.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from fp4_inductor.backends import get_backend
from fp4_inductor.device import DeviceInfo
from fp4_inductor.kernels import w4a16
from fp4_inductor.plan import run_plan
from fp4_inductor.spec import MoESpec, Operand

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Compilation:
    """One kernel that Triton would compile."""

    kernel: JITFunction
    target: GPUTarget
    source: Any
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def constants(self) -> dict[str, object]:
        return {self.kernel.arg_names[path[0]]: value for path, value in self.source.constants.items()}

    def build(self) -> CompiledKernel:
        return triton.compile(self.source, self.target, dict(self.options))


@dataclass(frozen=True)
class Resources:
    """What one program takes: threads, registers a thread, bytes of shared memory, bytes of local memory a thread."""

    threads: int
    registers: int
    shared: int
    local: int


def resources(built: CompiledKernel, directory: Path) -> Resources:
    """Read from the machine code by the tool that Triton brings along; needs no driver."""
    file = directory / "kernel.cubin"
    file.write_bytes(built.asm["cubin"])
    command = [str(_TOOLS / "cuobjdump"), "--dump-resource-usage", str(file)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    threads = built.metadata.num_warps * 32 * getattr(built.metadata, "num_ctas", 1)
    return Resources(threads, used["REG"], built.metadata.shared, used["STACK"] + used["LOCAL"])


def launches(spec: MoESpec, arch: int, token_counts: Iterable[int]) -> dict[int, list[Compilation]]:
    """Kernels that calls with ``token_counts`` tokens, one after another, make Triton compile for the first time.

    Returns:
        By token count; only counts that compile something.
    """
    device = DeviceInfo.parse(f"sm_{arch}")
    plan = get_backend("triton_w4a16").plan(spec, device)
    counts = list(token_counts)
    operands, prepared = unwritten(spec, max(counts))
    found: dict[int, list[Compilation]] = {}
    with recorded(device) as new:
        for count in counts:
            run_plan(plan, {o: t[:count] if o in _PER_TOKEN else t for o, t in operands.items()}, prepared)
            if new:
                found[count] = list(new)
                new.clear()
    return found


_PER_TOKEN = (Operand.HIDDEN, Operand.TOPK_IDS, Operand.TOPK_WEIGHTS, Operand.ROUTER_LOGITS)


def unwritten(spec: MoESpec, num_tokens: int) -> tuple[dict[Operand, torch.Tensor], dict[str, torch.Tensor]]:
    """Operands of a call, and prepared weights, in memory that nobody touches and that so costs nothing."""
    plan = get_backend("triton_w4a16").plan(spec, DeviceInfo.parse("sm_90"))
    with FakeTensorMode():
        weights = _weights(spec)
        shapes = {p.name: p.fn(*(weights[o] for o in p.of)) for p in plan.prepared}
    operands = {
        Operand.HIDDEN: torch.empty(num_tokens, spec.hidden_size, dtype=spec.act_dtype),
        Operand.TOPK_IDS: torch.empty(num_tokens, spec.top_k, dtype=torch.int64),
        Operand.TOPK_WEIGHTS: torch.empty(num_tokens, spec.top_k, dtype=spec.weights_dtype),
        Operand.ROUTER_LOGITS: torch.empty(num_tokens, spec.num_experts, dtype=spec.act_dtype),
        Operand.W2_BIAS: torch.empty(spec.num_experts, spec.hidden_size, dtype=spec.act_dtype),
    }
    prepared = {name: torch.empty(fake.shape, dtype=fake.dtype) for name, fake in shapes.items()}
    return operands, prepared


def _weights(spec: MoESpec) -> dict[Operand, torch.Tensor]:
    fmt, found = spec.weight_format, {}
    shapes = {"w13": (spec.w13_rows, spec.hidden_size), "w2": (spec.hidden_size, spec.intermediate_size)}
    for name, (rows, columns) in shapes.items():
        leading = (spec.num_experts, rows)
        found[Operand(name)] = torch.empty(*leading, columns // 2, dtype=torch.uint8)
        found[Operand(f"{name}_scale")] = torch.empty(*leading, columns // fmt.block_size, dtype=fmt.scale_dtype)
        found[Operand(f"{name}_global")] = torch.empty(leading)
        found[Operand(f"{name}_bias")] = torch.empty(leading, dtype=spec.act_dtype)
    return found


@contextmanager
def recorded(device: DeviceInfo) -> Iterator[list[Compilation]]:
    """Kernel launches bind for ``device`` and do nothing; each new compilation is added to the list."""
    assert device.arch is not None
    target = GPUTarget("cuda", device.arch, 32)
    new: list[Compilation] = []
    seen: list[JITFunction] = []
    key_of_caches = object()

    def compile_nothing(
        self: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, attributes: Any, warmup: bool
    ) -> Any:
        new.append(Compilation(self, target, self.ASTSource(self, signature, constants, attributes), vars(options)))
        seen.append(self)
        kernel = self.device_caches[device][0][key] = mock.MagicMock()
        return kernel

    absent = mock.Mock()
    absent.get_current_target.return_value = target
    absent.get_current_device.return_value = key_of_caches
    absent.get_current_stream.return_value = 0
    before = driver._active
    driver.set_active(absent)
    try:
        with (
            mock.patch.object(JITFunction, "_do_compile", compile_nothing),
            mock.patch.object(w4a16, "_arch", return_value=device.arch),
            mock.patch.object(w4a16, "_sm_count", return_value=device.sm_count),
        ):
            yield new
    finally:
        driver._active = before
        for kernel in seen:
            kernel.device_caches.pop(key_of_caches, None)
