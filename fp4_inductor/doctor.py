"""``python -m fp4_inductor doctor``: what runs here, or on a device that is not here, why not the rest, and the cure.

Versions are read from installed distributions and every decision is a question to values, so nothing is imported to
find out whether it works, and nothing is compiled.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import operator
import platform
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.torch_version import TorchVersion

from .bench.shapes import SHAPES
from .device import DeviceInfo
from .doctor_tools import Item, compilers, flashinfer_tools
from .formats import ACTIVATION_FORMATS, MXFP4, NVFP4
from .options import Options
from .reasons import Reason, ReasonCode, Verdict
from .report import verdict_json
from .select import Selection, select

_BLOCKS = (("gpt-oss-20b", MXFP4), ("qwen3-30b-a3b", NVFP4))
"""One well-known block of each weight format, which every backend is asked for."""
_LIBRARIES = {
    "torch": ("everything", "pip install -U torch"),
    "triton": ("own kernels on a GPU", "pip install triton"),
    "flashinfer-python": ("FlashInfer's kernels on a GPU", "pip install 'fp4_inductor[flashinfer]'"),
    "nvidia-cutlass-dsl": ("FlashInfer's CuTe-DSL kernels", "pip install 'fp4_inductor[flashinfer]'"),
    "transformers": ("models by name", "pip install 'fp4_inductor[hf]'"),
    "safetensors": ("fp4_inductor.load", "pip install 'fp4_inductor[hf]'"),
}
_ORDER = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_DESCRIPTION = """\
Shows devices, versions and compilers, and asks every kernel backend for a block of each weight format.
Exit status: 0 if a backend better than `reference` runs one of them, 1 if none does, 2 for a device that is unknown.
"""


@dataclass(frozen=True, slots=True)
class Target:
    """A device, whether this machine has it, and what was decided for each block."""

    device: DeviceInfo
    is_here: bool
    selections: tuple[Selection, ...]
    rounded: tuple[tuple[str, Selection], ...]
    """What would be decided if the user allowed a format of activations, for each block and format."""

    @property
    def cures(self) -> list[str]:
        """What to install so that backends run that have nothing else against this device."""
        verdicts = [verdict for selection in self.selections for verdict in selection.verdicts]
        missing = {ReasonCode.LIBRARY}
        return [r.hint for v in verdicts if {r.code for r in v.reasons} == missing for r in v.reasons if r.hint]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found. ``str`` for people, ``to_json`` for tools.

    Attributes:
        gpus: the kinds of GPU of this machine, and the torch devices that are of each.
        no_gpu: why there are none ("" if there are).
        targets: devices that backends were asked for.
    """

    gpus: dict[DeviceInfo, list[str]]
    no_gpu: str
    items: tuple[Item, ...]
    targets: tuple[Target, ...]

    @property
    def ok(self) -> bool:
        """Whether a backend better than ``reference`` runs a block on a device that was asked about."""
        return any(selection.chosen for target in self.targets for selection in target.selections)

    @property
    def cures(self) -> list[str]:
        """What to do, each thing once."""
        found = [item.cure for item in self.items if item.cure]
        return list(dict.fromkeys([*found, *(cure for target in self.targets for cure in target.cures)]))

    def to_json(self) -> dict[str, Any]:
        return {
            **_about(),
            "gpus": [
                {"where": where, "name": gpu.name, "arch": gpu.arch_name, "sm_count": gpu.sm_count}
                for gpu, where in self.gpus.items()
            ],
            "no_gpu": self.no_gpu,
            "items": [
                {"name": item.name, "found": item.found, "serves": item.serves, "cure": item.cure}
                for item in self.items
            ],
            "devices": [_target_json(target) for target in self.targets],
            "cures": self.cures,
            "ok": self.ok,
        }

    def __str__(self) -> str:
        about = _about()
        lines = [f"fp4_inductor {about['fp4_inductor']}, Python {about['python']}, {about['platform']}", "", "GPUs"]
        lines += _aligned((", ".join(where), _device_text(gpu)) for gpu, where in self.gpus.items())
        lines += [f"  none: {self.no_gpu}"] if self.no_gpu else []
        lines += ["", "Found"]
        lines += _aligned((item.name, item.found or "none", f"for {item.serves}") for item in self.items)
        for target in self.targets:
            lines += ["", *_target_lines(target)]
        lines += ["", "To do", *(f"  {cure}" for cure in self.cures or ["nothing"])]
        return "\n".join(lines)


