"""Every model family of transformers, in both forms: what is recognised, and its numbers, as MODELS.md says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family_models import DECORATOR, FAMILIES, missing
from family_runs import FORMS, run_family
from family_table import Outcome, is_worse, outcomes, read, render, version
from tolerances import assert_close_per_token

transformers = pytest.importorskip("transformers")

TABLE = read()
SAME_RELEASE = transformers.__version__ == version()
"""Other releases write experts otherwise: there a family may not fall behind the table, but it may differ."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_is_recognised_and_lowered_to_the_right_numbers(family: str, form: str) -> None:
    if reason := missing(family):
        pytest.skip(reason)
    run = run_family(family, form)
    assert run.num_graphs == 1
    for block in run.blocks:
        assert_close_per_token(block.fused, block.reference, torch.bfloat16)
        assert error(block.fused, block.reference) <= 1.25 * error(block.as_written, block.reference)
    tokens = token_errors(run.lowered, run.eager)
    tied = torch.stack([torch.zeros(len(tokens), dtype=torch.bool), *(block.tied for block in run.blocks)]).any(0)
    assert error(run.lowered[~tied], run.eager[~tied]) < 3e-2, "a token goes elsewhere, and not for rounding"
    assert float(tokens.median()) < 2e-2
    got, recorded = outcomes(run), TABLE[family, form]
    assert not is_worse(got, recorded), f"worse than MODELS.md says: {got}"
    if SAME_RELEASE:
        assert got == recorded, "MODELS.md is behind: regenerate the table with `make models`"


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def token_errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    return (got.double() - want).norm(dim=-1).flatten() / want.norm(dim=-1).flatten()


def test_every_family_of_this_release_is_in_the_table() -> None:
    root = Path(transformers.__file__).parent / "models"
    uses = {path.parent.name for path in root.glob("*/modeling_*.py") if DECORATOR in path.read_text()}
    assert uses <= set(FAMILIES)
    assert {family for family, _ in TABLE} == set(FAMILIES)


def test_the_page_is_what_its_table_renders_to() -> None:
    if not SAME_RELEASE:
        pytest.skip(f"MODELS.md speaks of transformers {version()}, not {transformers.__version__}")
    from family_table import PATH

    assert render(TABLE) == PATH.read_text()


def test_worse_and_better() -> None:
    full = Outcome("full", "softmax→topk", "swiglu", "gate_up")
    experts = Outcome("experts", "given", "swiglu", "gate_up")
    refused = Outcome("refused", reason="why")
    assert is_worse((experts,), (full,))
    assert is_worse((refused,), (experts,))
    assert is_worse((full,), (full, full))
    assert is_worse((Outcome("full", "softmax→topk", "geglu", "gate_up"),), (full,))
    assert is_worse((Outcome("full", "sigmoid→topk", "swiglu", "gate_up"),), (full,))
    assert not is_worse((full,), (experts,))
    assert not is_worse((experts,), (refused,))
