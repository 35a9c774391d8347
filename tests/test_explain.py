"""``explain``: what was found where, what runs it, why not the others; here and for other devices."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from models import MoEStack, hidden_states, pack_experts, tiny_model, token_ids
from moe_cases import make_case

from fp4_inductor import DeviceInfo, NoBackendError, Options, UnknownNameError, explain, list_backends, quantize_
from fp4_inductor.backends import BACKENDS
from fp4_inductor.dynamo_backend import compile_with
from fp4_inductor.plan import prepare
from fp4_inductor.reasons import ReasonCode
from fp4_inductor.spec import Operand


def test_on_this_machine() -> None:
    model = pack_experts(tiny_model("mixtral"), "mxfp4")
    report = explain(model, token_ids())
    text = str(report)
    assert "fp4moe on cpu: 2 of 2 MoE blocks lowered, 0 FP4 weights left behind, 1 graph" in text
    assert "transformers" in text  # the user's file: the model's own code
    assert "runs on  cpu (fp4_inductor::moe_cpu" in text
    data = json.loads(json.dumps(report.to_json()))
    assert [site["backend"] for site in data["sites"]] == ["cpu", "cpu"]
    assert data["sites"][0]["where"]["line"] > 0
    assert "layers.0" in data["sites"][0]["where"]["module"]


def small(family: str = "mixtral", fmt: str = "mxfp4") -> MoEStack:
    """One block of a model, for what is decided block by block: captured in a third of a model's time."""
    return MoEStack(pack_experts(tiny_model(family, layers=1), fmt))


ELSEWHERE = ("sm_80", "sm_90", "sm_100", "sm_103", "sm_120")


def with_triton_alone(name: str) -> DeviceInfo:
    """A device that is not here, beside the one kernel library that every test environment may assume."""
    return replace(DeviceInfo.parse(name), libraries=(("triton", "3.6.0"),))


@pytest.mark.parametrize("name", ELSEWHERE)
def test_for_a_device_that_is_not_here(name: str) -> None:
    """The whole decision: who was asked, what each said, and what the kernel's weights will be."""
    model = small("gpt_oss")
    report = explain(model, hidden_states(), device=with_triton_alone(name))
    assert [site.selection.chosen for site in report.sites] == ["triton_w4a16"]
    for site in report.sites:
        verdicts = {verdict.backend: verdict for verdict in site.selection.verdicts}
        assert tuple(verdicts) == list_backends()
        for backend in BACKENDS:
            assert verdicts[backend.name] == backend.check(site.selection.spec, with_triton_alone(name))
        assert [reason.code for reason in verdicts["cpu"].reasons] == [ReasonCode.CAPABILITY]
        assert all(reason.hint for verdict in verdicts.values() for reason in verdict.reasons)
    text = str(report)
    assert f"({name})" in text
    assert "layout lane words, 64x64 tiles, pads I 96 to 128)" in text
    assert "asked    " in text
    assert "triton_w4a16: chosen" in text
    assert "cpu: CAPABILITY: needs a CPU" in text
    assert all(f"{weight.name} " in text for weight in report.sites[0].weights)


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("name", ["sm_90", "cpu"])
def test_the_weights_it_names_are_those_that_the_plan_prepares(name: str, fmt: str) -> None:
    model = small("gpt_oss", fmt)
    (site,) = explain(model, hidden_states(), device=with_triton_alone(name)).sites
    spec = site.selection.spec
    sizes = {"num_experts": 8, "top_k": 2, "hidden_size": 128, "intermediate_size": 96}
    assert {field: getattr(spec, field) for field in sizes} == sizes
    alike = {"w13_order": spec.w13_order, "activation": spec.activation, "bias": True, "global_scale": "expert"}
    case = make_case(spec.weight_format, **sizes, **alike)
    assert site.selection.plan is not None
    ready = prepare(site.selection.plan, case.operands)
    told = {weight.name: weight for weight in site.weights}
    assert {name for name, weight in told.items() if weight.prepared} == set(ready)
    for weight_name, tensor in ready.items():
        weight = told[weight_name]
        assert (weight.shape, weight.dtype, weight.num_bytes) == (tensor.shape, tensor.dtype, tensor.nbytes)
    assert site.bytes_prepared == sum(tensor.nbytes for tensor in ready.values())
    as_it_is = {weight.name: weight.shape for weight in site.weights if not weight.prepared}
    assert all(shape == case.operands[Operand(name)].shape for name, shape in as_it_is.items())
    json.dumps(site.to_json())