def diagnose(device: str | None = None) -> Diagnosis:
    """Look at this machine, and ask every backend for its devices or for the one called ``device``.

    Raises:
        UnknownNameError: no such device.
    """
    asked = None if device is None else DeviceInfo.parse(device)
    driver = _driver()
    gpus, no_gpu = _gpus(driver)
    if asked is None:
        devices = list(gpus) or [DeviceInfo.parse("cpu")]
    else:
        devices = [gpu for gpu in gpus if gpu.arch == asked.arch] or [asked]
    blocks = [SHAPES[name].spec(fmt) for name, fmt in _BLOCKS]
    targets = [
        Target(
            info,
            info in gpus or info.family == "cpu",
            tuple(select(block, info, Options()) for block in blocks),
            tuple(
                (name, select(block, info, Options(activation_format=name)))
                for block in blocks
                for name in ACTIVATION_FORMATS
            ),
        )
        for info in devices
    ]
    needs_gpu = any(info.family == "cuda" for info in devices)
    cure = ""
    if driver and torch.version.cuda is None:
        cure = "install a build of torch with CUDA: https://pytorch.org/get-started"
    items = [Item("NVIDIA driver", driver, "GPUs", cure), *_libraries(), *compilers(needs_gpu)]
    if needs_gpu and _version("flashinfer-python") is not None:
        items += flashinfer_tools()
    return Diagnosis(gpus, no_gpu, tuple(items), tuple(targets))


