"""On a GPU: re-layouts are those of a CPU, FlashInfer's own preparation gives them too, and trials tell what runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from flashinfer_source import module, needs_flashinfer
from layout_bits import random_bits, same_bits
from moe_cases import CLAMPED_SWIGLU, make_case

from fp4_inductor import DeviceInfo, NoBackendError, Options
from fp4_inductor.backends import BACKENDS, get_backend
from fp4_inductor.formats import ACTIVATION_FORMATS, MXFP4, NVFP4, BlockFormat
from fp4_inductor.layouts.cutlass_sm90 import to_sm90_scales
from fp4_inductor.layouts.gate_up import UP_GATE, reorder_gate_up
from fp4_inductor.layouts.kernel_rows import BLOCKS_OF_64, PAIRS
from fp4_inductor.layouts.scale_128x4 import to_scale_tiles
from fp4_inductor.layouts.trtllm import shuffle_rows
from fp4_inductor.plan import prepare
from fp4_inductor.probe import forget_trials, probe
from fp4_inductor.reasons import ReasonCode
from fp4_inductor.select import select
from fp4_inductor.spec import GateUpOrder, MoESpec

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
LIBRARIES = (("flashinfer-python", "0.7.2.post1"), ("triton", "3.6.0"))
ARCHITECTURES = ("sm_90", "sm_100", "sm_103", "sm_120")


@pytest.mark.parametrize("order", GateUpOrder, ids=str)
@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)
def test_what_is_prepared_is_what_a_cpu_prepares(fmt: BlockFormat, order: GateUpOrder) -> None:
    """Every path of every backend, wherever its kernel would run."""
    paths = set()
    for bias, arch, allowed in product((False, True), ARCHITECTURES, (None, *ACTIVATION_FORMATS)):
        made = make_case(fmt, bias=bias, w13_order=order, hidden_size=160, intermediate_size=96, global_scale="expert")
        spec, on = (
            replace(made.spec, activation_format=allowed),
            replace(DeviceInfo.parse(arch), libraries=LIBRARIES),
        )
        for backend in BACKENDS:
            if not backend.name.startswith("flashinfer_") or not backend.check(spec, on).ok:
                continue
            plan = backend.plan(spec, on)
            here = prepare(plan, {operand: tensor.to(CUDA) for operand, tensor in made.operands.items()})
            for name, wanted in prepare(plan, made.operands).items():
                assert here[name].stride() == wanted.stride(), (plan.op, name)
                assert same_bits(here[name].cpu(), wanted), (plan.op, name)
            paths.add(plan.op)
    assert len(paths) >= 6


@needs_flashinfer
@pytest.mark.parametrize("shape", [(2, 128, 16), (3, 384, 40)], ids=str)
def test_flashinfer_prepares_the_same(shape: tuple[int, int, int]) -> None:
    fp4, core, theirs = map(module, ("quantization.fp4_quantization", "fused_moe.core", "fused_moe.prepare"))
    rows = random_bits(shape, torch.uint8).to(CUDA)
    assert same_bits(shuffle_rows(rows), torch.stack([fp4.shuffle_matrix_a(expert, 128) for expert in rows]))
    pairs = torch.stack([core.reorder_rows_for_gated_act_gemm(expert) for expert in rows])
    assert same_bits(reorder_gate_up(rows, UP_GATE, PAIRS), pairs)
    blocks = theirs._interleave_linear_and_gate(rows, group_size=64, dim=1)
    assert same_bits(reorder_gate_up(rows, UP_GATE, BLOCKS_OF_64), blocks)
    tiles = to_scale_tiles(rows)
    assert same_bits(theirs._swizzle_cutile_fp4_scales(rows, scale_block_size=16).reshape(tiles.shape), tiles)
    scale = random_bits((2, 128, 8), torch.uint8).to(CUDA)
    assert same_bits(to_sm90_scales(scale), theirs.interleave_moe_scales_for_sm90_mixed_gemm(scale, group_size=32))


@needs_flashinfer
def test_a_kernel_that_is_not_built_is_told_and_another_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On sm_90 FlashInfer would build for an hour; told not to, it raises, unless somebody built it ahead."""
    here = DeviceInfo.current(CUDA)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_experts": 8}
    spec: MoESpec = make_case(MXFP4, bias=True, activation=CLAMPED_SWIGLU, **sizes).spec
    backend = get_backend("flashinfer_cutlass")
    if not backend.check(spec, here).ok:
        pytest.skip(f"{backend.check(spec, here)}")
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    monkeypatch.setattr(type(backend), "rank", lambda self, spec, device: 1000)
    forget_trials()
    trial = partial(probe, device=here, where=CUDA)
    try:
        selection = select(spec, here, Options(), probe=trial)
        if selection.chosen == backend.name:
            return  # it is built, and its result was right
        assert selection.chosen == "triton_w4a16"
        (verdict,) = (verdict for verdict in selection.verdicts if verdict.backend == backend.name)
        assert [reason.code for reason in verdict.reasons] == [ReasonCode.PROBE_FAILED]
        with pytest.raises(NoBackendError, match="PROBE_FAILED"):
            select(spec, here, Options(backend.name), probe=trial)
    finally:
        forget_trials()
