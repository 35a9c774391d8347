"""Experts and weights from logits: the kernel in Triton's interpreter, on a GPU, and compiled for other devices.

The interpreter is chosen when Triton's decorators run, so its tests run in a process of their own, which
``test_in_the_interpreter`` starts on this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fp4_inductor.patterns.router_formulas import scores_of, weights_of
from interpreter import INTERPRETED, interpreted, run_in_interpreter, starts_the_interpreter

from fp4_inductor.spec import RUNTIME, RouterSpec, Scoring

triton = pytest.importorskip("triton", reason="triton is not installed")

from fp4_inductor.kernels import w4a16_routing  # noqa: E402
from fp4_inductor.kernels.w4a16 import Routes, route  # noqa: E402
from fp4_inductor.kernels.w4a16_config import configs  # noqa: E402
from fp4_inductor.kernels.w4a16_routing import Router, empty_routing, route_from_logits, topk  # noqa: E402
from fp4_inductor.kernels.w4a16_topk import topk_kernel  # noqa: E402

compiled = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

SOFTMAX = RouterSpec(Scoring.SOFTMAX)
LATE = RouterSpec(Scoring.SOFTMAX, topk_before_scoring=True)
BIASED = RouterSpec(Scoring.SIGMOID, has_bias=True, renormalize=True, renormalize_eps=1e-20, scaling_factor=2.5)
GROUPED = replace(BIASED, num_groups=4, topk_groups=2)
SPECS = {
    "softmax": SOFTMAX,
    "softmax_renorm": replace(SOFTMAX, renormalize=True),
    "softmax_bias": replace(SOFTMAX, has_bias=True, renormalize=True, renormalize_min=1e-12),
    "late": LATE,
    "late_scaled": replace(LATE, scaling_factor=0.5),
    "late_bias": replace(LATE, scoring=Scoring.SIGMOID, has_bias=True, renormalize=True),
    "sigmoid": RouterSpec(Scoring.SIGMOID, renormalize=True, renormalize_eps=1e-6),
    "sigmoid_bias": BIASED,
    "sqrt_softplus": replace(BIASED, scoring=Scoring.SQRT_SOFTPLUS),
    "groups": GROUPED,
    "groups_by_max": replace(
        SOFTMAX, num_groups=4, topk_groups=3, group_score="max", group_fill=0.0, scaling_factor=3.0
    ),
    "expert_scale": replace(SOFTMAX, renormalize=True, has_expert_scale=True),
    "runtime_scale": replace(BIASED, scaling_factor=RUNTIME),
}
CONFIG = configs(90)[0]
SIZES = [(1, 4, 2), (2, 8, 8), (7, 32, 4), (1, 60, 5), (2, 256, 8)]
"""Tokens, experts, top_k."""


@starts_the_interpreter
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """What is not written is NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def router_of(spec: RouterSpec, num_experts: int, top_k: int, device: str = "cpu", **kwargs: Any) -> Router:
    """``spec`` with random biases and scales."""
    rng = torch.Generator(device).manual_seed(num_experts)

    def vector() -> torch.Tensor:
        return torch.randn(num_experts, generator=rng, device=device) * 0.3

    return Router(
        spec,
        top_k,
        kwargs.get("weights_dtype", torch.float32),
        bias=vector() if spec.has_bias else None,
        scale=torch.full((1,), 1.7, device=device) if spec.scaling_factor is RUNTIME else None,
        expert_scale=vector() if spec.has_expert_scale else None,
    )


