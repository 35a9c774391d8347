"""Originals that leave the device: every use of a parameter afterwards finds the bytes that it had.

On a CPU there is no other memory to go to, so here the originals go to pages of their own, by the same code.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import interpreted, run_in_interpreter, starts_the_interpreter
from models import MoEStack, hidden_states, pack_experts, tiny_model
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from fp4_inductor import DeviceInfo, Options, host_memory
from fp4_inductor.dynamo_backend import compile_with
from fp4_inductor.fold import PREPARED_WEIGHTS
from fp4_inductor.host_memory import HostMemory, is_on_host, move_to_host

np = pytest.importorskip("numpy")
OPTIONS = {"fp4moe.strict": True, "fp4moe.on_unsupported": "error", "fp4moe.release_original_weights": True}
RELAID = ("gate_up_proj_packed", "gate_up_proj_block_scale", "gate_up_proj_bias")
"""What ``cpu_aten`` re-lays of a gpt-oss layer, whose gate and up rows are interleaved; the rest it reads as it is."""


class _Pages:
    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self.__array_interface__ = memory.__cuda_array_interface__


def addressed_by_cpu(device: torch.device, memory: HostMemory) -> torch.Tensor:
    return torch.as_tensor(np.asarray(_Pages(memory)))


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Take this CPU's memory for a device's. Counts the pieces of host memory in use."""
    monkeypatch.setitem(host_memory._ADDRESS_FROM, "cpu", addressed_by_cpu)

    def count() -> int:
        gc.collect()
        return len(host_memory._IN_USE)

    return count


def stack(seed: int = 1) -> MoEStack:
    return MoEStack(pack_experts(tiny_model("gpt_oss", layers=1, seed=seed), "mxfp4"))


def compiled(model: nn.Module, **more: Any) -> Any:
    return torch.compile(model, backend="fp4moe", options={**OPTIONS, "fp4moe.backend": "cpu_aten", **more})


def experts(model: nn.Module) -> Any:
    return next(module for module in model.modules() if hasattr(module, "gate_up_proj_packed"))


def relaid(model: nn.Module) -> list[torch.Tensor]:
    return [getattr(experts(model), name) for name in RELAID]


