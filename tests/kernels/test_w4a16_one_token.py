"""The two kernels for one token: in Triton's interpreter, on a GPU, and compiled for sm_90.

The interpreter is chosen when Triton's decorators run, so its tests run in a process of their own, which
``test_in_the_interpreter`` starts on this file.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from cuda_graphs import CapturedCall
from fp4_inductor.patterns.router_formulas import router_reference
from interpreter import INTERPRETED, interpreted, run_in_interpreter, starts_the_interpreter
from moe_cases import CLAMPED_SWIGLU, EXPERTS_CASES, MoECase, make_case, poison_allocator, with_router
from tolerances import assert_close_per_token

from fp4_inductor.backends import get_backend
from fp4_inductor.device import DeviceInfo
from fp4_inductor.formats import FORMATS, MXFP4, NVFP4, BlockFormat
from fp4_inductor.kernels.w4a16_config import DecodeConfig, DecodeGemm, choose_decode
from fp4_inductor.plan import prepare, run_plan
from fp4_inductor.spec import RUNTIME, MoESpec, Operand, RouterSpec, Scoring

pytest.importorskip("triton", reason="triton is not installed")

from fp4_inductor.kernels import w4a16, w4a16_routed, w4a16_routing

compiled = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)

SOFTMAX = RouterSpec(Scoring.SOFTMAX)
LATE = RouterSpec(Scoring.SOFTMAX, topk_before_scoring=True)
ROUTERS = {
    "softmax": SOFTMAX,
    "renormalized": replace(SOFTMAX, renormalize=True, renormalize_min=1e-12, renormalize_eps=1e-6, scaling_factor=1.5),
    "late": LATE,
    "late_sigmoid": RouterSpec(Scoring.SIGMOID, topk_before_scoring=True, scaling_factor=0.5),
}
CUT = DecodeGemm(block_n=32, split=2, groups=2, num_stages=4)
CUTS = [
    DecodeGemm(block_n=16, split=1, groups=2, num_stages=3),
    DecodeGemm(block_n=32, split=1, groups=1, num_stages=4),
]
SMALL: dict[str, Any] = {"num_tokens": 1, "num_experts": 7, "top_k": 4, "hidden_size": 160, "intermediate_size": 96}


@starts_the_interpreter
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def run(case: MoECase, monkeypatch: pytest.MonkeyPatch, cut: DecodeGemm = CUTS[0]) -> tuple[torch.Tensor, bool]:
    """The block, with one token's kernels wherever they may, and whether they ran."""
    monkeypatch.setattr(w4a16, "choose_decode", lambda *args: DecodeConfig(CUT, CUT, one_token=cut))
    plan = get_backend("triton_w4a16").plan(case.spec, DeviceInfo.parse("sm_90"))
    ready = prepare(plan, case.operands)
    torch.full((1 << 20,), float("nan"))  # memory that is handed out next
    with mock.patch.object(w4a16_routed, "run_one_token", wraps=w4a16_routed.run_one_token) as ran:
        out = run_plan(plan, case.operands, ready)
    return out, ran.called


def check(case: MoECase, monkeypatch: pytest.MonkeyPatch, cut: DecodeGemm = CUTS[0]) -> None:
    out, ran = run(case, monkeypatch, cut)
    assert ran
    assert out.dtype == case.spec.out_dtype
    assert_close_per_token(out, case.reference(), case.spec.act_dtype)


@interpreted
@formats
@pytest.mark.parametrize(("name", "cut"), [*((name, CUTS[0]) for name in ROUTERS), ("late", CUTS[1])])
def test_matches_the_reference(name: str, cut: DecodeGemm, fmt: BlockFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(fmt, **{**EXPERTS_CASES["gpt_oss"], **SMALL})
    check(with_router(case, ROUTERS[name], torch.randn(1, 7) * 2), monkeypatch, cut)


@interpreted
@pytest.mark.parametrize("name", ["float16", "low_weights", "float32_out", "up_first", "softcap", "not_gated"])
def test_every_type_and_activation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(NVFP4, **{**EXPERTS_CASES[name], **SMALL})
    check(with_router(case, ROUTERS["renormalized"], torch.randn(1, 7) * 2), monkeypatch)


@interpreted
@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 4), (130, 8), (9, 8)])
def test_numbers_of_experts(num_experts: int, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(MXFP4, **{**SMALL, "num_experts": num_experts, "top_k": top_k, "hidden_size": 64})
    check(with_router(case, LATE, torch.randn(1, num_experts)), monkeypatch)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_of_equal_logits_the_first_are_chosen(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[1.0, 3.0, -0.0, 0.0, 1.0, 0.0, 1.0]]).to(dtype)
    case = with_router(make_case(MXFP4, **SMALL), LATE, logits)
    case.operands[Operand.TOPK_IDS] = torch.tensor([[1, 0, 4, 6]])
    check(case, monkeypatch)


@interpreted
def test_of_a_token_with_nan_four_experts_are_chosen_and_the_result_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((1, 7), float("nan"))
    out, ran = run(with_router(make_case(MXFP4, **SMALL), LATE, logits), monkeypatch)
    assert ran
    assert out.isnan().all()


