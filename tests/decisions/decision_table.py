"""DECISIONS.md: what is decided for well-known blocks on every device. ``make decisions`` writes it.

Whoever adds a kernel backend changes cells of the page, never its rows or columns: a row is a block on a device, and
a cell tells of all backends.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fp4_inductor import DeviceInfo, Options
from fp4_inductor.formats import MXFP4, NVFP4, BlockFormat
from fp4_inductor.plan import KernelPlan, prepare
from fp4_inductor.select import Selection, select
from fp4_inductor.spec import ActivationSpec, GateUpOrder, MoESpec, Operand, RouterSpec, Scoring

PATH = Path(__file__).parents[2] / "DECISIONS.md"
LIBRARIES = (("triton", "3.6.0"), ("flashinfer-python", "0.7.2.post1"), ("c++", "g++"))
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121", "cpu")
DEVICES = {name: replace(DeviceInfo.parse(name), libraries=LIBRARIES) for name in ARCHITECTURES}
"""Every known device, as it would be with every kernel library installed."""
ALLOWED = {MXFP4: ("mxfp8",), NVFP4: ("nvfp4",)}
"""Formats of activations that some kernel multiplies weights of a format with."""

SWIGLU = ActivationSpec("silu")
_DEEPSEEK_V3 = RouterSpec(Scoring.SIGMOID, has_bias=True, renormalize=True, renormalize_eps=1e-20, scaling_factor=2.5)
_DEEPSEEK_V4 = RouterSpec(
    Scoring.SQRT_SOFTPLUS, renormalize=True, renormalize_eps=1e-20, scaling_factor=1.5, dtype=torch.bfloat16
)


@dataclass(frozen=True)
class Block:
    """One kind of block of a released model.

    Attributes:
        spec: what recognition makes of the model in transformers, in the checkpoint's sizes and weight format.
        family: of transformers, and ``config``: what a tiny model of it must be given to have this very block.
    """

    name: str
    spec: MoESpec
    family: str
    config: dict[str, Any] = field(default_factory=dict)


def _spec(sizes: tuple[int, int, int, int], fmt: BlockFormat, activation: ActivationSpec, **more: Any) -> MoESpec:
    """``sizes``: E, k, H, I."""
    return MoESpec(*sizes, weight_format=fmt, activation=activation, **more)


def _gpt_oss(num_experts: int) -> MoESpec:
    return _spec(
        (num_experts, 4, 2880, 2880),
        MXFP4,
        ActivationSpec("silu", alpha=1.702, beta=1.0, limit=7.0),
        router=RouterSpec(Scoring.SOFTMAX, topk_before_scoring=True),
        weights_dtype=torch.bfloat16,
        w13_order=GateUpOrder.INTERLEAVED,
        has_w13_bias=True,
        has_w2_bias=True,
    )


def _qwen3(hidden_size: int, intermediate_size: int) -> MoESpec:
    router = RouterSpec(Scoring.SOFTMAX, renormalize=True)
    sizes = (128, 8, hidden_size, intermediate_size)
    return _spec(sizes, NVFP4, SWIGLU, router=router, weights_dtype=torch.bfloat16)


def _deepseek_v4(router: RouterSpec) -> MoESpec:
    activation = ActivationSpec("silu", limit=10.0)
    return _spec((256, 6, 4096, 2048), MXFP4, activation, router=router, weights_dtype=torch.bfloat16)


def _llama4(num_experts: int) -> MoESpec:
    return _spec((num_experts, 1, 5120, 8192), NVFP4, SWIGLU, weights_dtype=torch.bfloat16, weight_on_input=True)


_GROUPED = replace(_DEEPSEEK_V3, num_groups=8, topk_groups=4)
_V4 = {"routed_scaling_factor": 1.5}
BLOCKS = {
    block.name: block
    for block in (
        Block("gpt-oss-20b", _gpt_oss(32), "gpt_oss"),
        Block("gpt-oss-120b", _gpt_oss(128), "gpt_oss"),
        Block("Qwen3-30B-A3B", _qwen3(2048, 768), "qwen3_moe", {"norm_topk_prob": True}),
        Block("Qwen3-235B-A22B", _qwen3(4096, 1536), "qwen3_moe", {"norm_topk_prob": True}),
        Block(
            "DeepSeek-V3",
            _spec((256, 8, 7168, 2048), NVFP4, SWIGLU, router=_GROUPED),
            "deepseek_v3",
            {"n_routed_experts": 16, "n_group": 8, "topk_group": 4},
        ),
        Block("DeepSeek-V4-Flash", _deepseek_v4(replace(_DEEPSEEK_V4, has_bias=True)), "deepseek_v4", _V4),
        Block(
            "DeepSeek-V4-Flash, hash layers", _deepseek_v4(replace(_DEEPSEEK_V4, ids_given=True)), "deepseek_v4", _V4
        ),
        Block(
            "Mixtral-8x7B",
            _spec((8, 2, 4096, 14336), NVFP4, SWIGLU, router=RouterSpec(Scoring.SOFTMAX, renormalize=True)),
            "mixtral",
        ),
        Block("Llama-4-Scout", _llama4(16), "llama4"),
        Block("Llama-4-Maverick", _llama4(128), "llama4"),
        Block(
            "Nemotron-3-Nano",
            _spec((128, 6, 2688, 1856), NVFP4, ActivationSpec("relu2", gated=False), router=_DEEPSEEK_V3),
            "nemotron_h",
            {"n_group": 1, "topk_group": 1},
        ),
    )
}

_HEAD = """\
# Decisions

