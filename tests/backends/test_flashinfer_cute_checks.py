"""What FlashInfer's CuTe-DSL backends refuse, for every device, and that they say all of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_cases import CLAMPED_SWIGLU, RUNTIME_SWIGLU, SWIGLU

from fp4_inductor import DeviceInfo, NoBackendError, Options
from fp4_inductor.backends import get_backend
from fp4_inductor.backends.base import ProbedBackend
from fp4_inductor.formats import MXFP4, NVFP4, BlockFormat
from fp4_inductor.reasons import ReasonCode
from fp4_inductor.select import select
from fp4_inductor.spec import ActivationSpec, ExpertRange, GlobalGrain, MoESpec, RouterSpec, Scoring

ARCHITECTURES = ("cpu", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
CUTEDSL, B12X = "flashinfer_cutedsl", "flashinfer_b12x"
SM_100, SM_120 = {"sm_100", "sm_103"}, {"sm_120", "sm_121"}
RUNS = {
    (CUTEDSL, "nvfp4", None): SM_100,
    (CUTEDSL, "nvfp4", "nvfp4"): SM_100,
    (CUTEDSL, "nvfp4", "mxfp8"): SM_100,
    (CUTEDSL, "mxfp4", None): set(),
    (CUTEDSL, "mxfp4", "nvfp4"): set(),
    (CUTEDSL, "mxfp4", "mxfp4"): set(),
    (CUTEDSL, "mxfp4", "mxfp8"): SM_100,
    (B12X, "nvfp4", None): SM_120,
    (B12X, "nvfp4", "nvfp4"): SM_120,
    (B12X, "nvfp4", "mxfp4"): SM_120,
    (B12X, "mxfp4", None): set(),
    (B12X, "mxfp4", "mxfp8"): set(),
    (B12X, "mxfp4", "nvfp4"): set(),
    (B12X, "mxfp4", "mxfp4"): SM_120,
}
HERE = {CUTEDSL: "sm_100", B12X: "sm_120"}
names = pytest.mark.parametrize("name", [CUTEDSL, B12X])


def device(name: str, **versions: str | None) -> DeviceInfo:
    found = {"flashinfer_python": "0.7.2.post1", "triton": "3.6.0", **versions}
    libraries = tuple((key.replace("_", "-"), version) for key, version in found.items() if version is not None)
    return replace(DeviceInfo.parse(name), libraries=libraries)


def block(fmt: BlockFormat = NVFP4, **given: Any) -> MoESpec:
    return replace(MoESpec(64, 8, 2048, 1024, fmt, SWIGLU), **given)


def codes(name: str, spec: MoESpec, on: DeviceInfo | None = None) -> list[ReasonCode]:
    verdict = get_backend(name).check(spec, device(HERE[name]) if on is None else on)
    assert all(reason.need and reason.got and reason.hint for reason in verdict.reasons), verdict
    return [reason.code for reason in verdict.reasons]


@pytest.mark.parametrize("asked", RUNS, ids=str)
def test_devices(asked: tuple[str, str, str | None]) -> None:
    name, weights, allowed = asked
    spec = block({"mxfp4": MXFP4, "nvfp4": NVFP4}[weights], activation_format=allowed)
    assert {arch for arch in ARCHITECTURES if not codes(name, spec, device(arch))} == RUNS[asked]


@pytest.mark.parametrize(
    ("name", "allowed", "op", "rounded"),
    [
        (CUTEDSL, None, "cutedsl_bf16", None),
        (CUTEDSL, "mxfp8", "cutedsl_bf16", None),
        (CUTEDSL, "nvfp4", "cutedsl_nvfp4", "nvfp4"),
        (B12X, None, "b12x_bf16", None),
        (B12X, "mxfp4", "b12x_bf16", None),
        (B12X, "nvfp4", "b12x_nvfp4", "nvfp4"),
    ],
)
def test_what_is_allowed_goes_before_what_the_graph_has(
    name: str, allowed: str | None, op: str, rounded: str | None
) -> None:
    plan = get_backend(name).plan(block(activation_format=allowed), device(HERE[name]))
    assert (plan.op, plan.activations) == (f"fp4_inductor::moe_flashinfer_{op}", rounded)


def test_a_permission_is_what_lacks() -> None:
    for name, lower in ((CUTEDSL, "mxfp8"), (B12X, "mxfp4")):
        (reason,) = get_backend(name).check(block(MXFP4), device(HERE[name])).reasons
        assert reason.code is ReasonCode.FORMAT
        assert reason.hint == f"options={{'fp4moe.activation_format': '{lower}'}} allows it"
        with pytest.raises(NoBackendError, match=rf"fp4moe\.activation_format': '{lower}'"):
            select(block(MXFP4), device(HERE[name]), Options(name))
        assert select(block(MXFP4), device(HERE[name]), Options(name, activation_format=lower)).plan is not None


@names
def test_all_reasons_at_once(name: str) -> None:
    spec = block(
        hidden_size=1000,
        intermediate_size=72,
        activation=ActivationSpec("relu", limit=0.0),
        act_dtype=torch.float16,
        out_dtype=torch.float32,
        weights_dtype=torch.float64,
        router=RouterSpec(Scoring.SOFTMAX, num_null_experts=8),
        local_experts=ExpertRange(0, 64, 128),
        has_w13_bias=True,
        has_w2_bias=True,
        w13_global=GlobalGrain.HALF,
        w2_global=GlobalGrain.ROW,
    )
    c = ReasonCode
    expected = [c.CAPABILITY, c.LIBRARY, c.ACTIVATION, c.SHAPE, c.SHAPE, c.DTYPE, c.DTYPE, c.DTYPE, c.FORMAT, c.ROUTING]
    own = [c.PARALLEL, c.FORMAT, c.LIBRARY, c.ACTIVATION, c.BIAS]
    assert codes(name, spec, device("sm_80", flashinfer_python=None, triton=None)) == expected + own


@names
@pytest.mark.parametrize(("version", "ok"), [(None, False), ("0.7.0", False), ("0.7.1", True), ("0.8.0", False)])
def test_libraries(name: str, version: str | None, ok: bool) -> None:
    on = device(HERE[name], flashinfer_python=version)
    assert codes(name, block(), on) == ([] if ok else [ReasonCode.LIBRARY])
    assert codes(name, block(), device(HERE[name], triton=None)) == [ReasonCode.LIBRARY]


@names
@pytest.mark.parametrize("biases", [{"has_w13_bias": True}, {"has_w2_bias": True}], ids=str)
def test_biases(name: str, biases: dict[str, bool]) -> None:
    for allowed in (None, "nvfp4"):
        assert codes(name, block(activation_format=allowed, **biases)) == [ReasonCode.BIAS]


KNOBS = (
    CLAMPED_SWIGLU,
    RUNTIME_SWIGLU,
    ActivationSpec("silu", beta=0.5),
    ActivationSpec("silu", up_limit=7.0, limit=7),
)
NEITHER = (
    ActivationSpec("silu", limit=7.0, up_limit=6.0),
    ActivationSpec("silu", limit=7.0, bound="clamp_activated"),
    ActivationSpec("silu", limit=7.0, bound="softcap"),
    ActivationSpec("silu", limit=0.0),
    ActivationSpec("gelu"),
    ActivationSpec("gelu_tanh", limit=7.0),
    ActivationSpec("relu2"),
    ActivationSpec("silu", gated=False),
    ActivationSpec("gelu_tanh", gated=False),
    ActivationSpec("relu2", gated=False, limit=7.0),
)


@pytest.mark.parametrize("allowed", [None, "nvfp4"])
def test_activations(allowed: str | None) -> None:
    refused = [ReasonCode.ACTIVATION]

    def asked(name: str, activation: ActivationSpec) -> list[ReasonCode]:
        return codes(name, block(activation=activation, activation_format=allowed))

    for name in (CUTEDSL, B12X):
        assert not asked(name, SWIGLU)
        assert not asked(name, ActivationSpec("relu2", gated=False))
        for activation in NEITHER:
            assert set(asked(name, activation)) == set(refused), activation
    for activation in (*KNOBS, ActivationSpec("gelu_tanh")):
        assert not asked(CUTEDSL, activation)
        # Its kernels for bfloat16 activations know SiLU and squared ReLU alone, and none of the knobs.
        assert asked(B12X, activation) == (refused if allowed is None else []), activation


@names
def test_global_scales_of_gate_and_up(name: str) -> None:
    """Up's may differ where it passes through the activation, and else is refused before weights are read."""
    for allowed in (None, "nvfp4"):
        spec = block(w13_global=GlobalGrain.HALF, activation_format=allowed)
        assert not codes(name, spec)
        assert not codes(name, replace(spec, w13_global=GlobalGrain.EXPERT, w2_global=GlobalGrain.EXPERT))
        assert codes(name, replace(spec, w13_global=GlobalGrain.ROW)) == [ReasonCode.FORMAT]
        assert codes(name, replace(spec, w2_global=GlobalGrain.ROW)) == [ReasonCode.FORMAT]
    for activation in KNOBS:
        spec = block(w13_global=GlobalGrain.HALF, activation=activation, activation_format="nvfp4")
        assert codes(name, spec) == [ReasonCode.FORMAT], activation


