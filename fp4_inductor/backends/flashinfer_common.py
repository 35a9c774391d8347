"""What FlashInfer's backends share: which kernel serves a block, every reason why none does, activations' names.

FlashInfer is imported where it is called, never before. Its kernels have no gradients.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from ..device import DeviceInfo
from ..formats import BlockFormat
from ..layouts.kernel_rows import KernelRows
from ..layouts.padding import round_up
from ..reasons import Reason, ReasonCode
from ..spec import ActivationSpec, GlobalGrain, MoESpec, RouterSpec
from .ops import ExpertsCall, range_reasons

logger = logging.getLogger(__name__)

LIBRARY = "flashinfer-python"
OLDEST, TOO_NEW = (0, 7, 1), (0, 8)
INSTALL = f"pip install '{LIBRARY}>=0.7.1,<0.8'"
PROBE_ERRORS: tuple[type[Exception], ...] = (
    # The library, or something that it needs, is not there or does not load.
    ImportError,
    # No nvcc or ninja, no network, no right to write: errors of requests and filelock are OSErrors.
    OSError,
    # A compiler that does not run.
    subprocess.SubprocessError,
    # A build or a download failed, JIT is disabled, a combination is not implemented, CUDA refused.
    RuntimeError,
    # Checks in C++ come under these names, too, and a function that changed its arguments is a TypeError.
    *(ValueError, TypeError, AttributeError, KeyError, IndexError, AssertionError),
)
"""What FlashInfer's functions raise where they cannot run. Not MemoryError, which is nobody's refusal."""
ANOTHER = "leave fp4moe.backend out, so that another backend is chosen"
_MAX_EXPERTS, _MAX_TOP_K = 2048, 32
_DISTINCT = "distinct ids"
_WEIGHTS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Mode:
    """A pair of formats that a kernel multiplies.

    Attributes:
        activations: the format that the kernel rounds them to; None where they stay bfloat16.
        architectures: devices that it runs on.
        functions: activations that it computes, by their names in ``ActivationType``.
        rows: order of w13's rows and the padding.
    """

    weights: BlockFormat
    activations: str | None
    architectures: frozenset[int]
    functions: frozenset[str]
    rows: KernelRows

    @property
    def name(self) -> str:
        return self.activations or "bf16"

    def __str__(self) -> str:
        return f"{self.weights}×{self.name}"


def choose_mode(modes: Sequence[Mode], spec: MoESpec, device: DeviceInfo) -> Mode | None:
    """The mode for ``spec``: what the user allows goes before what the graph computes. None where there is none."""
    fitting = [m for m in modes if m.weights == spec.weight_format and device.arch in m.architectures]
    allowed = [m for m in fitting if m.activations in (None, spec.activation_format)]
    return max(allowed, key=lambda m: m.activations is not None, default=None)


def common_reasons(modes: Sequence[Mode], spec: MoESpec, device: DeviceInfo) -> Iterator[Reason]:
    """Everything against ``spec`` that does not belong to one library's entry point alone."""
    yield from _mode_reasons(modes, spec, device)
    yield from _library_reasons(device)
    yield from _activation_reasons(modes, spec, device)
    yield from _size_reasons(spec)
    yield from _dtype_reasons(spec)
    for name, grain in (("w13", spec.w13_global), ("w2", spec.w2_global)):
        if grain is GlobalGrain.ROW:
            yield Reason(ReasonCode.FORMAT, f"one global scale an expert in {name}", "one a row", ANOTHER)
    if isinstance(spec.router, RouterSpec) and spec.router.num_null_experts:
        got = f"{spec.router.num_null_experts} null experts, which give a token expert 0 more than once"
        yield Reason(ReasonCode.ROUTING, "distinct experts for each token", got, ANOTHER)
    yield from range_reasons(spec)


def half_reasons(spec: MoESpec, *, common: bool) -> Iterator[Reason]:
    """Global scales of gate and up that are apart, for a kernel that needs ``common`` ones with this activation."""
    if common and spec.w13_global is GlobalGrain.HALF:
        biased = " with biases" if spec.has_w13_bias else ""
        need = f"one global scale for gate and up of an expert, for {spec.activation}{biased}"
        yield Reason(ReasonCode.FORMAT, need, "one for gate and one for up", ANOTHER)


