"""Python in a process of its own, and compilers that are not what they seem."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with ``arguments``, where it finds what tests share."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    given = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run([sys.executable, *arguments], env=given, capture_output=True, text=True, check=False)


def compiler_script(folder: Path, line: str) -> str:
    """Path of a C++ compiler that is this line of a shell script."""
    compiler = folder / "c++"
    compiler.write_text(f"#!/bin/sh\n{line}\n")
    compiler.chmod(0o755)
    return str(compiler)
