"""Every registered kernel backend keeps the contract that selection, folding and dumps rely on."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from moe_cases import make_case
from torch._subclasses.fake_tensor import FakeTensorMode

from fp4_inductor.backends import BACKENDS
from fp4_inductor.backends.base import KernelBackend
from fp4_inductor.device import DeviceInfo
from fp4_inductor.formats import ACTIVATION_FORMATS, MXFP4, NVFP4, BlockFormat
from fp4_inductor.plan import resolve_op, run_plan
from fp4_inductor.reasons import Reason, Verdict

LIBRARIES = (("triton", "3.6.0"), ("flashinfer-python", "0.7.1"), ("c++", "g++"))
ARCHITECTURES = ("cpu", "sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
DEVICES = [replace(DeviceInfo.parse(name), libraries=LIBRARIES) for name in ARCHITECTURES]
"""Every known device as it would be with every kernel library installed."""

backends = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
formats = pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)


@backends
@formats
def test_answers_for_every_device(backend: KernelBackend, fmt: BlockFormat) -> None:
    """Each format runs on some device, where the user allows any activations."""
    assert isinstance(backend, KernelBackend)
    willing = []
    plain = make_case(fmt, hidden_size=256, intermediate_size=256, global_scale="expert").spec
    for device, allowed in product(DEVICES, (None, *ACTIVATION_FORMATS)):
        spec = replace(plain, activation_format=allowed)
        verdict = backend.check(spec, device)
        assert isinstance(verdict, Verdict)
        assert verdict.backend == backend.name
        assert all(isinstance(reason, Reason) and reason.need and reason.got for reason in verdict.reasons)
        assert isinstance(backend.rank(spec, device), int)
        willing += [device] if verdict.ok else []
    assert willing, "a backend that no device can run"


@backends
@formats
def test_the_op_and_its_fake_agree_with_the_plan(backend: KernelBackend, fmt: BlockFormat) -> None:
    """The whole plan, re-layouts included, runs on fake tensors: shapes and dtypes alone decide it."""
    case = make_case(fmt, hidden_size=256, intermediate_size=256, num_tokens=3, global_scale="expert")
    for device, allowed in product(DEVICES, (None, *ACTIVATION_FORMATS)):
        spec = replace(case.spec, activation_format=allowed)
        if not backend.check(spec, device).ok:
            continue
        plan = backend.plan(spec, device)
        assert resolve_op(plan.op)._schema.name == plan.op
        assert len({prepared.name for prepared in plan.prepared}) == len(plan.prepared)
        with FakeTensorMode(allow_non_fake_inputs=False) as mode:
            out = run_plan(plan, {operand: mode.from_tensor(tensor) for operand, tensor in case.operands.items()})
        assert out.shape == (3, 256)
        assert out.dtype == spec.out_dtype
        assert out.device.type == "cpu"
        assert isinstance(out, torch._subclasses.FakeTensor)
