"""``cpu``: FP4 weights × bfloat16, float16 or float32 activations on any processor, by an own C++ kernel.

The kernel is compiled when it is first called, for this processor, and kept. Only routed experts are read, each byte
once, and no weight is ever held dequantised. One layout of the weights serves every token count and every processor.
"""

from __future__ import annotations

from functools import cache, partial

import torch

from ..device import DeviceInfo
from ..formats import MXFP4, NVFP4, BlockFormat
from ..kernels.cpu_build import NO_COMPILER, BuildError
from ..kernels.cpu_moe import install_kernel
from ..layouts.gate_up import RowOrder, reorder_gate_up, row_order
from ..layouts.lane_scales import absorb_scale_signs
from ..layouts.row_blocks import (
    E4M3_FACTOR,
    ROWS,
    clear_nan_blocks,
    e4m3_magnitudes,
    to_row_blocks,
    to_scale_blocks,
)
from ..plan import KernelPlan, Prepared
from ..reasons import Reason, ReasonCode, Verdict
from ..spec import GateUpOrder, MoESpec, Operand
from .ops import define_native_op, experts_args, range_reasons

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_BLOCKS = {fmt.scale_encoding: fmt.block_size for fmt in (MXFP4, NVFP4)}
"""Columns that share a scale in the kernel; a larger block's scale is repeated."""
_GATE_UP = RowOrder(ROWS)


class CpuBackend:
    name = "cpu"
    op = define_native_op("moe_cpu", install_kernel)

    def check(self, spec: MoESpec, device: DeviceInfo) -> Verdict:
        reasons = [*range_reasons(spec)]
        if device.family != "cpu":
            reasons.append(Reason(ReasonCode.CAPABILITY, "a CPU", str(device), "it is for models on a CPU"))
        elif device.library("c++") is None:
            reasons.append(Reason(ReasonCode.LIBRARY, "a C++ compiler", "none", NO_COMPILER))
        for what, dtype in (("activations", spec.act_dtype), ("output", spec.out_dtype)):
            if dtype not in _DTYPES:
                need = f"{what} in bfloat16, float16 or float32"
                reasons.append(Reason(ReasonCode.DTYPE, need, str(dtype), "model.to(torch.bfloat16)"))
        block, smallest = spec.weight_format.block_size, _BLOCKS[spec.weight_format.scale_encoding]
        if block % smallest:
            need = f"blocks of a multiple of {smallest}"
            reasons.append(Reason(ReasonCode.FORMAT, need, str(block), "set fp4moe.backend to cpu_aten"))
        for what, size in (("hidden size", spec.hidden_size), ("intermediate size", spec.intermediate_size)):
            if size % block:
                need = f"a {what} that is a multiple of {block}"
                reasons.append(Reason(ReasonCode.SHAPE, need, str(size), "pad the weights with zeros before packing"))
        return Verdict(self.name, tuple(reasons))

    def rank(self, spec: MoESpec, device: DeviceInfo) -> int:
        return 100

    def probe_errors(self) -> tuple[type[Exception], ...]:
        return (BuildError, OSError)  # what is built may not load

    def plan(self, spec: MoESpec, device: DeviceInfo) -> KernelPlan:
        order = spec.w13_order if spec.activation.gated else None
        w13 = _prepared("w13", spec.weight_format, order, spec.w13_rows, spec.has_w13_bias)
        w2 = _prepared("w2", spec.weight_format, None, spec.hidden_size, spec.has_w2_bias)
        args = experts_args(spec, **w13, **w2, w13_order=spec.w13_order, table="")
        return KernelPlan(self.op, args, layout="blocks of 16 rows")


@cache
def _prepared(name: str, fmt: BlockFormat, order: GateUpOrder | None, rows: int, has_bias: bool) -> dict[str, Prepared]:
    """Arguments of ``experts_args`` for one weight. Cached, so that equal layers share their recipes."""
    codes, scale, glob, bias = (Operand(name + suffix) for suffix in ("", "_scale", "_global", "_bias"))
    repeats = fmt.block_size // _BLOCKS[fmt.scale_encoding]
    ready = {}

    def prepare(argument: str, fn: partial[torch.Tensor], *of: Operand) -> None:
        ready[argument] = Prepared(f"{argument}_cpu", fn, of)

    if fmt.scale_encoding == "e4m3":
        prepare(name, partial(_e4m3_codes, order), codes, scale)
        prepare(f"{name}_scale", partial(_e4m3_scales, order, repeats), scale)
    else:
        prepare(name, partial(_e8m0_codes, order), codes, scale)
        prepare(f"{name}_scale", partial(_scales, order, repeats), scale)
    if fmt.has_global_scale:
        factor = E4M3_FACTOR if fmt.scale_encoding == "e4m3" else 1.0
        prepare(f"{name}_global", partial(_factors, order, rows, factor), glob, codes)
    elif fmt.scale_encoding == "e4m3":
        prepare(f"{name}_global", partial(_constant_factors, rows), codes)
    if has_bias:
        prepare(f"{name}_bias", partial(_bias, order), bias)
    return ready


def _ordered(order: GateUpOrder | None, rows: torch.Tensor) -> torch.Tensor:
    """[E, N, ...] with gate and up rows sixteen at a time in turn, where it has them."""
    return rows if order is None else reorder_gate_up(rows, row_order(order), _GATE_UP)


def _codes(order: GateUpOrder | None, codes: torch.Tensor) -> torch.Tensor:
    return to_row_blocks(_ordered(order, codes))


def _scales(order: GateUpOrder | None, repeats: int, scale: torch.Tensor) -> torch.Tensor:
    return to_scale_blocks(_ordered(order, scale.repeat_interleave(repeats, dim=-1)))


def _e8m0_codes(order: GateUpOrder | None, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return _codes(order, clear_nan_blocks(codes, scale))


def _e4m3_codes(order: GateUpOrder | None, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return _codes(order, absorb_scale_signs(codes, scale))


def _e4m3_scales(order: GateUpOrder | None, repeats: int, scale: torch.Tensor) -> torch.Tensor:
    return _scales(order, repeats, e4m3_magnitudes(scale))


def _factors(
    order: GateUpOrder | None, rows: int, factor: float, global_scale: torch.Tensor, codes: torch.Tensor
) -> torch.Tensor:
    """float32 [E, N] from globals [E | 1, N | 1]."""
    every = (global_scale.float() * factor).expand(codes.shape[0], rows)
    return _ordered(order, every).contiguous()


def _constant_factors(rows: int, codes: torch.Tensor) -> torch.Tensor:
    return codes.new_full((codes.shape[0], rows), E4M3_FACTOR, dtype=torch.float32)


def _bias(order: GateUpOrder | None, bias: torch.Tensor) -> torch.Tensor:
    return _ordered(order, bias.float()).contiguous()
