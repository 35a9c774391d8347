"""Compiling only: for arguments without memory, exactly the kernels that a call launches."""

from __future__ import annotations

import os
from dataclasses import replace
from unittest import mock

import pytest
import torch

from fp4_inductor.backends import get_backend
from fp4_inductor.device import DeviceInfo
from fp4_inductor.formats import MXFP4, NVFP4, BlockFormat
from fp4_inductor.plan import KernelPlan, Prepared, resolve_op
from fp4_inductor.spec import ActivationSpec, MoESpec, Operand, RouterSpec, Scoring

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from launches import recorded, unwritten

from fp4_inductor.kernels.launch import compiling_only, launch

BACKEND = get_backend("triton_w4a16")
GIVEN = MoESpec(128, 8, 2048, 768, MXFP4, ActivationSpec("silu"))
ROUTED = MoESpec(128, 8, 2048, 768, MXFP4, ActivationSpec("silu"), router=RouterSpec(Scoring.SOFTMAX, renormalize=True))


def arguments(plan: KernelPlan, spec: MoESpec, tokens: int) -> tuple[object, ...]:
    operands, prepared = unwritten(spec, tokens)
    operands[Operand.ROUTER_LOGITS] = torch.empty(tokens, spec.num_experts)
    found = (prepared[arg.name] if isinstance(arg, Prepared) else arg for arg in plan.args)
    return tuple(operands[arg] if isinstance(arg, Operand) else arg for arg in found)


def on_meta(arg: object) -> object:
    return arg.to("meta") if isinstance(arg, torch.Tensor) else arg


@pytest.mark.parametrize("tokens", [1, 3, 17, 64, 300, 5000])
@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("spec", [GIVEN, ROUTED], ids=["given", "routed"])
def test_a_call_finds_its_kernels_compiled(spec: MoESpec, arch: int, fmt: BlockFormat, tokens: int) -> None:
    spec = replace(spec, weight_format=fmt)
    device = DeviceInfo.parse(f"sm_{arch}")
    plan = BACKEND.plan(spec, device)
    args = arguments(plan, spec, tokens)
    with recorded(device) as new:
        BACKEND.compile_call(plan.op, tuple(map(on_meta, args)))
        kernels = {compilation.name for compilation in new}
        if Operand.ROUTER_LOGITS in plan.operands and (arch, tokens) == (90, 1):
            assert kernels == {"gate_up_one_token_kernel", "down_one_token_kernel"}
        else:
            assert len(kernels) >= 3
        new.clear()
        resolve_op(plan.op)(*args)
        assert not new, [compilation.name for compilation in new]


def test_nothing_is_launched() -> None:
    kernel = mock.MagicMock()
    with compiling_only():
        launch(kernel, (3,))(1, A=2)
    kernel.warmup.assert_called_once_with(1, A=2, grid=(3,))
    kernel.__getitem__.assert_not_called()
    launch(kernel, (3,))(1, A=2)
    kernel.__getitem__.assert_called_once_with((3,))
    kernel.__getitem__.return_value.assert_called_once_with(1, A=2)


def test_an_error_leaves_the_thread_as_it_was() -> None:
    kernel = mock.MagicMock()
    with pytest.raises(ZeroDivisionError), compiling_only():
        raise ZeroDivisionError
    launch(kernel, (1,))()
    kernel.warmup.assert_not_called()
