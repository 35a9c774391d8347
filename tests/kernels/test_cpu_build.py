"""Building the CPU kernel: once, whole, for this processor, with a word where it cannot be."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from moe_cases import make_case
from processes import compiler_script, run_python

from fp4_inductor.backends import get_backend
from fp4_inductor.device import DeviceInfo, cxx_compiler
from fp4_inductor.errors import InvalidOptionError
from fp4_inductor.formats import MXFP4
from fp4_inductor.kernels import cpu_build
from fp4_inductor.kernels.cpu_build import (
    ISA_VARIABLE,
    ISAS,
    BuildError,
    Library,
    choose_isa,
    load_libraries,
    processor_isas,
)
from fp4_inductor.options import Options
from fp4_inductor.reasons import ReasonCode
from fp4_inductor.select import select

CPU = DeviceInfo.parse("cpu")
READ, MOE = Library("read", "portable"), Library("moe", "portable")
BUILD = """
from fp4_inductor.kernels.cpu_build import Library, load_libraries
print(load_libraries(Library('read', 'portable'))[0].fp4_read)
"""


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Libraries go to a new folder."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "fp4_inductor"


def test_is_built_once_and_loaded_fast(empty_cache: Path) -> None:
    load_libraries(READ)
    (built,) = empty_cache.iterdir()
    made = built.stat().st_mtime_ns
    start = time.perf_counter()
    load_libraries(READ)
    assert time.perf_counter() - start < 0.2
    assert built.stat().st_mtime_ns == made


def test_processes_that_build_at_once_leave_one_whole_library(empty_cache: Path) -> None:
    running = [
        subprocess.Popen([sys.executable, "-c", BUILD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in running:
        out, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        assert "_FuncPtr" in out
    assert [path.suffix for path in empty_cache.iterdir()] == [".so"]


def test_sources_flags_compiler_and_isa_make_the_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys = {cpu_build._key("g++", Library("moe", isa)) for isa in ISAS}
    keys |= {cpu_build._key("clang++", MOE), cpu_build._key("g++", Library("op", "portable"))}
    assert len(keys) == len(ISAS) + 2
    shutil.copytree(cpu_build._SOURCES, tmp_path / "cpu")
    monkeypatch.setattr(cpu_build, "_SOURCES", tmp_path / "cpu")
    assert cpu_build._key("g++", MOE) in keys
    (tmp_path / "cpu" / "lanes.h").write_text("// other")
    assert cpu_build._key("g++", MOE) not in keys
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert cpu_build._key("g++", MOE) not in keys


@pytest.mark.parametrize("said", ["unknown processor", ""])
def test_a_compiler_that_fails_is_quoted(
    said: str, empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler_script(tmp_path, f"echo '{said}' >&2; exit 3"))
    with pytest.raises(BuildError, match=said or "exit status 3") as failed:
        load_libraries(READ)
    assert "cpu_aten" in str(failed.value)
    assert not list(empty_cache.iterdir())


def test_without_openmp_it_is_built_for_one_thread(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    line = f'case "$*" in *-fopenmp*) echo no -lgomp >&2; exit 1;; esac; exec {cxx_compiler()} "$@"'
    monkeypatch.setenv("CXX", compiler_script(tmp_path, line))
    assert load_libraries(READ)[0].fp4_read
    assert "has no OpenMP" in caplog.text
    assert "no -lgomp" in caplog.text


def test_a_folder_that_cannot_be_written_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cpu_build._cache_folder() == tmp_path / ".cache" / "fp4_inductor"


def test_without_a_compiler_plain_aten_runs_and_the_cure_is_told() -> None:
    spec = make_case(MXFP4).spec
    none = replace(CPU, libraries=())
    selection = select(spec, none, Options())
    assert selection.chosen == "cpu_aten"
    (refused,) = (verdict for verdict in selection.verdicts if verdict.backend == "cpu")
    (reason,) = refused.reasons
    assert reason.code is ReasonCode.LIBRARY
    assert "apt-get install g++" in reason.hint
    assert select(spec, CPU, Options()).chosen == "cpu"


def test_a_compiler_that_is_named_but_not_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert cxx_compiler() is None
    monkeypatch.delenv("CXX")
    assert cxx_compiler() is not None


def test_a_model_is_compiled_on_plain_aten_where_the_compiler_fails(tmp_path: Path) -> None:
    code = """
import torch, logging
from fp4_inductor.probe import probe
from fp4_inductor.backends import get_backend
from fp4_inductor.device import DeviceInfo
from fp4_inductor.options import Options
from fp4_inductor.select import select
from functools import partial
from moe_cases import make_case
from fp4_inductor.formats import MXFP4
device = DeviceInfo.parse("cpu")
trial = partial(probe, device=device, where=torch.device("cpu"), launch=True)
selection = select(make_case(MXFP4).spec, device, Options(), probe=trial)
print(selection.chosen, *(reason.code.name for verdict in selection.verdicts if verdict.backend == "cpu"
    for reason in verdict.reasons))
"""
    done = run_python("-c", code, CXX=compiler_script(tmp_path, "exit 1"), TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert done.stdout.split() == ["cpu_aten", "PROBE_FAILED"], done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere libraries keep their names apart by themselves")
def test_a_cxx_library_that_is_linked_statically_does_not_mix_with_that_of_torch(tmp_path: Path) -> None:
    """Half of a stream from one and half from the other would lose the error's text, or end the process."""
    code = """
from dataclasses import replace
from fp4_inductor.backends import get_backend
from fp4_inductor.device import DeviceInfo
from fp4_inductor.formats import MXFP4
from fp4_inductor.plan import run_plan
from moe_cases import make_case
case = make_case(MXFP4)
plan = get_backend("cpu").plan(case.spec, DeviceInfo.parse("cpu"))
try:
    run_plan(replace(plan, args=tuple("mish" if arg == "silu" else arg for arg in plan.args)), case.operands)
except RuntimeError as error:
    print(error)
"""
    compiler = compiler_script(tmp_path, f'exec {cxx_compiler()} "$@" -static-libstdc++')
    done = run_python("-c", code, CXX=compiler, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert done.stdout.endswith("moe_cpu knows no mish\n"), done.stderr


def test_float_activations_take_float_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    best = processor_isas()[0]
    assert choose_isa(torch.bfloat16) == best
    assert choose_isa(torch.float32) != "avx512_bf16"
    monkeypatch.setenv(ISA_VARIABLE, "portable")
    assert choose_isa(torch.bfloat16) == "portable"
    monkeypatch.setenv(ISA_VARIABLE, "sse9")
    with pytest.raises(InvalidOptionError, match="sse9"):
        choose_isa(torch.bfloat16)


def test_a_backend_is_asked_for_what_its_probe_may_raise() -> None:
    assert BuildError in get_backend("cpu").probe_errors()  # type: ignore[attr-defined]
