"""``tuned_plan``: from a backend's configurations and a timer to a table in the plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from moe_cases import SWIGLU

from fp4_inductor import lowering_pass, tuned_plan
from fp4_inductor.autotune import CandidateFailedError, Choices
from fp4_inductor.backends import get_backend
from fp4_inductor.device import DeviceInfo
from fp4_inductor.formats import MXFP4, NVFP4
from fp4_inductor.kernels.w4a16_config import choose_config
from fp4_inductor.kernels.w4a16_tuning import PARTS, choose_tuned, read_config
from fp4_inductor.options import Options
from fp4_inductor.plan import KernelPlan
from fp4_inductor.select import select
from fp4_inductor.spec import MoESpec, RouterSpec, Scoring, TokenRange
from fp4_inductor.tuned_plan import TunableBackend, token_counts, tuned, tuned_table

SPEC = MoESpec(8, 2, 128, 64, MXFP4, SWIGLU)
H200 = DeviceInfo("cuda", (9, 0), "NVIDIA H200", 132, 227 * 1024, (("triton", "3.6.0"),))


class Toy:
    """A backend whose configurations are two digits; its own table says 11 for whatever comes."""

    name = "toy"
    tuned_parts = ("first", "second")

    def plan(self, spec: MoESpec, device: DeviceInfo, table: str = "") -> KernelPlan:
        return KernelPlan("toy::op", (table,))

    def config(self, spec: MoESpec, device: DeviceInfo, num_tokens: int) -> str:
        return "11"

    def variants(self, config: str, part: str, device: DeviceInfo) -> tuple[str, ...]:
        near = [f"{d}{config[1]}" if part == "first" else f"{config[0]}{d}" for d in range(1, 6)]
        return (config, *(other for other in near if other != config))

    def table(self, rows: Sequence[tuple[int | None, str]]) -> str:
        return " ".join(f"{limit}:{config}" for limit, config in rows)


class Stopwatch:
    """Fastest where the digits are those of ``best``; 5 never runs."""

    def __init__(self, best: dict[int, str]) -> None:
        self.best = best
        self.asked = 0

    def __call__(self, config: str, num_tokens: int) -> float:
        self.asked += 1
        if "5" in config:
            raise CandidateFailedError("out of registers")
        best = max((limit, digits) for limit, digits in self.best.items() if limit <= num_tokens)[1]
        return 1.0 + sum(abs(int(a) - int(b)) for a, b in zip(config, best, strict=True))


def test_each_part_is_tuned_from_the_best_of_the_last(tmp_path: Path) -> None:
    assert isinstance(Toy(), TunableBackend)
    watch = Stopwatch({0: "42", 64: "11", 1024: "33"})
    table = tuned_table(Toy(), SPEC, H200, Choices(tmp_path), watch)
    assert table == "32:42 512:11 None:33"
    assert watch.asked == len(token_counts(SPEC.num_tokens)) * 10


def test_nothing_is_timed_twice(tmp_path: Path) -> None:
    first, second = Stopwatch({0: "42"}), Stopwatch({0: "11"})
    table = tuned_table(Toy(), SPEC, H200, Choices(tmp_path), first)
    static = dataclasses.replace(SPEC, num_tokens=TokenRange(16, 16))
    routed = dataclasses.replace(SPEC, router=RouterSpec(Scoring.SOFTMAX))
    for spec in (SPEC, static, routed):
        assert tuned_table(Toy(), spec, H200, Choices(tmp_path), second) == table
    assert second.asked == 0


@pytest.mark.parametrize(
    "change",
    [
        {"spec": dataclasses.replace(SPEC, hidden_size=256)},
        {"spec": dataclasses.replace(SPEC, weight_format=NVFP4)},
        {"spec": dataclasses.replace(SPEC, act_dtype=torch.float16)},
        {"spec": dataclasses.replace(SPEC, weights_dtype=torch.bfloat16)},
        {"spec": dataclasses.replace(SPEC, has_w2_bias=True)},
        {"device": dataclasses.replace(H200, name="NVIDIA H100")},
        {"device": dataclasses.replace(H200, sm_count=114)},
        {"device": dataclasses.replace(H200, libraries=(("triton", "3.7.0"),))},
    ],
    ids=str,
)
def test_another_layer_device_or_library_is_timed_anew(tmp_path: Path, change: dict[str, object]) -> None:
    tuned_table(Toy(), SPEC, H200, Choices(tmp_path), Stopwatch({0: "42"}))
    watch = Stopwatch({0: "33"})
    given = {"spec": SPEC, "device": H200, **change}
    assert tuned_table(Toy(), choices=Choices(tmp_path), timer=watch, **given) == "None:33"  # type: ignore[arg-type]
    assert watch.asked


def test_other_sources_are_timed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned_table(Toy(), SPEC, H200, Choices(tmp_path), Stopwatch({0: "42"}))
    monkeypatch.setattr(tuned_plan, "_source_hash", lambda: "changed")
    assert tuned_table(Toy(), SPEC, H200, Choices(tmp_path), Stopwatch({0: "33"})) == "None:33"


@pytest.mark.parametrize(
    ("tokens", "counts"),
    [
        (TokenRange(0, None), (1, 4, 16, 64, 256, 1024, 4096, 16384)),
        (TokenRange(2, None), (1, 4, 16, 64, 256, 1024, 4096, 16384)),
        (TokenRange(7, 7), (7,)),
        (TokenRange(0, 0), (1,)),
        (TokenRange(9, 100), (16, 64)),
        (TokenRange(40000, 50000), (40000,)),
        (TokenRange(40000, None), (40000,)),
    ],
    ids=str,
)
def test_counts_that_are_timed(tokens: TokenRange, counts: tuple[int, ...]) -> None:
    assert token_counts(tokens) == counts


def test_every_count_of_a_range_has_a_row_near_it() -> None:
    counts = token_counts(TokenRange(0, None))
    for tokens in range(1, 2 * counts[-1]):
        row = next(count for count in counts if tokens <= 2 * count)
        assert row <= 2 * tokens


@pytest.mark.parametrize("device", ["cpu", "sm_90"])
def test_a_backend_or_device_that_cannot_be_timed_keeps_its_plan(device: str) -> None:
    """A CPU's backend has one configuration; another machine's GPU cannot be asked."""
    selection = select(SPEC, DeviceInfo.parse(device), Options())
    assert tuned(selection) is selection
    nobody = dataclasses.replace(selection, chosen=None, plan=None)
    assert tuned(nobody) is nobody
    assert not isinstance(get_backend("cpu"), TunableBackend)


def favour_wide_stages(config: str, num_tokens: int) -> float:
    """A timer that likes stages in small calls and tiles in large ones."""
    found = read_config(config)
    return 1 / (found.gate_up.num_stages + found.down.num_stages if num_tokens < 100 else found.block_m)


@pytest.fixture
def present(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> DeviceInfo:
    """An H200 that is here, and a timer for it."""

    @contextmanager
    def timer(*_: object) -> Iterator[object]:
        yield favour_wide_stages

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(DeviceInfo, "current", lambda _: H200)
    monkeypatch.setattr(tuned_plan, "_device_timer", timer)
    monkeypatch.setattr(tuned_plan, "kept_choices", lambda: Choices(tmp_path))
    return H200


def table_of(plan: KernelPlan | None) -> str:
    assert plan is not None
    *_, table, _ = plan.args
    assert isinstance(table, str)
    return table


def test_the_choice_stands_in_the_plan(present: DeviceInfo) -> None:
    selection = select(SPEC, present, Options(backend="triton_w4a16"))
    assert table_of(selection.plan) == ""
    table = table_of(tuned(selection).plan)
    small, large = (choose_tuned(table, count) for count in (1, 16384))
    own = choose_config(90, 2 * SPEC.top_k, SPEC.num_experts, (SPEC.hidden_size, SPEC.intermediate_size), e4m3=False)
    assert small.gate_up.num_stages == small.down.num_stages == 6
    assert small.block_m == own.block_m
    assert large.block_m > own.block_m
    assert {"gate_up", "down"} <= set(PARTS)
    assert len(table) < 1000


def test_plans_without_and_with_a_table_prepare_the_same_weights(present: DeviceInfo) -> None:
    selection = select(SPEC, present, Options(backend="triton_w4a16"))
    assert selection.plan is not None
    plan = tuned(selection).plan
    assert plan is not None
    assert plan.prepared == selection.plan.prepared
    assert [a for a, b in zip(plan.args, selection.plan.args, strict=True) if a != b] == [table_of(plan)]


@pytest.mark.parametrize("autotune", [False, True])
def test_the_option_decides(present: DeviceInfo, autotune: bool) -> None:
    operand = SimpleNamespace(meta={"val": torch.empty(1)})
    match = SimpleNamespace(spec=SPEC, where="here", node=lambda _: operand)
    options = Options(autotune=autotune)
    selection = lowering_pass._select(match, options=options, device=None, try_kernels=False)  # type: ignore[arg-type]
    assert selection.chosen == "triton_w4a16"
    assert bool(table_of(selection.plan)) == autotune


def test_the_option_is_part_of_the_compile_caches_key() -> None:
    from fp4_inductor.post_grad_pass import cache_key

    assert cache_key(Options(autotune=True)) != cache_key(Options())