def of_experts(state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The first layer's."""
    return next(tensor for key, tensor in state.items() if key.endswith(f".{name}"))


def check(got_of: Callable[..., torch.Tensor], model: nn.Module, tokens: int = 16) -> None:
    hidden = hidden_states(tokens)
    with torch.no_grad():
        torch.testing.assert_close(got_of(hidden), model(hidden), rtol=0.05, atol=0.05)


def same_state(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype
        assert torch.equal(got[name].view(torch.uint8), want[name].view(torch.uint8)), name


def copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def test_originals_leave_and_the_parameters_stay(pages: Callable[[], int]) -> None:
    model, before = stack(), pages()
    state, parameters = copied(model.state_dict()), relaid(model)
    storages = [StorageWeakRef(p.untyped_storage()) for p in parameters]
    run = compiled(model)
    for _ in range(2):
        check(run, model)
    assert pages() == before + len(RELAID)
    assert all(storage.expired() for storage in storages)
    assert all(new is old and is_on_host(new) for new, old in zip(relaid(model), parameters, strict=True))
    assert not is_on_host(experts(model).down_proj_packed)  # the graph itself reads it
    same_state(model.state_dict(), state)


def test_nothing_leaves_unasked(pages: Callable[[], int]) -> None:
    model, before = stack(), pages()
    check(torch.compile(model, backend="fp4moe"), model)
    assert pages() == before


def test_copies_and_files_of_a_released_model(pages: Callable[[], int], tmp_path: Path) -> None:
    model = pack_experts(tiny_model("gpt_oss", layers=1), "mxfp4")
    state, other = copied(model.state_dict()), copy.deepcopy(model)
    check(compiled(MoEStack(model)), MoEStack(model))
    assert is_on_host(relaid(model)[0])
    same_state(copy.deepcopy(model).state_dict(), state)
    same_state(pickle.loads(pickle.dumps(MoEStack(model))).state_dict(), MoEStack(model).state_dict())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    same_state(torch.load(file), state)
    pytest.importorskip("safetensors")
    from safetensors.torch import load_file

    for saved, name in ((model, "released"), (other, "whole")):
        saved.save_pretrained(tmp_path / name)
    same_state(*(load_file(tmp_path / name / "model.safetensors") for name in ("released", "whole")))
    assert repr(relaid(model)[0]) == repr(nn.Parameter(of_experts(state, RELAID[0]), requires_grad=False))
    model.to(torch.float32)
    assert torch.equal(relaid(model)[0], of_experts(state, RELAID[0]))


def test_a_copy_is_a_model_of_its_own(pages: Callable[[], int]) -> None:
    model, before = stack(), pages()
    run = compiled(model)
    check(run, model)
    other = copy.deepcopy(model)
    experts(other).gate_up_proj_packed.bitwise_xor_(0x88)
    check(compiled(other), other)
    check(run, model)
    assert pages() == before + 2 * len(RELAID)


@pytest.mark.parametrize("kind", ["in place", "copied state", "assigned state", "data"])
def test_updates_of_released_weights_are_seen(kind: str, pages: Callable[[], int]) -> None:
    model, other, before = stack(1), stack(2), pages()
    run = compiled(model)
    check(run, model)
    with torch.no_grad():
        if kind == "in place":
            experts(model).gate_up_proj_packed.bitwise_xor_(0x88)
        elif kind == "data":
            experts(model).gate_up_proj_packed.data = experts(other).gate_up_proj_packed.data.clone()
        else:
            model.load_state_dict(copied(other.state_dict()), assign=kind == "assigned state")
            check(run, other)
    check(run, model)
    assert all(map(is_on_host, relaid(model)))
    assert pages() == before + len(RELAID)


def test_other_graphs_share_what_is_prepared(pages: Callable[[], int]) -> None:
    model = stack()
    run = compiled(model)
    check(run, model)
    entries = dict(PREPARED_WEIGHTS._entries)
    for tokens in (24, 40, 7):
        check(run, model, tokens)
    check(compiled(model, **{"fp4moe.verify": "first_call"}), model)  # another graph, which runs what it replaced
    assert PREPARED_WEIGHTS._entries.keys() == entries.keys()
    assert all(PREPARED_WEIGHTS._entries[key] is entry for key, entry in entries.items())


def test_graphs_that_read_the_originals_find_them(pages: Callable[[], int]) -> None:
    model = stack()
    check(compiled(model), model)
    check(torch.compile(model, backend="inductor"), model)
    check(compiled(model, **{"fp4moe.backend": "reference"}), model)


def test_a_recipe_of_another_kind_runs_on_released_weights(pages: Callable[[], int]) -> None:
    from test_fold import Layer, folding_backend

    layer = Layer()
    want = layer.weight.clone()
    assert move_to_host(layer.weight) == ""
    run = torch.compile(layer, backend=folding_backend)
    x = torch.randn(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(run(x), x @ want.t())


def test_deleting_the_model_frees_everything(pages: Callable[[], int]) -> None:
    gc.collect()
    prepared, before = len(PREPARED_WEIGHTS), pages()
    model = stack()
    run = compiled(model)
    check(run, model)
    held = relaid(model)[0]
    bits = held.clone()
    del model, run
    assert pages() == before + 1
    assert torch.equal(held, bits)
    del held
    assert pages() == before
    assert len(PREPARED_WEIGHTS) == prepared


def test_a_shared_storage_stays_and_is_said(pages: Callable[[], int], caplog: pytest.LogCaptureFixture) -> None:
    model, before = stack(), pages()
    held = model.state_dict()
    run = compiled(model)
    for _ in range(2):
        check(run, model)
    assert pages() == before
    said = [message for message in caplog.messages if "another tensor shares its storage" in message]
    assert len(said) == 1
    assert f"{sum(weight.nbytes for weight in relaid(model))} bytes" in said[0]
    of_experts(held, RELAID[0]).bitwise_xor_(0x88)  # still the parameter's own bytes
    check(run, model)


def test_weights_made_under_inference_mode(pages: Callable[[], int]) -> None:
    with torch.inference_mode():
        model = stack()
        run = compiled(model)
        hidden = hidden_states()
        for _ in range(2):
            torch.testing.assert_close(run(hidden), model(hidden), rtol=0.05, atol=0.05)
    assert all(is_on_host(p) and p.is_inference() for p in relaid(model))


def test_a_cpu_has_nowhere_to_release_to(caplog: pytest.LogCaptureFixture) -> None:
    model = stack()
    check(compiled(model), model)
    assert "memory of a cpu device is not device memory" in caplog.text


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float32])
def test_any_tensor_moves_as_it_stands(dtype: torch.dtype, pages: Callable[[], int]) -> None:
    base = torch.randint(0, 255, (2, 6, 4 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    view = nn.Parameter(base.transpose(1, 2)[1:], requires_grad=False)
    want, stride, offset, version = view.clone(), view.stride(), view.storage_offset(), view._version
    before = pages()
    assert "another tensor" in move_to_host(view)
    del base
    assert move_to_host(view) == ""
    assert (view.stride(), view.storage_offset(), view._version) == (stride, offset, version)
    assert torch.equal(view.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
    assert move_to_host(view) == ""  # there already
    assert pages() == before + 1


def test_what_cannot_move_stays(pages: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapped(torch.Tensor):
        pass

    assert "Wrapped" in move_to_host(torch.ones(3).as_subclass(Wrapped))
    assert move_to_host(torch.ones(0)) == ""
    monkeypatch.setitem(host_memory._ADDRESS_FROM, "cpu", lambda device, memory: "no pages left")
    tensor = torch.ones(3)
    address = tensor.data_ptr()
    assert move_to_host(tensor) == "no pages left"
    assert tensor.data_ptr() == address


@starts_the_interpreter
def test_in_the_interpreter() -> None:
    """The GPU's plan, whose recipes share sources, runs on the CPU where Triton interprets kernels."""
    pytest.importorskip("triton", reason="triton is not installed")
    run_in_interpreter(__file__, "-k", "every_weight")


@interpreted
@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_every_weight_of_a_gpu_plan_leaves_once(fmt: str, pages: Callable[[], int]) -> None:
    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any], **_: Any) -> Callable[..., Any]:
        options = Options(strict=True, on_unsupported="error", release_original_weights=True)
        return compile_with(gm, example_inputs, options, device=DeviceInfo.parse("sm_90"))

    model, before = MoEStack(pack_experts(tiny_model("gpt_oss", layers=1), fmt)), pages()
    state = copied(model.state_dict())
    run = torch.compile(model, backend=backend)
    check(run, model, tokens=3)
    packed = {name: weight for name, weight in experts(model).named_parameters() if "bias" not in name}
    assert all(map(is_on_host, packed.values()))
    assert len(packed) == (4 if fmt == "mxfp4" else 6)
    prepared, moved = len(PREPARED_WEIGHTS), pages()
    check(run, model, tokens=5)
    assert (len(PREPARED_WEIGHTS), pages()) == (prepared, moved)
    same_state(model.state_dict(), state)
    packed["gate_up_proj_block_scale"].copy_(packed["gate_up_proj_block_scale"].flip(0))
    check(run, model, tokens=3)
    assert (len(PREPARED_WEIGHTS), pages()) == (prepared, moved)
    assert moved > before
