"""Hundreds of mutants of matched graphs: each is refused with a reason and a place, or read as what it now is.

A seeded sample runs by default. ``FP4_INDUCTOR_MUTANTS=all`` tries every mutation of every case, which takes
hours; ``FP4_INDUCTOR_MUTANTS=300`` tries as many of each.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from capture import capture
from fp4_inductor.patterns.rows import RowOrder
from mutations import Mutation
from suite import Case, Subject, Verdict, sample

from fp4_inductor.matching import Recognition

sys.path.insert(0, str(Path(__file__).parents[1] / "patterns"))

import branch_spellings
import loop_spellings
from branch_spellings import BranchMoE
from loop_spellings import LoopMoE

pytest.importorskip("transformers", reason="needs transformers' models")

MUTANTS = os.environ.get("FP4_INDUCTOR_MUTANTS", "48")
"""How many mutants of each case are tried, or "all"."""

CASES = (
    Case("mixtral", "grouped_mm"),
    Case("mixtral", "batched_mm", "nvfp4"),
    Case("qwen3_moe", "grouped_mm", "nvfp4", dynamic=True),
    Case("qwen3_moe", "batched_mm", dynamic=True),
    Case("gpt_oss", "grouped_mm"),
    Case("gpt_oss", "batched_mm", "nvfp4"),
    Case("gpt_oss", "grouped_mm", dynamic=True),
    Case("deepseek_v3", "grouped_mm", "nvfp4"),
    Case("deepseek_v3", "batched_mm"),
    Case("olmoe", "grouped_mm", layers=2),
)


@pytest.mark.parametrize(("seed", "case"), list(enumerate(CASES)), ids=str)
def test_no_mutant_is_read_wrongly(seed: int, case: Case) -> None:
    subject = Subject.of(case)
    chosen = subject.mutations if MUTANTS == "all" else sample(subject.mutations, int(MUTANTS), seed)
    verdicts = [subject.judge(mutation) for mutation in chosen]
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    problems = [str(verdict) for verdict in verdicts if verdict.problem]
    assert not problems, f"{outcomes}\n" + "\n".join(problems)
    assert outcomes["refused"] >= len(verdicts) / 5, f"these mutations change too little: {outcomes}"


OWN = {
    "all experts": lambda: BranchMoE(branch_spellings.gpt_oss),
    "all experts, one-hot": lambda: BranchMoE(branch_spellings.one_hot),
    "gathered": lambda: BranchMoE(branch_spellings.gpt_fast),
    "weights go in": lambda: BranchMoE(branch_spellings.gathered_weighted_before),
    "loop": lambda: LoopMoE(loop_spellings.where_index_add),
    "loop over all tokens": lambda: LoopMoE(loop_spellings.masked_sum, storage="own", apart=True),
}
"""Own model code in the forms that transformers does not write."""


@pytest.mark.parametrize(("seed", "name"), list(enumerate(OWN)))
def test_no_mutant_of_own_code_is_read_wrongly(seed: int, name: str) -> None:
    torch.manual_seed(seed)
    model = OWN[name]().eval().requires_grad_(False)
    hidden = torch.randn(14, loop_spellings.H).bfloat16()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        subject = Subject(capture(model, hidden, dynamic=isinstance(model, LoopMoE)))
    chosen = subject.mutations if MUTANTS == "all" else sample(subject.mutations, int(MUTANTS), seed)
    verdicts = [subject.judge(mutation) for mutation in chosen]
    problems = [str(verdict) for verdict in verdicts if verdict.problem]
    assert not problems, "\n".join(problems)


def test_the_suite_finds_a_recogniser_that_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that go to other tokens: each of the two readings guards alone, without both the suite tells."""
    subject = Subject.of(Case("mixtral", "grouped_mm"))
    chosen = _named(subject, "roll(0) behind aten.div.Tensor_mode", "flip(0) behind aten.index_put")
    assert len(chosen) == 2
    with monkeypatch.context() as patch:
        patch.setattr("fp4_inductor.patterns.search.prove", lambda *_: None)
        assert _wrong(subject, chosen) == []
    monkeypatch.setattr(RowOrder, "holds_tokens", lambda *_: True)
    monkeypatch.setattr(RowOrder, "restores_slots", lambda *_: True)
    assert _wrong(subject, chosen) == []
    monkeypatch.setattr("fp4_inductor.patterns.search.prove", lambda *_: None)
    assert len(_wrong(subject, chosen)) == 2


def test_the_suite_finds_weights_that_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject.of(Case("mixtral", "grouped_mm"))
    chosen = _named(subject, "4 becomes 5 in aten.__rshift__")
    assert _wrong(subject, chosen) == []
    monkeypatch.setattr("fp4_inductor.patterns.decoding._error", lambda *_: 0.0)
    assert _wrong(subject, chosen)


def test_the_suite_finds_a_wrong_spec() -> None:
    """A recogniser that forgets one field is told by the numbers of the unchanged graph."""
    subject = Subject.of(Case("gpt_oss", "grouped_mm"))
    (match,) = subject.matches
    for forgotten in ({"limit": None}, {"alpha": 1.7}, {"beta": 0.0}):
        activation = replace(match.spec.activation, **forgotten)
        wrong = replace(match, spec=replace(match.spec, activation=activation))
        assert subject.error(subject.gm, [wrong])


def test_the_suite_finds_a_refusal_without_a_reason() -> None:
    subject = Subject.of(Case("mixtral", "grouped_mm"))
    mutation = next(mutation for mutation in subject.mutations if mutation.detail.startswith("negated behind aten.mul"))
    assert subject.judge(mutation).problem == ""

    def silent(graph: object) -> Recognition:
        return Recognition((), ())

    assert "no near miss" in subject.judge(mutation, silent).problem


def _named(subject: Subject, *details: str) -> list[Mutation]:
    return [mutation for mutation in subject.mutations if mutation.detail.startswith(details)]


def _wrong(subject: Subject, chosen: list[Mutation]) -> list[Verdict]:
    return [verdict for verdict in map(subject.judge, chosen) if verdict.outcome == "wrong"]
