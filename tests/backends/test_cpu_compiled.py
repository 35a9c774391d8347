"""The ``cpu`` backend inside compiled models: Inductor's wrappers in Python and in C++, and several threads."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from cpu_isa import forced_isa
from models import MoEStack, hidden_states, pack_experts, tiny_model

from fp4_inductor.device import DeviceInfo
from fp4_inductor.kernels.cpu_build import processor_isas

WHOLE = {"fp4moe.strict": True, "fp4moe.on_unsupported": "error"}


def stack(fmt: str) -> torch.nn.Module:
    return pack_experts(MoEStack(tiny_model("qwen3_moe", layers=1)), fmt)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_a_wrapper_in_cpp_calls_it(fmt: str, caplog: pytest.LogCaptureFixture) -> None:
    from torch._inductor import config

    caplog.set_level(logging.INFO, logger="fp4_inductor")
    model, hidden = stack(fmt), hidden_states()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="fp4moe", options=WHOLE)
    with torch.no_grad(), config.patch(cpp_wrapper=True):
        got = compiled(hidden)
        again = compiled(hidden)
    assert any("→ cpu" in message for message in caplog.messages)
    with torch.no_grad():
        want = model(hidden)
    assert torch.equal(got, again)
    assert (got - want).norm() / want.norm() < 1.5e-2


@pytest.mark.parametrize("isa", ["portable", processor_isas()[0]])
def test_threads_share_a_compiled_model(isa: str) -> None:
    assert DeviceInfo.parse("cpu").library("c++")
    with forced_isa(isa):
        check_threads(stack("mxfp4"))


def check_threads(model: torch.nn.Module) -> None:
    inputs = [hidden_states(seed=seed) for seed in range(4)]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="fp4moe", options=WHOLE)
    with torch.no_grad():
        expected = [compiled(hidden) for hidden in inputs]
    wrong: list[int] = []

    def work(index: int) -> None:
        with torch.no_grad():
            for _ in range(20):
                if not torch.equal(compiled(inputs[index]), expected[index]):
                    wrong.append(index)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
