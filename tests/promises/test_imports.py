"""Importing the package is cheap, and there is one way to import recognition."""

from __future__ import annotations

import subprocess
import sys

from source_tree import ROOT, modules

HEAVY = ("triton", "flashinfer", "transformers", "torch._inductor", "torch._dynamo")
ON_FIRST_USE = ("fp4_inductor.kernels.", "fp4_inductor.post_grad_pass", "fp4_inductor.__main__")
"""Modules that need one of these at their top, and are imported by the function that needs them."""

REPORT = """
import importlib, sys
import torch
heavy = {heavy}
loaded = set(sys.modules)
for name in {names}:
    importlib.import_module(name)
    for module in sorted(set(sys.modules) - loaded):
        if any(module == h or module.startswith(h + ".") for h in heavy):
            print(name, "loads", module)
    loaded = set(sys.modules)
"""


def python(code: str, cwd: object = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=str(cwd), capture_output=True, text=True, check=False)


def test_importing_loads_no_compiler_and_no_kernel_library() -> None:
    names = ["fp4_inductor", *(name for name in modules() if not name.startswith(ON_FIRST_USE))]
    result = python(REPORT.format(heavy=HEAVY, names=names))
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""


def test_importing_the_package_alone_does_not_import_torch() -> None:
    result = python("import sys, fp4_inductor; print('torch' in sys.modules)")
    assert result.stdout.strip() == "False", result.stderr


def test_bare_import_of_patterns_is_refused() -> None:
    result = python("import patterns")
    assert "import fp4_inductor.patterns, not 'patterns'" in result.stderr


def test_torch_finds_the_backend_with_nothing_imported(tmp_path: object) -> None:
    code = """
import torch._dynamo
assert "fp4moe" in torch._dynamo.list_backends()
from torch._dynamo.backends.registry import lookup_backend
print(lookup_backend("fp4moe").__module__)
"""
    result = python(code, tmp_path)
    assert result.stdout.strip() == "fp4_inductor.dynamo_backend", result.stderr
