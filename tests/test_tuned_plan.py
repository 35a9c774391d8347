"""``tuned_plan``: from a backend's configurations and a timer to a table in the plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from moe_cases import SWIGLU

from fp4_inductor import tuned_plan
from fp4_inductor.autotune import CandidateFailedError, Choices
from fp4_inductor.backends import get_backend
from fp4_inductor.device import DeviceInfo
from fp4_inductor.formats import MXFP4, NVFP4
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
