"""Mixtures of experts in random spellings: each is read as what it is, or refused with a reason and a place.

``FP4_INDUCTOR_SPELLINGS=500`` tries as many, other ones in every run, and prints how many of each form were read.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from capture import capture
from judge import REGIMES, TOLERANCE, draw, roles_of, worst_error
from spelled_moe import (
    ACTIVATIONS,
    COMBINES,
    DEQUANTISATIONS,
    EXPERTS,
    FORMS,
    HIDDEN,
    INNER,
    ORDERS,
    RENORMS,
    ROUTERS,
    SpelledMoE,
    Spelling,
)

from fp4_inductor.matching import Match, find_matches

pytest.importorskip("hypothesis", reason="needs hypothesis")

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

COUNT = os.environ.get("FP4_INDUCTOR_SPELLINGS", "")
"""How many spellings are tried by hand; empty: the same few in every run."""

SPELLINGS = st.builds(
    Spelling,
    form=st.sampled_from(FORMS),
    router=st.sampled_from(ROUTERS),
    renorm=st.sampled_from(RENORMS),
    activation=st.sampled_from(ACTIVATIONS),
    dequantisation=st.sampled_from(DEQUANTISATIONS),
    combine=st.sampled_from(COMBINES),
    order=st.sampled_from(ORDERS),
    fmt=st.sampled_from(("mxfp4", "nvfp4")),
    top_k=st.integers(1, 3),
    k_first=st.booleans(),
    bias=st.booleans(),
    weights_in_bf16=st.booleans(),
    weigh_first=st.booleans(),
    factor=st.sampled_from((1.0, 2.5)),
    batch=st.integers(1, 2),
    tokens=st.integers(3, 9),
    dynamic=st.booleans(),
)


@pytest.fixture(scope="module")
def tally() -> Iterator[Counter[tuple[str, str]]]:
    """What became of the spellings of each form."""
    counts: Counter[tuple[str, str]] = Counter()
    yield counts
    if COUNT:
        print("".join(f"\n{form:10} {what:8} {count}" for (form, what), count in sorted(counts.items())))


@settings(
    max_examples=int(COUNT or 20),
    derandomize=not COUNT,
    deadline=None,
    phases=[Phase.generate],  # a smaller example would tell no more, and takes minutes to find
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(spelling=SPELLINGS)
def test_a_random_spelling_is_read_as_it_is_or_refused(tally: Counter[tuple[str, str]], spelling: Spelling) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(spelling.batch, spelling.tokens, HIDDEN).bfloat16()
    gm = capture(SpelledMoE(spelling), hidden, dynamic=spelling.dynamic)
    found = find_matches(gm.graph)
    if not found.matches:
        tally[spelling.form, "refused"] += 1
        weights = 3 if spelling.order == "apart" else 2
        assert len(found.near_misses) == weights
        assert all(miss.reason and miss.packed_bytes for miss in found.near_misses)
        assert any(miss.where.file.endswith("spelled_moe.py") for miss in found.near_misses)
        if COUNT:
            print(f"\n{spelling}\n    {max(found.near_misses, key=lambda miss: miss.progress).reason}", flush=True)
        return
    (match,) = found.matches
    tally[spelling.form, match.grade] += 1
    check_spec(spelling, match)
    roles = roles_of(gm, found.matches)
    for seed, regime in enumerate(REGIMES):
        assert worst_error(gm, found.matches, draw(roles, regime, seed)) <= TOLERANCE, regime


def check_spec(spelling: Spelling, match: Match) -> None:
    spec = match.spec
    assert (spec.num_experts, spec.top_k) == (EXPERTS, spelling.top_k)
    assert (spec.hidden_size, spec.intermediate_size) == (HIDDEN, INNER)
    assert spec.weight_format.name == spelling.fmt
    assert spec.activation == spelling.activation_spec
    assert spec.w13_order in spelling.orders
    assert (spec.has_w13_bias, spec.has_w2_bias) == (spelling.bias, spelling.bias)
    assert spec.num_tokens.static != spelling.dynamic