def _gpus(driver: str | None) -> tuple[dict[DeviceInfo, list[str]], str]:
    """The kinds of GPU of this machine with the devices of each, or why there are none."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus: dict[DeviceInfo, list[str]] = {}
    for index in range(count):
        info = DeviceInfo.current(torch.device("cuda", index))
        gpus.setdefault(info, []).append(f"cuda:{index}")
    if gpus:
        return gpus, ""
    if torch.version.cuda is None:
        why = f"torch {torch.__version__} is built without CUDA"
    else:
        why = "; ".join(str(warning.message) for warning in said) or "torch finds no CUDA device"
    return {}, why if driver else f"no NVIDIA driver, and {why}"


def _driver() -> str | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    text = ctypes.create_string_buffer(80)
    failed = library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(text, len(text))
    return None if failed else text.value.decode()


def _libraries() -> Iterator[Item]:
    bounds = _bounds()
    for name, (serves, install) in _LIBRARIES.items():
        version = _version(name)
        wanted = bounds.get(name, "")
        if version is None or not wanted or _within(version, wanted):
            yield Item(name, version, serves)
        else:
            yield Item(name, version, serves, f"{install}    # {name} {version} is installed, {wanted} is needed")


def _bounds() -> dict[str, str]:
    """Versions that this package asks for, by distribution, as in ``{"torch": ">=2.11"}``."""
    try:
        lines = importlib.metadata.requires("fp4_inductor") or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    found = (re.match(r"([\w.-]+)\s*([^;\s]*)", line) for line in lines)
    return {match[1]: match[2] for match in found if match and match[2]}


def _within(version: str, bounds: str) -> bool:
    clauses = re.findall(r"([<>=!]=?)([^,]+)", bounds)
    return all(_ORDER[sign](TorchVersion(version), bound) for sign, bound in clauses)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _about() -> dict[str, str]:
    version = _version("fp4_inductor") or "not installed"
    return {"fp4_inductor": version, "python": platform.python_version(), "platform": platform.platform()}


def _aligned(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Cells in columns as wide as their widest."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  " + "  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]


def _device_text(device: DeviceInfo) -> str:
    return f"{device}, {device.sm_count} SMs, {device.shared_memory // 1024} KiB of shared memory a block"


def _target_lines(target: Target) -> list[str]:
    title = f"Kernel backends on {target.device}"
    title += "" if target.is_here else ", which is not here, with the libraries of this environment"
    by_block = [{verdict.backend: verdict for verdict in selection.verdicts} for selection in target.selections]
    rows = [("", *(f"{name}, {fmt}" for name, fmt in _BLOCKS))]
    for backend in by_block[0]:
        answers = zip(target.selections, by_block, strict=True)
        rows.append((backend, *(_answer(selection, verdicts[backend]) for selection, verdicts in answers)))
    return [title, *_aligned(rows), *_rounded(target), *_refusals(target)]


def _rounded(target: Target) -> list[str]:
    """Backends that another format of activations would win over."""
    rows = []
    for (allowed, selection), base in _with_base(target):
        refused = {verdict.backend for verdict in base.verdicts if not verdict.ok}
        for verdict in selection.verdicts:
            if verdict.ok and verdict.backend in refused:
                answer = "runs" if verdict.backend == selection.chosen else "if named"
                rows.append((verdict.backend, f"{selection.spec.weight_format} weights, {allowed}: {answer}"))
    if not rows:
        return []
    return ["Also, where options={'fp4moe.activation_format': ...} allows it", *_aligned(rows)]


def _with_base(target: Target) -> Iterator[tuple[tuple[str, Selection], Selection]]:
    """Every selection for rounded activations, with that for the same block without."""
    count = len(target.rounded) // len(target.selections)
    for index, entry in enumerate(target.rounded):
        yield entry, target.selections[index // count]


def _answer(selection: Selection, verdict: Verdict) -> str:
    if not verdict.ok:
        return "no: " + ", ".join(dict.fromkeys(reason.code.name for reason in verdict.reasons))
    return "runs" if verdict.backend == selection.chosen else "if named"


def _refusals(target: Target) -> list[str]:
    """Each backend's reasons, once; with the weight format where they are against one format only."""
    formats: dict[tuple[str, Reason], list[str]] = {}
    for selection, (_, fmt) in zip(target.selections, _BLOCKS, strict=True):
        for verdict in selection.verdicts:
            for reason in verdict.reasons:
                formats.setdefault((verdict.backend, reason), []).append(str(fmt))
    every = len(target.selections)
    rows = [
        (backend, str(reason) if len(against) == every else f"{', '.join(against)}: {reason}")
        for (backend, reason), against in sorted(formats.items(), key=lambda entry: _backend_index(target, entry[0][0]))
    ]
    return ["Why not", *_aligned(rows)] if rows else []


def _backend_index(target: Target, backend: str) -> int:
    return [verdict.backend for verdict in target.selections[0].verdicts].index(backend)


def _target_json(target: Target) -> dict[str, Any]:
    device = target.device
    return {
        "name": device.name,
        "arch": device.arch_name,
        "is_here": target.is_here,
        "sm_count": device.sm_count,
        "shared_memory": device.shared_memory,
        "blocks": [
            {
                "block": name,
                "format": str(fmt),
                "spec": str(selection.spec),
                "backend": selection.chosen,
                "verdicts": [verdict_json(verdict) for verdict in selection.verdicts],
            }
            for (name, fmt), selection in zip(_BLOCKS, target.selections, strict=True)
        ],
        "rounded": [
            {
                "format": str(selection.spec.weight_format),
                "activation_format": allowed,
                "backend": selection.chosen,
                "willing": [verdict.backend for verdict in selection.verdicts if verdict.ok],
            }
            for allowed, selection in target.rounded
        ],
    }


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe this command's arguments; its ``run`` gets them."""
    parser = commands.add_parser(
        "doctor",
        help="show what runs here, why not the rest, and what to install",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", metavar="NAME", help="answer for a device that need not be here: sm_90, cpu ...")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print the diagnosis; exits with 1 where nothing better than ``reference`` runs."""
    diagnosis = diagnose(args.device)
    print(json.dumps(diagnosis.to_json(), indent=2) if args.json else diagnosis)
    if not diagnosis.ok:
        raise SystemExit(1)
