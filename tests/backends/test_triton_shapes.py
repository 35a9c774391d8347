"""The Triton experts op at the sizes of real models, on a GPU, token by token against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from moe_cases import CLAMPED_SWIGLU, SWIGLU, make_case, poison_allocator
from tolerances import assert_close_per_token

from fp4_inductor import DeviceInfo
from fp4_inductor.backends import get_backend
from fp4_inductor.bench.shapes import SHAPES
from fp4_inductor.formats import MXFP4, NVFP4, BlockFormat
from fp4_inductor.plan import prepare, run_plan
from fp4_inductor.reference import moe_reference
from fp4_inductor.spec import GateUpOrder, Operand

pytestmark = pytest.mark.gpu


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_real_shapes(shape: str, fmt: BlockFormat) -> None:
    """Within the tolerances, and no further from the truth than 1.25 times an eager block in bfloat16."""
    num_experts, top_k, hidden_size, intermediate_size = SHAPES[shape].sizes
    gpt_oss = shape.startswith("gpt-oss")
    case = make_case(
        fmt,
        num_tokens=1024,
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        activation=CLAMPED_SWIGLU if gpt_oss else SWIGLU,
        w13_order=GateUpOrder.INTERLEAVED if gpt_oss else GateUpOrder.GATE_UP,
        bias=gpt_oss,
        global_scale="expert",
        device="cuda",
    )
    device = DeviceInfo.current(torch.device("cuda"))
    backend = get_backend("triton_w4a16")
    assert backend.check(case.spec, device).ok
    plan = backend.plan(case.spec, device)
    prepared = prepare(plan, case.operands)
    reference = moe_reference(case.spec, case.operands)
    for num_tokens in (1, 16, 64, 1024):
        tokens = {
            operand: case.operands[operand][:num_tokens].contiguous()
            for operand in (Operand.HIDDEN, Operand.TOPK_IDS, Operand.TOPK_WEIGHTS)
        }
        operands = {**case.operands, **tokens}
        poison_allocator()
        out = run_plan(plan, operands, prepared)
        assert_close_per_token(out, reference[:num_tokens], torch.bfloat16)
        spec = dataclasses.replace(case.spec, weights_dtype=torch.bfloat16)
        eager = moe_reference(spec, operands, torch.bfloat16)
        assert relative_error(out, reference[:num_tokens]) <= 1.25 * relative_error(eager, reference[:num_tokens])
