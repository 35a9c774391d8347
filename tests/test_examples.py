"""Every example runs to its end on this machine, with arguments small enough for a test."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from source_tree import ROOT

pytest.importorskip("transformers")

EXAMPLES = ROOT / "examples"


def load_example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import an example as a script would be: with its folder on the path."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_quickstart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    load_example("quickstart", monkeypatch).main(["--layers", "1", "--tokens", "3", "--device", "cpu"])
    out = capsys.readouterr().out
    assert "1 of 1 MoE blocks lowered" in out
    assert re.search(r"largest logit difference to eager +\d+\.\d\d%", out)


def test_load_gpt_oss(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    load_example("load_gpt_oss", monkeypatch).main(["--layers", "1", "--tokens", "1", "--device", "cpu"])
    out = capsys.readouterr().out
    assert "1 of 1 MoE blocks lowered" in out
    assert "tokens/s, compiled" in out


def test_inspect_with_depyf(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("depyf")
    arguments = ["--layers", "1", "--device", "cpu", "--folder", str(tmp_path / "dump")]
    load_example("inspect_with_depyf", monkeypatch).main(arguments)
    assert "fused calls" in capsys.readouterr().out
    graphs = [text for file in tmp_path.rglob("*.py") if "torch.ops.fp4_inductor" in (text := file.read_text())]
    assert any("fp4_prepared_" in text for text in graphs)


def test_inspect_without_depyf_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "depyf", None)
    with pytest.raises(SystemExit, match="pip install"):
        load_example("inspect_with_depyf", monkeypatch).main([])


def test_cpu_benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = load_example("cpu_benchmark", monkeypatch)
    sizes = ["--layers", "1", "--experts", "4", "--top-k", "2", "--hidden", "64", "--intermediate", "32"]
    monkeypatch.setattr(example, "MODES", ("dense", "fp4moe"))
    example.main([*sizes, "--tokens", "3", "--repeat", "1"])
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[-2:]}
    assert set(rows) == {"dense", "fp4moe"}
    assert all(float(number) > 0 for row in rows.values() for number in row)


def test_gpu_benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = load_example("gpu_benchmark", monkeypatch)

    def run_here(name: str, variant: str, args: Any) -> list[dict[str, Any]]:
        args.models, args.variants = [name], [variant]
        with torch.no_grad():
            return list(example.measure(args))

    monkeypatch.setattr(example, "run", run_here)
    sizes = ["--tiny", "--device", "cpu", "--layers", "1", "--calls", "1", "--repeats", "1"]
    example.main([*sizes, "--models", "gpt-oss-120b", "--variants", "fp4moe-mxfp4", "--cases", "decode1"])
    (row,) = (line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("fp4moe-mxfp4"))
    assert float(row[1]) > 0


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_every_example_is_tested_and_has_a_main(path: Path) -> None:
    text = path.read_text()
    assert "def main(argv: Sequence[str] | None = None) -> None:" in text
    assert f'"{path.stem}"' in Path(__file__).read_text()
