"""Ratios, means and files, from numbers that are given: each is worked out again here."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from fp4_inductor.__main__ import main
from fp4_inductor.bench import plot, table
from fp4_inductor.bench.machine import Clock
from fp4_inductor.bench.results import Column, Results, Row, Timing, read_json, write_csv, write_json
from fp4_inductor.errors import InvalidOptionError

OURS, OURS_NV = Column("triton_w4a16", "mxfp4", ours=True), Column("triton_w4a16", "nvfp4", ours=True)
TK, MARLIN = Column("triton_kernels", "mxfp4", ours=False), Column("marlin", "mxfp4", ours=False)
MARLIN_NV, BF16 = Column("marlin", "nvfp4", ours=False), Column("grouped_mm", "bf16", ours=False)


def row(tokens: int, floors: dict[str, float], clock: Clock | None = None, **us: float) -> Row:
    labels = {
        "ours": OURS, "ours_nv": OURS_NV, "tk": TK, "marlin": MARLIN, "marlin_nv": MARLIN_NV, "bf16": BF16,
    }  # fmt: skip
    timings = {labels[name].label: Timing(value, clock) for name, value in us.items()}
    return Row("gpt-oss-20b", (32, 4, 2880, 2880), tokens, floors, timings)


@pytest.fixture
def results() -> Results:
    first = row(
        1, {"mxfp4": 10.0, "nvfp4": 11.0}, Clock(1900, 1980), ours=40.0, ours_nv=44.0, tk=60.0, marlin=50.0,
        marlin_nv=55.0, bf16=150.0,
    )  # fmt: skip
    second = row(
        4096, {"mxfp4": 1000.0, "nvfp4": 1000.0}, Clock(1500, 1700), ours=2000.0, ours_nv=2500.0, tk=1600.0,
        marlin_nv=4000.0, bf16=2250.0,
    )  # fmt: skip
    columns = (OURS, OURS_NV, TK, MARLIN, MARLIN_NV, BF16)
    environment = {"device": "NVIDIA H200 (sm_90)", "driver": "580.1"}
    return Results(environment, columns, [first, second], ["flashinfer: not installed"])


def test_ratios(results: Results) -> None:
    first, second = results.rows
    assert results.over_floor(first, OURS) == 4.0
    assert results.over_floor(first, OURS_NV) == 4.0
    assert results.over_floor(second, OURS_NV) == 2.5
    assert results.best_peer(first, OURS) == MARLIN
    assert results.ahead(first, OURS) == 50 / 40
    assert results.best_peer(second, OURS) == TK
    assert results.ahead(second, OURS) == 0.8
    assert results.best_peer(first, OURS_NV) == MARLIN_NV
    assert results.best_peer(second, OURS_NV) == BF16, "unquantised weights count against every format"
    assert results.ahead(second, OURS_NV) == 0.9
    assert results.opponent(MARLIN_NV) == OURS_NV
    assert results.opponent(BF16) == OURS
    assert results.over(first, MARLIN_NV, results.opponent(MARLIN_NV)) == 55 / 44
    assert results.clocks() == Clock(1500, 1980), "six timings at 1980, five at 1700"


def test_what_was_not_measured_has_no_ratio() -> None:
    alone = Results({}, (OURS,), [row(1, {}, ours=2.0), row(2, {"mxfp4": 1.0})])
    without_floor, without_time = alone.rows
    assert alone.over_floor(without_floor, OURS) is None
    assert alone.best_peer(without_floor, OURS) is None
    assert alone.ahead(without_floor, OURS) is None
    assert alone.over_floor(without_time, OURS) is None
    assert alone.clocks() is None


def test_the_table(results: Results) -> None:
    head = table.header(results).splitlines()
    assert head[0] == "device NVIDIA H200 (sm_90), driver 580.1"
    assert head[-1].split() == [
        "shape", "tokens", "mxfp4", "nvfp4", "mxfp4", "/floor", "peer/it", "nvfp4", "/floor", "peer/it",
        "mxfp4", "/ours", "mxfp4", "/ours", "nvfp4", "/ours", "bf16", "/ours", "SM", "MHz",
    ]  # fmt: skip
    first, second = (table.line(results, row) for row in results.rows)
    assert first.split() == [
        "gpt-oss-20b", "1", "10.0", "11.0", "40.0", "4.00", "1.25", "44.0", "4.00", "1.25", "60.0", "1.50", "50.0",
        "1.25", "55.0", "1.25", "150.0", "3.75", "1900/1980",
    ]  # fmt: skip
    assert second.split() == [
        "gpt-oss-20b", "4096", "1000", "1000", "2000", "2.00", "0.80", "2500", "2.50", "0.90", "1600", "0.80", "-",
        "-", "4000", "1.60", "2250", "1.12", "1500/1700",
    ]  # fmt: skip
    assert len(first) == len(second) == len(head[-1]) == len(head[-2]) + 12


def test_the_summary(results: Results) -> None:
    ours, ours_nv = OURS.label, OURS_NV.label
    early, late = "at gpt-oss-20b T=1", "at gpt-oss-20b T=4096"
    assert table.summary(results).splitlines() == [
        "geometric means over 2 rows",
        f"  {ours} / floor: {math.sqrt(4 * 2):.3f}, worst 4.000 {early}",
        f"  best peer / {ours}: {math.sqrt(1.25 * 0.8):.3f}, worst 0.800 {late}, below 1 at 1",
        f"  triton_kernels/mxfp4 / {ours}: {math.sqrt(1.5 * 0.8):.3f}, worst 0.800 {late}, below 1 at 1",
        f"  marlin/mxfp4 / {ours}: 1.250, worst 1.250 {early}, below 1 at 0 (of 1 rows)",
        f"  grouped_mm/bf16 / {ours}: {math.sqrt(3.75 * 1.125):.3f}, worst 1.125 {late}, below 1 at 0",
        f"  {ours_nv} / floor: {math.sqrt(4 * 2.5):.3f}, worst 4.000 {early}",
        f"  {ours_nv} / {ours}: {math.sqrt(1.1 * 1.25):.3f}, worst 1.250 {late}",
        f"  best peer / {ours_nv}: {math.sqrt(1.25 * 0.9):.3f}, worst 0.900 {late}, below 1 at 1",
        f"  marlin/nvfp4 / {ours_nv}: {math.sqrt(1.25 * 1.6):.3f}, worst 1.250 {early}, below 1 at 0",
        "SM clock while timing: 1980 MHz median, 1500 MHz least",
        "flashinfer: not installed",
    ]


def test_csv(results: Results, tmp_path: Path) -> None:
    write_csv(results, tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["shape"], first["num_experts"], first["top_k"], first["tokens"]) == ("gpt-oss-20b", "32", "4", "1")
    assert (first["hidden_size"], first["intermediate_size"]) == ("2880", "2880")
    assert float(second["floor/mxfp4_us"]) == 1000.0
    assert float(second["triton_w4a16/mxfp4_us"]) == 2000.0
    assert float(second["triton_w4a16/mxfp4_mhz"]) == 1700
    assert float(second["triton_w4a16/mxfp4_over_floor"]) == 2.0
    assert second["triton_w4a16/mxfp4_best_peer"] == "triton_kernels/mxfp4"
    assert float(second["triton_w4a16/mxfp4_ahead"]) == 0.8
    assert float(second["marlin/nvfp4_over_ours"]) == 1.6
    assert second["marlin/mxfp4_us"] == second["marlin/mxfp4_over_ours"] == ""


def test_json_keeps_everything(results: Results, tmp_path: Path) -> None:
    write_json(results, tmp_path / "out.json")
    assert read_json(tmp_path / "out.json") == results


def test_from_json_shows_it_again(results: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(results, tmp_path / "out.json")
    main(["bench", "--from-json", str(tmp_path / "out.json"), "--csv", str(tmp_path / "out.csv")])
    shown = capsys.readouterr().out
    for text in (table.header(results), table.line(results, results.rows[1]), table.summary(results)):
        assert text in shown
    assert (tmp_path / "out.csv").read_text().startswith("shape,num_experts,")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{}], "columns": [], "environment": {}, "notes": []}'])
def test_a_file_of_another_kind(text: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(InvalidOptionError, match=r"needed a file that --json wrote"):
        read_json(tmp_path / "other.json")


def test_plot(results: Results, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install fp4_inductor[bench]")
    plot.require_matplotlib()
    plot.draw(results, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_plot_draws_the_numbers(results: Results) -> None:
    """On a stand-in for a panel, so that it needs no matplotlib."""

    class Panel:
        def __init__(self) -> None:
            self.lines: dict[str, list[tuple[float, ...]]] = {}
            self.settings: dict[str, object] = {}

        def plot(self, *xy: tuple[float, ...], label: str, **style: object) -> None:
            self.lines[label] = list(xy)

        def set(self, **settings: object) -> None:
            self.settings = settings

        def grid(self, **style: object) -> None:
            pass

    panel = Panel()
    plot._panel(panel, results, "gpt-oss-20b")
    assert panel.lines == {
        OURS.label: [(1, 4096), (40.0, 2000.0)],
        OURS_NV.label: [(1, 4096), (44.0, 2500.0)],
        TK.label: [(1, 4096), (60.0, 1600.0)],
        MARLIN.label: [(1,), (50.0,)],
        MARLIN_NV.label: [(1, 4096), (55.0, 4000.0)],
        BF16.label: [(1, 4096), (150.0, 2250.0)],
        "floor/mxfp4": [(1, 4096), (10.0, 1000.0)],
    }
    assert panel.settings["xscale"] == panel.settings["yscale"] == "log"
    assert panel.settings["title"] == "gpt-oss-20b"
