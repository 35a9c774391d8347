"""Build the C++ kernel for this processor, once: shared libraries under names that say what they were made of.

A library is compiled to a temporary name and then renamed, so that processes that build at the same time, or a build
that is cut short, leave a whole library or none.
"""

from __future__ import annotations

import ctypes
import getpass
import hashlib
import logging
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from ..device import cxx_compiler
from ..errors import Fp4InductorError, InvalidOptionError

logger = logging.getLogger(__name__)

ISA_VARIABLE = "FP4_INDUCTOR_CPU_ISA"
"""Environment variable that names one of ``ISAS``, in place of the best that the processor has."""

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
ISAS = {
    "avx512_bf16": ("-DFP4_AVX512BF16", *_AVX512, "-mavx512bf16"),
    "avx512": ("-DFP4_AVX512", *_AVX512),
    "avx2": ("-DFP4_AVX2", *_AVX2),
    "portable": (),
}
"""Instruction sets that the kernel knows, best first, and the flags that choose them."""

_SOURCES = Path(__file__).parent / "cpu"
# A C++ library that the compiler links statically must not mix with the one that torch has.
_APART = ("-Wl,--exclude-libs,ALL",) if sys.platform == "linux" else ()
_OPTIMIZED = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
_FLAGS = (*_OPTIMIZED, "-fPIC", "-shared", *_APART)
_TORCH = Path(torch.__file__).parent
_TORCH_FLAGS = (
    "-DTORCH_TARGET_VERSION=0x020b000000000000",  # the interface of 2.11, which later versions have, too
    f"-I{_TORCH / 'include'}",
    f"-L{_TORCH / 'lib'}",
    f"-Wl,-rpath,{_TORCH / 'lib'}",
    "-ltorch_cpu",
)
_SECONDS = 300
NO_COMPILER = "apt-get install g++, xcode-select --install, or name a compiler in the variable CXX"
_NO_SUCCESS = "name another compiler in the variable CXX, or set options={'fp4moe.backend': 'cpu_aten'}"
_lock = threading.Lock()


class BuildError(Fp4InductorError, RuntimeError):
    """The C++ kernel could not be compiled."""


@cache
def processor_isas() -> tuple[str, ...]:
    """Those of ``ISAS`` that this processor runs."""
    has = {
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
        "avx512": torch.cpu._is_avx512_supported(),
        "avx2": torch.cpu._is_avx2_supported(),
        "portable": True,
    }
    return tuple(name for name in ISAS if has[name])


def choose_isa(act_dtype: torch.dtype) -> str:
    """The best for activations of ``act_dtype``: pairs of bfloat16 are multiplied only where they are bfloat16.

    Raises:
        InvalidOptionError: the environment names one that does not exist, or that this processor has not.
    """
    forced = os.environ.get(ISA_VARIABLE)
    if forced is None:
        return next(isa for isa in processor_isas() if isa != "avx512_bf16" or act_dtype == torch.bfloat16)
    if forced not in processor_isas():
        needed = f"one of {', '.join(processor_isas())}, which this processor has"
        raise InvalidOptionError(f"reading the environment variable {ISA_VARIABLE}", needed=needed, got=repr(forced))
    return "avx512" if forced == "avx512_bf16" and act_dtype != torch.bfloat16 else forced


class Library(NamedTuple):
    """A shared library: ``kernels/cpu/<source>.cpp``, compiled for one of ``ISAS``."""

    source: str
    isa: str

    @property
    def flags(self) -> tuple[str, ...]:
        return *_FLAGS, *ISAS[self.isa], *(_TORCH_FLAGS if self.source == "op" else ())

    @property
    def openmp(self) -> tuple[str, ...]:
        """Further flags, without which it does the same on one thread."""
        return () if self.source == "op" else ("-fopenmp",)


def load_libraries(*wanted: Library) -> list[ctypes.CDLL]:
    """Load libraries, and build those that never were, side by side.

    Raises:
        BuildError: no compiler, or it fails; the message holds what it said.
    """
    compiler = cxx_compiler()
    if compiler is None:
        raise BuildError("building the CPU kernel", needed="a C++ compiler", got="none", now=NO_COMPILER)
    with _lock:
        folder = _cache_folder()
        paths = {each: folder / f"{each.source}_{each.isa}_{_key(compiler, each)}.so" for each in wanted}
        missing = {each: path for each, path in paths.items() if not path.exists()}
        if missing:
            _build_all(compiler, missing)
        return [ctypes.CDLL(str(paths[each])) for each in wanted]


def _key(compiler: str, library: Library) -> str:
    found = hashlib.sha256()
    for part in (compiler, platform.machine(), torch.__version__, *library.flags):
        found.update(part.encode() + b"\0")
    for path in sorted((*_SOURCES.glob("*.h"), *_SOURCES.glob("*.cpp"))):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _cache_folder() -> Path:
    """A folder that this user may write; the one of Inductor's caches where the environment names it."""
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    places = [Path(named)] if named else []
    places += [Path.home() / ".cache", Path(tempfile.gettempdir()) / f"fp4_inductor_{getpass.getuser()}"]
    for place in places:
        folder = place / "fp4_inductor"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    return Path(tempfile.mkdtemp(prefix="fp4_inductor_"))


def _build_all(compiler: str, libraries: dict[Library, Path]) -> None:
    with (
        ThreadPoolExecutor(max_workers=len(libraries)) as pool,
        tqdm(total=len(libraries), desc="compiling the FP4 kernel", disable=None, leave=False) as bar,
    ):
        for _ in pool.map(partial(_build, compiler), libraries, libraries.values()):
            bar.update()


def _build(compiler: str, library: Library, path: Path) -> None:
    logger.info("compiling the CPU kernel's %s for %s with %s, once", library.source, library.isa, compiler)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        source = str(_SOURCES / f"{library.source}.cpp")
        command = [compiler, source, *library.flags, "-o", str(made)]
        said = _run([*command, *library.openmp])
        if said and library.openmp:
            of_openmp, said = said, _run(command)
            if not said:
                logger.warning("%s has no OpenMP, so the CPU kernel runs on one thread: %s", compiler, of_openmp)
        if said:
            needed = f"{compiler} to compile it"
            raise BuildError("building the CPU kernel", needed=needed, got=said, now=_NO_SUCCESS)
        made.replace(path)
    logger.info("compiled %s in %.1f s", path, time.perf_counter() - start)


def _run(command: Sequence[str]) -> str:
    """What a compiler says when it fails; nothing if it does not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip() or f"exit status {done.returncode}")[-2000:]