@interpreted
@pytest.mark.parametrize(
    "router",
    [
        replace(SOFTMAX, has_bias=True),
        RouterSpec(Scoring.SIGMOID, renormalize=True),
        replace(LATE, num_groups=2, topk_groups=1),
    ],
    ids=["bias", "sigmoid", "groups"],
)
def test_routers_that_choose_otherwise_do_not_take_them(router: RouterSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(MXFP4, **{**SMALL, "num_experts": 8})
    logits, bias = torch.randn(1, 8), torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0, -1.0, -2.0, -3.0])
    ids, weights = router_reference(router, logits.double(), 4, bias.double() if router.has_bias else None, 1.0)
    operands = {Operand.ROUTER_LOGITS: logits, Operand.TOPK_IDS: ids, Operand.TOPK_WEIGHTS: weights.float()}
    if router.has_bias:
        operands[Operand.ROUTER_BIAS] = bias
    case = MoECase(replace(case.spec, router=router), {**case.operands, **operands})
    out, ran = run(case, monkeypatch)
    assert not ran
    assert_close_per_token(out, case.reference(), case.spec.act_dtype)


@pytest.mark.parametrize(
    ("changes", "extra"),
    [
        ({"has_bias": True}, "bias"),
        ({"scaling_factor": RUNTIME}, "scale"),
        ({"has_expert_scale": True}, "expert_scale"),
    ],
)
def test_what_changes_choice_or_weights_is_seen(changes: dict[str, Any], extra: str) -> None:
    plain = w4a16_routing.Router(SOFTMAX, 4, torch.float32)
    assert w4a16_routed.chooses_by_logits(plain)
    router = replace(plain, spec=replace(SOFTMAX, **changes), **{extra: torch.ones(1)})
    assert not w4a16_routed.chooses_by_logits(router)


def test_which_layers_take_them() -> None:
    """Small ones with as many experts a token as warps, where few tokens are measured."""

    def takes(num_tokens: int, top_k: int, num_experts: int, hidden: int, inner: int, arch: int = 90) -> bool:
        sizes = ((2 * inner, hidden), (hidden, inner))
        config = choose_decode(arch, 132, num_tokens, top_k, num_experts, *sizes)
        return config is not None and config.one_token is not None

    assert takes(1, 8, 128, 2048, 768)
    assert takes(1, 4, 60, 2048, 1408)
    assert not takes(2, 8, 128, 2048, 768)
    assert not takes(1, 8, 128, 2048, 1024), "too large"
    assert not takes(1, 10, 512, 2048, 512), "six of sixteen warps would idle"
    assert not takes(1, 8, 128, 2048, 768, arch=80)


@compiled
@pytest.mark.usefixtures("kernels_of_this_run")
@formats
@pytest.mark.parametrize(("name", "scoring"), [("qwen3", SOFTMAX), ("qwen2", LATE)])
def test_compiles_for_sm_90(name: str, scoring: RouterSpec, fmt: BlockFormat, tmp_path: Path) -> None:
    from launches import launches, resources

    sizes = {"qwen3": (128, 8, 2048, 768), "qwen2": (60, 4, 2048, 1408)}[name]
    spec = MoESpec(*sizes, fmt, EXPERTS_CASES["gpt_oss"]["activation"], router=scoring)
    new = launches(spec, 90, [1])[1]
    assert [compilation.name for compilation in new] == ["gate_up_one_token_kernel", "down_one_token_kernel"]
    for compilation in new:
        built = compilation.build()
        used = resources(built, tmp_path)
        assert used.local == 0
        assert used.registers <= 128
        assert used.shared <= 32 * 1024
        ptx = built.asm["ptx"]
        assert "mma.sync" in ptx
        assert re.findall(r"griddepcontrol\.(\w+)", ptx) == ["wait", "launch_dependents"]
        assert "redux.sync" in ptx, "a warp must find the best expert in one instruction"


@pytest.mark.gpu
@compiled
@formats
@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize(("hidden", "inner", "top_k"), [(2048, 768, 8), (1472, 736, 4)])
def test_on_a_gpu(
    hidden: int, inner: int, top_k: int, name: str, fmt: BlockFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers, the same three times in poisoned memory, and a captured call that follows its inputs."""
    monkeypatch.setattr(w4a16, "choose_decode", lambda *args: DecodeConfig(CUT, CUT, pdl=True, one_token=CUTS[0]))
    sizes = {"num_tokens": 1, "num_experts": 32, "top_k": top_k, "hidden_size": hidden, "intermediate_size": inner}
    case = make_case(fmt, **sizes, activation=CLAMPED_SWIGLU, bias=True, amplitude=2.0, device="cuda")
    case = with_router(case, ROUTERS[name], torch.randn(1, 32, device="cuda") * 2)
    plan = get_backend("triton_w4a16").plan(case.spec, DeviceInfo.current(torch.device("cuda")))
    operands = {operand: case.operands[operand] for operand in plan.operands}
    ready = prepare(plan, operands)

    def block() -> torch.Tensor:
        return run_plan(plan, operands, ready)

    poison_allocator()
    with mock.patch.object(w4a16_routed, "run_one_token", wraps=w4a16_routed.run_one_token) as ran:
        first = block()
    assert ran.called
    assert_close_per_token(first, case.reference(), case.spec.act_dtype)
    for _ in range(2):
        poison_allocator(num_bytes=16 << 20)
        assert torch.equal(block(), first)
    captured = CapturedCall(block)
    for _ in range(3):
        for operand in (Operand.HIDDEN, Operand.ROUTER_LOGITS):
            operands[operand].copy_(torch.randn_like(operands[operand]) * 2)
        assert torch.equal(captured.replay(), block())
