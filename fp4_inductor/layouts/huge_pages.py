"""Where prepared weights stand in a CPU's memory: in pages of 2 MiB, as far as Linux grants them on request.

A call streams through its weights once. In pages of 4 KiB the processor looks up an address every 64 cache lines, which
costs a quarter of what memory could bring and more, most under a hypervisor.
"""

from __future__ import annotations

import mmap
from functools import cache
from pathlib import Path

import torch

HUGE_PAGE = 1 << 21
_SMALLEST = 2 * HUGE_PAGE
"""Bytes below which a tensor stays where it is."""
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def to_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in huge pages; the tensor itself where it is small, not contiguous or not on a CPU."""
    plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.is_contiguous()
    if not plain or tensor.nbytes < _SMALLEST or not _on_request():
        return tensor
    pages = mmap.mmap(-1, tensor.nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    begin = -memory.data_ptr() % HUGE_PAGE
    try:
        pages.madvise(mmap.MADV_HUGEPAGE, begin, tensor.nbytes // HUGE_PAGE * HUGE_PAGE)
    except OSError:
        return tensor
    return memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


@cache
def _on_request() -> bool:
    """Whether memory gets huge pages where it asks for them, and only there."""
    try:
        return "[madvise]" in _SETTING.read_text()
    except OSError:
        return False
