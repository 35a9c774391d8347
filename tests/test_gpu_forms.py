"""Own spellings of MoE blocks on a GPU, whose traces differ from a CPU's: found, lowered, and held to the graph."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "patterns"))

import branch_spellings
import loop_spellings
import test_moe_forms
import test_separate_gate_up as separate

from fp4_inductor.formats import MXFP4, NVFP4, BlockFormat

pytestmark = pytest.mark.gpu
OPTIONS = {
    "fp4moe.backend": "triton_w4a16",
    "fp4moe.expect_matches": 1,
    "fp4moe.strict": True,
    "fp4moe.verify": "first_call",
    "shape_padding": False,  # else Inductor pads a sum over slots where a measurement says so
}


def check(model: torch.nn.Module, *shapes: tuple[int, ...], **config: Any) -> None:
    """Compile ``model`` and call it; the first call of each graph compares the block as written with the fused op."""
    torch._dynamo.reset()
    model = model.eval().requires_grad_(False).cuda()
    compiled = torch.compile(model, backend="fp4moe", fullgraph=True, options=OPTIONS, **config)
    with torch.no_grad():
        for shape in shapes:
            out = compiled(torch.randn(shape, device="cuda").bfloat16())
            assert out.isfinite().all()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("spelling", [*branch_spellings.DENSE, *branch_spellings.GATHERED], ids=lambda f: f.__name__)
def test_branches(spelling: branch_spellings.Spelling, dynamic: bool) -> None:
    top_k = 1 if spelling is branch_spellings.llama4 else 3
    check(branch_spellings.BranchMoE(spelling, top_k), (2, 9, branch_spellings.H), dynamic=dynamic)


@pytest.mark.parametrize("loop", [*loop_spellings.SPARSE, *loop_spellings.DENSE], ids=lambda f: f.__name__)
def test_loops(loop: loop_spellings.Loop) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(loop_spellings.LoopMoE(loop), (14, loop_spellings.H), (5, loop_spellings.H), dynamic=True)


@pytest.mark.parametrize("name", list(test_moe_forms.FORMS))
def test_rows(name: str) -> None:
    check(test_moe_forms.UserMoE(test_moe_forms.FORMS[name][1]), (2, 9, test_moe_forms.H))


@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)
def test_gate_and_up_apart(fmt: BlockFormat, form: str) -> None:
    check(separate.SeparateMoE(fmt, form, bias=True), (separate.TOKENS, separate.H))
