"""The ``reference`` backend is ``moe_reference`` behind the experts op, in float32."""

from __future__ import annotations

import pytest
import torch
from moe_cases import CLAMPED_SWIGLU, SWIGLU, make_case
from tolerances import assert_close_per_token

from fp4_inductor.backends import get_backend
from fp4_inductor.device import DeviceInfo
from fp4_inductor.formats import MXFP4, NVFP4, BlockFormat
from fp4_inductor.plan import resolve_op, run_plan
from fp4_inductor.reference import moe_reference
from fp4_inductor.spec import RUNTIME, ActivationSpec, GateUpOrder, Operand

CPU = DeviceInfo.parse("cpu")


@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)
@pytest.mark.parametrize("w13_order", GateUpOrder, ids=str)
@pytest.mark.parametrize("activation", [SWIGLU, CLAMPED_SWIGLU, ActivationSpec("relu2", gated=False)], ids=str)
def test_equals_the_reference_bit_by_bit(fmt: BlockFormat, w13_order: GateUpOrder, activation: ActivationSpec) -> None:
    case = make_case(fmt, w13_order=w13_order, activation=activation, bias=True, outside_ids=True)
    out = run_plan(get_backend("reference").plan(case.spec, CPU), case.operands)
    expected = moe_reference(case.spec, case.operands, torch.float32).to(torch.bfloat16)
    assert torch.equal(out, expected)
    assert_close_per_token(out, case.reference(), torch.bfloat16)


def test_runtime_scalars_reach_the_op() -> None:
    activation = ActivationSpec("silu", alpha=RUNTIME, beta=RUNTIME, limit=RUNTIME, up_limit=RUNTIME)
    plans, outs = [], []
    for scalars in ((1.702, 1.0, 2.0, 1.5), (1.0, 0.5, 0.7, 0.9)):
        case = make_case(MXFP4, activation=activation, scalars=scalars, act_dtype=torch.float32)
        plans.append(get_backend("reference").plan(case.spec, CPU))
        outs.append(run_plan(plans[-1], case.operands))
        assert_close_per_token(outs[-1], case.reference(), torch.float32)
    assert plans[0] == plans[1], "a runtime scalar was baked into the plan"
    assert not torch.allclose(outs[0], outs[1])


def test_opcheck() -> None:
    case = make_case(MXFP4, bias=True)
    plan = get_backend("reference").plan(case.spec, CPU)
    args = tuple(case.operands[arg] if isinstance(arg, Operand) else arg for arg in plan.args)
    torch.library.opcheck(resolve_op(plan.op), args)
