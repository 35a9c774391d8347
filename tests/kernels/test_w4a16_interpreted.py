"""The Triton kernels of ``triton_w4a16`` on a CPU, in Triton's interpreter.

The interpreter is chosen when Triton's decorators run, so these tests run in a process of their own, which
``test_in_the_interpreter`` starts on this file.
"""

from __future__ import annotations

import pytest
import torch
from interpreter import interpreted, run_in_interpreter, starts_the_interpreter
from moe_cases import EXPERTS_CASES, MoECase, make_case, with_router
from tolerances import assert_close_per_token

from fp4_inductor.backends import get_backend
from fp4_inductor.device import DeviceInfo
from fp4_inductor.formats import MXFP4, NVFP4, BlockFormat
from fp4_inductor.kernels.w4a16_config import DecodeConfig, DecodeGemm
from fp4_inductor.plan import prepare, run_plan
from fp4_inductor.spec import Operand, RouterSpec, Scoring

pytest.importorskip("triton", reason="triton is not installed")


@starts_the_interpreter
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def run(case: MoECase) -> torch.Tensor:
    backend = get_backend("triton_w4a16")
    plan = backend.plan(case.spec, DeviceInfo.parse("sm_90"))
    ready = prepare(plan, case.operands)
    torch.full((1 << 20,), float("nan"))  # memory that is handed out next
    return run_plan(plan, case.operands, ready)


TWO_WARPS = DecodeGemm(block_n=32, split=2, groups=2, num_stages=4)
EIGHT_WARPS = DecodeGemm(block_n=32, split=8, groups=2, num_stages=3)
ONE_WARP = DecodeGemm(block_n=64, split=1, groups=1, num_stages=6)
FEW = {**EXPERTS_CASES, "gpt_oss": {**EXPERTS_CASES["gpt_oss"], "hidden_size": 160, "intermediate_size": 64}}
"""Each expert of a token takes programs of its own: few rows do, and the last tile of them is not full."""
cuts = pytest.mark.parametrize("cut", [TWO_WARPS, EIGHT_WARPS, ONE_WARP], ids=["two", "eight", "one"])


def use_decode_kernels(monkeypatch: pytest.MonkeyPatch, cut: DecodeGemm) -> None:
    from fp4_inductor.kernels import w4a16

    monkeypatch.setattr(w4a16, "choose_decode", lambda *args: DecodeConfig(cut, cut))


def check(case: MoECase) -> None:
    out = run(case)
    assert out.dtype == case.spec.out_dtype
    assert_close_per_token(out, case.reference(), case.spec.act_dtype)


@interpreted
@pytest.mark.parametrize("name", EXPERTS_CASES)
def test_matches_the_reference(name: str) -> None:
    check(make_case(NVFP4, **EXPERTS_CASES[name]))


@interpreted
@pytest.mark.parametrize("name", ["gpt_oss", "odd_sizes", "long_rows", "not_gated", "float16"])
def test_matches_the_reference_in_mxfp4(name: str) -> None:
    check(make_case(MXFP4, **EXPERTS_CASES[name]))


@interpreted
@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)
@pytest.mark.parametrize(
    ("name", "num_tokens"),
    [("gpt_oss", 1), ("gpt_oss", 3), ("odd_sizes", 2), ("long_rows", 1), ("outside_ids", 8), ("not_gated", 5)],
)
@cuts
def test_few_tokens(
    name: str, num_tokens: int, fmt: BlockFormat, cut: DecodeGemm, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_decode_kernels(monkeypatch, cut)
    check(make_case(fmt, **{**FEW[name], "num_tokens": num_tokens}))


@interpreted
@pytest.mark.parametrize("name", ["float16", "low_weights", "float32_out", "up_first", "softcap"])
def test_few_tokens_of_every_type(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_decode_kernels(monkeypatch, TWO_WARPS)
    check(make_case(NVFP4, **{**EXPERTS_CASES[name], "num_tokens": 2}))


@interpreted
@cuts
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_a_token_may_name_an_expert_twice(num_tokens: int, cut: DecodeGemm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among few tokens, next to ids that name an expert only in their lower 32 bits."""
    use_decode_kernels(monkeypatch, cut)
    case = make_case(MXFP4, num_tokens=num_tokens, num_experts=5, top_k=4, bias=True)
    ids = case.operands[Operand.TOPK_IDS]
    ids.copy_(torch.tensor([[2, 0, 2, 2], [0, 0, 0, 0], [1, 1, 0, -1], [(1 << 32) + 1, 1, 2, 1]])[:num_tokens])
    check(case)


@interpreted
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_few_tokens_routed_from_logits(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_decode_kernels(monkeypatch, TWO_WARPS)
    router = RouterSpec(Scoring.SOFTMAX, topk_before_scoring=True)
    case = make_case(MXFP4, **{**FEW["gpt_oss"], "num_tokens": num_tokens})
    logits = torch.randn(num_tokens, case.spec.num_experts) * 2
    check(with_router(case, router, logits))


@interpreted
def test_no_tokens() -> None:
    assert run(make_case(MXFP4, num_tokens=0)).shape == (0, 128)


@interpreted
@pytest.mark.parametrize("act_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scales_of_one_row_may_lie_far_apart(act_dtype: torch.dtype) -> None:
    case = make_case(MXFP4, act_dtype=act_dtype, out_dtype=torch.float32)
    # Down to 60 octaves below the row's largest: what float16 cannot hold is beyond float32 accuracy of the sum.
    scale = case.operands[Operand.W13_SCALE]
    scale.copy_(torch.where(torch.rand(scale.shape) < 0.5, torch.randint(60, 120, scale.shape), scale))
    check(case)


@interpreted
@pytest.mark.parametrize("act_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_e4m3_scale(act_dtype: torch.dtype) -> None:
    """Zero, subnormal, negative and largest scales; both zeros are exact."""
    case = make_case(NVFP4, act_dtype=act_dtype, hidden_size=256)
    scale = case.operands[Operand.W13_SCALE]
    bits = torch.arange(256, dtype=torch.uint8)
    bits[(bits & 0x7F) == 0x7F] = 0  # NaN
    small = bits[torch.randint(0, 256, scale.shape)]
    scale.copy_(torch.where(torch.rand(scale.shape) < 0.7, small & 0x9F, small).view(scale.dtype))
    case.operands[Operand.W13_GLOBAL].mul_(0.02)
    check(case)


@interpreted
def test_a_nan_scale_shows() -> None:
    case = make_case(NVFP4)
    case.operands[Operand.W2_SCALE].view(torch.uint8)[:, 3, 0] = 0x7F
    out = run(case)
    assert out[:, 3].isnan().all()
    assert out[:, 4:].isfinite().all()
