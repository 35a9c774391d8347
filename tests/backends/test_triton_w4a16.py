"""``triton_w4a16``: what it refuses, what it plans, and its numbers on a GPU."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch
from cuda_graphs import CapturedCall
from moe_cases import CLAMPED_SWIGLU, EXPERTS_CASES, SWIGLU, MoECase, make_case, poison_allocator
from tolerances import assert_close_per_token
from torch.fx.experimental.proxy_tensor import make_fx

from fp4_inductor.backends import get_backend
from fp4_inductor.device import DeviceInfo
from fp4_inductor.formats import FORMATS, MXFP4, NVFP4, BlockFormat
from fp4_inductor.kernels.w4a16_config import FAMILIES
from fp4_inductor.plan import prepare, run_plan
from fp4_inductor.reasons import ReasonCode
from fp4_inductor.spec import ActivationSpec, ExpertRange, GateUpOrder, MoESpec, Operand

BACKEND = get_backend("triton_w4a16")
H200 = dataclasses.replace(DeviceInfo.parse("sm_90"), libraries=(("triton", "3.6.0"),))
SPEC = MoESpec(8, 2, 2880, 96, MXFP4, SWIGLU)


def codes(spec: MoESpec, device: DeviceInfo = H200) -> set[ReasonCode]:
    return {reason.code for reason in BACKEND.check(spec, device).reasons}


@pytest.mark.parametrize("arch", FAMILIES)
def test_takes_every_listed_family(arch: int) -> None:
    device = DeviceInfo.parse(f"sm_{arch}")
    assert BACKEND.check(SPEC, dataclasses.replace(device, libraries=H200.libraries)).ok


def test_refuses_a_device_with_too_little_shared_memory() -> None:
    assert codes(SPEC, dataclasses.replace(H200, shared_memory=48 * 1024)) == {ReasonCode.CAPABILITY}


@pytest.mark.parametrize("capability", [(7, 5), (8, 7), (11, 0), (13, 0)])
def test_refuses_families_it_was_not_checked_on(capability: tuple[int, int]) -> None:
    assert codes(SPEC, dataclasses.replace(H200, capability=capability)) == {ReasonCode.CAPABILITY}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"weight_format": BlockFormat("odd", 64, "e8m0", False)}, ReasonCode.FORMAT),
        ({"activation": ActivationSpec("tanh")}, ReasonCode.ACTIVATION),
        ({"activation": ActivationSpec("silu", limit=1.0, bound="wrap")}, ReasonCode.ACTIVATION),
        ({"hidden_size": 2888}, ReasonCode.SHAPE),
        ({"intermediate_size": 48}, ReasonCode.SHAPE),
        ({"act_dtype": torch.float32}, ReasonCode.DTYPE),
        ({"out_dtype": torch.float64}, ReasonCode.DTYPE),
        ({"weights_dtype": torch.float64}, ReasonCode.DTYPE),
        ({"local_experts": ExpertRange(0, 4, 8)}, ReasonCode.PARALLEL),
    ],
    ids=str,
)
def test_refuses_what_its_kernels_lack(changes: dict[str, Any], code: ReasonCode) -> None:
    assert codes(dataclasses.replace(SPEC, **changes)) == {code}


def test_gives_all_reasons_at_once() -> None:
    spec = dataclasses.replace(SPEC, hidden_size=40, intermediate_size=8, act_dtype=torch.float64)
    verdict = BACKEND.check(spec, DeviceInfo("cpu"))
    assert [reason.code for reason in verdict.reasons] == [
        ReasonCode.CAPABILITY,
        ReasonCode.LIBRARY,
        ReasonCode.SHAPE,
        ReasonCode.SHAPE,
        ReasonCode.DTYPE,
    ]


def test_equal_layers_share_their_recipes() -> None:
    first, second = BACKEND.plan(SPEC, H200), BACKEND.plan(dataclasses.replace(SPEC), H200)
    assert first == second
    assert first.padding == "I 96 to 128"


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@pytest.mark.parametrize("name", ["gpt_oss", "up_first", "not_gated"])
def test_recipes_trace_to_plain_ops_without_constants(name: str, fmt: BlockFormat) -> None:
    case = make_case(fmt, **EXPERTS_CASES[name])
    for prepared in BACKEND.plan(case.spec, H200).prepared:
        operands = [case.operands[operand] for operand in prepared.of]
        graph = make_fx(prepared.fn)(*operands)
        assert not [node for node in graph.graph.nodes if node.op == "get_attr"], prepared.name
        assert torch.equal(graph(*operands), prepared.fn(*operands))


def test_planning_loads_no_triton() -> None:
    code = (
        "import sys, fp4_inductor.backends as b, fp4_inductor.device as d;"
        "b.get_backend('triton_w4a16'); d.DeviceInfo.parse('sm_90'); assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def gpu_case(name: str, fmt: BlockFormat, **changes: Any) -> MoECase:
    return make_case(fmt, device="cuda", **{**EXPERTS_CASES[name], **changes})


def run(case: MoECase) -> torch.Tensor:
    plan = BACKEND.plan(case.spec, DeviceInfo.current(torch.device("cuda")))
    ready = prepare(plan, case.operands)
    poison_allocator()
    return run_plan(plan, case.operands, ready)


def check(case: MoECase) -> None:
    out = run(case)
    assert out.dtype == case.spec.out_dtype
    assert_close_per_token(out, case.reference(), case.spec.act_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@pytest.mark.parametrize("name", EXPERTS_CASES)
def test_matches_the_reference(name: str, fmt: BlockFormat) -> None:
    check(gpu_case(name, fmt))


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@pytest.mark.parametrize("num_tokens", [1, 3, 16, 33, 65, 130, 700, 20000])
def test_every_token_count(num_tokens: int, fmt: BlockFormat) -> None:
    check(gpu_case("gpt_oss", fmt, num_tokens=num_tokens, num_experts=12, top_k=3))


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@pytest.mark.parametrize("num_tokens", [2, 500])
def test_real_sizes(num_tokens: int, fmt: BlockFormat) -> None:
    check(
        make_case(
            fmt,
            num_tokens=num_tokens,
            num_experts=8,
            top_k=4,
            hidden_size=2880,
            intermediate_size=2880,
            activation=CLAMPED_SWIGLU,
            w13_order=GateUpOrder.INTERLEAVED,
            bias=True,
            device="cuda",
        )
    )


@pytest.mark.gpu
def test_no_tokens() -> None:
    out = run(gpu_case("gpt_oss", MXFP4, num_tokens=0))
    assert out.shape == (0, 192)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [7, 900])
def test_runs_repeat_bit_for_bit(num_tokens: int) -> None:
    case = gpu_case("gpt_oss", NVFP4, num_tokens=num_tokens)
    first = run(case)
    assert all(torch.equal(first, run(case)) for _ in range(5))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [5, 400])
def test_a_cuda_graph_follows_new_routes(num_tokens: int) -> None:
    case = gpu_case("gpt_oss", NVFP4, num_tokens=num_tokens)
    other = gpu_case("gpt_oss", NVFP4, num_tokens=num_tokens, seed=1)
    plan = BACKEND.plan(case.spec, DeviceInfo.current(torch.device("cuda")))
    ready = prepare(plan, case.operands)
    captured = CapturedCall(lambda: run_plan(plan, case.operands, ready))
    for operand in (Operand.HIDDEN, Operand.TOPK_IDS, Operand.TOPK_WEIGHTS):
        case.operands[operand].copy_(other.operands[operand])
    assert_close_per_token(captured.replay(), case.reference(), torch.bfloat16)


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    """The lane words of w13 have more than 2**31 elements; experts at both ends are routed."""
    experts, hidden_size, intermediate_size = 320, 7168, 2048
    spec_of = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "top_k": 3, "num_tokens": 4}
    small = make_case(NVFP4, num_experts=3, idle_expert=False, device="cuda", **spec_of)
    place = torch.tensor([0, 299, 319], device="cuda")

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        bits = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
        out = bits.new_zeros(experts, *bits.shape[1:])
        out[place] = bits
        return out.view(tensor.dtype)

    weights = {o: spread(t) for o, t in small.operands.items() if o.value.startswith("w")}
    operands = {**small.operands, **weights, Operand.TOPK_IDS: place[small.operands[Operand.TOPK_IDS]]}
    case = MoECase(dataclasses.replace(small.spec, num_experts=experts), operands)
    assert case.spec.w13_rows * hidden_size * experts // 4 > 2**31
    assert_close_per_token(run(case), small.reference(), torch.bfloat16)