WITH_FLASHINFER = (("triton", "3.6.0"), ("flashinfer-python", "0.7.2.post1"))


@pytest.mark.parametrize(
    ("name", "allowed", "chosen", "op"),
    [
        ("sm_80", None, "triton_w4a16", "moe_triton_w4a16_routed"),
        ("sm_90", None, "triton_w4a16", "moe_triton_w4a16_routed"),
        ("sm_100", None, "triton_w4a16", "moe_triton_w4a16_routed"),
        ("sm_100", "mxfp8", "flashinfer_trtllm", "moe_flashinfer_trtllm_mxfp8_routed"),
        ("sm_103", None, "triton_w4a16", "moe_triton_w4a16_routed"),
        ("sm_103", "mxfp8", "flashinfer_trtllm", "moe_flashinfer_trtllm_mxfp8_routed"),
        ("sm_120", None, "triton_w4a16", "moe_triton_w4a16_routed"),
    ],
)
def test_the_whole_decision_and_the_folded_weights(name: str, allowed: str | None, chosen: str, op: str) -> None:
    """With every library there: what runs, and each tensor that the folded graph is given, in its shape."""
    model = small("gpt_oss")
    device = replace(DeviceInfo.parse(name), libraries=WITH_FLASHINFER)
    report = explain(model, hidden_states(), device=device, options=Options(activation_format=allowed))
    (site,) = report.sites
    assert site.selection.plan is not None
    assert (site.selection.chosen, site.selection.plan.op) == (chosen, f"fp4_inductor::{op}")
    spec = site.selection.spec
    sizes = {"num_experts": 8, "top_k": 2, "hidden_size": 128, "intermediate_size": 96}
    case = make_case(spec.weight_format, **sizes, w13_order=spec.w13_order, activation=spec.activation, bias=True)
    ready = prepare(site.selection.plan, case.operands)
    told = {weight.name: (weight.shape, weight.dtype) for weight in site.weights if weight.prepared}
    assert told == {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in ready.items()}
    rounds = allowed if chosen == "flashinfer_trtllm" else None
    assert site.to_json()["activations"] == rounds
    assert ("rounds activations to mxfp8)" in str(report)) is (rounds is not None)
    if rounds is not None:
        assert told["w13_trtllm_mxfp8"] == ((8, 256, 128), torch.uint8)  # H 256, I 128
        assert told["w13_scale_trtllm_mxfp8"] == ((8, 256, 8), torch.float8_e4m3fn)


@pytest.mark.parametrize("name", ["sm_80", "sm_103"])
def test_a_missing_library_is_a_reason_with_its_cure(name: str) -> None:
    model = small()
    (site,) = explain(model, hidden_states(), device=replace(DeviceInfo.parse(name), libraries=())).sites
    assert site.selection.chosen is None
    assert site.weights == ()
    (verdict,) = (v for v in site.selection.verdicts if v.backend == "triton_w4a16")
    assert [(r.code, r.hint) for r in verdict.reasons] == [(ReasonCode.LIBRARY, "pip install triton")]


def test_a_device_by_its_name() -> None:
    report = explain(tiny_model("mixtral", layers=1), token_ids(), device="sm_103")
    assert report.device == DeviceInfo.parse("sm_103")


def test_leaves_the_model_and_its_numbers_alone() -> None:
    model, ids = pack_experts(tiny_model("mixtral"), "nvfp4"), token_ids()
    with torch.no_grad():
        before = model(ids).logits
        explain(model, ids)
        assert torch.equal(model(ids).logits, before)


