"""The test bench keeps its own promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

GPU_TEST = """
import pytest

@pytest.mark.gpu
def test_it():
    pass
"""


def run_gpu_test(folder: Path, require: str) -> str:
    """Run one ``gpu`` test under this conftest on a machine that shows no GPU."""
    conftest = Path(__file__).with_name("conftest.py").read_text()
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_gpu.py").write_text(GPU_TEST)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs CUDA\n")
    env = {**os.environ, "FP4_INDUCTOR_REQUIRE_GPU": require, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", str(folder)]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize(("require", "outcome"), [("0", "1 skipped"), ("1", "1 error")])
def test_gpu_tests_skip_with_a_reason_or_fail(tmp_path: Path, require: str, outcome: str) -> None:
    output = run_gpu_test(tmp_path, require)
    assert outcome in output
    assert "CUDA device" in output


def test_the_seed_is_fixed() -> None:
    expected = torch.Generator().manual_seed(0)
    assert torch.equal(torch.randn(3), torch.randn(3, generator=expected))


def test_the_inductor_cache_is_this_runs_own() -> None:
    assert "fp4_inductor_tests_" in os.environ["TORCHINDUCTOR_CACHE_DIR"]
