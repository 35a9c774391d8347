"""The kernels of ``triton_w4a16`` built for every device family without a device: what they take, and how many."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest
import torch
from moe_cases import CLAMPED_SWIGLU

from fp4_inductor.device import DeviceInfo
from fp4_inductor.formats import FORMATS, MXFP4, NVFP4, BlockFormat
from fp4_inductor.kernels.w4a16_config import FAMILIES, W4A16Config, configs, shared_memory
from fp4_inductor.spec import ActivationSpec, MoESpec

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from launches import Compilation, Resources, launches, resources
from sass import product_loops, touched_under_way

KIB = 1024
SHARED_MEMORY = {
    80: 163 * KIB,
    86: 99 * KIB,
    89: 99 * KIB,
    90: 227 * KIB,
    100: 227 * KIB,
    103: 227 * KIB,
    120: 99 * KIB,
    121: 99 * KIB,
}
"""Bytes a block may use: CUDA C++ programming guide, table of technical specifications per compute capability."""
REGISTER_FILE = 65536
REGISTER_UNIT = 8
"""Registers of a thread are handed out in eights."""
LOCAL = 16
"""Bytes of local memory that a thread may take at most: a stack frame, or four spilled registers."""
RELATIVES = {86: 80, 89: 80, 103: 100, 121: 120}
"""Devices for which Triton takes the same way as for another; of these only the largest kernels are built."""

DEPENDENCIES = {
    "gate_up_decode_kernel": ["wait", "launch_dependents"],
    "down_decode_kernel": ["wait", "wait", "launch_dependents"],
}
"""How a kernel for few tokens waits for the one before it and lets the next one start, in the order of its code."""

GPT_OSS = MoESpec(128, 4, 2880, 2880, MXFP4, CLAMPED_SWIGLU, has_w13_bias=True, has_w2_bias=True)
RAGGED = dataclasses.replace(GPT_OSS, num_experts=8, top_k=2, hidden_size=160, intermediate_size=96)
QWEN3 = MoESpec(128, 8, 2048, 768, MXFP4, ActivationSpec("silu"))
MIXTRAL = MoESpec(8, 2, 4096, 14336, MXFP4, ActivationSpec("silu"))
DEEPSEEK = MoESpec(256, 8, 7168, 2048, MXFP4, ActivationSpec("silu"))
SHAPES = {"gpt_oss": GPT_OSS, "ragged": RAGGED, "qwen3": QWEN3, "mixtral": MIXTRAL, "deepseek": DEEPSEEK}
POWERS = [2**i for i in range(15)]


pytestmark = pytest.mark.usefixtures("kernels_of_this_run")


def is_gemm(compilation: Compilation) -> bool:
    return "SPLIT_K" in compilation.constants


def is_hopper(compilation: Compilation) -> bool:
    return "hopper" in compilation.name


def serves_few_tokens(compilation: Compilation) -> bool:
    return "decode" in compilation.name


def cut(compilation: Compilation) -> tuple[object, ...]:
    """What a row of the tables decides of a GEMM."""
    num_warps = compilation.options["num_warps"]
    if is_hopper(compilation):  # its number of stages depends on the columns too
        return compilation.name, compilation.constants["BLOCK_M"], num_warps
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K")
    return compilation.name, *(compilation.constants[n] for n in names), num_warps, compilation.options["num_stages"]


def cuts_of(config: W4A16Config) -> set[tuple[object, ...]]:
    found: set[tuple[object, ...]] = set()
    for name, g in (("gate_up", config.gate_up), ("down", config.down)):
        if g.hopper:
            found.add((f"{name}_hopper_kernel", config.block_m, g.num_warps))
        else:
            found.add((f"{name}_kernel", config.block_m, g.block_n, g.block_k, g.num_warps, g.num_stages))
    return found


def gemms(arch: int, fmt: BlockFormat, dtype: torch.dtype) -> list[Compilation]:
    """GEMMs of every row of the arch's table, whole and ragged, alone on a block and sharing it: no two alike."""
    found: dict[tuple[object, ...], Compilation] = {}
    for spec in (GPT_OSS, MIXTRAL, RAGGED):
        spec = dataclasses.replace(spec, weight_format=fmt, act_dtype=dtype, out_dtype=dtype)
        for new in launches(spec, arch, POWERS).values():
            for compilation in filter(is_gemm, new):
                shares = compilation.constants["SPLIT_K"] != 1
                if spec.hidden_size != RAGGED.hidden_size:
                    found.setdefault((*cut(compilation), shares), compilation)
                    continue
                # A ragged one has masks besides; it is built for the largest block only.
                other = found.setdefault((compilation.name, "ragged"), compilation)
                if compilation.constants["BLOCK_M"] > other.constants["BLOCK_M"]:
                    found[compilation.name, "ragged"] = compilation
    return list(found.values())