def test_limits_of_the_routing_kernel() -> None:
    sizes = {"num_experts": 4096, "top_k": 33}
    assert codes(CUTEDSL, block(**sizes)) == [ReasonCode.SHAPE] * 2
    assert not codes(CUTEDSL, block(num_experts=2048, top_k=32))


@names
def test_ranks_below_what_is_measured_and_needs_less(name: str) -> None:
    on = device(HERE[name])
    others = ("triton_w4a16", "flashinfer_trtllm", "flashinfer_cutlass")
    assert 0 < get_backend(name).rank(block(), on) < min(get_backend(other).rank(block(), on) for other in others)


@names
def test_is_tried_before_it_is_used(name: str) -> None:
    backend = get_backend(name)
    assert isinstance(backend, ProbedBackend)
    assert all(issubclass(error, Exception) for error in backend.probe_errors())


def test_padding_is_told() -> None:
    plan = get_backend(B12X).plan(block(intermediate_size=768), device("sm_120"))
    assert plan.padding == ""
    plan = get_backend(B12X).plan(block(intermediate_size=704, activation_format="nvfp4"), device("sm_120"))
    assert plan.padding == "I 704 to 768"
    plan = get_backend(CUTEDSL).plan(block(hidden_size=2880, intermediate_size=720), device("sm_100"))
    assert plan.padding == "H 2880 to 3072, I 720 to 768"
