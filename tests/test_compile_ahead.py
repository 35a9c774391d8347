"""Each kind of fused call on a GPU is compiled once, ahead, on its device and without its memory."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import MoEStack, hidden_states, pack_experts, tiny_model
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from fp4_inductor import compile_ahead
from fp4_inductor.compile_ahead import CompilingAhead
from fp4_inductor.emit import FUSED

OP = "fp4_inductor::moe_triton_w4a16"


class Recorder:
    """A backend that writes down what it is asked to compile."""

    name = "recorder"

    def __init__(self) -> None:
        self.ops: tuple[str, ...] = (OP,)
        self.calls: list[tuple[Any, ...]] = []
        self.threads: set[str] = set()
        self.error: Exception | None = None

    def check(self, *_: Any) -> None: ...

    def rank(self, *_: Any) -> None: ...

    def plan(self, *_: Any) -> None: ...

    def compile_call(self, op: str, args: tuple[Any, ...]) -> None:
        self.threads.add(threading.current_thread().name)
        self.calls.append(args)
        if self.error is not None:
            raise self.error


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(compile_ahead, "BACKENDS", [recorder])
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return recorder


def fake(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(shape, dtype=dtype, device=device)


def graph_of(calls: list[list[Any]]) -> fx.Graph:
    """One call of the op for each list of arguments; its result is like its first one."""
    graph = fx.Graph()
    results = []
    for number, values in enumerate(calls):
        nodes = []
        for position, value in enumerate(values):
            nodes.append(value)
            if isinstance(value, torch.Tensor):
                nodes[-1] = graph.placeholder(f"input_{number}_{position}")
                nodes[-1].meta["val"] = value
        results.append(graph.call_function(torch.ops.fp4_inductor.moe_triton_w4a16.default, tuple(nodes)))
        results[-1].meta.update({"val": values[0], FUSED: "recorder"})
    graph.output(tuple(results))
    return graph


def test_equal_layers_are_one_kind(backend: Recorder) -> None:
    layers = [[fake(5, 64), None, 1.5, "silu"] for _ in range(3)]
    with FakeTensorMode():  # Inductor may be in one
        CompilingAhead(graph_of([*layers, [fake(6, 64, dtype=torch.float16), None, 1.5, "silu"]])).wait()
    (first, *rest), (second, *_) = backend.calls
    assert (first.shape, first.dtype, first.device.type) == ((5, 64), torch.bfloat16, "meta")
    assert type(first) is torch.Tensor
    assert rest == [None, 1.5, "silu"]
    assert (second.shape, second.dtype) == ((6, 64), torch.float16)
    (thread,) = backend.threads
    assert thread.startswith("fp4_inductor_compile")


def test_numbers_of_other_types_are_another_kind(backend: Recorder) -> None:
    hidden = fake(5, 64)
    CompilingAhead(graph_of([[hidden, 1], [hidden, 1.0], [hidden, True]])).wait()
    assert [repr(args[1]) for args in backend.calls] == ["1", "1.0", "True"]


def test_a_scalar_on_the_host_has_a_value(backend: Recorder) -> None:
    CompilingAhead(graph_of([[fake(5, 64), fake(dtype=torch.float64, device="cpu")]])).wait()
    ((_, scalar),) = backend.calls
    assert (float(scalar), scalar.dtype) == (1.0, torch.float64)


def test_an_unknown_size_is_what_it_was_without_a_guard(backend: Recorder) -> None:
    shape_env = ShapeEnv()
    symbol = shape_env.create_symbol(7, ConstantSource("tokens"), DimDynamic.DYNAMIC)
    tokens = shape_env.create_symintnode(symbol, hint=7)
    with FakeTensorMode(shape_env=shape_env):
        hidden = torch.empty(tokens, 64, device="cuda")
    CompilingAhead(graph_of([[hidden]])).wait()
    ((given,),) = backend.calls
    assert given.shape == (7, 64)
    assert not shape_env.guards


def test_a_size_that_was_never_seen_compiles_nothing(backend: Recorder) -> None:
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env):
        hidden = torch.empty(shape_env.create_unbacked_symint(), 64, device="cuda")
    CompilingAhead(graph_of([[hidden]])).wait()
    assert not backend.calls


def test_other_devices_and_other_ops_are_left(backend: Recorder) -> None:
    CompilingAhead(graph_of([[fake(5, 64, device="cpu")]])).wait()
    backend.ops = ()
    CompilingAhead(graph_of([[fake(5, 64)]])).wait()
    assert not backend.calls


def test_an_error_is_left_to_the_call(backend: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    backend.error = RuntimeError("no such instruction")
    with caplog.at_level(logging.INFO, logger="fp4_inductor.compile_ahead"):
        ahead = CompilingAhead(graph_of([[fake(5, 64)]]))
        ahead.wait()
        ahead.wait()
    assert [record.getMessage() for record in caplog.records] == [
        "kernels are compiled when they are first called: no such instruction"
    ]


def forget_kernels() -> None:
    """What this process has compiled of the package's kernels."""
    modules = [module for path, module in list(sys.modules.items()) if path.startswith("fp4_inductor.kernels.")]
    for kernel in [value for module in modules for value in vars(module).values()]:
        getattr(kernel, "device_caches", {}).clear()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 40, 700])
@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_the_first_call_compiles_nothing(monkeypatch: pytest.MonkeyPatch, fmt: str, tokens: int) -> None:
    from triton.runtime.jit import JITFunction

    forget_kernels()
    compiled: list[tuple[str, str]] = []
    compile_kernel: Callable[..., Any] = JITFunction._do_compile

    def recording(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled.append((self.__module__, threading.current_thread().name))
        return compile_kernel(self, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "_do_compile", recording)
    model = MoEStack(pack_experts(tiny_model("qwen3_moe"), fmt).cuda())
    hidden = hidden_states(tokens).cuda()
    with torch.no_grad():
        torch.compile(model, backend="fp4moe")(hidden)
    assert len(compiled) >= 3
    assert {thread.rpartition("_")[0] for _, thread in compiled} == {"fp4_inductor_compile"}
