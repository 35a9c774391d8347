"""Reports name parameters as people know them, also where a graph calls them ``arg5_1``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp4_inductor import Options, UnmatchedError, explain
from fp4_inductor.formats import MXFP4
from fp4_inductor.input_names import readable
from fp4_inductor.quant import dequantize


class Experts(nn.Module):
    """All experts' outputs, with a square that no pattern knows between the GEMMs."""

    def __init__(self) -> None:
        super().__init__()
        for name, rows, columns in (("w13", 64, 96), ("w2", 96, 64)):
            codes = torch.randint(0, 256, (4, rows, columns // 2), dtype=torch.uint8)
            self.register_parameter(f"{name}_packed", nn.Parameter(codes, requires_grad=False))
            self.register_buffer(f"{name}_scale", torch.full((4, rows, columns // 32), 120, dtype=torch.uint8))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        w13 = dequantize(self.w13_packed, self.w13_scale, None, MXFP4)
        w2 = dequantize(self.w2_packed, self.w2_scale, None, MXFP4)
        inner = F.silu(torch.bmm(w13[ids], x[:, :, None])).square()
        return torch.bmm(w2[ids], inner)[:, :, 0].cumsum(0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Experts(), Experts()])

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, ids)
        return x


INPUTS = torch.randn(5, 96).bfloat16(), torch.randint(0, 4, (5,))


def test_near_misses_name_parameters() -> None:
    report = explain(Model(), *INPUTS)
    anchors = [miss.anchor.split()[0] for miss in report.near_misses]
    assert anchors == [f"layers.{layer}.{name}_packed" for layer in (0, 1) for name in ("w13", "w2")]
    for layer, miss in zip((0, 0, 1, 1), report.near_misses, strict=True):
        assert miss.where.file.endswith("test_input_names.py")
        assert miss.where.module.endswith(f"[{layer}]") or str(layer) in miss.where.module
        assert "arg" not in miss.reason
    text = str(report)
    assert "left behind: layers.0.w13_packed" in text
    assert "12.0 KiB packed" in text


def test_strict_says_what_was_needed_got_and_where() -> None:
    with pytest.raises(UnmatchedError) as failure:
        explain(Model(), *INPUTS, options=Options(strict=True))
    error = failure.value
    assert "strict" in error.did
    assert "every FP4 weight" in error.needed
    assert "4 left behind" in error.got
    assert "layers.1.w2_packed" in error.got
    assert "test_input_names.py:" in error.got
    assert error.now


def test_expected_matches_say_what_was_found() -> None:
    with pytest.raises(UnmatchedError) as failure:
        explain(Model(), *INPUTS, options=Options(expect_matches=2))
    error = failure.value
    assert (error.did, error.got) == ("lowering with fp4moe.expect_matches", "0: none")
    assert "2 MoE blocks" in error.needed
    assert "explain" in error.now


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("L['self']._modules['layers']._modules['0']._parameters['w_packed']", "layers.0.w_packed"),
        ("L['s']._buffers['scale']", "scale"),
        ("L['x']", "x"),
        ("", ""),
    ],
)
def test_sources_are_paths(source: str, name: str) -> None:
    assert readable(source) == name
