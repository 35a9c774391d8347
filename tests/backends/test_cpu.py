"""The ``cpu`` backend against float64 on every instruction set that this processor has, and what it promises."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from cpu_isa import forced_isa
from moe_cases import ACTIVATIONS as SHARED_ACTIVATIONS
from moe_cases import CLAMPED_SWIGLU, EXPERTS_CASES, MoECase, make_case
from processes import run_python
from tolerances import assert_close_per_token

from fp4_inductor.backends import get_backend
from fp4_inductor.backends.ops import call_implementation
from fp4_inductor.device import DeviceInfo
from fp4_inductor.formats import MXFP4, NVFP4, BlockFormat
from fp4_inductor.kernels import cpu_moe
from fp4_inductor.kernels.cpu_build import ISAS, BuildError
from fp4_inductor.plan import prepare, resolve_op, run_plan
from fp4_inductor.spec import ActivationSpec, GateUpOrder, Operand

CPU = DeviceInfo.parse("cpu")
BACKEND = get_backend("cpu")
STRANGE_FORMATS = {
    "e4m3-blocks-of-32": BlockFormat("nvfp4", 32, "e4m3", has_global_scale=True),
    "e4m3-without-global": BlockFormat("nvfp4", 16, "e4m3", has_global_scale=False),
    "e8m0-blocks-of-64": BlockFormat("mxfp4", 64, "e8m0", has_global_scale=False),
    "e8m0-with-global": BlockFormat("mxfp4", 32, "e8m0", has_global_scale=True),
}
ACTIVATIONS = [*SHARED_ACTIVATIONS, ActivationSpec("silu", gated=False, limit=0.5, bound="softcap")]
SLOTS_AT_ONCE = 1 << 14  # kMaxSlots in moe.cpp
SWIGLU_ALONE = ActivationSpec("silu", gated=False)
FIRST_CALLS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Barrier
import torch
from moe_cases import make_case
from tolerances import assert_close_per_token
from torch._dispatch.python import enable_python_dispatcher
from fp4_inductor.backends import get_backend
from fp4_inductor.device import DeviceInfo
from fp4_inductor.formats import MXFP4
from fp4_inductor.plan import prepare, run_plan

def installed():
    return torch._C._dispatch_has_kernel_for_dispatch_key("fp4_inductor::moe_cpu", "CPU")

case = make_case(MXFP4)
plan = get_backend("cpu").plan(case.spec, DeviceInfo.parse("cpu"))
ready, together, before = prepare(plan, case.operands), Barrier(4), installed()

def call(index):
    together.wait()
    with enable_python_dispatcher() if "tracing" in sys.argv else nullcontext():
        run_plan(plan, case.operands, ready)
        return run_plan(plan, case.operands, ready)

with ThreadPoolExecutor(4) as pool:
    for out in pool.map(call, range(4)):
        assert_close_per_token(out, case.reference(), torch.bfloat16)
print(before, installed())
"""
formats = pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set in turn, forced."""
    with forced_isa(request.param):
        yield request.param


def run(case: MoECase) -> torch.Tensor:
    return run_plan(BACKEND.plan(case.spec, CPU), case.operands)


def check(case: MoECase) -> None:
    out = run(case)
    assert out.dtype == case.spec.out_dtype
    assert_close_per_token(out, case.reference(), case.spec.act_dtype)


@pytest.mark.parametrize("act_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@formats
def test_every_token_count_of_an_expert(isa: str, fmt: BlockFormat, act_dtype: torch.dtype) -> None:
    """Panels of every width, and experts that fill several."""
    for num_tokens in (0, *range(1, 17), 29, 43):
        check(make_case(fmt, act_dtype=act_dtype, num_tokens=num_tokens, num_experts=1, top_k=1, seed=num_tokens))


@pytest.mark.parametrize("name", EXPERTS_CASES)
@formats
def test_every_knob(isa: str, fmt: BlockFormat, name: str) -> None:
    check(make_case(fmt, **EXPERTS_CASES[name]))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("act_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_activations(isa: str, activation: ActivationSpec, act_dtype: torch.dtype) -> None:
    for amplitude in (0.05, 1.0, 12.0):
        check(make_case(MXFP4, activation=activation, act_dtype=act_dtype, bias=True, amplitude=amplitude))


def test_small_and_large_activations(isa: str) -> None:
    case = make_case(MXFP4, act_dtype=torch.float32, num_tokens=40)
    case.operands[Operand.HIDDEN].mul_(torch.logspace(-9, 6, 40).unsqueeze(-1))
    out, expected = run(case).double(), case.reference()
    error = (out - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < 3e-5


@pytest.mark.parametrize("fmt", STRANGE_FORMATS.values(), ids=list(STRANGE_FORMATS))
def test_other_blocks_and_globals(fmt: BlockFormat) -> None:
    check(make_case(fmt, hidden_size=192, intermediate_size=128, num_tokens=20))


@pytest.mark.parametrize("w13_order", GateUpOrder, ids=str)
@pytest.mark.parametrize("global_scale", ["tensor", "expert", "row"])
def test_orders_and_global_scales(w13_order: GateUpOrder, global_scale: Any) -> None:
    check(make_case(NVFP4, w13_order=w13_order, global_scale=global_scale, bias=True))


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16], ids=str)
def test_routing_and_output_dtypes(weights_dtype: torch.dtype, ids_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    check(make_case(MXFP4, weights_dtype=weights_dtype, ids_dtype=ids_dtype, out_dtype=out_dtype))


def test_inputs_that_are_not_contiguous() -> None:
    case = make_case(MXFP4, num_tokens=9)
    expected = run(case)
    for operand in (Operand.HIDDEN, Operand.TOPK_IDS, Operand.TOPK_WEIGHTS):
        tensor = case.operands[operand]
        case.operands[operand] = torch.stack((tensor, tensor), dim=-1)[..., 1]
    assert torch.equal(run(case), expected)


def test_hidden_states_between_two_words() -> None:
    """They are read in pairs where they stand, if they stand so."""
    case = make_case(MXFP4, num_tokens=1)
    hidden, expected = case.operands[Operand.HIDDEN], run(case)
    place = hidden.new_empty(hidden.numel() + 1)[1:].view(hidden.shape)
    assert place.data_ptr() % 4 == 2
    case.operands[Operand.HIDDEN] = place.copy_(hidden)
    assert torch.equal(run(case), expected)


def test_ids_outside_the_experts_contribute_nothing(isa: str) -> None:
    case = make_case(MXFP4, num_tokens=40, outside_ids=True)
    check(case)
    assert not run(case)[0].any()


def test_an_expert_chosen_twice_by_one_token_counts_twice() -> None:
    case = make_case(MXFP4)
    case.operands[Operand.TOPK_IDS].fill_(3)
    check(case)


@formats
def test_tokens_that_take_turns(fmt: BlockFormat) -> None:
    sizes = {"num_experts": 6, "top_k": 4, "hidden_size": 64, "intermediate_size": 32}
    check(make_case(fmt, num_tokens=SLOTS_AT_ONCE // 4 + 9, outside_ids=True, **sizes))


@pytest.mark.parametrize("isa", ["portable"], indirect=True)
@pytest.mark.parametrize(("num_tokens", "at_once"), [(50, 50), (SLOTS_AT_ONCE // 2 + 300, SLOTS_AT_ONCE // 2)])
def test_memory_is_no_more_than_activations(isa: str, num_tokens: int, at_once: int) -> None:
    """Hidden states and h by slot, and float32 sums by token, of as many as are held at once."""
    case = make_case(MXFP4, num_tokens=num_tokens)
    plan, spec = BACKEND.plan(case.spec, CPU), case.spec
    prepared = prepare(plan, case.operands)
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        run_plan(plan, case.operands, prepared)
    made = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.nbytes() > 0]
    a_token = spec.top_k * (spec.hidden_size + spec.intermediate_size) * 4 + spec.hidden_size * 4
    assert made == [num_tokens * spec.hidden_size * 2, at_once * a_token]


@formats
def test_the_result_is_bitwise_repeatable_and_independent_of_threads(isa: str, fmt: BlockFormat) -> None:
    case = make_case(fmt, num_tokens=50, num_experts=8, top_k=4)
    threads, first = torch.get_num_threads(), run(case)
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            assert torch.equal(run(case), first)
    finally:
        torch.set_num_threads(threads)


def test_several_python_threads() -> None:
    cases = [make_case(fmt, num_tokens=count, seed=count) for fmt in (MXFP4, NVFP4) for count in (1, 5, 40)]
    expected = [run(case) for case in cases]
    wrong: list[int] = []

    def work(first: int) -> None:
        for turn in range(30):
            index = (first + turn) % len(cases)
            if not torch.equal(run(cases[index]), expected[index]):
                wrong.append(index)

    workers = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@formats
def test_bytes_of_experts_without_tokens_are_never_read(isa: str, fmt: BlockFormat) -> None:
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


def weight_of_one_expert(codes: torch.Tensor, scale: torch.Tensor, fmt: BlockFormat) -> MoECase:
    """A block that gives back its w13: hidden states are unit vectors and their negatives, w2 is the identity."""
    rows, columns = codes.shape[0], codes.shape[1] * 2
    size = max(rows, columns)
    case = make_case(
        fmt,
        num_tokens=2 * size,
        num_experts=1,
        top_k=1,
        hidden_size=size,
        intermediate_size=size,
        activation=ActivationSpec("relu", gated=False),
        global_scale="tensor",
    )
    one = 127 if fmt is MXFP4 else 0x38
    unit = torch.eye(size)
    given = dict.fromkeys((Operand.W13, Operand.W2, Operand.W13_SCALE, Operand.W2_SCALE))
    for operand in given:
        case.operands[operand].view(torch.uint8).zero_()
    case.operands[Operand.W13][0, :rows, : columns // 2] = codes
    case.operands[Operand.W13_SCALE].view(torch.uint8)[0, :rows, : scale.shape[1]] = scale
    case.operands[Operand.W2_SCALE].view(torch.uint8).fill_(one)
    nibble = unit.to(torch.uint8) * 2  # the code of 1.0
    case.operands[Operand.W2][0] = nibble[:, ::2] | nibble[:, 1::2] << 4
    for operand in (Operand.W13_GLOBAL, Operand.W2_GLOBAL):
        if operand in case.operands:
            case.operands[operand].fill_(1.0)
    case.operands[Operand.HIDDEN].copy_(torch.cat((unit, -unit)))
    case.operands[Operand.TOPK_WEIGHTS].fill_(1.0)
    return case


@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)
def test_every_code_and_every_scale_is_exact(isa: str, fmt: BlockFormat) -> None:
    """All weights from 2**-125 to the largest of bfloat16: two products by one, and sums with zeros, round nothing."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)[:, : 512 // 2]
    last = 224 if isa == "avx2" else 253  # there, the sums of a block are 2**25 times as large
    first, last = (3, last) if fmt is MXFP4 else (0, 256)
    bits = torch.arange(256, dtype=torch.uint8).clamp(first, last - 1)
    case = weight_of_one_expert(codes, bits[:, None].repeat(1, 512 // fmt.block_size), fmt)
    spec = replace(case.spec, out_dtype=torch.float32)
    out = run_plan(BACKEND.plan(spec, CPU), case.operands)
    positive, negative = out.tensor_split(2)
    factor = torch.exp2(bits.double() - 127) if fmt is MXFP4 else bits.view(fmt.scale_dtype).double()
    values = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    values = torch.cat((values, -values))
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    exact = values[nibbles.int()] * factor[:, None]
    finite = ~factor.isnan()
    got = (positive.double() - negative.double()).T[:256]
    assert torch.equal(got[finite], exact[finite])


@formats
def test_a_scale_that_is_nan_shows_in_every_token(isa: str, fmt: BlockFormat) -> None:
    one, nan = (127, 255) if fmt is MXFP4 else (0x38, 0xFF)
    codes = torch.full((64, 32), 0x22, dtype=torch.uint8)
    scale = torch.full((64, 64 // fmt.block_size), one, dtype=torch.uint8)
    case = weight_of_one_expert(codes, scale, fmt)
    case = MoECase(replace(case.spec, activation=SWIGLU_ALONE), case.operands)
    assert run(case).isfinite().all()
    case.operands[Operand.W13_SCALE].view(torch.uint8)[0, 5, 1] = nan
    assert run(case).isnan().all(), "NaN times zero is NaN"


@formats
def test_the_op(fmt: BlockFormat) -> None:
    case = make_case(fmt, bias=True, activation=CLAMPED_SWIGLU)
    plan = BACKEND.plan(case.spec, CPU)
    prepared = prepare(plan, case.operands)
    args = tuple(
        case.operands[arg] if isinstance(arg, Operand) else prepared.get(getattr(arg, "name", ""), arg)
        for arg in plan.args
    )
    torch.library.opcheck(
        resolve_op(plan.op),
        args,
        test_utils=["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"],
    )


def test_tensors_on_another_device_are_refused() -> None:
    case = make_case(MXFP4)
    with pytest.raises(NotImplementedError, match="needs tensors on a CPU, got them on meta"):
        call_implementation(BACKEND.plan(case.spec, CPU).op, (case.operands[Operand.HIDDEN].to("meta"),))


def test_a_name_that_the_kernel_does_not_know_is_told() -> None:
    case = make_case(MXFP4)
    plan = BACKEND.plan(case.spec, CPU)
    strange = replace(plan, args=tuple("mish" if arg == "silu" else arg for arg in plan.args))
    with pytest.raises(RuntimeError, match="moe_cpu knows no mish"):
        run_plan(strange, case.operands)


def test_a_kernel_that_torch_does_not_take_is_an_error_of_its_build(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = MagicMock()
    refusing.fp4_install.return_value = 1
    monkeypatch.setattr(cpu_moe, "load_libraries", lambda *wanted: [refusing] * len(wanted))
    with pytest.raises(BuildError, match="needed torch to take it"):
        cpu_moe.install_kernel()


@pytest.mark.parametrize("how", ["running", "tracing"])
def test_threads_may_make_the_first_call_together(how: str) -> None:
    done = run_python("-c", FIRST_CALLS, how)
    assert (done.returncode, done.stdout) == (0, "False True\n"), done.stderr
