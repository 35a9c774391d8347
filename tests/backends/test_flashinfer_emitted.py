"""Every path's plan is written into a graph, re-layouts and all, and the graph computes what it did."""

from __future__ import annotations

import pytest
from test_flashinfer_probe import STAND_INS, with_libraries
from test_lowering_pass import captured_stack, random_inputs

from fp4_inductor import Options
from fp4_inductor.emit import FUSED
from fp4_inductor.lowering_pass import lower

PATHS = [
    # backend, device, family, weights, activations; the call's op
    ("flashinfer_cutlass", "sm_90", "gpt_oss", "mxfp4", None, "moe_flashinfer_cutlass_bf16"),
    ("flashinfer_cutlass", "sm_121", "gpt_oss", "mxfp4", "mxfp8", "moe_flashinfer_cutlass_mxfp8"),
    ("flashinfer_cutlass", "sm_120", "gpt_oss", "nvfp4", "nvfp4", "moe_flashinfer_cutlass_nvfp4"),
    ("flashinfer_trtllm", "sm_100", "gpt_oss", "mxfp4", None, "moe_flashinfer_trtllm_bf16_routed"),
    ("flashinfer_trtllm", "sm_103", "gpt_oss", "mxfp4", "mxfp8", "moe_flashinfer_trtllm_mxfp8_routed"),
    ("flashinfer_trtllm", "sm_100", "gpt_oss", "nvfp4", "nvfp4", "moe_flashinfer_trtllm_nvfp4_routed"),
    ("flashinfer_cutedsl", "sm_100", "qwen3_moe", "nvfp4", None, "moe_flashinfer_cutedsl_bf16"),
    ("flashinfer_cutedsl", "sm_100", "qwen3_moe", "nvfp4", "nvfp4", "moe_flashinfer_cutedsl_nvfp4"),
    ("flashinfer_cutedsl", "sm_103", "qwen3_moe", "mxfp4", "mxfp8", "moe_flashinfer_cutedsl_mxfp8"),
    ("flashinfer_cutedsl", "sm_103", "gpt_oss", "nvfp4", "nvfp4", "moe_flashinfer_masked_nvfp4"),
    ("flashinfer_b12x", "sm_120", "qwen3_moe", "nvfp4", None, "moe_flashinfer_b12x_bf16"),
    ("flashinfer_b12x", "sm_121", "qwen3_moe", "nvfp4", "nvfp4", "moe_flashinfer_b12x_nvfp4"),
    ("flashinfer_b12x", "sm_120", "qwen3_moe", "mxfp4", "mxfp4", "moe_flashinfer_b12x_mxfp4"),
]


@pytest.mark.parametrize(
    ("backend", "arch", "family", "fmt", "allowed", "op"), PATHS, ids=[f"{path[-1]}-{path[1]}" for path in PATHS]
)
def test_the_graph_computes_what_it_did(
    backend: str, arch: str, family: str, fmt: str, allowed: str | None, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stand_ins,) = (module for module, names in STAND_INS.items() if backend in names)
    stand_ins.stand_in(monkeypatch)
    gm = captured_stack(family, fmt)
    options = Options(backend, activation_format=allowed, verify="first_call")
    lowering = lower(gm.graph, options, with_libraries(arch))
    called = {node.target.name() for node in gm.graph.nodes if FUSED in node.meta}
    assert called == {f"fp4_inductor::{op}"}
    assert lowering.verification is not None
    lowering.verification(random_inputs(gm))
