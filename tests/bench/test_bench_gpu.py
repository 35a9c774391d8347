"""The benchmark on a GPU: what is timed is right, and the table holds who is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_bench_layers import reference
from tolerances import assert_close_per_token

from fp4_inductor.__main__ import main
from fp4_inductor.backends import get_backend
from fp4_inductor.bench.layers import planned_layer
from fp4_inductor.bench.peers import TritonKernels
from fp4_inductor.bench.peers.triton_kernels import triton_kernels_layer
from fp4_inductor.bench.shapes import Shape, parse_shape
from fp4_inductor.device import DeviceInfo
from fp4_inductor.formats import MXFP4, NVFP4, BlockFormat
from fp4_inductor.random_layer import inputs, random_weights
from fp4_inductor.timing import cuda_graph_us

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
GPT_OSS = Shape("small gpt-oss", 16, 4, 512, 384, gpt_oss=True)


@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)
@pytest.mark.parametrize("shape", [GPT_OSS, parse_shape("32x6x256x512")], ids=lambda shape: shape.name)
def test_our_layer_is_right(shape: Shape, fmt: BlockFormat) -> None:
    spec = shape.spec(fmt)
    weights = random_weights(spec, CUDA)
    plan = get_backend("triton_w4a16").plan(spec, DeviceInfo.current(CUDA))
    layer = planned_layer(spec, plan, weights)
    for tokens in (1, 33):
        hidden, logits = inputs(spec, tokens, CUDA)[0]
        logits = logits.float() + torch.arange(spec.num_experts, device=CUDA) * 1e-3  # no ties
        assert_close_per_token(layer(hidden, logits), reference(spec, weights, hidden, logits), torch.bfloat16)


def test_triton_kernels_is_right() -> None:
    if reason := TritonKernels().missing(DeviceInfo.current(CUDA)):
        pytest.skip(reason)
    spec = GPT_OSS.spec(MXFP4)
    weights = random_weights(spec, CUDA)
    layer = triton_kernels_layer(spec, weights)
    for tokens in (1, 33):
        hidden, logits = inputs(spec, tokens, CUDA)[0]
        logits = logits.float() + torch.arange(spec.num_experts, device=CUDA) * 1e-3
        assert_close_per_token(layer(hidden, logits), reference(spec, weights, hidden, logits), torch.bfloat16)


def test_the_command_beside_its_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "out.json"
    words = ["--shapes", "16x2x512x512", "--tokens", "1,64", "--formats", "mxfp4,nvfp4", "--peers"]
    main(["bench", *words, "--json", str(data)])
    found = json.loads(data.read_text())
    labels = {f"{column['provider']}/{column['weights']}" for column in found["columns"]}
    assert {"triton_w4a16/mxfp4", "triton_w4a16/nvfp4", "grouped_mm/bf16"} <= labels
    for row in found["rows"]:
        for label in ("triton_w4a16/mxfp4", "triton_w4a16/nvfp4", "grouped_mm/bf16"):
            timing = row["timings"][label]
            assert 1 < timing["us"] < 10_000
            if timing["clock"]:
                assert 100 < timing["clock"]["least"] <= timing["clock"]["median"] < 5000
    assert "best peer / triton_w4a16/mxfp4" in capsys.readouterr().out


def test_a_kernel_takes_as_long_in_a_graph() -> None:
    """Graph replay and events around many calls agree, for a kernel that takes much longer than its launch."""
    source = torch.zeros(1 << 29, dtype=torch.uint8, device=CUDA)
    target = torch.empty_like(source)
    sampled = []
    us = cuda_graph_us([lambda: torch.neg(source, out=target)] * 4, replays=5, during=lambda: sampled.append(1))
    assert len(sampled) == 5
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(20):
        torch.neg(source, out=target)
    end.record()
    torch.cuda.synchronize()
    assert us == pytest.approx(start.elapsed_time(end) * 1e3 / 20, rel=0.2)
