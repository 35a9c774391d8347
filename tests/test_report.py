"""Reports: text for people, JSON for tools, the same facts in both."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import torch

from fp4_inductor import DeviceInfo, LoweringReport
from fp4_inductor.emit import KernelWeight
from fp4_inductor.formats import MXFP4
from fp4_inductor.matching import NearMiss, SourceLocation
from fp4_inductor.plan import KernelPlan
from fp4_inductor.reasons import Reason, ReasonCode, Verdict
from fp4_inductor.report import SiteReport, log_report
from fp4_inductor.select import Selection
from fp4_inductor.spec import ActivationSpec, MoESpec

SPEC = MoESpec(32, 4, 2880, 2880, MXFP4, ActivationSpec("silu", alpha=1.702, beta=1.0, limit=7.0), has_w13_bias=True)
DEVICE = DeviceInfo.parse("sm_90")
REFUSAL = Verdict("cpu", (Reason(ReasonCode.CAPABILITY, "a CPU", "H200 (sm_90)"),))
WEIGHTS = (
    KernelWeight("w13_codes", (32, 5760, 360), torch.int32, prepared=True),
    KernelWeight("w2_bias", (32, 2880), torch.bfloat16, prepared=False),
)


def site(layer: int, chosen: str | None = "triton_w4a16") -> SiteReport:
    plan = KernelPlan("fp4_inductor::moe_w4a16", (), layout="planes") if chosen else None
    verdicts = (Verdict("triton_w4a16"), REFUSAL) if chosen else (REFUSAL,)
    return SiteReport(
        where=SourceLocation("/site/modeling.py", 77, "y = experts(x)", f"model.layers.{layer}.mlp"),
        pattern="grouped_mm",
        grade="full",
        selection=Selection(SPEC, DEVICE, chosen, plan, verdicts),
        nodes_replaced=41 if chosen else 0,
        bytes_before=SPEC.packed_bytes,
        bytes_dense=32 * 2880 * 2880 * 3 * 2,
        weights=WEIGHTS if chosen else (),
    )


MISS = NearMiss("experts.down_proj_packed", "grouped_mm", "a norm before the weights", 0.8, 4096, site(3).where)


def test_text_says_what_where_and_why() -> None:
    report = LoweringReport(DEVICE, [site(0), site(1)], [MISS], num_graphs=1)
    text = str(report)
    assert "2 of 2 MoE blocks lowered, 1 FP4 weights left behind, 1 graph" in text
    assert "model.layers.0.mlp … model.layers.1.mlp (2 blocks)" in text
    assert "/site/modeling.py:77" in text
    assert "swiglu(alpha=1.702, beta=1.0, limit=7.0) +bias" in text
    assert "triton_w4a16 (fp4_inductor::moe_w4a16, layout planes)" in text
    assert "403.4 MiB packed, prepared 253.1 MiB" in text
    assert "experts.down_proj_packed (4.0 KiB packed)" in text
    assert "a norm before the weights" in text


def test_every_backend_is_told_in_order_with_each_of_its_reasons() -> None:
    two = replace(REFUSAL, reasons=(*REFUSAL.reasons, Reason(ReasonCode.DTYPE, "float32", "bfloat16", "cast it")))
    first = site(0)
    verdicts = (two, Verdict("triton_w4a16"), Verdict("reference"))
    block = replace(first, selection=replace(first.selection, verdicts=verdicts))
    assert str(LoweringReport(DEVICE, [block], num_graphs=1)).splitlines()[-6:] == [
        "    weights  w13_codes int32 [32, 5760, 360], 253.1 MiB",
        "             w2_bias bfloat16 [32, 2880], 180.0 KiB, as the model holds it",
        "    asked    cpu: CAPABILITY: needs a CPU, got H200 (sm_90)",
        "                  DTYPE: needs float32, got bfloat16 (cast it)",
        "             triton_w4a16: chosen",
        "             reference: willing",
    ]


def test_weights_left_behind_together_are_told_together() -> None:
    other = replace(MISS, anchor="experts.gate_up_proj_packed")
    text = str(LoweringReport(DEVICE, [], [MISS, other], num_graphs=1))
    assert "experts.down_proj_packed and experts.gate_up_proj_packed (8.0 KiB packed)" in text
    assert text.count("a norm before the weights") == 1


def test_padding_is_told() -> None:
    plain = site(0)
    assert plain.selection.plan is not None
    plan = replace(plain.selection.plan, padding="I 96 to 128")
    padded = replace(plain, selection=replace(plain.selection, plan=plan))
    assert "layout planes, pads I 96 to 128)" in str(LoweringReport(DEVICE, [padded], num_graphs=1))
    assert padded.to_json()["padding"] == "I 96 to 128"


def test_blocks_that_differ_stand_apart() -> None:
    report = LoweringReport(DEVICE, [site(0), site(1, chosen=None)], num_graphs=1)
    assert "1 of 2 MoE blocks lowered" in str(report)
    assert "left as written, every call dequantises all experts" in str(report)


def test_json_holds_the_same() -> None:
    report = LoweringReport(DEVICE, [site(0)], [MISS], num_graphs=1)
    data = json.loads(json.dumps(report.to_json()))
    assert data["sites"][0]["backend"] == "triton_w4a16"
    assert data["sites"][0]["where"] == {
        "module": "model.layers.0.mlp",
        "file": "/site/modeling.py",
        "line": 77,
        "code": "y = experts(x)",
    }
    assert data["sites"][0]["verdicts"][1]["reasons"][0]["code"] == "CAPABILITY"
    assert data["sites"][0]["weights"] == [
        {
            "name": "w13_codes",
            "shape": [32, 5760, 360],
            "dtype": "int32",
            "bytes": 4 * 32 * 5760 * 360,
            "prepared": True,
        },
        {"name": "w2_bias", "shape": [32, 2880], "dtype": "bfloat16", "bytes": 2 * 32 * 2880, "prepared": False},
    ]
    assert data["sites"][0]["bytes"]["prepared"] == 4 * 32 * 5760 * 360
    assert data["sites"][0]["bytes"]["packed"] == 32 * 2880 * 2880 * 3 * 17 // 32
    assert data["near_misses"][0]["packed_bytes"] == 4096


def test_reports_of_several_graphs_add_up() -> None:
    report = LoweringReport()
    report.add(LoweringReport(DEVICE, [site(0)], num_graphs=1, notes=["slow"]))
    report.add(LoweringReport(DEVICE, [site(1)], num_graphs=1, notes=["slow"]))
    assert (report.num_graphs, report.num_lowered, report.notes) == (2, 2, ["slow"])
    assert report.device == DEVICE


def test_log_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fp4_inductor")
    log_report(LoweringReport(DEVICE, [site(0), site(1, chosen=None)], [MISS], num_graphs=1))
    levels = [record.levelname for record in caplog.records]
    assert levels == ["INFO", "WARNING", "WARNING"]
    assert "model.layers.0.mlp" in caplog.messages[0]
    assert "CAPABILITY" in caplog.messages[1]
    assert "dequantised whole in every call" in caplog.messages[2]


def test_sizes_follow_the_format() -> None:
    assert SPEC.packed_bytes == 32 * (2 * 2880 + 2880) * 2880 * 4.25 / 8