def random_logits(tokens: int, experts: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    rng = torch.Generator(device).manual_seed(seed)
    return (torch.randn(tokens, experts, generator=rng, device=device) * 2).to(dtype)


def expected(router: Router, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [T, k], of equals the lowest first, and weights [T, k], in float64."""
    spec = router.spec
    bias = None if router.bias is None else router.bias.double()
    scores, selection = scores_of(spec, logits.double(), bias)
    ids = selection.sort(dim=-1, descending=True, stable=True).indices[:, : router.top_k]
    factor = 1.7 if spec.scaling_factor is RUNTIME else spec.scaling_factor
    weights = weights_of(spec, scores, ids) * factor
    return ids, weights if router.expert_scale is None else weights * router.expert_scale.double()[ids]


def topk_and_sort(logits: torch.Tensor, router: Router) -> tuple[torch.Tensor, torch.Tensor, Routes | None]:
    ids, weights = empty_routing(logits, router)
    return ids, weights, route_from_logits(logits, router, ids, weights, CONFIG)


def check(router: Router, logits: torch.Tensor) -> None:
    ids, weights = topk(logits, router)
    want_ids, want = expected(router, logits)
    assert (ids.dtype, weights.dtype) == (torch.int32, router.weights_dtype)
    assert torch.equal(ids.long(), want_ids)
    rounding = torch.finfo(router.weights_dtype).eps / 2
    torch.testing.assert_close(weights.double(), want, rtol=rounding + 4e-6, atol=1e-12)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_every_router(name: str, dtype: torch.dtype) -> None:
    spec = SPECS[name]
    for tokens, experts, top_k in SIZES:
        if spec.num_groups == 1 or (experts % 8 == 0 and top_k < experts):
            check(router_of(spec, experts, top_k), random_logits(tokens, experts, dtype))


@interpreted
def test_sizes_that_are_no_powers_of_two() -> None:
    logits = random_logits(5, 60, torch.float16)
    check(router_of(replace(GROUPED, num_groups=6, topk_groups=3), 60, 7, weights_dtype=torch.bfloat16), logits)
    check(router_of(LATE, 6, 6, weights_dtype=torch.float16), logits[:, :6])
    check(router_of(SOFTMAX, 1, 1), logits[:, :1])


@interpreted
def test_several_tokens_for_each_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(w4a16_routing, "_ALONE", 4)
    check(router_of(SOFTMAX, 6, 2), random_logits(11, 6, torch.bfloat16))


@interpreted
def test_no_tokens() -> None:
    router = router_of(SOFTMAX, 8, 2)
    assert [tuple(part.shape) for part in topk(torch.zeros(0, 8), router)] == [(0, 2), (0, 2)]
    ids, weights, routes = topk_and_sort(torch.zeros(0, 8), router)
    assert (ids.shape, weights.shape, routes) == ((0, 2), (0, 2), None)


@interpreted
@pytest.mark.parametrize("name", ["softmax", "late", "sigmoid", "groups"])
def test_the_lowest_index_wins_a_tie(name: str) -> None:
    """Half the experts share a score, and both zeros are one number."""
    for dtype in (torch.float32, torch.bfloat16):
        logits = random_logits(4, 16, dtype).round()
        logits[1] = 0.0
        logits[2, ::3] = -0.0
        router = replace(router_of(SPECS[name], 16, 5), bias=torch.zeros(16) if SPECS[name].has_bias else None)
        ids, _ = topk(logits, router)
        if name == "groups":  # and of equal groups the first
            assert ids[1].tolist() == [0, 1, 2, 3, 4]
        else:
            assert torch.equal(ids.long(), expected(router, logits)[0])


@interpreted
@pytest.mark.parametrize("name", SPECS)
def test_values_that_are_not_finite(name: str) -> None:
    """Ids stay distinct experts; weights are what torch makes of such logits."""
    inf, nan = float("inf"), float("nan")
    logits = random_logits(6, 8, torch.float32)
    logits[0, 3] = nan
    logits[1] = nan
    logits[2, 5] = inf
    logits[3, :6] = -inf
    logits[4] = -inf
    logits[5, 0] = -nan
    router = router_of(SPECS[name], 8, 3)
    ids, weights = topk(logits, router)
    assert (ids.sort(-1).values.diff(dim=-1) > 0).all()
    assert int(ids.min()) >= 0
    assert int(ids.max()) < 8
    scores, _ = scores_of(router.spec, logits, router.bias)
    want = weights_of(router.spec, scores, ids.long())
    assert torch.equal(weights.isnan(), want.isnan())
    if router.spec.num_groups == 1 and name != "softmax_bias":  # where one NaN does not make every score NaN
        assert 3 in ids[0]


@interpreted
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(1, 8, 2), (3, 60, 5), (16, 128, 8), (64, 32, 2), (100, 8, 1), (37, 32, 4), (34, 16, 8), (70, 8, 2)],
)
def test_pairs_are_sorted_as_they_are_alone(tokens: int, experts: int, top_k: int) -> None:
    logits = random_logits(tokens, experts, torch.bfloat16)
    router = router_of(SOFTMAX, experts, top_k)
    ids, weights, routes = topk_and_sort(logits, router)
    alone = topk(logits, router)
    assert torch.equal(ids, alone[0])
    assert torch.equal(weights, alone[1])
    assert routes is not None
    want = route(ids, experts, CONFIG.block_m)
    tiles = int(want.num_tiles[0])
    assert (routes.num_pairs, routes.max_tiles, int(routes.num_tiles[0])) == (want.num_pairs, want.max_tiles, tiles)
    assert torch.equal(routes.order[: ids.numel()], want.order[: ids.numel()])
    assert torch.equal(routes.tile_expert[:tiles], want.tile_expert[:tiles])
    assert torch.equal(routes.tile_row[:tiles], want.tile_row[:tiles])
    assert torch.equal(routes.expert_end, want.expert_end)
    assert torch.equal(routes.arrivals, want.arrivals)


@interpreted
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(44, 8, 3), (5, 2100, 1), (9, 2100, 16)])
def test_what_fits_no_program_is_sorted_apart(tokens: int, experts: int, top_k: int) -> None:
    logits, router = random_logits(tokens, experts, torch.float32), router_of(LATE, experts, top_k)
    ids, _, routes = topk_and_sort(logits, router)
    assert torch.equal(ids.long(), expected(router, logits)[0])
    assert routes is None


@compiled
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_every_router_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    spec = SPECS[name]
    for tokens, experts, top_k in [*SIZES, (17, 128, 8), (130, 6, 6), (4097, 128, 8), (333, 512, 10), (65, 160, 6)]:
        if spec.num_groups > 1 and (experts % 8 or top_k == experts):
            continue
        router = router_of(spec, experts, top_k, "cuda")
        logits = random_logits(tokens, experts, dtype, "cuda")
        ids, weights, _ = topk_and_sort(logits, router)
        want_ids, want = expected(router, logits)
        # Scores that differ by a rounding may change places.
        assert (ids != want_ids).any(-1).float().mean() < (0.01 if tokens > 100 else 1e-9)
        same = (ids == want_ids).all(-1)
        torch.testing.assert_close(weights.double()[same], want[same], rtol=1e-5, atol=1e-7)


@compiled
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(
    ("name", "experts", "top_k", "dtype", "tokens", "more"),
    [
        ("late", 32, 4, "bf16", 1, "sort"),
        ("softmax_renorm", 128, 8, "bf16", 16, "count"),
        ("groups", 256, 8, "fp32", 4, ""),
        ("sqrt_softplus", 60, 6, "fp16", 64, "sort"),
    ],
)
def test_compiles(
    arch: int,
    name: str,
    experts: int,
    top_k: int,
    dtype: str,
    tokens: int,
    more: str,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    spec = SPECS[name]
    constants: dict[str, object] = {
        "NUM_EXPERTS": experts,
        "TOP_K": top_k,
        "SCORING": str(spec.scoring),
        "LATE": spec.topk_before_scoring,
        "NUM_GROUPS": spec.num_groups,
        "TOPK_GROUPS": spec.topk_groups,
        "TOP2": spec.group_score == "top2_sum",
        "RENORMALIZE": spec.renormalize,
        "HAS_BIAS": spec.has_bias,
        "HAS_SCALE": spec.scaling_factor is RUNTIME,
        "HAS_EXPERT_SCALE": spec.has_expert_scale,
        "TOKENS": tokens,
        "GROUPS": triton.next_power_of_2(spec.num_groups),
        "SIZE": triton.next_power_of_2(experts // spec.num_groups),
        "SLOTS": triton.next_power_of_2(top_k),
        "COUNT": more == "count",
        "SORT": more == "sort",
        "CHUNK": 128,
        "BINS": triton.next_power_of_2(experts + 2),
        "BLOCK_M": 16,
        "ARRIVALS": 1024,
        "INTERPRETED": False,
        "PDL": arch == 90,
    }
    types = {"logits": f"*{dtype}", "topk_weights": "*bf16", "num_tokens": "i32"}
    types |= dict.fromkeys(("bias", "scale", "expert_scale"), "*fp32")
    types |= dict.fromkeys(("group_fill", "renormalize_min", "renormalize_eps", "factor"), "fp32")
    names = topk_kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "*i32") for n in names}
    source = ASTSource(topk_kernel, signature, constants)
    built = triton.compile(source, GPUTarget("cuda", arch, 32), {"num_warps": min(tokens, 8)})
    assert built.metadata.shared <= 48 * 1024
    assert "redux.sync" in built.asm["ptx"], "the best of a row must reduce in one instruction"
