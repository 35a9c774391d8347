"""The Gluon kernels of ``triton_w4a16``: what ptxas makes of them, without a device, and their numbers on sm_90."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from cuda_graphs import CapturedCall
from moe_cases import CLAMPED_SWIGLU, EXPERTS_CASES, MoECase, make_case, poison_allocator
from tolerances import assert_close_per_token

from fp4_inductor.backends import get_backend
from fp4_inductor.device import DeviceInfo
from fp4_inductor.formats import FORMATS, MXFP4, NVFP4, BlockFormat
from fp4_inductor.kernels.w4a16_config import BLOCK, GemmConfig, W4A16Config, choose_config, choose_stages, configs
from fp4_inductor.kernels.w4a16_tuning import write_config, write_table
from fp4_inductor.plan import KernelPlan, prepare, run_plan
from fp4_inductor.spec import ActivationSpec, MoESpec, Operand

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter knows no Gluon", allow_module_level=True)
pytest.importorskip("fp4_inductor.kernels.w4a16_hopper", reason="this Triton has another Gluon", exc_type=ImportError)

import triton
from launches import Compilation, launches, resources
from triton.backends.nvidia.compiler import get_ptxas

from fp4_inductor.kernels import w4a16

TILES = (8, 16, 32, 64, 128)
ROWS = tuple(config for config in configs(90) if config.hopper)
LONG = (4096, 14336)
SHORT = (2048, 768)
"""Columns of gate_up and of down."""
GPT_OSS = MoESpec(8, 2, 320, 96, MXFP4, CLAMPED_SWIGLU, has_w13_bias=True, has_w2_bias=True)
NEW_TRITON = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
SPILLED = {("not_gated", 128, 4): 16} if NEW_TRITON else {}
"""Bytes of local memory that newer Tritons take, by activation, rows of a tile and warps."""
REGISTERS = {("softcap", 32): 136} if NEW_TRITON else {}
"""Registers by activation and rows of a tile where newer Tritons take more than four programs leave."""
SPECS = {
    "gpt_oss": GPT_OSS,
    "float32_out": replace(GPT_OSS, out_dtype=torch.float32, has_w13_bias=False, has_w2_bias=False),
    "not_gated": replace(GPT_OSS, activation=ActivationSpec("relu2", gated=False)),
    "softcap": replace(GPT_OSS, activation=ActivationSpec("gelu_tanh", limit=1.0, bound="softcap")),
}


def is_hopper(compilation: Compilation) -> bool:
    return "hopper" in compilation.name


def listing(compilation: Compilation, directory: Path) -> str:
    """What ptxas says of a kernel."""
    source = directory / "kernel.ptx"
    source.write_text(compilation.build().asm["ptx"])
    command = [get_ptxas(90).path, "-v", "-arch=sm_90a", str(source), "-o", str(directory / "kernel.cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize(
    ("name", "fmt"), [("gpt_oss", MXFP4), ("gpt_oss", NVFP4), *((name, NVFP4) for name in SPECS if name != "gpt_oss")]
)
@pytest.mark.usefixtures("kernels_of_this_run")
def test_products_run_beside_the_decoding(name: str, fmt: BlockFormat, tmp_path: Path) -> None:
    """ptxas would wait for each product at once, and say so, if it could not prove that registers stay as they are."""
    new = launches(replace(SPECS[name], weight_format=fmt), 90, (8, 12, 40, 80))
    found = [compilation for compilations in new.values() for compilation in filter(is_hopper, compilations)]
    assert {compilation.constants["BLOCK_M"] for compilation in found} == {8, 16, 32}
    for compilation in found:
        said = listing(compilation, tmp_path)
        assert "serialized" not in said, (compilation.constants, said)
        assert "0 bytes spill stores" in said, (compilation.constants, said)
        limit = REGISTERS.get((name, compilation.constants["BLOCK_M"]), 128)
        assert resources(compilation.build(), tmp_path).registers <= limit, "fewer than four programs a multiprocessor"


@pytest.mark.parametrize("name", ["not_gated", "softcap"])
@pytest.mark.usefixtures("kernels_of_this_run")
def test_wide_tiles_leave_registers_for_every_activation(name: str, tmp_path: Path) -> None:
    """Two programs of 4 warps run on a multiprocessor, or one of 8."""
    spec = replace(SPECS[name], weight_format=NVFP4, hidden_size=4096)
    found = {}
    for compilation in (c for new in launches(spec, 90, (200, 800, 2400)).values() for c in new if is_hopper(c)):
        found[compilation.constants["BLOCK_M"], compilation.options["num_warps"]] = compilation.name
        used = resources(compilation.build(), tmp_path)
        assert used.registers <= 255
        assert used.local == SPILLED.get((name, compilation.constants["BLOCK_M"], compilation.options["num_warps"]), 0)
    assert found == dict.fromkeys([(64, 4), (128, 4), (128, 8)], "gate_up_hopper_kernel")


@pytest.mark.usefixtures("kernels_of_this_run")
def test_weights_come_by_ldmatrix() -> None:
    down = next(c for c in launches(GPT_OSS, 90, [12])[12] if c.name == "down_hopper_kernel")
    loop = down.build().asm["ptx"].split("wgmma.wait_group")[0]
    assert "ldmatrix.sync.aligned.m8n8.x4" in loop
    assert "st.shared" not in loop


def kinds(tokens: int, columns: tuple[int, int], e4m3: bool = False) -> tuple[int, ...]:
    """Tokens of a tile and, of gate_up and down, warps of a Gluon kernel or 0, for experts of ``tokens`` tokens."""
    config = choose_config(90, 128 * tokens, 128, columns, e4m3=e4m3)
    return config.block_m, *(g.num_warps if g.hopper else 0 for g in (config.gate_up, config.down))


def test_which_gemms_take_them() -> None:
    for columns in (LONG, SHORT):
        assert [kinds(tokens, columns) for tokens in (2, 10, 24)] == [(8, 4, 4), (16, 4, 4), (32, 4, 4)]
        assert kinds(32, columns) == (64, 0, 0)
    assert [kinds(tokens, LONG) for tokens in (64, 256, 512)] == [(64, 4, 4), (128, 4, 4), (128, 8, 8)]
    assert [kinds(tokens, SHORT) for tokens in (64, 256, 512)] == [(64, 4, 0), (128, 4, 0), (128, 4, 0)]
    assert [kinds(tokens, (2880, 2880)) for tokens in (128, 512)] == [(128, 4, 0), (128, 4, 8)]
    assert kinds(512, (7168, 2048)) == kinds(512, (7168, 2016)) == (128, 8, 8)
    assert [kinds(32, columns, e4m3=True) for columns in (LONG, SHORT)] == [(64, 4, 4), (64, 4, 0)]


def test_who_never_takes_them() -> None:
    size: dict[str, Any] = {"num_experts": 128, "columns": LONG, "e4m3": False}
    for num_pairs in (256, 8192, 1 << 16):
        assert not choose_config(90, num_pairs, hopper=False, **size).hopper
        assert not any(choose_config(arch, num_pairs, **size).hopper for arch in (80, 89, 100, 120))
    assert choose_config(90, 5 * 128, hopper=False, **size).block_m == 16
    float16 = replace(GPT_OSS, act_dtype=torch.float16, out_dtype=torch.float16)
    assert not any(is_hopper(c) for c in launches(float16, 90, [12])[12])


def test_no_step_is_empty_where_another_buffer_helps() -> None:
    stages = partial(choose_stages, block_m=32, e4m3=False)
    assert [stages(4, steps) for steps in (45, 32, 112, 5, 6, 20)] == [5, 4, 4, 5, 4, 4]
    assert [stages(3, steps) for steps in (45, 64, 112, 224)] == [3, 4, 4, 3]
    assert [choose_stages(4, 45, 64, e4m3) for e4m3 in (False, True)] == [4, 5]


@pytest.fixture
def hopper_only() -> Iterator[None]:
    """Other kernels would pass these tests too."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a device of sm_90")
    with mock.patch.object(w4a16, "_kernels", wraps=w4a16._kernels) as kernels:
        yield
    assert kernels.call_args_list
    assert all(call.args[0].hopper for call in kernels.call_args_list)


