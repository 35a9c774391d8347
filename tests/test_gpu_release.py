"""Originals that leave a GPU for page-locked host memory; what holds on any device is in test_release."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from models import pack_experts, tiny_model
from test_release import OPTIONS, RELAID, copied, of_experts, relaid, same_state
from torch import nn

from fp4_inductor import host_memory
from fp4_inductor.host_memory import HostMemory, is_on_host, move_to_host

GPU_SIZES = {"hidden_size": 512, "intermediate_size": 512, "num_local_experts": 32}


def gpu_model(fmt: str = "mxfp4") -> nn.Module:
    return pack_experts(tiny_model("gpt_oss", **GPU_SIZES).cuda(), fmt)


def expert_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for name, p in model.named_parameters() if ".experts." in name)


def gpu_logits(model: Any, tokens: int = 16) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(torch.arange(3, 3 + tokens, device="cuda").view(1, -1) % 61 + 3).logits
    return out.double()


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_gpu_memory_holds_prepared_weights_only(fmt: str) -> None:
    gpu_logits(gpu_model(fmt))  # libraries allocate workspaces, which they keep
    start = allocated()
    model = gpu_model(fmt)
    bits, num_bytes, originals = 4.25 if fmt == "mxfp4" else 4.5, expert_bytes(model), allocated()
    run = torch.compile(model, backend="fp4moe", options=OPTIONS)
    want = gpu_logits(model)
    for tokens in (16, 16, 40, 1):
        assert_near(gpu_logits(run, tokens), gpu_logits(model, tokens))
    beside = allocated() - originals
    assert beside < 0.1 * num_bytes, f"{beside} bytes more than before, of {num_bytes} bytes of {bits}-bit weights"
    assert_near(gpu_logits(run), want)
    del model, run
    torch._dynamo.reset()
    assert allocated() - start < 1 << 20


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    error = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert float(error.median()) < 0.2


@pytest.mark.gpu
def test_gpu_parameters_work_on(tmp_path: Path) -> None:
    model = gpu_model()
    state = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
    run = torch.compile(model, backend="fp4moe", options=OPTIONS)
    gpu_logits(run)
    packed = relaid(model)[0]
    assert packed.is_cuda
    assert is_on_host(packed)

    def on_cpu(some: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.cpu() for name, tensor in some.items()}

    same_state(on_cpu(model.state_dict()), state)
    same_state(on_cpu(copied(model.state_dict())), state)
    twin = copy.deepcopy(model)
    same_state(on_cpu(twin.state_dict()), state)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    same_state(on_cpu(torch.load(tmp_path / "state.pt")), state)
    model.save_pretrained(tmp_path / "saved")
    assert int(packed.sum()) == int(of_experts(state, RELAID[0]).sum())
    with torch.no_grad():
        packed.bitwise_xor_(0x88)
        twin_packed = relaid(twin)[0]
        twin_packed.bitwise_xor_(0x88)
    assert torch.equal(packed.cpu(), twin_packed.cpu())
    assert_near(gpu_logits(run), gpu_logits(twin))
    model.load_state_dict(state)
    same_state(on_cpu(model.state_dict()), state)
    assert_near(gpu_logits(run), gpu_logits(model))
    model.to("cpu")
    same_state(model.state_dict(), state)


@pytest.mark.gpu
def test_gpu_graphs_replay_released_weights() -> None:
    model = gpu_model()
    run = torch.compile(model, backend="fp4moe", options={**OPTIONS, "triton.cudagraphs": True})
    for _ in range(4):
        assert_near(gpu_logits(run), gpu_logits(model))
    with torch.no_grad():
        relaid(model)[0].bitwise_xor_(0x88)
    for _ in range(3):
        assert_near(gpu_logits(run), gpu_logits(model))


@pytest.mark.gpu
def test_gpu_pages_that_cannot_be_locked_leave_no_error_behind() -> None:
    device, memory = torch.device("cuda", torch.cuda.current_device()), HostMemory(1 << 20)
    view = host_memory._lock_pages(device, memory)
    assert isinstance(view, torch.Tensor)
    assert view.device == device
    view.fill_(7)
    torch.cuda.synchronize()
    assert bool((memory.bytes == 7).all())
    again = host_memory._lock_pages(device, memory)
    assert isinstance(again, str)
    assert float(torch.ones(4, device=device).sum()) == 4


@pytest.mark.gpu
def test_gpu_frees_pages_with_the_last_tensor() -> None:
    weight = torch.randint(0, 255, (1 << 20,), dtype=torch.uint8, device="cuda")
    want, before = weight.clone(), len(host_memory._IN_USE)
    assert move_to_host(weight) == ""
    assert len(host_memory._IN_USE) == before + 1
    assert torch.equal(weight, want)
    alias = weight[5:]
    del weight
    gc.collect()
    assert len(host_memory._IN_USE) == before + 1
    assert torch.equal(alias, want[5:])
    del alias
    gc.collect()
    assert len(host_memory._IN_USE) == before
