"""The CPU kernel without Python: with Clang, on an emulated Arm processor, and under valgrind."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fp4_inductor.device import cxx_compiler
from fp4_inductor.kernels.cpu_build import ISAS, processor_isas

PROGRAM = Path(__file__).parent / "moe_check.cpp"
SOURCES = Path(__file__).parents[2] / "fp4_inductor" / "kernels" / "cpu"
FLAGS = ("-std=c++17", "-O1", "-g1", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wall", "-Werror")
isas = pytest.mark.parametrize("isa", ISAS)


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name}")
    return found


def build(compiler: str, isa: str, folder: Path, *more: str, sources: Path = SOURCES) -> str:
    program = folder / "program"
    flags = [*FLAGS, *ISAS[isa], *more, "-I", str(sources)]
    done = subprocess.run(
        [compiler, *flags, str(PROGRAM), "-o", str(program)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return str(program)


def run(*command: str, isa: str = "portable") -> None:
    if isa not in processor_isas():
        pytest.skip(f"this processor has no {isa}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


def test_an_error_would_show(tmp_path: Path) -> None:
    compiler = cxx_compiler()
    assert compiler is not None
    run(build(compiler, "portable", tmp_path, "-fopenmp"))
    for source in SOURCES.iterdir():
        text = source.read_text()
        (tmp_path / source.name).write_text(text.replace("gate[i] *= x + act.beta", "gate[i] *= x"))
    wrong = build(compiler, "portable", tmp_path, "-fopenmp", sources=tmp_path)
    assert subprocess.run([wrong], capture_output=True, check=False).returncode == 1


@pytest.mark.slow
@isas
def test_clang_builds_the_same(isa: str, tmp_path: Path) -> None:
    run(build(tool("clang++"), isa, tmp_path, "-Wno-unknown-pragmas"), isa=isa)


@pytest.mark.slow
def test_it_runs_on_arm(tmp_path: Path) -> None:
    emulator = tool("qemu-aarch64")
    program = build(tool("aarch64-linux-gnu-g++"), "portable", tmp_path, "-fopenmp", "-static")
    run(emulator, program)


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["avx2", "portable"])  # valgrind knows no AVX-512
def test_valgrind_finds_nothing(isa: str, tmp_path: Path) -> None:
    valgrind, compiler = tool("valgrind"), cxx_compiler()
    assert compiler is not None
    run(valgrind, "--error-exitcode=9", build(compiler, isa, tmp_path, "-Wno-unknown-pragmas"), isa=isa)
