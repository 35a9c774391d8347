"""``python -m fp4_inductor bench`` on a CPU, as a user calls it."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fp4_inductor.__main__ import main
from fp4_inductor.bench import command

TINY = ["bench", "--device", "cpu", "--shapes", "4x2x64x64,6x3x64x96", "--tokens", "4,1", "--formats", "mxfp4,nvfp4"]


def test_a_run_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, data = tmp_path / "out.csv", tmp_path / "out.json"
    main([*TINY, "--bandwidth", "0.01", "--tflops", "0.1", "--csv", str(table), "--json", str(data)])
    shown, progress = capsys.readouterr()
    found = json.loads(data.read_text())
    assert [(row["shape"], row["sizes"], row["tokens"]) for row in found["rows"]] == [
        ("4x2x64x64", [4, 2, 64, 64], 1),
        ("4x2x64x64", [4, 2, 64, 64], 4),
        ("6x3x64x96", [6, 3, 64, 96], 1),
        ("6x3x64x96", [6, 3, 64, 96], 4),
    ]
    weights = 6 * 3 * 64 * 96 * (1 - 0.5**4)  # expected of six experts, four tokens with three each
    assert found["rows"][3]["floors"] == pytest.approx(
        {"mxfp4": weights * 4.25 / 8 / 1e4, "nvfp4": weights * 4.5 / 8 / 1e4}
    )
    assert found["environment"]["torch"] == torch.__version__
    assert found["environment"]["floor by"] == "0.01 TB/s and 0.1 TFLOP/s"
    with table.open(newline="") as file:
        lines = list(csv.DictReader(file))
    for line, row in zip(lines, found["rows"], strict=True):
        for fmt in ("mxfp4", "nvfp4"):
            us = row["timings"][f"cpu/{fmt}"]["us"]
            assert us > 0
            assert float(line[f"cpu/{fmt}_us"]) == us
            assert float(line[f"cpu/{fmt}_over_floor"]) == pytest.approx(us / row["floors"][fmt])
            assert line[f"cpu/{fmt}_ahead"] == line[f"cpu/{fmt}_mhz"] == ""
    ratios = [row["timings"]["cpu/mxfp4"]["us"] / row["floors"]["mxfp4"] for row in found["rows"]]
    assert f"cpu/mxfp4 / floor: {math.prod(ratios) ** 0.25:.3f}, worst {max(ratios):.3f} at" in shown
    assert "SM clock while timing: not read" in shown
    assert [text.split()[:2] for text in progress.splitlines()] == [
        [shape, f"cpu/{fmt}:"] for shape in ("4x2x64x64", "6x3x64x96") for fmt in ("mxfp4", "nvfp4")
    ]


def test_without_rates_a_cpu_has_the_floor_of_reading(capsys: pytest.CaptureFixture[str]) -> None:
    main(["bench", "--device", "cpu", "--shapes", "4x2x64x64", "--tokens", "2", "--backends", "reference"])
    shown = capsys.readouterr().out
    assert "floor by reading the routed bytes" in shown
    assert "/floor" in shown


def test_it_is_a_program() -> None:
    line = [sys.executable, "-m", "fp4_inductor", *TINY[:4], "4x2x64x64", "--tokens", "1"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert "geometric means over 1 rows" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shapes", "gpt-oss-21b"], "did you mean 'gpt-oss-20b'?"),
        (["--backends", "gpu"], "choosing a kernel backend: needed one of cpu, cpu_aten, "),
        (["--backends", "triton_w4a16"], "CAPABILITY: needs one of sm_80"),
        (["--formats", "fp4"], "choosing a weight format: needed one of mxfp4, nvfp4, got 'fp4'"),
        (["--tokens", "1,0"], "reading --tokens: needed positive numbers with commas between, got 1,0"),
        (["--peers", "marlin"], "reading --peers: needed one of ggml, ggml_repack, got 'marlin'"),
        (["--device", "tpu"], "reading --device: needed one of cpu"),
        (["--csv", "no/such/folder/out.csv"], "choosing where to write: needed a folder that exists"),
        (["--from-json", "missing.json"], "reading --from-json: needed a file that --json wrote"),
    ],
)
def test_what_cannot_be_done_is_said_without_a_traceback(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*TINY, *words])
    assert stopped.value.code == 2
    shown, error = capsys.readouterr()
    assert said in error
    assert "Traceback" not in error
    assert not shown, "nothing is measured before it is refused"


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main(["bench"])
    assert "needed a CUDA device, got none.\n  What now: try --device cpu" in capsys.readouterr().err


def test_a_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    with pytest.raises(SystemExit):
        main([*TINY, "--plot", "out.png"])
    shown, error = capsys.readouterr()
    assert "drawing --plot: needed matplotlib" in error
    assert "pip install fp4_inductor[bench]" in error
    assert not shown


def test_unknown_peers_are_refused_before_any_is_asked() -> None:
    with pytest.raises(ValueError, match=r"reading --peers: needed one of flashinfer, grouped_mm, marlin.*'marlyn'"):
        command._peers("grouped_mm,marlyn", torch.device("cuda"))
    assert [peer.name for peer in command._peers("marlin,grouped_mm", torch.device("cuda"))] == ["marlin", "grouped_mm"]
    assert command._peers(None, torch.device("cuda")) == ()


def test_a_run_cut_short_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timed = command.measure.__globals__["wall_clock_us"]
    calls = 0

    def cut_short(contestants: object) -> list[float]:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise KeyboardInterrupt
        found: list[float] = timed(contestants)
        return found

    monkeypatch.setitem(command.measure.__globals__, "wall_clock_us", cut_short)
    data = tmp_path / "out.json"
    with pytest.raises(KeyboardInterrupt):
        main([*TINY, "--json", str(data)])
    found = json.loads(data.read_text())
    assert [sorted(row["timings"]) for row in found["rows"]] == [["cpu/mxfp4", "cpu/nvfp4"], []]
    assert "geometric means" in capsys.readouterr().out
