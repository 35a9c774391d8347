"""The Triton kernels of ``triton_w4a16`` as no layer of ``test_w4a16_targets`` launches them, and what they become."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from fp4_inductor.device import DeviceInfo
from fp4_inductor.kernels.w4a16_config import FAMILIES, W4A16Config, choose_decode, configs, shared_memory

triton = pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, CompiledKernel  # noqa: E402

from fp4_inductor.kernels import w4a16_decode, w4a16_gemm  # noqa: E402

POINTERS = {"words": "i16", "row_scale": "fp32", "bias": "fp32", "topk_weights": "fp32", "topk_ids": "i64"}
ACTIVATIONS = ("hidden", "h", "y", "out")
SCALARS = {"alpha": "fp32", "beta": "fp32", "limit": "fp32", "up_limit": "fp32"}
INTEGERS = ("top_k", "H", "I", "num_experts", "num_pairs", "num_tokens", "num_chunks")


def plain_configs(arch: int) -> list[W4A16Config]:
    return [config for config in configs(arch) if not config.hopper]


pytestmark = pytest.mark.usefixtures("kernels_of_this_run")


def compile_for(arch: int, kernel: Any, constants: dict[str, object], dtype: str, **options: int) -> CompiledKernel:
    """The kernel as a launch with 16-byte aligned pointers and sizes would compile it."""
    constants = {p.name: p.default for p in kernel.params if p.has_default} | constants
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in SCALARS:
            signature[name] = SCALARS[name]
        else:
            pointer = "*" + (dtype if name in ACTIVATIONS else POINTERS.get(name, "i32"))
            signature[name] = "i32" if name in INTEGERS else pointer
            if name in ("H", "I") or name not in INTEGERS:
                attributes[(i,)] = [["tt.divisibility", 16]]
    if "parts" in signature:
        signature["parts"] = "*fp32"
    return triton.compile(ASTSource(kernel, signature, constants, attributes), GPUTarget("cuda", arch, 32), options)


def gemm(
    arch: int,
    kernel: Any,
    config: W4A16Config,
    *,
    e4m3: bool,
    dtype: str = "bf16",
    split: int = 1,
    bound: str = "clamp",
) -> Any:
    cut = config.gate_up if kernel is w4a16_gemm.gate_up_kernel else config.down
    constants: dict[str, object] = {
        "BLOCK_M": config.block_m,
        "MIN_M": config.min_m,
        "BLOCK_N": cut.block_n,
        "BLOCK_K": cut.block_k,
        "SPLIT_K": split,
        "GROUP_M": config.group_m,
        "WHOLE": False,
        "E4M3": e4m3,
        "HAS_BIAS": True,
        "INTERPRETED": False,
    }
    if kernel is w4a16_gemm.gate_up_kernel:
        constants |= {"GATED": True, "BOUND": bound, "KIND": "silu"}
    built = compile_for(arch, kernel, constants, dtype, num_warps=cut.num_warps, num_stages=cut.num_stages)
    assert built.metadata.shared <= shared_memory(config) <= DeviceInfo.parse(f"sm_{arch}").shared_memory
    assert "mma" in built.asm["ptx"], "the product must run on the matrix units"
    return built


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("bound", ["none", "clamp_activated", "softcap"])
def test_every_bound(arch: int, bound: str) -> None:
    gemm(arch, w4a16_gemm.gate_up_kernel, plain_configs(arch)[0], e4m3=True, bound=bound)


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_down_with_shared_blocks(arch: int) -> None:
    gemm(arch, w4a16_gemm.down_kernel, plain_configs(arch)[0], e4m3=False, split=3)


def test_weights_go_from_words_to_registers() -> None:
    """On sm_90 decoded weights never pass through shared memory: wgmma reads them from registers."""
    config = plain_configs(90)[0]
    constants = {
        "BLOCK_M": config.block_m,
        "MIN_M": config.min_m,
        "BLOCK_N": config.down.block_n,
        "BLOCK_K": config.down.block_k,
        "SPLIT_K": 1,
        "GROUP_M": 1,
        "WHOLE": True,
        "HAS_BIAS": False,
        "INTERPRETED": False,
    }
    for e4m3 in (False, True):
        built = compile_for(90, w4a16_gemm.down_kernel, constants | {"E4M3": e4m3}, "bf16", num_warps=4, num_stages=4)
        before_store = built.asm["ptx"].split("wgmma.wait_group")[0]
        assert "wgmma.mma_async" in before_store
        assert "st.shared" not in before_store


@pytest.mark.parametrize("kernel", [w4a16_gemm.gate_up_kernel, w4a16_gemm.down_kernel], ids=["gate_up", "down"])
def test_no_product_runs_on_into_the_next_step(kernel: Any) -> None:
    """A wgmma still running would read its weights from registers that the next step writes.

    The rows that only float16 takes; ``test_w4a16_targets`` looks at all others.
    """
    for config in plain_configs(90)[:2]:
        built = gemm(90, kernel, config, e4m3=False, dtype="fp16")
        assert set(re.findall(r"warp_group_dot_wait .*pendings = (\d+)", built.asm["ttgir"])) == {"0"}


DECODE = {"GROUPS": 2, "WHOLE": False, "HAS_BIAS": True, "INTERPRETED": False}


@pytest.mark.parametrize("arch", [80, 100, 120])
@pytest.mark.parametrize("e4m3", [False, True])
def test_few_tokens_where_other_kernels_are_chosen(arch: int, e4m3: bool) -> None:
    """Two programs of each kernel fit a multiprocessor; the first wait stands before the first trigger."""
    decode = DECODE | {"E4M3": e4m3, "PDL": arch >= 90}
    down = decode | {"TOKENS": 8, "SLOTS": 4, "BLOCK_N": 32, "PARTS": 4}
    gate_up = down | {"GATED": True, "BOUND": "clamp", "KIND": "silu", "LATE": True}
    for kernel, constants, orders in (
        (w4a16_decode.gate_up_decode_kernel, gate_up, ["wait", "launch_dependents"]),
        (w4a16_decode.down_decode_kernel, down, ["wait", "wait", "launch_dependents"]),
    ):
        built = compile_for(arch, kernel, constants, "bf16", num_warps=4, num_stages=3)
        assert "mma.sync" in built.asm["ptx"]
        assert 2 * built.metadata.shared <= DeviceInfo.parse(f"sm_{arch}").shared_memory
        found = re.findall(r"griddepcontrol\.(\w+)", built.asm["ptx"])
        assert found == (orders if arch >= 90 else [])


def test_every_family_has_configurations_that_fit() -> None:
    for arch in FAMILIES:
        device = DeviceInfo.parse(f"sm_{arch}")
        assert all(shared_memory(config) <= device.shared_memory for config in configs(arch))


GPT_OSS = (4, 32, (5760, 2880), (2880, 2880))
QWEN3 = (8, 128, (1536, 2048), (2048, 768))
MIXTRAL = (2, 8, (28672, 4096), (4096, 14336))
DEEPSEEK = (8, 256, (4096, 7168), (7168, 2048))


@pytest.mark.parametrize(
    ("layer", "num_tokens", "rows", "warps"),
    [
        (GPT_OSS, 1, (32, 32), (2, 4)),
        (GPT_OSS, 2, (64, 32), (2, 2)),
        (GPT_OSS, 4, (64, 64), (1, 2)),
        (QWEN3, 1, (32, 32), (2, 2)),
        (QWEN3, 2, (32, 32), (2, 2)),
        (QWEN3, 4, (64, 64), (2, 2)),
        (MIXTRAL, 1, (32, 32), (2, 8)),
        (MIXTRAL, 2, (64, 32), (2, 8)),
        (DEEPSEEK, 1, (32, 32), (4, 2)),
        (DEEPSEEK, 2, (64, 64), (2, 2)),
    ],
)
def test_how_few_tokens_are_cut(
    layer: tuple[Any, ...], num_tokens: int, rows: tuple[int, int], warps: tuple[int, int]
) -> None:
    config = choose_decode(90, 132, num_tokens, *layer)
    assert config is not None
    assert (config.gate_up.block_n, config.down.block_n) == rows
    assert (config.gate_up.split, config.down.split) == warps
    assert config.pdl
    assert config.late == (num_tokens > 1)


def test_down_starts_while_gate_up_multiplies_or_after_it() -> None:
    """A program that waits to be allowed to read takes a place that one that multiplies may need."""
    constants = DECODE | {"TOKENS": 1, "SLOTS": 4, "BLOCK_N": 32, "PARTS": 2, "E4M3": False, "PDL": True}
    constants |= {"GATED": True, "BOUND": "clamp", "KIND": "silu"}
    for late in (False, True):
        built = compile_for(
            90, w4a16_decode.gate_up_decode_kernel, constants | {"LATE": late}, "bf16", num_warps=2, num_stages=4
        )
        before = built.asm["ptx"].split("griddepcontrol.launch_dependents")[0]
        assert ("mma.sync" in before) == late


def test_when_tokens_are_few() -> None:
    """Where they are measured, until they would often share an expert."""
    for layer, most in ((GPT_OSS, 4), (QWEN3, 4), (MIXTRAL, 2), (DEEPSEEK, 4)):
        found = [choose_decode(90, 132, num_tokens, *layer) is not None for num_tokens in range(1, 10)]
        assert found == [num_tokens <= most for num_tokens in range(1, 10)]
    assert not any(choose_decode(arch, 132, 1, *GPT_OSS) for arch in FAMILIES.keys() - {90})