def assert_fits(compilation: Compilation, directory: Path) -> Resources:
    built = compilation.build()
    used = resources(built, directory)
    limit = SHARED_MEMORY[compilation.target.arch]
    where = f"{compilation.name} {compilation.constants} for sm_{compilation.target.arch}: {used}"
    assert used.shared <= limit, where
    assert -(-used.registers // REGISTER_UNIT) * REGISTER_UNIT * used.threads <= REGISTER_FILE, where
    assert used.local <= LOCAL, where
    if is_gemm(compilation):
        rows = [config for config in configs(compilation.target.arch) if cut(compilation) in cuts_of(config)]
        assert rows, f"no row of the table has {where}"
        assert used.shared <= min(map(shared_memory, rows)), f"more than check() reckons with: {where}"
        assert "mma" in built.asm["ptx"], f"the product must run on the matrix units: {where}"
    if is_hopper(compilation):
        assert_products_overlap(directory / "kernel.cubin", where)
    if compilation.target.arch == 90 and compilation.name in ("gate_up_kernel", "down_kernel"):
        waits = re.findall(r"warp_group_dot_wait .*pendings = (\d+)", built.asm["ttgir"])
        assert set(waits) == {"0"}, f"a product still running would read weights that the next step writes: {where}"
    return used


def assert_products_overlap(cubin: Path, where: str) -> None:
    """One product runs while the next one's weights are decoded, into registers that it does not read."""
    loops = list(product_loops(cubin))
    assert loops, where
    for loop in loops:
        waits = [instruction for instruction in loop if "DEPBAR.LE gsb0" in instruction]
        assert waits, where
        assert all(wait.endswith("0x1") for wait in waits), f"ptxas waits for each product: {where}"
        assert not [instruction for instruction in loop if re.search(r"\b(LDL|STL)\b", instruction)], f"spills: {where}"
        assert touched_under_way(loop) == [], where
        assert touched_under_way(loop, late=1), "these registers are used again once the wait is over"


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@pytest.mark.parametrize("arch", sorted(FAMILIES.keys() - RELATIVES.keys()))
def test_every_row_of_the_table_fits_its_device(arch: int, fmt: BlockFormat, tmp_path: Path) -> None:
    for compilation in gemms(arch, fmt, torch.bfloat16):
        assert_fits(compilation, tmp_path)


def largest(arch: int, fmt: BlockFormat, dtype: torch.dtype) -> list[Compilation]:
    """Both GEMMs of the row that takes the most shared memory, alone on a block and without masks."""
    row = cuts_of(max((config for config in configs(arch) if not config.hopper), key=shared_memory))
    return [
        c for c in gemms(arch, fmt, dtype) if cut(c) in row and c.constants["SPLIT_K"] == 1 and c.constants["WHOLE"]
    ]


@pytest.mark.parametrize("arch", RELATIVES)
def test_the_largest_fit_relatives(arch: int, tmp_path: Path) -> None:
    assert configs(arch) == configs(RELATIVES[arch])
    for compilation in largest(arch, NVFP4, torch.bfloat16):
        assert_fits(compilation, tmp_path)


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_float16_fits(arch: int, tmp_path: Path) -> None:
    for compilation in largest(arch, MXFP4, torch.float16):
        assert_fits(compilation, tmp_path)


@pytest.mark.parametrize("arch", [80, 90])
def test_what_sorts_and_combines_fits(arch: int, tmp_path: Path) -> None:
    """With the most experts, and so the most counters; ``check`` reckons with the GEMMs alone."""
    smallest = min(map(shared_memory, configs(arch)))
    for new in launches(DEEPSEEK, arch, POWERS).values():
        for compilation in new:
            if not is_gemm(compilation) and not serves_few_tokens(compilation):
                assert assert_fits(compilation, tmp_path).shared <= smallest


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@pytest.mark.parametrize("arch", FAMILIES)
def test_what_serves_few_tokens_fits(arch: int, fmt: BlockFormat, tmp_path: Path) -> None:
    """Whatever numbers of tokens it serves; its choice looks at the device's family, so every family is asked.

    Two programs fit a multiprocessor, and one what ``check`` asks for; the first wait stands before the first trigger.
    """
    limit = min(SHARED_MEMORY[arch] // 2, max(map(shared_memory, configs(arch))))
    found: dict[tuple[object, ...], Compilation] = {}
    for spec in (GPT_OSS, RAGGED, DEEPSEEK):
        for new in launches(dataclasses.replace(spec, weight_format=fmt), arch, range(1, 65)).values():
            for compilation in new:
                if serves_few_tokens(compilation):
                    found.setdefault((compilation.name, *sorted(compilation.constants.items())), compilation)
    for compilation in found.values():
        assert assert_fits(compilation, tmp_path).shared <= limit
        ptx = compilation.build().asm["ptx"]
        assert "mma.sync" in ptx
        assert re.findall(r"griddepcontrol\.(\w+)", ptx) == DEPENDENCIES[compilation.name]


@pytest.mark.parametrize("arch", FAMILIES)
def test_layers_use_every_row_and_nothing_else(arch: int) -> None:
    """So the tests above build all that can run."""
    used = set()
    float16 = dataclasses.replace(GPT_OSS, act_dtype=torch.float16, out_dtype=torch.float16)
    for spec in (*SHAPES.values(), float16):
        for new in launches(spec, arch, POWERS).values():
            used |= {cut(compilation) for compilation in filter(is_gemm, new)}
    assert used == set().union(*map(cuts_of, configs(arch)))


def test_devices_have_the_shared_memory_that_is_known_of_them() -> None:
    assert set(FAMILIES) == set(SHARED_MEMORY)
    for arch, size in SHARED_MEMORY.items():
        assert DeviceInfo.parse(f"sm_{arch}").shared_memory == size


MOST_KERNELS = 36
"""Kernels that a process compiles for layers of one kind, whatever the numbers of tokens; half a second each, those in
Gluon up to four."""
COUNTS = [
    *range(1, 300),
    *(count + by for count in (512, 1024, 2048, 4096, 8192) for by in (-1, 0, 1, 16)),
    *range(301, 16384, 397),
    16384,
]
"""Every small count, where programs share blocks, and odd, even and round ones around each larger row."""


@pytest.mark.parametrize("name", SHAPES)
def test_kernels_are_few_whatever_the_token_counts(name: str) -> None:
    new = [compilation for found in launches(SHAPES[name], 90, COUNTS).values() for compilation in found]
    assert len(new) <= MOST_KERNELS
    written = {(c.name, *sorted(c.constants.items()), c.options["num_warps"], c.options["num_stages"]) for c in new}
    assert len(written) == len(new), "Triton compiled a kernel anew for the value of an argument"
