"""Tests that run kernels in Triton's interpreter.

The interpreter is chosen when Triton's decorators run, so such tests run in a process of their own. A file that has
some starts it on itself from one test, which is called ``test_in_the_interpreter``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs inside test_in_the_interpreter")
starts_the_interpreter = pytest.mark.skipif(INTERPRETED, reason="this is that process")


def run_in_interpreter(file: str, *options: str) -> None:
    """Run the tests of ``file``, or those that pytest's ``options`` leave, where Triton interprets."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, file]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-6000:]


def _prepare_once_a_launch() -> None:
    """Prepare Triton's language once for each module of a launch, not anew for every call of a helper.

    Every call looks through all members of ``triton.language``, which takes the interpreter 40 % of its time; all but
    the first of a launch find them as they left them.
    """
    from triton.runtime import interpreter

    prepare, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    prepared: set[int] = set()

    def prepare_once(fn: Any) -> Any:
        if id(fn.__globals__) in prepared:
            return None
        prepared.add(id(fn.__globals__))
        return prepare(fn)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = prepare_once, launch_anew


def _look_for_overflow_in_numpy() -> None:
    """Refuse sums, differences and products that their integer does not hold.

    Triton computes each of them once more in its language, in int64, and then looks at none: it asserts only where it
    debugs. That takes the interpreter a fifth of its time.
    """
    import numpy as np
    from triton.language.semantic import TritonSemantic

    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def check(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        dtype = lhs.type.scalar
        if dtype.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
            return
        assert dtype == rhs.type.scalar
        assert dtype.is_int()
        exact = operations[binary_op.__name__](*(side.handle.data.astype(np.int64) for side in (lhs, rhs)))
        held = (exact >= dtype.get_int_min_value()) & (exact <= dtype.get_int_max_value())
        assert held.all(), f"{dtype} overflow detected for operation {binary_op.__name__}"

    TritonSemantic.binary_op_sanitize_overflow_impl = check


if INTERPRETED:
    _prepare_once_a_launch()
    _look_for_overflow_in_numpy()
