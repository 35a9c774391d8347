"""Expert parallelism: a device that holds some experts of a layer gives ids that count its own, others are outside.

So transformers does it: ids of experts elsewhere become E, their weights 0, and an all-reduce sums what devices found.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from models import hidden_states, moe_layers, pack_experts, tiny_model
from test_flashinfer_probe import STAND_INS, with_libraries
from torch import distributed, nn

from fp4_inductor import LoweringReport, Options, explain
from fp4_inductor.dynamo_backend import compile_with
from fp4_inductor.modules import carried_weights

RANKS = 2
PATHS = [
    # backend, device, weights, activations
    ("flashinfer_cutlass", "sm_90", "mxfp4", None),
    ("flashinfer_trtllm", "sm_100", "mxfp4", None),
    ("flashinfer_trtllm", "sm_103", "nvfp4", "nvfp4"),
    ("flashinfer_cutedsl", "sm_100", "nvfp4", None),
    ("flashinfer_b12x", "sm_120", "nvfp4", None),
]


class Rank(nn.Module):
    """What one device computes of a layer of Qwen3-MoE."""

    def __init__(self, layer: nn.Module, rank: int, group: str | None = None) -> None:
        super().__init__()
        self.gate, self.experts = layer.gate, copy.deepcopy(layer.experts)
        self.rank, self.group, self.count = rank, group, layer.experts.num_experts // RANKS
        mine = slice(rank * self.count, (rank + 1) * self.count)
        for weight in carried_weights(self.experts):
            for name in weight.tensor_names:
                part = self.experts.get_parameter(name)[mine].clone()
                setattr(self.experts, name, nn.Parameter(part, requires_grad=False))
        self.experts.num_experts, self.experts._is_expert_parallel = self.count, True

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden ``[B, S, H]``; returns ``[B*S, H]``."""
        rows = hidden.flatten(0, 1)
        _, weights, ids = self.gate(rows)
        elsewhere = (ids // self.count) != self.rank
        local = torch.where(elsewhere, self.count, ids % self.count)
        out = self.experts(rows, local, weights.masked_fill(elsewhere, 0.0))
        if self.group is None:
            return out
        return distributed._functional_collectives.all_reduce(out, "sum", self.group)


def layer_of(fmt: str) -> nn.Module:
    model = tiny_model("qwen3_moe", layers=1)
    (layer,) = moe_layers(pack_experts(model, fmt))
    return layer


@pytest.fixture
def group() -> Iterator[str]:
    """A group of two processes of which one is here, and the other is not missed."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=RANKS)
    yield distributed.group.WORLD.group_name
    distributed.destroy_process_group()


@pytest.mark.parametrize("path", PATHS, ids=lambda path: "-".join(map(str, path)))
def test_a_device_with_some_experts_runs_them(path: tuple[str, str, str, str | None], group: str) -> None:
    backend, arch, fmt, allowed = path
    options = Options(backend, activation_format=allowed)
    report = explain(Rank(layer_of(fmt), 1, group), hidden_states(), device=with_libraries(arch), options=options)
    (site,) = report.sites
    assert site.selection.spec.num_experts == 4
    assert site.selection.chosen == backend
    assert not report.near_misses


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS[1:4], ids=lambda path: "-".join(map(str, path)))
def test_devices_together_compute_the_layer(
    path: tuple[str, str, str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, arch, fmt, allowed = path
    (stand_ins,) = (module for module, names in STAND_INS.items() if backend in names)
    layer, inputs, options = layer_of(fmt), hidden_states(), Options(backend, activation_format=allowed)
    reports: list[LoweringReport] = []
    door = partial(compile_with, options=options, device=with_libraries(arch), on_report=reports.append)
    with torch.no_grad():
        wanted = layer(inputs).double().flatten(0, 1)
        stand_ins.stand_in(monkeypatch)
        parts = []
        for rank in range(RANKS):
            torch._dynamo.reset()
            parts.append(torch.compile(Rank(layer, rank), backend=door, fullgraph=True)(inputs).double())
    assert [site.selection.chosen for report in reports for site in report.sites] == [backend] * RANKS
    assert all(bool(part.any(dim=1).logical_not().any()) for part in parts), "some tokens have no expert here"
    error = (sum(parts) - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert float(error.max()) < (1.5e-2 if allowed is None else 0.3)