Which kernel backend runs the blocks of well-known models, on each device, with default options and every kernel
library installed ({libraries}), and why the others do not.
`make decisions` writes this page from the backends' own answers, which need no hardware; a test fails where they part.
`fp4_inductor.explain(model, *args, device="sm_100")` and `python -m fp4_inductor doctor --device sm_100` tell the same
of the model and the libraries at hand.

"""
_ROUNDED_HEAD = """
Where `options={"fp4moe.activation_format": ...}` lets kernels round activations to that format, with less accuracy
than the model as written, these run:

"""
_LEGEND = """
Below, with default options again, a row for each device:

- *Call*: the op, and the layout and padding of the weights that are prepared for it, ahead of time.
- *Bytes*: codes and block scales in the checkpoint → all weights that the kernel has, with global scales, biases and
  padding.
- *Also willing*: backends that run when `options={"fp4moe.backend": ...}` names them.
- *Refused*: the others, each with the codes of all its reasons, as `fp4_inductor.reasons` explains them.

"""
_COLUMNS = ("Device", "Runs on", "Call", "Bytes", "Also willing", "Refused")
NOTHING = "–"

Row: TypeAlias = "tuple[str, ...]"
"""The cells of a block on a device."""


def decide(block: Block, device: DeviceInfo, options: Options | None = None) -> Selection:
    return select(block.spec, device, options or Options())


def row(block: Block, arch: str) -> Row:
    """The cells of ``block`` on the device called ``arch``."""
    selection = decide(block, DEVICES[arch])
    others = [verdict for verdict in selection.verdicts if verdict.backend != selection.chosen]
    willing = ", ".join(verdict.backend for verdict in others if verdict.ok)
    refused = "; ".join(
        f"{verdict.backend} {', '.join(dict.fromkeys(reason.code.name for reason in verdict.reasons))}"
        for verdict in others
        if not verdict.ok
    )
    call, size = NOTHING, NOTHING
    if selection.plan is not None:
        padding = f", pads {selection.plan.padding}" if selection.plan.padding else ""
        call = f"`{selection.plan.op.partition('::')[2]}`, {selection.plan.layout}{padding}"
        size = _bytes(block.spec, selection.plan)
    return (arch, selection.chosen or "as written", call, size, willing or NOTHING, refused or NOTHING)


def _bytes(spec: MoESpec, plan: KernelPlan) -> str:
    with FakeTensorMode():
        given = weights(spec)
        ready = [*prepare(plan, given).values(), *(given[arg] for arg in plan.args if arg in given)]
        size = sum(tensor.nbytes for tensor in ready)
    return f"{spec.packed_bytes / 2**20:.0f} → {size / 2**20:.0f} MiB"


def weights(spec: MoESpec) -> dict[Operand, torch.Tensor]:
    """Canonical weights of ``spec`` without values."""
    fmt, experts = spec.weight_format, spec.num_experts
    found: dict[Operand, torch.Tensor] = {}
    for name, rows, columns in (
        ("w13", spec.w13_rows, spec.hidden_size),
        ("w2", spec.hidden_size, spec.intermediate_size),
    ):
        found[Operand(name)] = torch.empty(experts, rows, columns // 2, dtype=torch.uint8)
        found[Operand(f"{name}_scale")] = torch.empty(experts, rows, columns // fmt.block_size, dtype=fmt.scale_dtype)
        found[Operand(f"{name}_global")] = torch.empty(experts, 1)
        found[Operand(f"{name}_bias")] = torch.empty(experts, rows, dtype=spec.act_dtype)
    return found


def rounded_row(block: Block, allowed: str) -> Row:
    """What runs ``block`` on each device where activations may become ``allowed``."""
    options = Options(activation_format=allowed)
    chosen = (decide(block, DEVICES[arch], options).chosen for arch in ARCHITECTURES)
    return (block.name, f"{block.spec.weight_format} × {allowed}", *(name or NOTHING for name in chosen))


def read(path: Path = PATH) -> dict[str, list[Row]]:
    """The rows on the page, of each block."""
    found: dict[str, list[Row]] = {}
    block = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            block = line.removeprefix("## ")
        cells = tuple(cell.strip() for cell in line.strip("|").split(" | "))
        if block and cells[0] in ARCHITECTURES:
            found.setdefault(block, []).append(cells)
    return found


def render() -> str:
    """The page."""
    rows = {name: [row(block, arch) for arch in ARCHITECTURES] for name, block in BLOCKS.items()}
    overview = [(name, str(BLOCKS[name].spec.weight_format), *(cells[1] for cells in rows[name])) for name in BLOCKS]
    libraries = " and ".join(f"{name} {version}" for name, version in LIBRARIES)
    rounded = [
        rounded_row(block, allowed) for block in BLOCKS.values() for allowed in ALLOWED[block.spec.weight_format]
    ]
    lines = [*_table(("Block", "Weights", *ARCHITECTURES), overview), _ROUNDED_HEAD.rstrip("\n"), ""]
    lines += [*_table(("Block", "Weights × activations", *ARCHITECTURES), rounded), _LEGEND.rstrip("\n")]
    for name, block in BLOCKS.items():
        lines += ["", f"## {name}", "", f"`{block.spec}`", "", *_table(_COLUMNS, rows[name])]
    return _HEAD.format(libraries=libraries) + "\n".join(lines) + "\n"


def _table(head: Row, rows: list[Row]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    yield from (f"| {' | '.join(cells)} |" for cells in rows)


def main() -> None:
    """Print or write the page."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--write", action="store_true", help="write the page instead of printing it")
    if parser.parse_args().write:
        PATH.write_text(render(), encoding="utf-8")
    else:
        print(render(), end="")


if __name__ == "__main__":
    main()
