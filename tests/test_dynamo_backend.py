"""``torch.compile(..., backend="fp4moe")`` on whole models."""

from __future__ import annotations

import copy
import gc
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Block, MoEStack, hidden_states, pack_experts, tiny_model, token_ids

import fp4_inductor
from fp4_inductor import InvalidOptionError, UnknownNameError
from fp4_inductor.errors import VerificationError
from fp4_inductor.fold import PREPARED_WEIGHTS

WHOLE = {"fp4moe.strict": True, "fp4moe.on_unsupported": "error"}


def packed(family: str = "qwen3_moe", fmt: str = "mxfp4", layers: int = 1, **kwargs: Any) -> torch.nn.Module:
    return pack_experts(tiny_model(family, layers=layers, **kwargs), fmt)


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(ids).logits
    return out.double()


def assert_same_logits(got: torch.Tensor, want: torch.Tensor, tolerance: float = 0.1) -> None:
    """Models in bfloat16 amplify rounding, so blocks are held to float64 elsewhere; this catches wrong wiring."""
    error = (got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-30)  # a padding token's may all be zero
    assert float(error.median()) < tolerance


def assert_same_block(got: Any, want: Any, tokens: int = 16) -> None:
    """Two blocks in bfloat16, run on the same tokens."""
    hidden = hidden_states(tokens)
    with torch.no_grad():
        assert_same_logits(got(hidden).double(), want(hidden).double(), tolerance=0.03)


def count_lowered(caplog: pytest.LogCaptureFixture) -> int:
    return sum("→ cpu" in message for message in caplog.messages)


