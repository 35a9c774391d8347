"""The ``fp4moe`` experts implementation of transformers: what it computes, that it is recognised, who registers it."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from capture import capture
from family_models import build, missing
from models import EXPERTS, HIDDEN, MoEStack, hidden_states, pack_experts, tiny_model, token_ids
from moe_graphs import error_of
from torch import nn

from fp4_inductor.experts_interface import experts_forward, register
from fp4_inductor.matching import find_matches
from fp4_inductor.modules import transposed_experts

pytest.importorskip("transformers")

FAMILIES = ("mixtral", "olmoe", "gpt_oss", "aria", "deepseek_v3", "nemotron_h", "minimax_m3_vl", "deepseek_v4", "zaya")
"""Stored either way, gate and up in halves or interleaved, with biases, without a gate, ids by token, one slot."""


def per_token(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())


def family_model(family: str) -> nn.Module:
    if reason := missing(family):
        pytest.skip(reason)
    assert register()
    return build(family)


def logits(model: Any, implementation: str) -> torch.Tensor:
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        return model(input_ids=token_ids()).logits.double()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", FAMILIES)
def test_computes_what_transformers_does(family: str, dtype: torch.dtype, packed: bool) -> None:
    model = family_model(family).to(dtype)
    if packed:
        pack_experts(model, "nvfp4")
    got = logits(model, "fp4moe")
    assert per_token(got, logits(model, "grouped_mm")) < (1e-3 if dtype is torch.bfloat16 else 1e-6)
    assert per_token(got, logits(model, "eager")) < (3e-2 if dtype is torch.bfloat16 else 1e-5)


WHOLE = {"fp4moe.strict": True, "fp4moe.on_unsupported": "error", "fp4moe.verify": "first_call"}


@pytest.mark.parametrize("family", FAMILIES[:6])
def test_compiles_whole_and_agrees(family: str) -> None:
    model = pack_experts(family_model(family), "mxfp4")
    model.set_experts_implementation("eager")
    hidden, layers = hidden_states(), MoEStack(model)
    with torch.no_grad():
        want = layers(hidden).double()
        model.set_experts_implementation("fp4moe")
        got = torch.compile(layers, backend="fp4moe", fullgraph=True, options=WHOLE)(hidden).double()
    assert float(((got - want).norm(dim=-1) / want.norm(dim=-1)).median()) < 1e-2


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
def test_is_recognised(tokens: int, dynamic: bool, parallel: bool) -> None:
    model = pack_experts(family_model("gpt_oss"), "mxfp4")
    model.set_experts_implementation("fp4moe")
    for experts in experts_of(model):
        experts._is_expert_parallel = parallel
    gm = capture(MoEStack(model), hidden_states(tokens), dynamic=dynamic)
    found = find_matches(gm.graph)
    assert [(match.pattern, match.grade) for match in found.matches] == [("grouped_mm", "full")]
    assert not found.near_misses
    assert error_of(gm, found.matches[0]) < 2e-2


def experts_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if transposed_experts(module) is not None]


@pytest.mark.parametrize("family", ["gpt_oss", "nemotron_h", "mixtral"])
def test_absent_experts_add_nothing(family: str) -> None:
    """Under expert parallelism a slot of an absent expert has an id of E or more, and weight 0."""
    model = family_model(family)
    (experts,) = experts_of(model)
    experts._is_expert_parallel = True
    hidden = hidden_states().reshape(-1, HIDDEN).requires_grad_()
    ids = torch.stack([torch.randperm(EXPERTS)[:2] for _ in hidden])
    weights = torch.rand(ids.shape)
    absent = torch.rand(ids.shape) < 0.5
    absent[0] = True
    there = experts_forward(experts, hidden, ids, weights * ~absent)
    got = experts_forward(experts, hidden, ids.masked_fill(absent, EXPERTS + 1), weights * ~absent)
    torch.testing.assert_close(got, there)
    assert not got[0].any()
    (gradient,) = torch.autograd.grad(got.float().square().sum(), hidden)
    assert bool(gradient.isfinite().all())
    assert not gradient[0].any()


@pytest.mark.slow
def test_generates_with_one_implementation(caplog: pytest.LogCaptureFixture) -> None:
    """transformers replaces "grouped_mm" for decoding, off the CPU; this form stays."""
    caplog.set_level(logging.INFO, logger="fp4_inductor")
    assert register()
    model = pack_experts(tiny_model("qwen3_moe", layers=1, experts_implementation="fp4moe"), "mxfp4")
    seen = set()
    (experts,) = experts_of(model)
    experts.register_forward_pre_hook(lambda module, _: seen.add(module.config._experts_implementation))
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    want = model.generate(token_ids(6), **settings)
    model.compile(backend="fp4moe", options=WHOLE)
    assert torch.equal(model.generate(token_ids(6), **settings), want)
    lowered = [message for message in caplog.messages if "→ cpu" in message]
    assert len(lowered) == 2  # prefill and decode
    assert seen == {"fp4moe"}
    with model._optimize_model_for_decode():
        assert model.get_experts_implementation()[""] == "fp4moe"


def test_register_waits_for_transformers(tmp_path: Any) -> None:
    package = tmp_path / "transformers" / "integrations"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "moe.py").write_text("class ALL_EXPERTS_FUNCTIONS:\n    register = print\n")
    code = """
        import sys
        sys.path.insert(0, {path!r})
        if {first}: import transformers
        import fp4_inductor
        assert ("transformers" in sys.modules) == {first}
        from fp4_inductor.experts_interface import register
        assert register() == {first}
        import transformers
        assert register()
    """
    for first, times in ((True, 3), (False, 1)):
        text = textwrap.dedent(code.format(path=str(tmp_path), first=first))
        result = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("fp4moe <function experts_forward") == times