def test_a_model_without_fp4_says_so() -> None:
    report = explain(tiny_model("mixtral"), token_ids())
    assert not report.sites
    assert "no FP4 weights reached a graph" in str(report)


def test_a_near_miss_names_the_reason_and_the_line() -> None:
    class Strange(torch.nn.Module):
        """Weights, then a norm of each expert's output: nothing the fused op computes."""

        def __init__(self, experts: torch.nn.Module) -> None:
            super().__init__()
            self.experts = experts

        def forward(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            w13 = self.experts.gate_up_proj[ids]
            w2 = self.experts.down_proj[ids]
            gate, up = torch.einsum("th,tkih->tki", hidden, w13).chunk(2, dim=-1)
            y = torch.einsum("tki,tkhi->tkh", torch.tanh(gate) * up.cos(), w2)
            return torch.nn.functional.layer_norm(y, y.shape[-1:]).sum(1)

    experts = pack_experts(tiny_model("mixtral"), "mxfp4").model.layers[0].mlp.experts
    hidden, ids = torch.randn(4, 128).bfloat16(), torch.randint(0, 8, (4, 2))
    report = explain(Strange(experts), hidden, ids)
    assert not report.sites
    assert len(report.near_misses) == 2
    text = str(report)
    assert "2 FP4 weights left behind" in text
    assert "test_explain.py" in text
    assert all(miss.reason and miss.packed_bytes for miss in report.near_misses)


class Ungated(torch.nn.Module):
    """Experts of two plain layers, gathered for each token."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.act = act
        self.up = torch.nn.Parameter(torch.randn(8, 96, 128).bfloat16())
        self.down = torch.nn.Parameter(torch.randn(8, 128, 96).bfloat16())

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        slots = ids.flatten()
        rows = hidden.repeat_interleave(ids.shape[1], 0).unsqueeze(-1)
        h = self.act(torch.bmm(self.up[slots], rows).squeeze(-1))
        y = torch.bmm(self.down[slots], h.unsqueeze(-1)).squeeze(-1) * weights.flatten().unsqueeze(-1)
        return y.view(*ids.shape, -1).sum(1)


@pytest.mark.parametrize(("act", "known"), [(torch.relu, True), (torch.tanh, False)])
def test_experts_without_a_gate(act: Callable[[torch.Tensor], torch.Tensor], known: bool) -> None:
    model = quantize_(Ungated(act).eval(), "mxfp4", filter=lambda name, _: True)
    report = explain(model, torch.randn(4, 128).bfloat16(), torch.randint(0, 8, (4, 2)), torch.rand(4, 2).bfloat16())
    if known:
        assert [str(site.selection.spec.activation) for site in report.sites] == ["relu"]
    else:
        assert len(report.near_misses) == 2
        assert all("tanh" in miss.reason for miss in report.near_misses)


def test_takes_a_device_of_this_machine() -> None:
    report = explain(tiny_model("mixtral", layers=1), token_ids(), device=torch.device("cpu"))
    assert str(report.device) == "cpu"


def test_unknown_device_shows_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="sm_90"):
        explain(tiny_model("mixtral"), token_ids(), device="sm_9")


def test_errors_are_our_own() -> None:
    """Not wrapped in Dynamo's, which would name a backend that the user never chose."""
    model = small()
    with pytest.raises(UnknownNameError, match="did you mean 'triton_w4a16'"):
        explain(model, hidden_states(), options={"fp4moe.backend": "triton"})
    with pytest.raises(NoBackendError, match="CAPABILITY"):
        explain(model, hidden_states(), device="cpu", options={"fp4moe.backend": "triton_w4a16"})


def test_a_model_without_data() -> None:
    model = small(fmt="nvfp4").to("meta")
    report = explain(model, hidden_states().to("meta"), device="sm_100")
    assert [site.selection.chosen for site in report.sites] == ["triton_w4a16"]


def test_blocks_that_an_option_leaves_are_told() -> None:
    model = small()
    text = str(explain(model, hidden_states(), options={"fp4moe.max_sites": 0}))
    assert "max_sites=0 leaves 1 recognised blocks" in text
    assert "no FP4 weights" not in text


def eager_model(family: str = "mixtral", layers: int = 2) -> torch.nn.Module:
    return pack_experts(tiny_model(family, layers=layers, experts_implementation="eager"), "mxfp4")


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_loop_over_experts_is_named_once_with_its_cure(family: str) -> None:
    report = explain(eager_model(family), token_ids())
    assert report.near_misses
    (broken,) = report.broken_experts
    assert broken.where.file.endswith(f"modeling_{family}.py")
    assert broken.where.module == "model.layers.0.mlp.experts"
    assert "gate_up_proj" in broken.where.code
    assert {miss.where.file for miss in report.near_misses} == {broken.where.file}
    text = str(report)
    assert text.count("a loop over experts of ") == 1
    assert 'call model.set_experts_implementation("grouped_mm")' in text
    assert "capture_dynamic_output_shape_ops" not in text  # which does not help here
    assert json.loads(json.dumps(report.to_json()))["broken_experts"][0]["cure"] == broken.cure


@pytest.mark.parametrize("implementation", ["grouped_mm", "fp4moe"])
def test_the_cure_cures(implementation: str) -> None:
    model = eager_model(layers=1)
    assert explain(model, token_ids()).broken_experts
    model.set_experts_implementation(implementation)
    report = explain(model, token_ids())
    assert report.num_lowered == 1
    assert not report.broken_experts


def test_the_backend_warns_of_a_loop_once(caplog: pytest.LogCaptureFixture) -> None:
    backend = functools.partial(compile_with, options=Options(), generate_code=False)
    with torch.no_grad():
        torch.compile(eager_model(), backend=backend)(token_ids())
    said = [message for message in caplog.messages if "a loop over experts of MixtralExperts" in message]
    assert len(said) == 1
    assert 'call model.set_experts_implementation("grouped_mm")' in said[0]


class Loop(torch.nn.Module):
    """Experts in a loop over sizes that values decide."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = torch.nn.Parameter(torch.randn(4, 192, 128).bfloat16())
        self.w2 = torch.nn.Parameter(torch.randn(4, 128, 96).bfloat16())

    def expert(self, e: int, rows: torch.Tensor) -> torch.Tensor:
        gate, up = torch.nn.functional.linear(rows, self.w13[e]).chunk(2, dim=-1)
        return torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, self.w2[e])

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for e in range(4):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.expert(e, hidden[token]) * weights[token, slot, None])
        return out


def test_a_users_loop_is_named_with_the_option_that_unrolls_it() -> None:
    model = quantize_(Loop().eval(), "mxfp4", filter=lambda name, _: True)
    inputs = torch.randn(6, 128).bfloat16(), torch.rand(6, 4).topk(2).indices, torch.rand(6, 2).bfloat16()
    report = explain(model, *inputs)
    (broken,) = report.broken_experts
    assert (broken.owner, broken.where.file) == ("Loop", __file__)
    assert "self.expert(e, hidden[token])" in broken.where.code
    assert "set torch._dynamo.config.capture_dynamic_output_shape_ops = True" in str(report)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        report = explain(model, *inputs)
    assert report.num_lowered == 1
    assert not report.broken_experts


def test_weights_that_are_left_behind_otherwise_are_no_loop() -> None:
    class Dense(torch.nn.Module):
        """One weight that every token uses, after a break."""

        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(1, 192, 128).bfloat16())

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            kept = hidden[hidden.abs().amax(-1).gt(0).nonzero().squeeze(-1)]
            return torch.nn.functional.linear(kept, self.w[0])

    report = explain(quantize_(Dense().eval(), "mxfp4", filter=lambda name, _: True), torch.randn(6, 128).bfloat16())
    assert report.near_misses
    assert report.num_graphs > 1
    assert not report.broken_experts
