"""What ``doctor`` finds of programs: the compilers that Inductor, Triton and FlashInfer call, looked for as they do.

Importing them to ask would take long, and FlashInfer's import makes folders.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HEADERS = ("cuda_runtime.h", "cublasLt.h", "curand_kernel.h", "nvrtc.h")
"""What FlashInfer's sources include of CUDA's toolkit, a name for each of its parts."""


@dataclass(frozen=True, slots=True)
class Item:
    """Something that is found or not: a library, a driver, a compiler. ``cure`` is "" where it is well."""

    name: str
    found: str | None
    serves: str
    cure: str = ""


def compilers(needs_gpu: bool) -> Iterator[Item]:
    """Those that Inductor and Triton call."""
    cxx = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    found = first_line(cxx)
    cure = "" if found else f"install a C++ compiler: {cxx} does not run, and without one Inductor compiles no CPU code"
    yield Item("C++ compiler", found, "Inductor on a CPU", cure)
    if needs_gpu:
        names = (os.environ["CC"],) if "CC" in os.environ else ("gcc", "clang")
        found = next(filter(None, map(first_line, names)), None)
        cure = "" if found else "install a C compiler (gcc): without one Triton launches no kernel"
        yield Item("C compiler", found, "Triton's launcher", cure)
        header = Path(sysconfig.get_path("include"), "Python.h")
        cure = "" if header.exists() else "install Python's headers (python3-dev): Triton's launcher includes Python.h"
        yield Item("Python.h", str(header) if header.exists() else None, "Triton's launcher", cure)


def first_line(command: str, word: str = "") -> str | None:
    """The first line with ``word`` that a compiler says of its version; None if it does not run."""
    try:
        result = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return next((line for line in result.stdout.splitlines() if word in line), command)


def _parent_of_nvcc() -> str:
    """What FlashInfer takes for CUDA_HOME where that is not set."""
    nvcc = shutil.which("nvcc")
    return "/usr/local/cuda" if nvcc is None else str(Path(nvcc).parents[1])


def flashinfer_tools() -> Iterator[Item]:
    """What FlashInfer builds its kernels with when they are first called, and where it looks for built ones."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = os.environ.get("FLASHINFER_NVCC") or (f"{home}/bin/nvcc" if home else "nvcc")
    found = first_line(nvcc, "release")
    cure = "" if found else f"install CUDA's compiler or set CUDA_HOME: {nvcc} does not run, which builds its kernels"
    yield Item("nvcc", found, "FlashInfer's builds", cure)
    include = Path(home or _parent_of_nvcc(), "include")
    missing = [name for name in _HEADERS if not (include / name).exists()]
    cure = f"install all of CUDA's toolkit or set CUDA_HOME: {include} has no {', '.join(missing)}" if missing else ""
    yield Item("CUDA's headers", None if missing else str(include), "FlashInfer's builds", cure)
    ninja = shutil.which("ninja")
    cure = "" if ninja else "pip install ninja, and put it on the PATH: without it FlashInfer builds nothing"
    yield Item("ninja", ninja, "FlashInfer's builds", cure)
    folder = os.environ.get("FLASHINFER_CUBIN_DIR")
    offline = bool(os.environ.get("FLASHINFER_NO_DOWNLOAD"))
    there = folder is not None and Path(folder).is_dir()
    cure = ""
    if folder is not None and not there:
        cure = f"FLASHINFER_CUBIN_DIR={folder} is no folder: make it, or leave it out"
    elif offline and not there:
        cure = "FLASHINFER_NO_DOWNLOAD is set: let FLASHINFER_CUBIN_DIR name a folder of downloaded kernels"
    fetched = "are not downloaded" if offline else "are downloaded at the first call"
    yield Item("kernels of TRTLLM", folder if there else fetched, "flashinfer_trtllm", cure)
