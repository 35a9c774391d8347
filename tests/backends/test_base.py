"""What every kernel backend has in common: the registry, the op schema, and honest refusals."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from moe_cases import SWIGLU, make_case

from fp4_inductor.backends import BACKENDS, get_backend, list_backends
from fp4_inductor.backends.ops import experts_args
from fp4_inductor.device import DeviceInfo
from fp4_inductor.errors import UnknownNameError
from fp4_inductor.formats import MXFP4, NVFP4
from fp4_inductor.plan import resolve_op
from fp4_inductor.reasons import ReasonCode
from fp4_inductor.spec import RUNTIME, ActivationSpec, ExpertRange, MoESpec, Operand

CPU = DeviceInfo.parse("cpu")
DEVICES = [DeviceInfo.parse(name) for name in ("cpu", "sm_80", "sm_90", "sm_100", "sm_103", "sm_120")]


def test_names_are_unique_and_found() -> None:
    assert len(set(list_backends())) == len(BACKENDS)
    for backend in BACKENDS:
        assert get_backend(backend.name) is backend
    with pytest.raises(UnknownNameError, match="did you mean 'cpu'"):
        get_backend("cpuu")


def test_a_device_lists_what_it_can_run() -> None:
    assert {"cpu", "reference"} <= set(list_backends(CPU))
    hopper = list_backends(DeviceInfo.parse("sm_90"))
    assert "cpu" not in hopper
    assert "reference" in hopper


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_range_of_experts_is_refused(backend) -> None:  # type: ignore[no-untyped-def]
    """No op knows it: ids would name other experts than those that are here."""
    spec = dataclasses.replace(make_case(MXFP4).spec, local_experts=ExpertRange(4, 8, 16))
    for device in DEVICES:
        found = [reason for reason in backend.check(spec, device).reasons if reason.code is ReasonCode.PARALLEL]
        assert len(found) == 1
        assert "subtract the first expert's number" in str(found[0])


def test_cpu_ranks_above_reference_which_runs_only_when_named() -> None:
    spec = make_case(MXFP4).spec
    assert get_backend("cpu").rank(spec, CPU) > get_backend("reference").rank(spec, CPU)
    assert all(get_backend("reference").rank(spec, device) <= 0 for device in DEVICES)


def test_cpu_gives_all_its_reasons_at_once() -> None:
    spec = MoESpec(8, 2, 24, 40, MXFP4, SWIGLU, act_dtype=torch.float64, out_dtype=torch.int32)
    verdict = get_backend("cpu").check(spec, DeviceInfo.parse("sm_90"))
    codes = [reason.code for reason in verdict.reasons]
    assert codes == [ReasonCode.CAPABILITY] + [ReasonCode.DTYPE] * 2 + [ReasonCode.SHAPE] * 2
    assert "needs a CPU, got H200 (sm_90)" in str(verdict)


@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_experts_args_drop_what_the_spec_does_not_have(fmt, bias: bool) -> None:  # type: ignore[no-untyped-def]
    args = experts_args(make_case(fmt, bias=bias).spec)
    assert (Operand.W13_BIAS in args) is bias
    assert (Operand.W2_GLOBAL in args) is fmt.has_global_scale
    assert Operand.ALPHA not in args


def test_experts_args_pass_runtime_scalars_as_operands() -> None:
    spec = make_case(MXFP4, activation=ActivationSpec("silu", alpha=RUNTIME, limit=7.0)).spec
    args = experts_args(spec)
    assert Operand.ALPHA in args
    assert Operand.LIMIT not in args
    assert 7.0 in args


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.arch_name)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_plans_fit_their_ops(backend, device: DeviceInfo) -> None:  # type: ignore[no-untyped-def]
    """Wherever a backend is willing, its plan has exactly the arguments that its op takes."""
    for fmt, bias in itertools.product((MXFP4, NVFP4), (False, True)):
        spec = make_case(fmt, bias=bias, hidden_size=256, intermediate_size=256, global_scale="expert").spec
        if backend.check(spec, device).ok:
            plan = backend.plan(spec, device)
            assert len(plan.args) == len(resolve_op(plan.op)._schema.arguments)