def limit_reasons(spec: MoESpec) -> Iterator[Reason]:
    """More experts than kernels that sort routes by themselves have room for."""
    limits = (("experts", spec.num_experts, _MAX_EXPERTS), ("experts a token", spec.top_k, _MAX_TOP_K))
    for what, size, most in limits:
        if size > most:
            yield Reason(ReasonCode.SHAPE, f"at most {most} {what}", str(size), ANOTHER)


def _mode_reasons(modes: Sequence[Mode], spec: MoESpec, device: DeviceInfo) -> Iterator[Reason]:
    same_weights = [m for m in modes if m.weights == spec.weight_format]
    here = [m for m in modes if device.arch in m.architectures]
    if not here:
        known = sorted(frozenset().union(*(m.architectures for m in same_weights or modes)))
        need = f"one of {', '.join(f'sm_{arch}' for arch in known)}"
        yield Reason(ReasonCode.CAPABILITY, need, str(device), ANOTHER)
    candidates = [m for m in same_weights if m in here or not here]
    if not candidates:
        need = " or ".join(map(str, here or modes)) + (f" on {device.arch_name}" if here else "")
        yield Reason(ReasonCode.FORMAT, need, f"{spec.weight_format} weights", ANOTHER)
    elif not any(m.activations in (None, spec.activation_format) for m in candidates):
        lower = [m.activations for m in candidates if m.activations is not None]
        got = f"activations that may be no less than {_name(spec.act_dtype)}"
        got = f"activations that may be {spec.activation_format}" if spec.activation_format else got
        cure = f"options={{'fp4moe.activation_format': '{lower[0]}'}} allows it"
        yield Reason(ReasonCode.FORMAT, f"activations rounded to {' or '.join(lower)}", got, cure)


def _library_reasons(device: DeviceInfo) -> Iterator[Reason]:
    version = device.library(LIBRARY)
    need = f"{LIBRARY} >=0.7.1,<0.8"
    if version is None:
        yield Reason(ReasonCode.LIBRARY, need, "none installed", INSTALL)
    elif not OLDEST <= _release(version) < TOO_NEW:
        yield Reason(ReasonCode.LIBRARY, need, version, INSTALL)


def _release(version: str) -> tuple[int, ...]:
    """``(0, 7, 2)`` of ``"0.7.2.post1"``. A release candidate is not yet its release."""
    found = re.match(r"(\d+(?:\.\d+)*)(a|b|rc|\.dev)?", version)
    if found is None:
        return ()
    numbers = tuple(int(part) for part in found[1].split("."))
    return (*numbers[:-1], numbers[-1] - 1) if found[2] else numbers


def _activation_reasons(modes: Sequence[Mode], spec: MoESpec, device: DeviceInfo) -> Iterator[Reason]:
    same = [m for m in modes if m.weights == spec.weight_format]
    nearest = [m for m in same if device.arch in m.architectures] or same
    mode = choose_mode(modes, spec, device) or next(iter(nearest), None)
    function = activation_function(spec.activation)
    if mode is not None and function not in mode.functions:
        need = f"one of {', '.join(sorted(mode.functions))} for {mode}"
        yield Reason(ReasonCode.ACTIVATION, need, f"{spec.activation}", ANOTHER)


def _size_reasons(spec: MoESpec) -> Iterator[Reason]:
    block = spec.weight_format.block_size
    for what, size in (("hidden size", spec.hidden_size), ("intermediate size", spec.intermediate_size)):
        if size <= 0 or size % block:
            need, cure = f"a {what} that is a multiple of {block}", "pad the weights with zeros before packing"
            yield Reason(ReasonCode.SHAPE, need, str(size), cure)


