"""Classes that split gate and up in halves without an attribute that says so: their own forward says it here."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from layout_writers import write_stacked
from test_layouts import assert_exact
from test_saving import assert_same_weights

from fp4_inductor.checkpoint import load
from fp4_inductor.modules import _GATE_BEFORE_UP, gate_before_up

E, H, INNER = 3, 32, 24
CLASSES = {
    "Llama4TextExperts": ("llama4", {"num_local_experts": E, "hidden_size": H, "intermediate_size": INNER}),
    "Step3p7Experts": ("step3p7", {"num_local_experts": E, "hidden_size": H, "moe_intermediate_size": INNER}),
}


def test_every_class_is_held_against_its_forward() -> None:
    assert CLASSES.keys() == _GATE_BEFORE_UP


@pytest.mark.parametrize("name", CLASSES)
def test_gate_stands_before_up(name: str) -> None:
    family, sizes = CLASSES[name]
    modeling: Any = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config: Any = type("Config", (), {**sizes, "hidden_act": "silu"})
    experts = getattr(modeling, name)(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(E, H)  # a token for each expert
    is_k_first = experts.gate_up_proj.shape[1] == H
    with torch.no_grad():
        ids = torch.arange(E).unsqueeze(-1)
        got = experts(x) if is_k_first else experts(x, ids, torch.ones(E, 1))
        both = torch.einsum("ek,enk->en", x, experts.gate_up_proj.mT if is_k_first else experts.gate_up_proj)
        down = experts.down_proj.mT if is_k_first else experts.down_proj
        first, second = (torch.einsum("en,ehn->eh", F.silu(g) * u, down) for g, u in _orders(both))
    assert gate_before_up(experts) is True
    torch.testing.assert_close(got, first, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(got, second, rtol=1e-2)


def _orders(both: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(both[:, :INNER], both[:, INNER:]), (both[:, 0::2], both[:, 1::2])]


def test_a_class_of_that_name_elsewhere_says_nothing() -> None:
    assert gate_before_up(type("Llama4TextExperts", (torch.nn.Module,), {})()) is None


@pytest.mark.parametrize("scales", ["one", "pair"])
def test_llama_4_comes_back(scales: str, tmp_path: Path) -> None:
    made = write_stacked(tmp_path / "first", "llama4_text", k_first=True, scales=scales)
    model: Any = load(tmp_path / "first")
    assert_exact(model, made)
    model.save_pretrained(tmp_path / "second")
    assert_same_weights(model, load(tmp_path / "second"))