# Every family, form and format is held to float64 in test_lowering_pass; compiling them all takes minutes.
@pytest.mark.parametrize(
    ("family", "form", "fmt"),
    [
        ("mixtral", "grouped_mm", "nvfp4"),
        ("qwen3_moe", "batched_mm", "mxfp4"),
        ("gpt_oss", "grouped_mm", "mxfp4"),
        ("deepseek_v3", "batched_mm", "nvfp4"),
        ("olmoe", "grouped_mm", "mxfp4"),
        ("glm4_moe", "batched_mm", "nvfp4"),
    ],
)
def test_models_compile_whole_and_agree(family: str, form: str, fmt: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fp4_inductor")
    model = packed(family, fmt, experts_implementation=form)
    options = {**WHOLE, "fp4moe.verify": "first_call", "fp4moe.expect_matches": 1}
    compiled = torch.compile(model, backend="fp4moe", fullgraph=True, options=options)
    ids = token_ids()
    assert_same_logits(logits(compiled, ids), logits(model, ids))
    assert count_lowered(caplog) == 1


def test_growing_batches_recompile_once_and_prepare_once() -> None:
    gc.collect()  # dead models of other tests still count
    before = len(PREPARED_WEIGHTS)
    block = Block(packed("gpt_oss"))
    compiled = torch.compile(block, backend="fp4moe", options=WHOLE)
    sizes = []
    for tokens in (16, 24, 40, 7):
        with torch._dynamo.config.patch(error_on_recompile=len(sizes) >= 2):
            assert_same_block(compiled, block, tokens)
        sizes.append(len(PREPARED_WEIGHTS) - before)
    assert sizes[0] > 0
    assert sizes == sizes[:1] * 4


def test_second_model_of_the_same_shape_has_its_own_weights() -> None:
    first, second = packed("gpt_oss", seed=1), packed("gpt_oss", seed=2)
    ids = token_ids()
    for model in (first, second, first):
        compiled = torch.compile(model, backend="fp4moe", options=WHOLE)
        assert_same_logits(logits(compiled, ids), logits(model, ids))


def test_updated_weights_are_seen() -> None:
    model, other = packed("gpt_oss", seed=1), packed("gpt_oss", seed=2)
    compiled = torch.compile(model, backend="fp4moe", options=WHOLE)
    ids = token_ids()
    logits(compiled, ids)
    experts = model.model.layers[0].mlp.experts
    experts.gate_up_proj_packed.bitwise_xor_(0x88)  # every sign, in place
    assert_same_logits(logits(compiled, ids), logits(model, ids))
    model.load_state_dict(other.state_dict(), assign=True)
    assert_same_logits(logits(compiled, ids), logits(other, ids))
    replacement = packed("gpt_oss", seed=3).model.layers[0].mlp.experts
    experts = model.model.layers[0].mlp.experts
    experts.gate_up_proj_packed.data = replacement.gate_up_proj_packed.data
    assert_same_logits(logits(compiled, ids), logits(model, ids))


def test_deleting_the_model_frees_its_prepared_weights() -> None:
    gc.collect()
    before = len(PREPARED_WEIGHTS)
    model = packed("gpt_oss")
    compiled = torch.compile(model, backend="fp4moe", options=WHOLE)
    logits(compiled, token_ids())
    assert len(PREPARED_WEIGHTS) > before
    del model, compiled
    gc.collect()
    assert len(PREPARED_WEIGHTS) == before


def test_a_deep_copy_is_another_model() -> None:
    model = packed("gpt_oss")
    compiled = torch.compile(model, backend="fp4moe", options=WHOLE)
    ids = token_ids()
    logits(compiled, ids)
    other = copy.deepcopy(model)
    other.model.layers[0].mlp.experts.gate_up_proj_packed.bitwise_xor_(0x88)
    assert_same_logits(logits(torch.compile(other, backend="fp4moe", options=WHOLE), ids), logits(other, ids))
    assert_same_logits(logits(compiled, ids), logits(model, ids))


def test_training_graphs_are_left_alone_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    block = Block(packed())
    router = block.layer.gate.weight.requires_grad_(True)
    compiled = torch.compile(block, backend="fp4moe")
    for tokens in (16, 16, 24):
        compiled(hidden_states(tokens)).float().square().mean().backward()
    assert router.grad is not None
    said = [message for message in caplog.messages if "torch.no_grad()" in message]
    assert len(said) == 1
    assert count_lowered(caplog) == 0


def test_an_empty_batch_between_others() -> None:
    model = MoEStack(packed())
    compiled = torch.compile(model, backend="fp4moe", dynamic=True, options=WHOLE)
    with torch.no_grad():
        for tokens in (0, 7, 0):
            hidden = hidden_states(tokens)
            torch.testing.assert_close(compiled(hidden), model(hidden), rtol=0.05, atol=0.05)


def test_option_errors_reach_the_user() -> None:
    model = MoEStack(packed())
    with torch.no_grad():
        for options, error in (
            ({"fp4moe.backnd": "cpu"}, UnknownNameError),
            ({"fp4moe.backend": "cpuu"}, UnknownNameError),
            ({"fp4moe.max_sites": -1}, InvalidOptionError),
        ):
            torch._dynamo.reset()
            with pytest.raises(Exception, match=r"fp4moe\.") as caught:
                torch.compile(model, backend="fp4moe", options=options)(hidden_states())
            assert f"{error.__name__}: " in str(caught.value)
    with pytest.raises(Exception, match="epilogue_fusionn"), torch.no_grad():
        torch.compile(model, backend="fp4moe", options={"epilogue_fusionn": True})(hidden_states())


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"])
def test_modes(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fp4_inductor")
    model = packed(experts_implementation="batched_mm")
    ids = token_ids()
    assert_same_logits(logits(torch.compile(model, backend="fp4moe", mode=mode), ids), logits(model, ids))
    assert count_lowered(caplog) == 1


def test_freezing_does_not_hide_the_weights(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fp4_inductor")
    model, ids = packed(), token_ids()
    with torch._inductor.config.patch(freezing=True):
        compiled = torch.compile(model, backend="fp4moe", options=WHOLE)
        assert_same_logits(logits(compiled, ids), logits(model, ids))
    assert count_lowered(caplog) == 1


def test_verification_names_the_faulty_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4_inductor.backends import cpu_aten

    true_route = cpu_aten._routes

    def misroute(ids: torch.Tensor, num_experts: int) -> Any:
        return true_route((ids + 1) % num_experts, num_experts)

    monkeypatch.setattr(cpu_aten, "_routes", misroute)
    options = {"fp4moe.verify": "first_call", "fp4moe.backend": "cpu_aten"}
    compiled = torch.compile(packed(), backend="fp4moe", options=options)
    with pytest.raises(VerificationError) as error:
        logits(compiled, token_ids())
    assert "model.layers.0.mlp" in str(error.value)
    assert "which went to experts [" in str(error.value)


def test_verification_leaves_state_to_the_call() -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = MoEStack(packed())
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return self.stack(hidden) * self.calls

    model = Counting()
    with torch.no_grad():
        torch.compile(model, backend="fp4moe", options={"fp4moe.verify": "first_call"})(hidden_states())
    assert model.calls.item() == 1


def test_unquantised_models_are_inductors() -> None:
    block = Block(tiny_model("qwen3_moe", layers=1))
    assert_same_block(torch.compile(block, backend="fp4moe"), block)


def test_generation_uses_the_compiled_forward(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fp4_inductor")
    model = packed("qwen3_moe", use_cache=True)
    ids = token_ids(8)
    settings: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    with torch.no_grad():
        want = model.generate(ids, **settings)
        model.compile(backend="fp4moe", options=WHOLE)
        got = model.generate(ids, **settings)
    assert count_lowered(caplog) >= 2  # prefill and decode
    assert_same_logits(got.logits[0].double(), want.logits[0].double())


def test_decode_in_gathered_form_after_grouped_prefill(caplog: pytest.LogCaptureFixture) -> None:
    """What ``generate`` does off the CPU: the experts implementation is switched between the two."""
    caplog.set_level(logging.INFO, logger="fp4_inductor")
    model = packed("gpt_oss", use_cache=True)
    eager = copy.deepcopy(model)
    model.compile(backend="fp4moe", options=WHOLE)
    outputs = []
    for m in (model, eager):
        with torch.no_grad():
            m.set_experts_implementation("grouped_mm")
            prefill = m(token_ids(8, batch=8))
            m.set_experts_implementation("batched_mm")
            decode = m(token_ids(1, batch=8, seed=1), past_key_values=prefill.past_key_values)
        outputs.append((prefill.logits.double(), decode.logits.double()))
    for got, want in zip(*outputs, strict=True):
        assert_same_logits(got, want)
    patterns = [
        pattern for message in caplog.messages for pattern in ("grouped_mm", "batched_mm") if pattern in message
    ]
    assert patterns == ["grouped_mm", "batched_mm"]


def run_elsewhere(cache: Path, seed: int, **env: str) -> list[str]:
    """Compile a block in a process of its own: how often Inductor's cache served it, and whether it has weights."""
    script = textwrap.dedent("""
        import sys, torch
        sys.path.insert(0, sys.argv[1])
        import test_dynamo_backend as t
        block = t.Block(t.packed("gpt_oss", seed=int(sys.argv[2])))
        t.assert_same_block(torch.compile(block, backend="fp4moe", options=t.WHOLE), block)
        from torch._dynamo.utils import counters
        from fp4_inductor.fold import PREPARED_WEIGHTS
        print("hits", counters["inductor"]["fxgraph_cache_hit"], "prepared", len(PREPARED_WEIGHTS) > 0)
    """)
    command = [sys.executable, "-c", script, str(Path(__file__).parent), str(seed)]
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), **env}
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.split()


@pytest.fixture(scope="module")
def traced_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    """A process that found Inductor's cache empty: the cache that it leaves, its trace, and what it said."""
    cache, trace = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("trace")
    return cache, trace, run_elsewhere(cache, 1, TORCH_TRACE=str(trace))


def test_warm_cache_serves_another_process_with_other_weights(traced_process: tuple[Path, Path, list[str]]) -> None:
    cache, _, said = traced_process
    assert said == ["hits", "0", "prepared", "True"]
    assert run_elsewhere(cache, 2) == ["hits", "1", "prepared", "True"]


def test_the_post_grad_pass_gives_the_same_numbers() -> None:
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomGraphPass

    block, hidden = Block(packed("gpt_oss")), hidden_states()
    with torch.no_grad():
        fused = torch.compile(block, backend="fp4moe")(hidden)
        torch._dynamo.reset()
        graph_pass = fp4_inductor.Fp4MoEPass()
        assert isinstance(graph_pass, CustomGraphPass)
        with config.patch(post_grad_custom_pre_pass=graph_pass):
            assert torch.equal(torch.compile(block, backend="inductor")(hidden), fused)


def test_pass_uuid_tells_options_apart() -> None:
    import pickle

    from fp4_inductor import Fp4MoEPass, Options

    default, same, other = Fp4MoEPass().uuid(), Fp4MoEPass(Options()).uuid(), Fp4MoEPass(Options(max_sites=1)).uuid()
    assert default == same
    assert default != other
    assert pickle.loads(pickle.dumps(default)) == default


def test_a_trace_holds_the_graph_before_and_after_and_the_report(
    traced_process: tuple[Path, Path, list[str]],
) -> None:
    """What tlparse shows."""
    (log,) = traced_process[1].iterdir()
    text = log.read_text()
    for artifact in ("fp4moe_before", "fp4moe_after", "fp4moe_report"):
        assert f'"name": "{artifact}"' in text
    assert "fp4_inductor.moe_cpu.default" in text.partition('"name": "fp4moe_after"')[2]
