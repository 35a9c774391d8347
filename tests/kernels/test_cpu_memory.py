"""No byte but those of routed experts is read, and none outside of any tensor is read or written."""

from __future__ import annotations

import mmap
import signal
import subprocess
from pathlib import Path

import pytest
from processes import compiler_script, run_python

from fp4_inductor.device import cxx_compiler
from fp4_inductor.kernels.cpu_build import ISA_VARIABLE, ISAS, processor_isas

PROGRAM = Path(__file__).parent / "odd_shapes.py"
isas = pytest.mark.parametrize("isa", ISAS)


def run(isa: str, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    if isa not in processor_isas():
        pytest.skip(f"this processor has no {isa}")
    if mmap.PAGESIZE != 4096:
        pytest.skip(f"pages have {mmap.PAGESIZE} bytes, and experts do not fill them")
    return run_python(str(PROGRAM), *args, **{ISA_VARIABLE: isa, **environment})


@isas
def test_no_page_is_touched_that_is_not_of_a_routed_expert(isa: str) -> None:
    done = run(isa)
    assert (done.returncode, done.stdout) == (0, "sound\n"), done.stderr


def test_a_byte_too_far_would_have_shown() -> None:
    done = run("portable", "touch")
    assert done.returncode == -signal.SIGSEGV


@pytest.mark.slow
@isas
def test_sanitizers_find_nothing(isa: str, tmp_path: Path) -> None:
    compiler = cxx_compiler()
    assert compiler is not None
    found = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    library = found.stdout.strip()
    if not Path(library).is_absolute():
        pytest.skip(f"{compiler} has no address sanitizer")
    flags = "-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all"
    wrapper = compiler_script(tmp_path, f'exec {compiler} "$@" {flags}')
    options = "detect_leaks=0,handle_segv=1"
    done = run(isa, CXX=wrapper, TORCHINDUCTOR_CACHE_DIR=str(tmp_path), LD_PRELOAD=library, ASAN_OPTIONS=options)
    assert (done.returncode, done.stdout) == (0, "sound\n"), done.stderr[-4000:]