gpu = [pytest.mark.gpu, pytest.mark.usefixtures("hopper_only")]


def tiles_of(block_m: int, num_stages: int = 4, num_warps: int = 4) -> W4A16Config:
    gemm = GemmConfig(32 * num_warps, 64, num_warps, num_stages, hopper=True)
    return W4A16Config(block_m, max(8, block_m // 4), 4, gemm, gemm, pdl=True)


def plan_with(spec: MoESpec, config: W4A16Config) -> KernelPlan:
    table = write_table([(None, write_config(config))])
    return get_backend("triton_w4a16").plan(spec, DeviceInfo.current(torch.device("cuda")), table)  # type: ignore[call-arg]


def run(case: MoECase, config: W4A16Config) -> torch.Tensor:
    plan = plan_with(case.spec, config)
    ready = prepare(plan, case.operands)
    poison_allocator(num_bytes=1 << 20)
    return run_plan(plan, case.operands, ready)


def check(case: MoECase, config: W4A16Config) -> None:
    assert_close_per_token(run(case, config), case.reference(), case.spec.act_dtype)


def skewed(case: MoECase) -> MoECase:
    """Expert 0 has nearly every token, and each next one fewer; some ids are outside."""
    given, experts = case.operands[Operand.TOPK_IDS], case.spec.num_experts
    rng = torch.Generator(given.device).manual_seed(0)
    liked = torch.rand(len(given), experts, generator=rng, device=given.device)
    ids = (liked - 0.4 * torch.arange(experts, device=given.device)).topk(given.shape[1]).indices
    ids = torch.where(torch.rand(ids.shape, generator=rng, device=ids.device) < 0.1, experts + 1, ids)
    ids[-1] = -1
    return MoECase(case.spec, {**case.operands, Operand.TOPK_IDS: ids.to(given.dtype)})


class TestOnHopper:
    pytestmark = gpu

    @pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
    @pytest.mark.parametrize("name", sorted(EXPERTS_CASES.keys() - {"float16"}))
    def test_every_knob(self, name: str, fmt: BlockFormat) -> None:
        check(make_case(fmt, device="cuda", **{**EXPERTS_CASES[name], "num_tokens": 11}), tiles_of(8))

    @pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
    @pytest.mark.parametrize("block_m", TILES)
    @pytest.mark.parametrize("num_tokens", [1, 2, 7, 33, 64, 300])
    def test_every_token_count(self, num_tokens: int, block_m: int, fmt: BlockFormat) -> None:
        sizes: dict[str, Any] = {"num_experts": 5, "top_k": 3, "hidden_size": 160, "intermediate_size": 224}
        check(
            make_case(fmt, num_tokens=num_tokens, outside_ids=True, bias=True, device="cuda", **sizes),
            tiles_of(block_m),
        )

    @pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
    @pytest.mark.parametrize("block_m", [16, 64, 128])
    @pytest.mark.parametrize("num_tokens", [5, 64, 700])
    def test_two_warpgroups(self, num_tokens: int, block_m: int, fmt: BlockFormat) -> None:
        """Weight rows that are no multiple of 256 or of 128, one expert with many tokens, others with few."""
        sizes: dict[str, Any] = {"num_experts": 5, "top_k": 3, "hidden_size": 352, "intermediate_size": 608}
        case = make_case(fmt, num_tokens=num_tokens, outside_ids=True, bias=True, device="cuda", **sizes)
        check(case, tiles_of(block_m, num_warps=8))

    @pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
    @pytest.mark.parametrize("columns", [32, 64, 320, 576, 1088])
    @pytest.mark.parametrize("num_stages", [3, 4, 6])
    def test_rows_of_every_length(self, num_stages: int, columns: int, fmt: BlockFormat) -> None:
        """Fewer steps than buffers, as many, and more; a program alone, and programs that share a block."""
        for experts, num_tokens in ((3, 5), (64, 64)):
            sizes = {"num_experts": experts, "hidden_size": columns, "intermediate_size": columns, "top_k": 3}
            check(make_case(fmt, num_tokens=num_tokens, device="cuda", **sizes), tiles_of(8, num_stages))

    @pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
    @pytest.mark.parametrize("gated", [True, False])
    @pytest.mark.parametrize("config", ROWS, ids=write_config)
    def test_rows_of_the_table(self, config: W4A16Config, gated: bool, fmt: BlockFormat) -> None:
        """Most tokens with one expert, whole tiles and the last one's every width; columns end in half a step.

        With 40 tokens programs share output blocks.
        """
        sizes: dict[str, Any] = {"num_experts": 6, "top_k": 3, "hidden_size": 1120, "intermediate_size": 864}
        activation = CLAMPED_SWIGLU if gated else SPECS["not_gated"].activation
        for num_tokens in (40, 333):
            case = make_case(
                fmt, num_tokens=num_tokens, activation=activation, bias=gated, device="cuda", seed=num_tokens, **sizes
            )
            check(skewed(case), config)

    @pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
    @pytest.mark.parametrize("block_m", [64, 128])
    def test_a_plain_gemm_beside_a_gluon_one(self, block_m: int, fmt: BlockFormat) -> None:
        own = tiles_of(block_m, num_warps=8)
        sizes: dict[str, Any] = {"num_experts": 5, "top_k": 2, "hidden_size": 544, "intermediate_size": 1056}
        case = skewed(make_case(fmt, num_tokens=200, bias=True, device="cuda", **sizes))
        for config in (replace(own, gate_up=BLOCK), replace(own, down=BLOCK)):
            check(case, config)

    @pytest.mark.parametrize("num_tokens", [9, 100, 500])
    @pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
    def test_runs_repeat_bit_for_bit(self, fmt: BlockFormat, num_tokens: int) -> None:
        case = make_case(fmt, num_tokens=num_tokens, hidden_size=1088, intermediate_size=576, bias=True, device="cuda")
        for config in (*map(tiles_of, TILES), tiles_of(128, 3), tiles_of(128, 4, 8)):
            first = run(case, config)
            assert all(torch.equal(first, run(case, config)) for _ in range(20))

    def test_hidden_states_may_lie_anywhere(self) -> None:
        case = make_case(MXFP4, device="cuda")
        first = run(case, tiles_of(8))
        hidden = case.operands[Operand.HIDDEN]
        moved = hidden.new_empty(hidden.numel() + 1)[1:].view_as(hidden).copy_(hidden)
        assert moved.data_ptr() % 16
        assert torch.equal(first, run(MoECase(case.spec, {**case.operands, Operand.HIDDEN: moved}), tiles_of(8)))

    @pytest.mark.parametrize(("num_tokens", "block_m"), [(6, 8), (60, 8), (300, 128)])
    def test_a_cuda_graph_follows_new_routes(self, num_tokens: int, block_m: int) -> None:
        case, other = (
            make_case(NVFP4, num_tokens=num_tokens, outside_ids=True, hidden_size=576, seed=seed, device="cuda")
            for seed in (0, 1)
        )
        plan = plan_with(case.spec, tiles_of(block_m))
        ready = prepare(plan, case.operands)
        captured = CapturedCall(lambda: run_plan(plan, case.operands, ready))
        for operand in (Operand.HIDDEN, Operand.TOPK_IDS, Operand.TOPK_WEIGHTS):
            case.operands[operand].copy_(other.operands[operand])
        for _ in range(20):
            assert torch.equal(captured.replay(), run_plan(plan, case.operands, ready))
        assert_close_per_token(captured.out, case.reference(), torch.bfloat16)

    @pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
    def test_real_sizes(self, fmt: BlockFormat) -> None:
        sizes: dict[str, Any] = {"num_experts": 8, "top_k": 4, "hidden_size": 2880, "intermediate_size": 2880}
        case = make_case(fmt, num_tokens=13, activation=CLAMPED_SWIGLU, bias=True, device="cuda", **sizes)
        for config in (*map(tiles_of, TILES), tiles_of(128, 4, 8)):
            check(case, config)

    @pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
    def test_many_tokens_of_a_long_layer(self, fmt: BlockFormat) -> None:
        """The family's own choice: two warpgroups in both GEMMs."""
        sizes: dict[str, Any] = {"num_experts": 3, "top_k": 2, "hidden_size": 4096, "intermediate_size": 2080}
        case = skewed(make_case(fmt, num_tokens=700, device="cuda", **sizes))
        config = choose_config(90, 1400, 3, (4096, 2080), e4m3=fmt is NVFP4)
        assert config.gate_up.num_warps == config.down.num_warps == 8
        check(case, config)
