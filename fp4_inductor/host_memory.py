"""Moving a weight's bytes out of device memory, under the tensor that holds them.

The tensor stays what it was for everyone who holds it: the same object, device, shape and strides, and the same
bytes at another address, which lies in page-locked host memory. Whatever reads it later, be it an eager call,
``state_dict`` or ``deepcopy``, gets those bytes over the bus, and whatever writes it, writes them.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable
from typing import Any

import torch


class HostMemory:
    """Zeroed pages; ``bytes`` is a CPU tensor over them."""

    def __init__(self, num_bytes: int) -> None:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Large pages are locked several times faster. After a fork, a page that both processes had would be copied
        # by the first to write it, away from under the device.
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            with contextlib.suppress(AttributeError, OSError):
                pages.madvise(getattr(mmap, advice))
        with torch.inference_mode(False):
            self.bytes = torch.frombuffer(pages, dtype=torch.uint8)

    @property
    def address(self) -> int:
        return self.bytes.data_ptr()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.bytes.numel(),), "typestr": "|u1", "data": (self.address, False), "version": 3}


def move_to_host(tensor: torch.Tensor) -> str:
    """Give ``tensor`` host memory that its device can address, and drop its device memory.

    Its version does not change. A CUDA graph captured earlier that reads the old address must be captured anew.

    Args:
        tensor: any shape, strides and dtype.

    Returns:
        "" if its bytes are in host memory now, otherwise why they are where they were.
    """
    address_from = _ADDRESS_FROM.get(tensor.device.type)
    if address_from is None:
        return f"memory of a {tensor.device.type} device is not device memory"
    if type(tensor.data) is not torch.Tensor:
        return f"a {type(tensor.data).__name__} is no plain tensor"
    storage = tensor.untyped_storage()
    if is_on_host(tensor) or storage.nbytes() == 0:
        return ""
    if torch._C._storage_Use_Count(storage._cdata) != 2:  # the tensor's and ours
        return "another tensor shares its storage, such as an entry of a state_dict that is still held"
    memory = HostMemory(storage.nbytes())
    with torch.no_grad(), torch.inference_mode(tensor.is_inference()):  # data must be of the tensor's kind
        view = address_from(tensor.device, memory)
        if isinstance(view, str):
            return view
        memory.bytes.copy_(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(view.untyped_storage(), *place)
    _IN_USE[memory.address] = memory
    return ""


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether ``move_to_host`` has moved what the tensor holds now."""
    return tensor.untyped_storage().data_ptr() in _IN_USE


def _lock_pages(device: torch.device, memory: HostMemory) -> torch.Tensor | str:
    """A tensor on a CUDA ``device`` over ``memory``, which lives as long as that; or why there cannot be one."""
    if torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    while _POSTPONED:
        _unlock_pages(*_POSTPONED.pop())
    with torch.cuda.device(device):
        cudart = torch.cuda.cudart()
        status = cudart.cudaHostRegister(memory.address, memory.bytes.numel(), 0)
        if status != cudart.cudaError.success:
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)  # the next launch is told of the error, so let it be this one
            return f"{memory.bytes.numel()} bytes of host memory cannot be page-locked: {status}"
        # The callback's reference keeps the pages mapped until they are unlocked.
        weakref.finalize(memory, _unlock_pages, device, memory.bytes).atexit = False
        try:
            view = torch.as_tensor(memory, device=device)
        except RuntimeError as error:
            return f"{device} cannot be given the address of host memory: {error}"
    if view.data_ptr() != memory.address:
        return f"{device} does not address host memory as the host does"
    return view


def _unlock_pages(device: torch.device, pages: torch.Tensor) -> None:
    if torch.cuda.is_current_stream_capturing():  # what follows would break the capture
        _POSTPONED.append((device, pages))
        return
    torch.cuda.synchronize(device)  # a kernel may still read them
    torch.cuda.cudart().cudaHostUnregister(pages.data_ptr())


_ADDRESS_FROM: dict[str, Callable[[torch.device, HostMemory], torch.Tensor | str]] = {"cuda": _lock_pages}
"""By device type: a tensor on the device over host memory."""
_IN_USE: weakref.WeakValueDictionary[int, HostMemory] = weakref.WeakValueDictionary()
"""By address. The device's tensors keep it alive."""
_POSTPONED: list[tuple[torch.device, torch.Tensor]] = []
