"""A kernel is tried before a graph is rewritten for it: every way to fail is a reason, and the next backend runs."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from models import pack_experts, tiny_model, token_ids

import fp4_inductor.probe as probe_module
import fp4_inductor.select as select_module
from fp4_inductor import DeviceInfo, LoweringReport, NoBackendError, Options, explain
from fp4_inductor.backends import get_backend
from fp4_inductor.backends.flashinfer_common import PROBE_ERRORS
from fp4_inductor.backends.ops import ExpertsCall, define_experts_op, experts_args
from fp4_inductor.backends.reference import _moe as reference_moe
from fp4_inductor.dynamo_backend import compile_with, fp4moe
from fp4_inductor.formats import MXFP4, NVFP4
from fp4_inductor.plan import KernelPlan
from fp4_inductor.probe import probe, small_layer
from fp4_inductor.reasons import Reason, ReasonCode, Verdict
from fp4_inductor.select import Selection, select
from fp4_inductor.spec import (
    RUNTIME,
    ActivationSpec,
    ExpertRange,
    GlobalGrain,
    MoESpec,
    RouterSpec,
    Scoring,
    TokenRange,
)

CPU, HERE = DeviceInfo.parse("cpu"), torch.device("cpu")
SPEC = MoESpec(64, 2, 64, 32, MXFP4, ActivationSpec("silu"))
Kernel = Callable[[ExpertsCall], torch.Tensor]
kernel: Kernel = reference_moe
launches: list[ExpertsCall] = []


def _launch(call: ExpertsCall) -> torch.Tensor:
    launches.append(call)
    return kernel(call)


OP = define_experts_op("moe_probe_test", _launch)


@dataclass(frozen=True)
class Probed:
    """A backend that runs ``kernel``."""

    name: str = "probed"
    rounds_to: str | None = None

    def check(self, spec: MoESpec, device: DeviceInfo) -> Verdict:
        return Verdict(self.name)

    def rank(self, spec: MoESpec, device: DeviceInfo) -> int:
        return 200

    def plan(self, spec: MoESpec, device: DeviceInfo) -> KernelPlan:
        return KernelPlan(OP, experts_args(spec), activations=self.rounds_to)

    def probe_errors(self) -> tuple[type[Exception], ...]:
        return PROBE_ERRORS


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "_tried", {})
    monkeypatch.setattr(select_module, "BACKENDS", (get_backend("cpu"), Probed(), get_backend("reference")))
    launches.clear()
    run_as(monkeypatch, reference_moe)


def run_as(monkeypatch: pytest.MonkeyPatch, function: Kernel) -> None:
    monkeypatch.setitem(globals(), "kernel", function)


def raising(error: Exception) -> Kernel:
    def fail(call: ExpertsCall) -> torch.Tensor:
        raise error

    return fail


def choose(backend: str | None = None) -> Selection:
    return select(SPEC, CPU, Options(backend), probe=partial(probe, device=CPU, where=HERE))


def reason_of(selection: Selection) -> Reason:
    (reason,) = next(verdict.reasons for verdict in selection.verdicts if verdict.backend == "probed")
    return reason


def test_one_that_runs_is_chosen_and_tried_once() -> None:
    first, second = choose(), choose()
    assert first == second
    assert first.chosen == "probed"
    assert all(verdict.ok for verdict in first.verdicts)
    assert len(launches) == 1
    (call,) = launches
    assert call.w13.codes.shape == (4, 64, 32), "the block's sizes, few experts"
    assert call.hidden.shape == (32, 64)


FAILURES = {
    "library missing": ModuleNotFoundError("No module named 'flashinfer'"),
    "library of another version": AttributeError("module 'flashinfer.fused_moe' has no attribute 'cutlass_fused_moe'"),
    "signature of another version": TypeError("got an unexpected keyword argument 'activation_type'"),
    "no compiler": FileNotFoundError("[Errno 2] No such file or directory: 'ninja'"),
    "compiler crashed": subprocess.CalledProcessError(1, ["nvcc", "--version"]),
    "build failed": RuntimeError("Ninja build failed. Ninja output:\n[1/248] nvcc ...\nmoe.cu(7): error: no type"),
    "no download": RuntimeError("Artifact not found locally: a.cubin. FLASHINFER_NO_DOWNLOAD is set"),
    "no network": ConnectionError("Max retries exceeded"),
    "argument refused": ValueError("hidden_size must be a multiple of 256"),
    "not on this device": NotImplementedError("ClampedRelu2 requires an SM10x GPU"),
    "launch failed": torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device"),
    "out of memory": torch.OutOfMemoryError("CUDA out of memory"),
    "check failed": AssertionError("only supported on SM100"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_every_failure_is_a_reason_and_the_next_backend_runs(
    failure: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error = FAILURES[failure]
    run_as(monkeypatch, raising(error))
    selection = choose()
    assert selection.chosen == "cpu"
    assert selection.plan is not None
    reason = reason_of(selection)
    assert reason.code is ReasonCode.PROBE_FAILED
    assert reason.got.startswith(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    assert "fp4moe.backend" in reason.hint
    choose()
    assert len(launches) == 1, "what failed is not tried again"
    assert [r.message for r in caplog.records if r.levelno == logging.WARNING] == [
        f"probed is not used on cpu: {reason}"
    ]


def test_of_a_long_text_the_error_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    run_as(monkeypatch, raising(FAILURES["build failed"]))
    got = reason_of(choose()).got
    assert got == "RuntimeError: Ninja build failed. Ninja output: … moe.cu(7): error: no type"
    monkeypatch.setattr(probe_module, "_tried", {})
    run_as(monkeypatch, raising(RuntimeError("x" * 9999)))
    assert len(reason_of(choose()).got) < 400


def test_what_failed_is_tried_again_after_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    run_as(monkeypatch, raising(FAILURES["no network"]))
    assert choose().chosen == "cpu"
    run_as(monkeypatch, reference_moe)
    assert choose().chosen == "cpu"
    fp4moe.reset()  # type: ignore[attr-defined]  # which torch._dynamo.reset() calls
    assert choose().chosen == "probed"


def test_named_it_is_an_error_with_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    run_as(monkeypatch, raising(FAILURES["no network"]))
    with pytest.raises(NoBackendError, match=r"PROBE_FAILED: needs a small layer .*ConnectionError: Max retries"):
        choose("probed")


def test_what_no_library_raises_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    run_as(monkeypatch, raising(MemoryError()))
    with pytest.raises(MemoryError):
        choose()


WRONG: dict[str, Kernel] = {
    "gate and up swapped": lambda call: reference_moe(replace(call, w13_order=type(call.w13_order)("up_gate"))),
    "not a number": lambda call: reference_moe(call).fill_(float("nan")),
    "infinite": lambda call: reference_moe(call).index_fill_(0, torch.tensor([3]), float("inf")),
    "nothing written": lambda call: torch.zeros_like(call.hidden),
    "one dead token": lambda call: reference_moe(call).index_fill_(0, torch.tensor([5]), 0.0),
    "weights ignored": lambda call: reference_moe(replace(call, topk_weights=torch.ones_like(call.topk_weights))),
    "3 percent too large": lambda call: reference_moe(call) * 1.03,
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_kernel_that_runs_and_is_wrong_is_not_used(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_as(monkeypatch, WRONG[fault])
    selection = choose()
    assert selection.chosen == "cpu"
    assert reason_of(selection).need.startswith("a small layer's result within 0.024 of the reference")


def test_a_result_of_another_shape_or_dtype_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (lambda call: reference_moe(call).float(), lambda call: reference_moe(call)[:, :32]):
        monkeypatch.setattr(probe_module, "_tried", {})
        run_as(monkeypatch, function)
        assert "AssertionError" in reason_of(choose()).got


@pytest.mark.parametrize(
    ("rounds_to", "noise", "ok"),
    [
        (None, 0.03, False),
        ("mxfp8", 0.05, True),
        ("mxfp8", 0.15, False),
        ("nvfp4", 0.16, True),
        ("nvfp4", 0.5, False),
    ],
)
def test_rounded_activations_have_their_own_bounds(
    rounds_to: str | None, noise: float, ok: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noisy(call: ExpertsCall) -> torch.Tensor:
        out = reference_moe(call).float()
        return (out + noise * out.std() * torch.randn(out.shape)).to(call.out_dtype)

    torch.manual_seed(0)
    run_as(monkeypatch, noisy)
    assert (probe(Probed(rounds_to=rounds_to), SPEC, CPU, HERE) is None) is ok


@pytest.mark.parametrize(
    "given",
    [
        {"activation": ActivationSpec("silu", alpha=RUNTIME, beta=RUNTIME, limit=RUNTIME)},
        {"activation": ActivationSpec("relu2", gated=False), "has_w13_bias": True, "has_w2_bias": True},
        {"weight_format": NVFP4, "w13_global": GlobalGrain.HALF, "top_k": 7},
        {"weight_on_input": True, "weights_dtype": torch.bfloat16, "top_k": 1},
        {"router": RouterSpec(Scoring.SIGMOID, has_bias=True, num_groups=8, topk_groups=4, renormalize=True)},
        {"router": RouterSpec(Scoring.SOFTMAX, has_expert_scale=True, scaling_factor=RUNTIME)},
        {"router": RouterSpec(Scoring.SOFTMAX, ids_given=True)},
        {"local_experts": ExpertRange(0, 64, 128), "num_experts": 64},
        {"num_experts": 3, "top_k": 3},
    ],
    ids=str,
)
def test_every_kind_of_block_has_a_small_layer(given: dict[str, object]) -> None:
    spec = replace(SPEC, **given)  # type: ignore[arg-type]
    assert probe(Probed(), spec, CPU, HERE) is None
    small = small_layer(spec)
    assert small.top_k <= small.num_experts <= min(spec.num_experts, 32)
    assert (small.hidden_size, small.intermediate_size) == (64, 32)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [((0, None), 32), ((1, 1), 1), ((0, 0), 1), ((0, 8), 8), ((100, 200), 100), ((9000, 9000), 1024)],
)
def test_tokens_are_as_many_as_the_graph_has(tokens: tuple[int, int | None], expected: int) -> None:
    probe(Probed(), replace(SPEC, num_tokens=TokenRange(*tokens)), CPU, HERE)
    assert launches[0].hidden.shape[0] == expected


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [((0, None), [1, 32, 192, 1024]), ((1, 1), [1]), ((2, 64), [2, 32, 64]), ((9000, None), [1024]), ((0, 0), [1])],
)
def test_a_gpu_is_tried_with_few_and_many_tokens(tokens: tuple[int, int | None], expected: list[int]) -> None:
    spec = replace(SPEC, num_tokens=TokenRange(*tokens))
    assert probe_module._token_counts(spec, torch.device("cuda")) == expected


def test_one_count_that_goes_wrong_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_for_many(call: ExpertsCall) -> torch.Tensor:
        out = reference_moe(call)
        return out.fill_(float("nan")) if len(out) > 100 else out

    monkeypatch.setattr(probe_module, "_COUNTS", {"cpu": (1, 32, 192)})
    run_as(monkeypatch, wrong_for_many)
    reason = probe(Probed(), SPEC, CPU, HERE)
    assert reason is not None
    assert reason.got == "nan, and nan in a token, of 192"
    assert len(launches) == 3


def test_only_backends_that_ask_for_it_are_tried() -> None:
    assert probe(get_backend("reference"), SPEC, CPU, HERE) is None
    assert probe(get_backend("cpu"), SPEC, CPU, HERE) is None


def test_a_device_that_is_dead_afterwards_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(where: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", dead)
    with pytest.raises(NoBackendError, match=r"start again, with another backend"):
        probe_module._require_usable("probed", torch.device("cuda"), RuntimeError("launch failed"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda where: None)
    probe_module._require_usable("probed", torch.device("cuda"), RuntimeError("launch failed"))


@pytest.mark.slow
def test_the_whole_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling tries; a device that is given is not tried; explaining tells what compiling found."""
    run_as(monkeypatch, raising(FAILURES["no download"]))
    model, ids = pack_experts(tiny_model("mixtral", layers=1), "mxfp4"), token_ids()
    assert explain(model, ids).sites[0].selection.chosen == "probed"
    assert explain(model, ids, device="cpu").sites[0].selection.chosen == "probed"
    assert not launches
    reports: list[LoweringReport] = []
    backend = partial(compile_with, options=Options(), on_report=reports.append)
    with torch.no_grad():
        wanted = model(ids).logits
        found = torch.compile(model, backend=backend)(ids).logits
    assert len(launches) == 1
    torch.testing.assert_close(found, wanted, atol=0.05, rtol=0.05)
    text = str(reports[0])
    assert "runs on  cpu" in text
    assert "probed: PROBE_FAILED: needs a small layer to run on this device, got RuntimeError: Artifact not" in text
    assert reports[0].to_json()["sites"][0]["verdicts"][1]["reasons"][0]["code"] == "PROBE_FAILED"
    assert explain(model, ids).sites[0].selection.chosen == "cpu"
    assert explain(model, ids, device="cpu").sites[0].selection.chosen == "probed"
