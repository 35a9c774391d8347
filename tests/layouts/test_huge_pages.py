"""Prepared weights stand in huge pages where Linux grants them, with the same values, and go when they are dropped."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fp4_inductor.layouts import huge_pages
from fp4_inductor.layouts.huge_pages import HUGE_PAGE, to_huge_pages


def mapping(address: int) -> dict[str, int]:
    """KiB by name of the mapping that holds ``address``."""
    found: dict[str, int] | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first:
            begin, end = (int(part, 16) for part in first.split("-"))
            if found is not None:
                return found
            found = {} if begin <= address < end else None
        elif found is not None and rest[-1:] == ["kB"]:
            found[first.rstrip(":")] = int(rest[0])
    return found or {}


@pytest.fixture
def on_request() -> None:
    if not huge_pages._on_request():
        pytest.skip("this machine gives no huge pages on request")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float8_e4m3fn], ids=str)
def test_values_shape_and_dtype_stay(dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 256, (3, 5 * HUGE_PAGE // 2), dtype=torch.uint8).view(dtype)
    moved = to_huge_pages(tensor)
    assert (moved.shape, moved.dtype, moved.stride()) == (tensor.shape, dtype, tensor.stride())
    assert torch.equal(moved.view(torch.uint8), tensor.view(torch.uint8))


def test_pages_are_huge_and_freed(on_request: None) -> None:
    tensor = torch.ones(16 * HUGE_PAGE + 4096, dtype=torch.uint8)
    moved = to_huge_pages(tensor)
    address = moved.data_ptr()
    assert address % HUGE_PAGE == 0
    assert address != tensor.data_ptr()
    held = mapping(address)
    assert held["Rss"] <= tensor.nbytes // 1024 + 4, "no page is touched that holds no weight"
    if not held["AnonHugePages"]:
        pytest.skip("no huge page is free")
    del moved
    gc.collect()
    assert mapping(address).get("AnonHugePages", 0) == 0


def test_what_would_gain_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    large = torch.empty(4 * HUGE_PAGE, dtype=torch.uint8)
    with FakeTensorMode():
        fake = torch.empty(4 * HUGE_PAGE, dtype=torch.uint8)
    for tensor in (large[:HUGE_PAGE], large.view(2, -1).T, large.to("meta"), fake):
        assert to_huge_pages(tensor) is tensor
    monkeypatch.setattr(huge_pages, "_on_request", lambda: False)
    assert to_huge_pages(large) is large
