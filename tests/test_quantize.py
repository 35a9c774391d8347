"""``quantize_`` on transformers' models and on any other: exact, complete, and all or nothing."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from models import CONFIGS, INTERMEDIATE, tiny_model, token_ids
from torch import nn

from fp4_inductor import quantize as quantize_module
from fp4_inductor.errors import QuantizationError, UnknownNameError
from fp4_inductor.formats import FORMATS, NVFP4
from fp4_inductor.modules import CarriedWeight, carried_weights
from fp4_inductor.quant import dequantize, quantize
from fp4_inductor.quantize import quantize_

TRANSPOSED_FAMILIES = {"gpt_oss"}
SIZES: dict[str, dict[str, Any]] = {"deepseek_v3": {"head_dim": 16}}
needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")


def experts_weights(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    names = (".gate_up_proj", ".up_proj", ".down_proj")
    return [(name, p) for name, p in model.named_parameters() if p.dim() == 3 and name.endswith(names)]


def rounded(model: nn.Module, fmt: str, transposed: bool) -> nn.Module:
    """The model with each expert weight replaced by the nearest one that the format holds."""
    for _, parameter in experts_weights(model):
        weight = parameter.detach().mT if transposed else parameter.detach()
        values = dequantize(*quantize(weight, FORMATS[fmt]), FORMATS[fmt], parameter.dtype)
        parameter.data = (values.mT if transposed else values).contiguous()
    return model


@needs_transformers
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_are_those_of_the_rounded_model(family: str, fmt: str) -> None:
    model = tiny_model(family, **SIZES.get(family, {}))
    reference = rounded(copy.deepcopy(model), fmt, family in TRANSPOSED_FAMILIES)
    weights = dict(experts_weights(model))
    assert quantize_(model, fmt) is model
    assert not experts_weights(model)
    assert sum(len(carried_weights(m)) for m in model.modules()) == len(weights) > 0
    for implementation in ("grouped_mm", "batched_mm", "eager"):
        for each in (model, reference):
            each.set_experts_implementation(implementation)
        with torch.no_grad():
            assert torch.equal(model(token_ids(24)).logits, reference(token_ids(24)).logits), implementation


@needs_transformers
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", CONFIGS)
def test_traces_to_one_graph(family: str, implementation: str) -> None:
    model = tiny_model(family, experts_implementation=implementation, layers=1, **SIZES.get(family, {}))
    quantize_(model, "nvfp4")
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(gm)
        return gm

    with torch.no_grad():
        expected = model(token_ids(), use_cache=False).logits
        actual = torch.compile(model, backend=keep, fullgraph=True)(token_ids(), use_cache=False).logits
    assert len(graphs) == 1
    assert torch.equal(actual, expected)


@needs_transformers
@pytest.mark.slow
@pytest.mark.parametrize("fmt", FORMATS)
def test_runs_under_inductor(fmt: str) -> None:
    model = quantize_(tiny_model("gpt_oss", layers=1), fmt)
    with torch.no_grad():
        expected = model(token_ids()).logits.double()
        actual = torch.compile(model, backend="inductor", fullgraph=True)(token_ids()).logits.double()
    assert ((actual - expected).norm() / expected.norm()).item() < 0.02


@needs_transformers
def test_experts_without_a_gate() -> None:
    sizes = {"hybrid_override_pattern": "E", "moe_intermediate_size": INTERMEDIATE, "n_routed_experts": 8}
    model = tiny_model("nemotron_h", layers=1, **sizes)
    reference = rounded(copy.deepcopy(model), "mxfp4", transposed=False)
    quantize_(model, "mxfp4")
    names = {weight.name for module in model.modules() for weight in carried_weights(module)}
    assert names == {"up_proj", "down_proj"}
    with torch.no_grad():
        assert torch.equal(model(token_ids()).logits, reference(token_ids()).logits)


@needs_transformers
def test_a_filter_chooses_among_experts() -> None:
    model = tiny_model("gpt_oss")
    quantize_(model, "mxfp4", filter=lambda name, _: "layers.1." in name and name.endswith("proj"))
    assert [name for name, _ in experts_weights(model)] == [
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.down_proj",
    ]
    weights = carried_weights(model.model.layers[1].mlp.experts)
    assert [weight.transposed for weight in weights] == [True, True]
    quantize_(model, "nvfp4")
    assert {w.format for w in carried_weights(model.model.layers[0].mlp.experts)} == {NVFP4}


class Own(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.w13 = nn.Parameter((torch.randn(3, 48, 64) * 0.02).to(dtype))
        self.w2 = nn.Parameter((torch.randn(3, 64, 32) * 0.02).to(dtype))
        self.conv = nn.Conv1d(4, 4, 3)


def by_name(name: str, parameter: nn.Parameter) -> Any:
    assert parameter.dim() == 3
    return {"w13": True, "w2": "transposed"}.get(name.rpartition(".")[2], False)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_own_modules_by_filter(fmt: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(Own(dtype), Own(dtype)).eval()
    expected = copy.deepcopy(model)
    quantize_(model, fmt, filter=by_name)
    for ours, plain in zip(model, expected, strict=True):
        assert torch.equal(ours.w13, dequantize(*quantize(plain.w13.detach(), FORMATS[fmt]), FORMATS[fmt], dtype))
        assert torch.equal(ours.w2, dequantize(*quantize(plain.w2.detach().mT, FORMATS[fmt]), FORMATS[fmt], dtype).mT)
        assert ours.w2.dtype == dtype
        assert isinstance(ours.conv.weight, nn.Parameter)


def test_each_expert_has_its_own_global_scale() -> None:
    model = Own().eval()
    with torch.no_grad():
        model.w13[1] *= 1000
    amax = model.w13.detach().float().abs().amax(dim=(1, 2))
    quantize_(model, "nvfp4", filter=by_name)
    assert torch.equal(model.get_parameter("w13_global_scale"), (amax / 2688).unsqueeze(1))


def changed(change: Callable[[Own], object]) -> nn.Module:
    model = nn.Sequential(Own(), Own()).eval()
    with torch.no_grad():
        change(model[1])
    return model


def spoil(value: float) -> Callable[[Own], object]:
    return lambda own: own.w2[2, 5, 7].fill_(value)


REFUSALS: dict[str, tuple[Callable[[Own], object], str]] = {
    "nan": (spoil(float("nan")), "needed finite weights"),
    "inf": (spoil(float("-inf")), "needed finite weights"),
    "meta": (lambda own: own.to("meta"), "load the weights first"),
    "mixed devices": (lambda own: setattr(own, "other", nn.Parameter(torch.empty(1, device="meta"))), "cpu, meta"),
    "integers": (
        lambda own: setattr(own, "w2", nn.Parameter(torch.zeros(3, 64, 32, dtype=torch.int8), requires_grad=False)),
        r"floating-point weight, got torch\.int8",
    ),
    "float8": (lambda own: own.to(torch.float8_e4m3fn), r"got torch\.float8_e4m3fn"),
    "too large": (
        lambda own: setattr(own, "w2", nn.Parameter(torch.full((3, 64, 32), 1e60, dtype=torch.float64))),
        "finite",
    ),
    "shape": (
        lambda own: setattr(own, "w2", nn.Parameter(torch.ones(3, 40, 64))),
        r"block size 32, got 40 .*3, 40, 64",
    ),
    "axis": (
        lambda own: setattr(own, "w13", nn.Parameter(torch.ones(3, 64, 40))),
        "let the filter return 'transposed'",
    ),
    "empty": (lambda own: setattr(own, "w2", nn.Parameter(torch.ones(0, 64, 32))), r"\[0, 64, 32\]"),
    "training": (lambda own: own.train(), "evaluation mode"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_the_weight_and_change_nothing(case: str) -> None:
    change, said = REFUSALS[case]
    model = changed(change)
    model.training = model[1].training
    before = dict(model.named_parameters())
    classes = [type(module) for module in model.modules()]
    with pytest.raises(QuantizationError, match=said) as caught:
        quantize_(model, "mxfp4", filter=by_name)
    assert "1.w" in caught.value.where or case == "training"
    assert [type(module) for module in model.modules()] == classes
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


def test_training_without_gradients_is_fine() -> None:
    model = Own().train().requires_grad_(False)
    quantize_(model, "mxfp4", filter=by_name)
    assert len(carried_weights(model)) == 2


def test_an_unknown_format_shows_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'nvfp4'"):
        quantize_(Own().eval(), "nvfp", filter=by_name)


def test_no_experts() -> None:
    with pytest.raises(QuantizationError, match=r"got none, and 3 other 3-D parameters[\s\S]*w13, w2, conv\.weight"):
        quantize_(Own().eval(), "mxfp4")
    with pytest.raises(QuantizationError, match="a filter that chose none of 3 3-D parameters"):
        quantize_(Own().eval(), "mxfp4", filter=lambda name, parameter: False)
    with pytest.raises(QuantizationError, match="got none, and 0 other"):
        quantize_(nn.Linear(4, 4).eval(), "mxfp4")


def test_already_quantised() -> None:
    model = quantize_(Own().eval(), "mxfp4", filter=by_name)
    with pytest.raises(QuantizationError, match="experts already in mxfp4"):
        quantize_(model, "nvfp4", filter=by_name)


def test_one_weight_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a weight is quantised, those before it are gone already."""
    model = nn.Sequential(Own(), Own()).eval()
    alive = [weakref.ref(p) for p in model.parameters() if p.dim() == 3 and len(p) == 3]
    seen: list[int] = []
    original = quantize_module.pack_parameter

    def count(module: nn.Module, weight: CarriedWeight, *args: Any) -> None:
        seen.append(sum(ref() is not None for ref in alive))
        original(module, weight, *args)

    monkeypatch.setattr(quantize_module, "pack_parameter", count)
    quantize_(model, "mxfp4", filter=by_name)
    assert seen == [4, 3, 2, 1]
