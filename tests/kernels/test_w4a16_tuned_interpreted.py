"""Tuned tables reach the kernels and every variant computes the same, in Triton's interpreter.

The interpreter is chosen when Triton's decorators run, so these tests run in a process of their own, which
``test_in_the_interpreter`` starts on this file.
"""

from __future__ import annotations

import pytest
from interpreter import interpreted, run_in_interpreter, starts_the_interpreter
from moe_cases import make_case
from tolerances import assert_close_per_token

from fp4_inductor.backends import get_backend
from fp4_inductor.device import DeviceInfo
from fp4_inductor.formats import MXFP4, NVFP4
from fp4_inductor.kernels.w4a16_config import W4A16Config, choose_config
from fp4_inductor.kernels.w4a16_tuning import PARTS, variants, write_config, write_table
from fp4_inductor.plan import prepare, run_plan
from fp4_inductor.tuned_plan import TunableBackend

pytest.importorskip("triton", reason="triton is not installed")

OWN = choose_config(90, 100, 4, (160, 96), e4m3=False)
TILES = [
    config
    for part in PARTS
    for config in variants(OWN, part, 227 * 1024)
    # The interpreter knows no warps and no stages.
    if any(getattr(config, p) != getattr(OWN, p) for p in ("block_m", "group_m"))
    or any(
        (g.block_n, g.block_k) != (o.block_n, o.block_k)
        for g, o in ((config.gate_up, OWN.gate_up), (config.down, OWN.down))
    )
]


@starts_the_interpreter
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@interpreted
@pytest.mark.parametrize("config", TILES, ids=write_config)
def test_variants_match_the_reference(config: W4A16Config, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4_inductor.kernels import w4a16

    def never(*_: object) -> None:
        raise AssertionError("the plan has a table of its own")

    monkeypatch.setattr(w4a16, "choose_config", never)
    backend = get_backend("triton_w4a16")
    assert isinstance(backend, TunableBackend)
    fmt = MXFP4 if config.block_m > OWN.block_m else NVFP4
    case = make_case(fmt, num_tokens=50, num_experts=4, hidden_size=160, bias=True)
    table = write_table([(49, write_config(OWN)), (None, write_config(config))])
    plan = backend.plan(case.spec, DeviceInfo.parse("sm_90"), table)
    out = run_plan(plan, case.operands, prepare(plan, case.operands))
    assert_close_per_token(out, case.reference(), case.spec.act_dtype)
