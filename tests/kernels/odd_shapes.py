"""A program: the CPU kernel on odd shapes, in memory where a byte too far ends it; at its end it prints "sound".

Every weight ends at a page that cannot be read, and so do the pages of every expert that no token is routed to.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch
from moe_cases import CLAMPED_SWIGLU, make_case
from tolerances import assert_close_per_token

from fp4_inductor.backends import get_backend
from fp4_inductor.device import DeviceInfo
from fp4_inductor.formats import FORMATS
from fp4_inductor.plan import prepare, run_plan
from fp4_inductor.spec import Operand

CPU = DeviceInfo.parse("cpu")
NO_ACCESS = 0
LIBC = ctypes.CDLL(None, use_errno=True)
KEPT: list[mmap.mmap] = []


def protect(address: int, num_bytes: int) -> None:
    if LIBC.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), NO_ACCESS):
        raise OSError(ctypes.get_errno(), "mprotect")


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, the last right before a page that cannot be read."""
    size = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    KEPT.append(memory)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    place = flat[size - tensor.nbytes : size].view(tensor.dtype).view(tensor.shape)
    place.copy_(tensor)
    protect(flat.data_ptr() + size, mmap.PAGESIZE)
    return place


def experts_apart(fmt: str, num_tokens: int, bias: bool) -> None:
    """Sizes of which every expert fills whole pages; all but the routed ones cannot be read."""
    sizes = {"hidden_size": 512, "intermediate_size": 256, "num_experts": 9, "top_k": 2}
    case = make_case(FORMATS[fmt], num_tokens=num_tokens, bias=bias, activation=CLAMPED_SWIGLU, **sizes)
    case.operands[Operand.TOPK_IDS] %= 4
    plan = get_backend("cpu").plan(case.spec, CPU)
    prepared = {name: guarded(tensor) for name, tensor in prepare(plan, case.operands).items()}
    for tensor in prepared.values():
        expert = tensor.nbytes // len(tensor)
        if expert % mmap.PAGESIZE == 0:
            protect(tensor.data_ptr() + 4 * expert, 5 * expert)
    given = {**case.operands, Operand.HIDDEN: guarded(case.operands[Operand.HIDDEN])}
    assert_close_per_token(run_plan(plan, given, prepared), case.reference(), torch.bfloat16)


def odd_shape(fmt: str, hidden_size: int, intermediate_size: int, num_tokens: int, act_dtype: torch.dtype) -> None:
    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_tokens": num_tokens}
    case = make_case(FORMATS[fmt], act_dtype=act_dtype, outside_ids=num_tokens > 1, bias=True, **sizes)
    plan = get_backend("cpu").plan(case.spec, CPU)
    prepared = {name: guarded(tensor) for name, tensor in prepare(plan, case.operands).items()}
    assert_close_per_token(run_plan(plan, case.operands, prepared), case.reference(), act_dtype)


def main() -> None:
    for fmt in FORMATS:
        for num_tokens in (1, 2, 30):
            experts_apart(fmt, num_tokens, bias=num_tokens == 2)
        for act_dtype in (torch.bfloat16, torch.float32):
            for sizes in ((32, 32, 1), (32, 96, 3), (160, 32, 17), (96, 224, 29)):
                odd_shape(fmt, *sizes, act_dtype)
    if "touch" in sys.argv:
        guarded(torch.zeros(64))
        ctypes.string_at(guarded(torch.zeros(64)).data_ptr(), 64 * 4 + 1)
    print("sound")


if __name__ == "__main__":
    main()
