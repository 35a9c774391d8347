"""The kernels for few tokens on a GPU, whatever its family would choose: numbers, repeats, CUDA graphs, routing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_graphs import CapturedCall
from moe_cases import CLAMPED_SWIGLU, MoECase, make_case, poison_allocator, with_router
from tolerances import assert_close_per_token

from fp4_inductor.backends import get_backend
from fp4_inductor.device import DeviceInfo
from fp4_inductor.formats import FORMATS, MXFP4, NVFP4, BlockFormat
from fp4_inductor.kernels.w4a16_config import DecodeConfig, DecodeGemm
from fp4_inductor.plan import prepare, run_plan
from fp4_inductor.spec import GateUpOrder, Operand, RouterSpec, Scoring

pytestmark = pytest.mark.gpu
TWO_WARPS = DecodeGemm(block_n=32, split=2, groups=2, num_stages=4)
EIGHT_WARPS = DecodeGemm(block_n=32, split=8, groups=2, num_stages=3)
WIDE = DecodeGemm(block_n=64, split=2, groups=2, num_stages=3)
ONE_WARP = DecodeGemm(block_n=64, split=1, groups=1, num_stages=6)
LAYER: dict[str, Any] = {
    "num_experts": 12,
    "top_k": 4,
    "hidden_size": 1472,
    "intermediate_size": 736,
    "activation": CLAMPED_SWIGLU,
    "w13_order": GateUpOrder.INTERLEAVED,
    "bias": True,
    "amplitude": 2.0,
    "device": "cuda",
}
GPT_OSS = RouterSpec(Scoring.SOFTMAX, topk_before_scoring=True)
formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)


@pytest.fixture(
    autouse=True,
    params=[(TWO_WARPS, EIGHT_WARPS, True), (EIGHT_WARPS, TWO_WARPS, False), (ONE_WARP, WIDE, True)],
    ids=["two", "eight", "wide"],
)
def _cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from fp4_inductor.kernels import w4a16

    *cut, late = request.param
    config = DecodeConfig(*cut, pdl=torch.cuda.get_device_capability()[0] >= 9, late=late)
    monkeypatch.setattr(w4a16, "choose_decode", lambda *args: config)


class Block:
    """A call on prepared weights."""

    def __init__(self, case: MoECase) -> None:
        self.case = case
        self.plan = get_backend("triton_w4a16").plan(case.spec, DeviceInfo.current(torch.device("cuda")))
        self.operands = {operand: case.operands[operand] for operand in self.plan.operands}
        self.prepared = prepare(self.plan, self.operands)

    def __call__(self) -> torch.Tensor:
        return run_plan(self.plan, self.operands, self.prepared)

    def check(self) -> None:
        """Three runs in poisoned memory are one, and right."""
        poison_allocator()
        first = self()
        assert_close_per_token(first, self.case.reference(), self.case.spec.act_dtype)
        for _ in range(2):
            poison_allocator(num_bytes=16 << 20)
            assert torch.equal(self(), first)

    def check_replays(self, *redrawn: Operand) -> None:
        """A captured call follows its inputs."""
        captured = CapturedCall(self)
        for _ in range(3):
            for operand in redrawn:
                tensor = self.operands[operand]
                tensor.copy_(torch.randn_like(tensor) * 2)
            assert torch.equal(captured.replay(), self())


@formats
@pytest.mark.parametrize("num_tokens", range(1, 9))
def test_matches_the_reference_again_and_again(num_tokens: int, fmt: BlockFormat) -> None:
    Block(make_case(fmt, num_tokens=num_tokens, seed=num_tokens, **LAYER)).check()


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 8])
def test_ids_outside_name_nothing(num_tokens: int) -> None:
    Block(make_case(NVFP4, num_tokens=num_tokens, outside_ids=True, **LAYER)).check()


@pytest.mark.parametrize("num_tokens", [1, 2, 4])
def test_a_token_may_name_an_expert_twice(num_tokens: int) -> None:
    case = make_case(MXFP4, num_tokens=num_tokens, **LAYER)
    ids = torch.tensor([[2, 0, 2, 2], [0, 0, 0, 0], [1, 1, 0, -1], [(1 << 32) + 1, 1, 2, 1]])
    case.operands[Operand.TOPK_IDS].copy_(ids[:num_tokens])
    Block(case).check()


@formats
@pytest.mark.parametrize("num_tokens", [1, 2, 4])
def test_replays_follow_their_inputs(num_tokens: int, fmt: BlockFormat) -> None:
    block = Block(make_case(fmt, num_tokens=num_tokens, **LAYER))
    block.check_replays(Operand.HIDDEN, Operand.TOPK_WEIGHTS)


@pytest.mark.parametrize("num_tokens", [1, 2, 4])
def test_experts_chosen_in_the_launch_before(num_tokens: int) -> None:
    """The GEMMs may start while that still runs."""
    case = make_case(MXFP4, num_tokens=num_tokens, **LAYER)
    logits = torch.randn(num_tokens, case.spec.num_experts, device="cuda") * 2
    block = Block(with_router(case, GPT_OSS, logits))
    block.check()
    block.check_replays(Operand.HIDDEN, Operand.ROUTER_LOGITS)
