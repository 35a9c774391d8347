"""What FlashInfer's backends refuse, for every device, and that they say all of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_cases import CLAMPED_SWIGLU, RUNTIME_SWIGLU, SWIGLU

from fp4_inductor import DeviceInfo, NoBackendError, Options
from fp4_inductor.backends import get_backend
from fp4_inductor.backends.flashinfer_common import activation_function
from fp4_inductor.formats import MXFP4, NVFP4, BlockFormat
from fp4_inductor.reasons import ReasonCode
from fp4_inductor.select import select
from fp4_inductor.spec import RUNTIME, ActivationSpec, ExpertRange, MoESpec, RouterSpec, Scoring

ARCHITECTURES = ("cpu", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
NAMES = ("flashinfer_cutlass", "flashinfer_trtllm")
BLACKWELL = {"sm_100", "sm_103", "sm_120", "sm_121"}
RUNS = {
    ("flashinfer_cutlass", "mxfp4", None): {"sm_90"},
    ("flashinfer_cutlass", "mxfp4", "mxfp8"): {"sm_90"} | BLACKWELL,
    ("flashinfer_cutlass", "mxfp4", "nvfp4"): {"sm_90"},
    ("flashinfer_cutlass", "nvfp4", None): set(),
    ("flashinfer_cutlass", "nvfp4", "mxfp8"): set(),
    ("flashinfer_cutlass", "nvfp4", "nvfp4"): BLACKWELL,
    ("flashinfer_trtllm", "mxfp4", None): {"sm_100"},
    ("flashinfer_trtllm", "mxfp4", "mxfp8"): {"sm_100", "sm_103"},
    ("flashinfer_trtllm", "mxfp4", "nvfp4"): {"sm_100"},
    ("flashinfer_trtllm", "nvfp4", None): set(),
    ("flashinfer_trtllm", "nvfp4", "mxfp8"): set(),
    ("flashinfer_trtllm", "nvfp4", "nvfp4"): {"sm_100", "sm_103"},
}


def device(name: str, version: str | None = "0.7.2.post1") -> DeviceInfo:
    libraries = () if version is None else (("flashinfer-python", version),)
    return replace(DeviceInfo.parse(name), libraries=libraries)


def block(fmt: BlockFormat = MXFP4, **given: Any) -> MoESpec:
    return replace(MoESpec(64, 8, 2048, 1024, fmt, SWIGLU), **given)


def codes(name: str, spec: MoESpec, on: DeviceInfo) -> list[ReasonCode]:
    verdict = get_backend(name).check(spec, on)
    assert all(reason.need and reason.got and reason.hint for reason in verdict.reasons), verdict
    return [reason.code for reason in verdict.reasons]


@pytest.mark.parametrize("asked", RUNS, ids=str)
def test_devices(asked: tuple[str, str, str | None]) -> None:
    name, weights, allowed = asked
    spec = block({"mxfp4": MXFP4, "nvfp4": NVFP4}[weights], activation_format=allowed)
    assert {arch for arch in ARCHITECTURES if not codes(name, spec, device(arch))} == RUNS[asked]


def test_a_permission_is_what_lacks() -> None:
    reasons = get_backend("flashinfer_cutlass").check(block(NVFP4), device("sm_120")).reasons
    assert [reason.code for reason in reasons] == [ReasonCode.FORMAT]
    assert str(reasons[0]) == (
        "FORMAT: needs activations rounded to nvfp4, got activations that may be no less than bfloat16 "
        "(options={'fp4moe.activation_format': 'nvfp4'} allows it)"
    )
    reason = get_backend("flashinfer_trtllm").check(block(activation_format="nvfp4"), device("sm_103")).reasons[0]
    assert reason.got == "activations that may be nvfp4"


def test_what_is_allowed_goes_before_what_the_graph_has() -> None:
    backend = get_backend("flashinfer_trtllm")
    for allowed, op in ((None, "bf16"), ("nvfp4", "bf16"), ("mxfp8", "mxfp8")):
        plan = backend.plan(block(activation_format=allowed), device("sm_100"))
        assert plan.op == f"fp4_inductor::moe_flashinfer_trtllm_{op}"


@pytest.mark.parametrize("name", NAMES)
def test_all_reasons_at_once(name: str) -> None:
    spec = block(
        hidden_size=1000,
        intermediate_size=72,
        activation=ActivationSpec("relu"),
        act_dtype=torch.float16,
        out_dtype=torch.float32,
        weights_dtype=torch.float64,
        router=RouterSpec(Scoring.SOFTMAX, num_null_experts=8),
        local_experts=ExpertRange(0, 64, 128),
    )
    c = ReasonCode
    expected = [c.CAPABILITY, c.LIBRARY, c.ACTIVATION, c.SHAPE, c.SHAPE, c.DTYPE, c.DTYPE, c.DTYPE, c.ROUTING]
    assert codes(name, spec, device("sm_80", None)) == [*expected, c.PARALLEL]
    odd = BlockFormat("odd", 64, "e8m0", False)
    assert codes(name, replace(block(), weight_format=odd), device("sm_100")) == [c.FORMAT]
    assert codes(name, replace(block(), weight_format=odd), device("sm_80")) == [c.CAPABILITY, c.FORMAT]


@pytest.mark.parametrize(
    ("version", "ok"),
    [
        (None, False),
        ("0.6.18.post1", False),
        ("0.7.0", False),
        ("0.7.1rc1", False),
        ("0.7.1", True),
        ("0.7.2.post1", True),
        ("0.7.10", True),
        ("0.8.0", False),
        ("0.8.0rc1", False),
        ("1.0", False),
        ("unknown", False),
    ],
)
def test_versions(version: str | None, ok: bool) -> None:
    found = codes("flashinfer_cutlass", block(), device("sm_90", version))
    assert found == ([] if ok else [ReasonCode.LIBRARY])


def test_limits_of_trtllm() -> None:
    sizes = {"num_experts": 4096, "top_k": 33}
    assert codes("flashinfer_trtllm", block(**sizes), device("sm_100")) == [ReasonCode.SHAPE] * 2
    assert not codes("flashinfer_cutlass", block(**sizes), device("sm_90"))


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (SWIGLU, "Swiglu"),
        (CLAMPED_SWIGLU, "Swiglu"),
        (RUNTIME_SWIGLU, "Swiglu"),
        (ActivationSpec("silu", limit=7.0, up_limit=7.0), "Swiglu"),
        (ActivationSpec("silu", limit=7.0, up_limit=6.0), None),
        (ActivationSpec("silu", up_limit=6.0), None),
        (ActivationSpec("silu", limit=RUNTIME, up_limit=RUNTIME), None),
        (ActivationSpec("silu", limit=7.0, bound="softcap"), None),
        (ActivationSpec("silu", limit=7.0, bound="clamp_activated"), "SwigluStep"),
        (ActivationSpec("silu", limit=7.0, alpha=1.7, bound="clamp_activated"), None),
        (ActivationSpec("silu", limit=7.0, beta=RUNTIME, bound="clamp_activated"), None),
        (ActivationSpec("gelu"), "Geglu"),
        (ActivationSpec("gelu_tanh"), "GegluTanh"),
        (ActivationSpec("gelu", limit=7.0), None),
        (ActivationSpec("gelu_tanh", beta=1.0), None),
        (ActivationSpec("relu"), None),
        (ActivationSpec("relu2"), None),
        (ActivationSpec("relu2", gated=False), "Relu2"),
        (ActivationSpec("relu2", gated=False, limit=7.0), None),
        (ActivationSpec("silu", gated=False, alpha=1.7), None),
        (ActivationSpec("gelu_tanh", gated=False), None),
    ],
    ids=str,
)
def test_activations_by_meaning(activation: ActivationSpec, name: str | None) -> None:
    assert activation_function(activation) == name


def test_ranks() -> None:
    """TRTLLM goes first on the devices for which its kernels are generated; CUTLASS was measured to be slower."""
    for arch in ARCHITECTURES:
        cutlass, trtllm, triton = (get_backend(name).rank(block(), device(arch)) for name in (*NAMES, "triton_w4a16"))
        assert 0 < cutlass < triton < trtllm
    both = {"libraries": (("flashinfer-python", "0.7.2.post1"), ("triton", "3.6.0"))}
    chosen = {arch: select(block(), replace(device(arch), **both), Options()).chosen for arch in ARCHITECTURES[1:]}
    assert chosen.pop("sm_100") == "flashinfer_trtllm"
    assert set(chosen.values()) == {"triton_w4a16"}


def test_named_it_runs_or_tells_what_would_allow_it() -> None:
    on = device("sm_100")
    assert select(block(NVFP4), on, Options("flashinfer_trtllm", activation_format="nvfp4")).plan is not None
    with pytest.raises(NoBackendError, match=r"fp4moe\.activation_format': 'nvfp4'"):
        select(block(NVFP4), on, Options("flashinfer_trtllm"))
