"""Selection: by rank among the willing, or exactly the backend that was named."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

import fp4_inductor.select as select_module
from fp4_inductor import DeviceInfo, NoBackendError, Options, UnknownNameError
from fp4_inductor.formats import MXFP4
from fp4_inductor.plan import KernelPlan
from fp4_inductor.reasons import Reason, ReasonCode, Verdict
from fp4_inductor.select import select
from fp4_inductor.spec import ActivationSpec, MoESpec

SPEC = MoESpec(4, 2, 64, 32, MXFP4, ActivationSpec("silu"))
CPU = DeviceInfo.parse("cpu")


@dataclass(frozen=True)
class Stub:
    name: str
    rank_: int
    reasons: tuple[Reason, ...] = ()

    def check(self, spec: MoESpec, device: DeviceInfo) -> Verdict:
        return Verdict(self.name, self.reasons)

    def rank(self, spec: MoESpec, device: DeviceInfo) -> int:
        return self.rank_

    def plan(self, spec: MoESpec, device: DeviceInfo) -> KernelPlan:
        return KernelPlan(f"stub::{self.name}", ())


REFUSAL = Reason(ReasonCode.CAPABILITY, "sm_90", "cpu")
OTHER = Reason(ReasonCode.BIAS, "no biases", "w13 bias", "use triton_w4a16")


@pytest.fixture(autouse=True)
def _backends(monkeypatch: pytest.MonkeyPatch) -> None:
    stubs = (Stub("fast", 50, (REFUSAL, OTHER)), Stub("slow", 10), Stub("better", 20), Stub("oracle", 0))
    monkeypatch.setattr(select_module, "BACKENDS", stubs)


def test_best_rank_among_the_willing() -> None:
    selection = select(SPEC, CPU, Options())
    assert selection.chosen == "better"
    assert [v.backend for v in selection.verdicts] == ["fast", "slow", "better", "oracle"]
    assert selection.verdicts[0].reasons == (REFUSAL, OTHER)


def test_named_backend_is_honoured() -> None:
    assert select(SPEC, CPU, Options(backend="slow")).chosen == "slow"
    assert select(SPEC, CPU, Options(backend="oracle")).chosen == "oracle"


def test_named_backend_is_never_replaced() -> None:
    with pytest.raises(NoBackendError) as error:
        select(SPEC, CPU, Options(backend="fast"), where="model.layers.0 (user.py:3)")
    for part in ("CAPABILITY: needs sm_90, got cpu", "BIAS", "use triton_w4a16", "user.py:3"):
        assert part in str(error.value)


def test_unknown_backend_shows_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'better'"):
        select(SPEC, CPU, Options(backend="beter"))


def test_a_rank_of_zero_runs_only_when_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select_module, "BACKENDS", (Stub("fast", 50, (REFUSAL,)), Stub("oracle", 0)))
    selection = select(SPEC, CPU, Options())
    assert selection.chosen is None
    assert selection.plan is None
    with pytest.raises(NoBackendError, match="CAPABILITY"):
        select(SPEC, CPU, Options(on_unsupported="error"))


def test_allowed_activations_reach_the_backends() -> None:
    assert select(SPEC, CPU, Options()).spec.activation_format is None
    spec = select(SPEC, CPU, Options(activation_format="mxfp8")).spec
    assert spec == replace(SPEC, activation_format="mxfp8")
    assert "mxfp4×(bfloat16|mxfp8)" in str(spec)
