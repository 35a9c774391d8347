"""flashinfer's own weight preparation, where it is installed: what of it runs on a CPU, as Python or as host C++.

Nothing here needs CUDA. A kernel that only moves bytes is compiled for the host from the source in flashinfer's
wheel, with the indices of its threads as global variables and its grid as loops.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
import torch

TESTED = "0.7."
REASON = (
    "flashinfer-python is not installed: pip install flashinfer-python triton"
    if importlib.util.find_spec("flashinfer") is None or importlib.util.find_spec("tvm_ffi") is None
    else ""
    if version("flashinfer-python").startswith(TESTED)
    else f"flashinfer-python {version('flashinfer-python')} is not {TESTED}*"
)
needs_flashinfer = pytest.mark.skipif(bool(REASON), reason=REASON)

_MIXED_GEMM = "data/csrc/nv_internal/tensorrt_llm/kernels/cutlass_kernels/moe_gemm/moe_gemm_mixed_utils.cu"
_HOST = """
#include <cstdint>
struct Index { int x, y, z; };
static Index blockIdx, threadIdx, gridDim, blockDim;
#define __global__ static
%s
extern "C" void run(uint8_t* codes, uint8_t* out, int rows, int cols) {
  gridDim = {8, 1, 1}; blockDim = {16, 4, 1};
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
    for (threadIdx.y = 0; threadIdx.y < blockDim.y; ++threadIdx.y)
      for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x)
        %s(codes, out, rows, cols);
}
"""


def module(name: str) -> ModuleType:
    """A module of flashinfer; skips the test where flashinfer cannot be used."""
    if REASON:
        pytest.skip(REASON)
    return importlib.import_module(f"flashinfer.{name}")


def sm90_words(codes: torch.Tensor, folder: Path) -> torch.Tensor:
    """flashinfer's kernel behind ``interleave_moe_weights_for_sm90_mixed_gemm`` over uint8 [E, N, K/2], on the host."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed, which compiles flashinfer's kernel for the host")
    kernel = "interleave_fp4_weights_for_sm90_mixed_gemm_kernel"
    source = (Path(str(module("fused_moe").__file__)).parents[1] / _MIXED_GEMM).read_text(encoding="utf-8")
    found = re.search(rf"__global__ void {kernel}\(.*?\n}}\n", source, re.DOTALL)
    assert found is not None, f"no {kernel} in {_MIXED_GEMM}"
    (folder / "host.cpp").write_text(_HOST % (found.group(), kernel), encoding="utf-8")
    library = folder / "host.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, folder / "host.cpp"], check=True)
    run = ctypes.CDLL(str(library)).run
    out = torch.zeros_like(codes)
    for given, taken in zip(codes, out, strict=True):
        rows, columns = given.shape
        run(ctypes.c_void_p(given.data_ptr()), ctypes.c_void_p(taken.data_ptr()), rows, 2 * columns)
    return out
