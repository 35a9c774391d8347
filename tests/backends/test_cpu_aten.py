"""The ``cpu_aten`` backend against float64, and what it promises about experts that no token is routed to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from moe_cases import ACTIVATIONS, CLAMPED_SWIGLU, MoECase, make_case
from tolerances import assert_close_per_token
from torch.utils._python_dispatch import TorchDispatchMode

from fp4_inductor.backends import cpu_aten as backend
from fp4_inductor.backends import get_backend, ops
from fp4_inductor.device import DeviceInfo
from fp4_inductor.formats import MXFP4, NVFP4, BlockFormat
from fp4_inductor.kernels import cpu_aten
from fp4_inductor.plan import resolve_op, run_plan
from fp4_inductor.quant import dequantize
from fp4_inductor.spec import ActivationSpec, GateUpOrder, Operand

CPU = DeviceInfo.parse("cpu")
NVFP4_BLOCKS_OF_32 = BlockFormat("nvfp4", 32, "e4m3", has_global_scale=True)


def run(case: MoECase) -> torch.Tensor:
    return run_plan(get_backend("cpu_aten").plan(case.spec, CPU), case.operands)


def check(case: MoECase) -> None:
    out = run(case)
    assert out.dtype == case.spec.out_dtype
    assert_close_per_token(out, case.reference(), case.spec.act_dtype)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7, 64])
@pytest.mark.parametrize("act_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)
def test_formats_dtypes_and_token_counts(fmt: BlockFormat, act_dtype: torch.dtype, num_tokens: int) -> None:
    check(make_case(fmt, act_dtype=act_dtype, num_tokens=num_tokens))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_activations(activation: ActivationSpec, bias: bool) -> None:
    check(make_case(NVFP4, activation=activation, bias=bias))


@pytest.mark.parametrize("w13_order", GateUpOrder, ids=str)
@pytest.mark.parametrize("global_scale", ["tensor", "expert", "row"])
def test_orders_and_global_scales(w13_order: GateUpOrder, global_scale: Any) -> None:
    check(make_case(NVFP4, w13_order=w13_order, global_scale=global_scale, bias=True))


@pytest.mark.parametrize("fmt", [MXFP4, NVFP4_BLOCKS_OF_32], ids=["mxfp4", "e4m3-blocks-of-32"])
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32], ids=str)
def test_routing_dtypes(fmt: BlockFormat, weights_dtype: torch.dtype, ids_dtype: torch.dtype) -> None:
    check(make_case(fmt, weights_dtype=weights_dtype, ids_dtype=ids_dtype, out_dtype=torch.float32))


def test_ids_outside_the_experts_contribute_nothing() -> None:
    case = make_case(MXFP4, num_tokens=40, outside_ids=True)
    check(case)
    assert not run(case)[0].any()


def test_an_expert_chosen_twice_by_one_token_counts_twice() -> None:
    case = make_case(MXFP4)
    case.operands[Operand.TOPK_IDS].fill_(3)
    check(case)


@pytest.mark.parametrize("intermediate_size", [32, 1056])
def test_rows_that_do_not_fill_the_last_chunk(intermediate_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_aten, "CHUNK_WEIGHTS", 7 * 128)
    check(make_case(MXFP4, intermediate_size=intermediate_size, num_tokens=3))


def test_the_result_is_bitwise_repeatable_and_independent_of_threads() -> None:
    case = make_case(NVFP4, num_tokens=50, num_experts=8, top_k=4)
    threads, first = torch.get_num_threads(), run(case)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(run(case), first)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)
def test_bytes_of_experts_without_tokens_are_never_read(fmt: BlockFormat) -> None:
    case = make_case(fmt, num_tokens=3, num_experts=16)
    expected = run(case)
    idle = torch.ones(16, dtype=torch.bool)
    idle[case.operands[Operand.TOPK_IDS].unique()] = False
    assert idle.any()
    nan_bits = 0xFF if fmt is MXFP4 else 0x7F
    for operand in (Operand.W13_SCALE, Operand.W2_SCALE):
        case.operands[operand].view(torch.uint8)[idle] = nan_bits
    assert torch.equal(run(case), expected)
    case.operands[Operand.W2_SCALE].view(torch.uint8)[~idle] = nan_bits
    assert run(case).isnan().all(), "the poison would not have shown"


class LargestNewTensor(TorchDispatchMode):
    """Records the bytes of the largest tensor that an operator returns in memory that was not there before."""

    def __init__(self, given: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in self.given:
            self.num_bytes = max(self.num_bytes, out.untyped_storage().nbytes())
        return out


def test_no_expert_is_ever_held_dequantised() -> None:
    case = make_case(MXFP4, num_tokens=5, num_experts=2, top_k=1, hidden_size=2048, intermediate_size=1024)
    args = [
        case.operands[arg] if isinstance(arg, Operand) else arg
        for arg in get_backend("cpu_aten").plan(case.spec, CPU).args
    ]
    with LargestNewTensor(case.operands.values()) as largest:
        out = backend._moe(ops._decode(*args))  # the kernel itself: a mode sees an op as one piece
    assert_close_per_token(out, case.reference(), torch.bfloat16)
    one_expert = case.spec.w13_rows * case.spec.hidden_size * 2
    chunk = cpu_aten.CHUNK_WEIGHTS * 4
    assert chunk // 2 <= largest.num_bytes <= chunk < one_expert


def test_every_byte_and_every_scale_decodes_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    e8m0 = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
    e4m3 = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 32).view(torch.float8_e4m3fn)
    for scale, block in ((e8m0[1:253], 32), (e4m3, 16)):
        rows = len(scale)
        fmt = MXFP4 if block == 32 else NVFP4
        exact = dequantize(codes[:rows], scale, None, fmt, torch.float64)
        for dtype in (torch.bfloat16, torch.float32):
            torch.testing.assert_close(
                cpu_aten.decode_rows(codes[:rows], scale, dtype).double(), exact, rtol=0, atol=0, equal_nan=True
            )


@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)
def test_the_op_of_plain_aten(fmt: BlockFormat) -> None:
    case = make_case(fmt, bias=True, activation=CLAMPED_SWIGLU)
    plan = get_backend("cpu_aten").plan(case.spec, CPU)
    args = tuple(case.operands[arg] if isinstance(arg, Operand) else arg for arg in plan.args)
    # The schema test compares inputs by allclose, which float8 tensors do not have.
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(resolve_op(plan.op), args, test_utils=["test_schema", *tests] if fmt is MXFP4 else tests)