def _dtype_reasons(spec: MoESpec) -> Iterator[Reason]:
    bf16 = (torch.bfloat16,)
    for what, dtype, known in (
        ("activations", spec.act_dtype, bf16),
        ("routing weights", spec.weights_dtype, _WEIGHTS_DTYPES),
        ("output", spec.out_dtype, bf16),
    ):
        if dtype not in known:
            need = f"{what} in {' or '.join(map(_name, known))}"
            yield Reason(ReasonCode.DTYPE, need, _name(dtype), "model.to(torch.bfloat16)")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def activation_function(activation: ActivationSpec) -> str | None:
    """The name in FlashInfer's ``ActivationType`` of exactly this activation, None where it has none.

    Knobs of Swiglu are alpha, beta and limit, one for gate and up; of SwigluStep, a limit of what the gate's
    activation gives. No other has any.
    """
    a = activation
    plain = a.alpha == 1.0 and a.beta == 0.0 and a.limit is None and a.up_limit is None
    if not a.gated:
        names = {"silu": "Silu", "gelu": "Gelu", "relu": "Relu", "relu2": "Relu2"}
        return names.get(a.kind) if plain else None
    if a.kind != "silu":
        return {"gelu": "Geglu", "gelu_tanh": "GegluTanh"}.get(a.kind) if plain else None
    one_limit = a.up_limit is None or (isinstance(a.up_limit, float | int) and a.up_limit == a.limit)
    if not one_limit:
        return None
    if a.limit is None or a.bound == "clamp":
        return "Swiglu"
    return "SwigluStep" if a.bound == "clamp_activated" and a.alpha == 1.0 and a.beta == 0.0 else None


def padding_text(spec: MoESpec, rows: KernelRows) -> str:
    """What the re-layout pads, for people."""
    intermediate = rows.multiple(spec.activation.gated)
    sizes = (("H", spec.hidden_size, rows.hidden), ("I", spec.intermediate_size, intermediate))
    return ", ".join(f"{name} {size} to {round_up(size, to)}" for name, size, to in sizes if size % to)


def unless_empty(kernel: Callable[[ExpertsCall], torch.Tensor]) -> Callable[[ExpertsCall], torch.Tensor]:
    """``kernel``, which is not asked for a batch of no tokens."""

    def run(call: ExpertsCall) -> torch.Tensor:
        if call.hidden.shape[0] == 0:
            return call.hidden.new_empty(call.hidden.shape, dtype=call.out_dtype)
        return kernel(call)

    return run


def routes_table(spec: MoESpec) -> str:
    """What plans tell their calls of ids: whether the graph shows that those of a token differ."""
    chosen = isinstance(spec.router, RouterSpec) and not spec.router.ids_given
    return _DISTINCT if chosen or spec.top_k == 1 else ""


def present_routes(call: ExpertsCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Routes as the kernels take them, whose tables have one place for a token and an expert.

    Returns:
        int32 ids [T, k], -1 for a route to no expert here (some kernels read 16 bits of an id), and weights [T, k]:
        an expert that a token names again has it all in the first place. Both contiguous.
    """
    ids, weights = call.topk_ids, call.topk_weights
    ids = torch.where((ids >= 0) & (ids < call.w13.codes.shape[0]), ids, -1).to(torch.int32)
    if call.table != _DISTINCT:
        same = ids.unsqueeze(2) == ids.unsqueeze(1)
        again = same.tril(-1).any(dim=2)
        weights = torch.where(same, weights.float().unsqueeze(1), 0.0).sum(dim=2).to(weights.dtype)
        ids = torch.where(again, -1, ids)
    return ids.contiguous(), weights.contiguous()


def padded_hidden(hidden: torch.Tensor, size: int) -> torch.Tensor:
    """[T, size] contiguous from [T, H], zeros behind."""
    return F.pad(hidden, (0, size - hidden.shape[1])).contiguous() if size != hidden.shape[1] else hidden.contiguous()


def by_expert(value: float | None, default: float | None, like: torch.Tensor) -> torch.Tensor | None:
    """float32 [E] of an activation's knob beside weights [E, ...], None where it is the kernel's default."""
    if value is None or value == default:
        return None
    return torch.full((like.shape[0],), value, dtype=torch.float32, device=like.device)


@cache
def announce_build(name: str, duration: str) -> None:
    """Say, once, that a call is about to compile FlashInfer's module ``name``, if it is."""
    from flashinfer.jit import env

    # Packages of modules that were compiled ahead of time have folders of their own.
    ahead = getattr(env, "FLASHINFER_AOT_DIRS", (env.FLASHINFER_AOT_DIR,))
    built = any((folder / name / f"{name}.so").exists() for folder in (*ahead, env.FLASHINFER_JIT_DIR))
    if not built and not os.environ.get("FLASHINFER_DISABLE_JIT"):
        logger.warning("FlashInfer compiles %s, %s, once, into %s", name, duration, env.FLASHINFER_JIT_DIR)
