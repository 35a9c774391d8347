"""Every test starts from the same state: fixed seed, no compiled code of another test, an empty compile cache."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator

import pytest

REQUIRE_GPU = "FP4_INDUCTOR_REQUIRE_GPU"
"""Set to 1 on a machine whose GPU must be tested: a test that would be skipped for want of CUDA then fails."""

try:
    from hypothesis import settings
except ImportError:  # tests that need it skip themselves
    pass
else:
    settings.register_profile("reproducible", derandomize=True, deadline=None, print_blob=True)
    settings.load_profile("reproducible")


def pytest_configure(config: pytest.Config) -> None:
    """Give the whole run, its workers included, a fresh Inductor cache and a fair share of the cores."""
    gc.set_threshold(20_000, 10, 10)  # compiling makes so many objects that 700, the default, takes 15 % of the time
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    config.stash[_cache] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="fp4_inductor_tests_")
    workers = getattr(config.option, "numprocesses", None) or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(workers))))


def pytest_unconfigure(config: pytest.Config) -> None:
    if _cache in config.stash:
        shutil.rmtree(config.stash[_cache], ignore_errors=True)


_cache = pytest.StashKey[str]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays: no collection looks through it again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if torch.cuda.is_available():
        return
    if os.environ.get(REQUIRE_GPU) == "1":
        pytest.fail(f"{REQUIRE_GPU}=1 and there is no CUDA device", pytrace=False)
    pytest.skip("needs a CUDA device")


@pytest.fixture
def kernels_of_this_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Triton compiles here for other devices serves the other tests and workers of this run, and no other run."""
    monkeypatch.setenv("TRITON_CACHE_DIR", os.path.join(os.environ["TORCHINDUCTOR_CACHE_DIR"], "kernels"))


@pytest.fixture(autouse=True)
def _isolated() -> Iterator[None]:
    """Seed torch, and forget what Dynamo compiled; neither is imported for tests that do without.

    Contractions of three operands run as they are written: opt_einsum, where it is installed, turns them around.
    No guards are timed: Dynamo flushes the processor's caches for that in every compilation, to write a line of debug.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
        sys.modules["torch.backends.opt_einsum"].enabled = False  # type: ignore[attr-defined]
    if "torch._dynamo.guards" in sys.modules:
        sys.modules["torch._dynamo.guards"].profile_guard_manager = lambda *_: 0.0  # type: ignore[attr-defined]
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
