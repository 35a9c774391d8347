"""``doctor``: what it finds, what it asks, what it tells to do, and how it exits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from source_tree import ROOT

from fp4_inductor import DeviceInfo, doctor
from fp4_inductor.__main__ import main
from fp4_inductor.backends import BACKENDS
from fp4_inductor.backends.triton_w4a16 import TritonW4A16Backend
from fp4_inductor.bench.shapes import SHAPES
from fp4_inductor.doctor import diagnose
from fp4_inductor.doctor_tools import Item
from fp4_inductor.formats import MXFP4, NVFP4
from fp4_inductor.reasons import Reason, ReasonCode, Verdict
from fp4_inductor.spec import MoESpec

DEVICES = ("cpu", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
BLOCKS = {"mxfp4": SHAPES["gpt-oss-20b"].spec(MXFP4), "nvfp4": SHAPES["qwen3-30b-a3b"].spec(NVFP4)}


@pytest.fixture
def no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp4_inductor.device._installed_libraries", tuple)


def exit_code(*argv: str) -> int:
    try:
        main(["doctor", *argv])
    except SystemExit as left:
        return int(left.code or 0)
    return 0


@pytest.mark.parametrize("name", DEVICES)
def test_asks_every_backend_for_a_block_of_each_format(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = exit_code("--device", name, "--json")
    data = json.loads(capsys.readouterr().out)
    assert code == (0 if data["ok"] else 1)
    (target,) = data["devices"]
    assert target["arch"] == name
    assert [block["format"] for block in target["blocks"]] == ["mxfp4", "nvfp4"]
    for block in target["blocks"]:
        verdicts = {verdict["backend"]: verdict for verdict in block["verdicts"]}
        assert list(verdicts) == [backend.name for backend in BACKENDS]
        for backend in BACKENDS:
            want = backend.check(BLOCKS[block["format"]], DeviceInfo.parse(name))
            assert verdicts[backend.name]["ok"] is want.ok
            assert [reason["code"] for reason in verdicts[backend.name]["reasons"]] == [
                reason.code.name for reason in want.reasons
            ]
        assert block["backend"] is None or verdicts[block["backend"]]["ok"]


@pytest.mark.parametrize("libraries", [(), (("triton", "3.6.0"), ("flashinfer-python", "0.7.2"))], ids=["none", "all"])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_every_refusal_comes_with_its_cure(backend: object, libraries: tuple[tuple[str, str], ...]) -> None:
    strange = replace(BLOCKS["nvfp4"], hidden_size=2049, intermediate_size=77, act_dtype=torch.float64)
    for name in DEVICES:
        device = replace(DeviceInfo.parse(name), libraries=libraries)
        for spec in (*BLOCKS.values(), strange):
            for reason in backend.check(spec, device).reasons:  # type: ignore[attr-defined]
                assert reason.hint, f"{name}: {reason}"


def test_the_text_says_what_runs_and_why_the_rest_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--device", "cpu") == 0
    text = capsys.readouterr().out
    assert re.search(r"^  torch +2\.", text, re.MULTILINE)
    assert re.search(r"^  C\+\+ compiler +\S", text, re.MULTILINE)
    assert re.search(r"^  cpu +runs +runs$", text, re.MULTILINE)
    assert re.search(r"^  reference +if named +if named$", text, re.MULTILINE)
    assert re.search(r"^  triton_w4a16 +CAPABILITY: needs one of sm_80.*, got cpu \(", text, re.MULTILINE)
    assert "Kernel backends on cpu\n" in text
    assert "C compiler" not in text  # which only a GPU's kernels need


def test_nothing_runs_without_a_library_and_the_cure_is_told(
    no_libraries: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("--device", "sm_90") == 1
    text = capsys.readouterr().out
    assert re.search(r"^  triton_w4a16 +no: LIBRARY +no: LIBRARY$", text, re.MULTILINE)
    assert "  pip install triton" in text.partition("To do\n")[2].splitlines()
    assert "which is not here" in text
    told = re.findall(r"^  triton_w4a16 +LIBRARY: needs triton", text, re.MULTILINE)
    assert len(told) == 1  # against both formats, told once


@dataclass(frozen=True)
class Absent(TritonW4A16Backend):
    """A backend that would be preferred, for these reasons not."""

    codes: tuple[ReasonCode, ...]
    name = "absent"

    def check(self, spec: MoESpec, device: DeviceInfo) -> Verdict:
        return Verdict(self.name, tuple(Reason(code, "it", "none", f"cure {code.value}") for code in self.codes))

    def rank(self, spec: MoESpec, device: DeviceInfo) -> int:
        return 1000


@pytest.mark.parametrize(
    ("codes", "cures"),
    [
        ((ReasonCode.LIBRARY,), ["cure library"]),
        ((ReasonCode.LIBRARY, ReasonCode.CAPABILITY), []),
        ((ReasonCode.SHAPE,), []),
    ],
)
def test_a_library_is_worth_installing_beside_a_backend_that_runs(
    codes: tuple[ReasonCode, ...], cures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp4_inductor.select.BACKENDS", (Absent(codes), *BACKENDS))
    diagnosis = diagnose("cpu")
    assert diagnosis.ok
    assert diagnosis.targets[0].cures == cures * 2  # for a block of each format
    assert diagnosis.cures.count("cure library") == len(cures)
    told = [line for line in str(diagnosis).splitlines() if line.startswith("  absent ")]
    assert told[0].split()[:2] == ["absent", "no:"]
    assert told[0].count(codes[-1].name) == 2


def test_what_no_library_would_cure_is_not_told_to_install(no_libraries: None) -> None:
    diagnosis = diagnose("cpu")
    assert diagnosis.ok
    assert "pip install triton" not in diagnosis.cures


def test_a_reason_against_one_format_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(SHAPES["qwen3-30b-a3b"], intermediate_size=776)  # blocks of 16 fit in no tile
    monkeypatch.setitem(doctor.SHAPES, "qwen3-30b-a3b", shape)
    assert re.search(r"^  cpu +nvfp4: SHAPE: ", str(diagnose("cpu")), re.MULTILINE)


def test_an_unknown_device_shows_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--device", "sm_91") == 2
    said = capsys.readouterr().err
    assert all(name in said for name in DEVICES)
    assert "did you mean 'sm_90'?" in said


def test_nothing_is_imported_to_find_out() -> None:
    code = """
import sys
from fp4_inductor.__main__ import main
try:
    main(["doctor", "--device", "sm_100"])
except SystemExit:
    pass
heavy = ("triton", "flashinfer", "transformers", "torch._inductor", "torch._dynamo")
print("LOADED", [name for name in heavy if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.endswith("LOADED []\n"), result.stdout + result.stderr


def test_gpus_of_one_kind_are_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ["sm_90", "sm_80", "sm_90"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(DeviceInfo, "current", lambda device: DeviceInfo.parse(kinds[device.index]))
    text = str(diagnose())
    assert "  cuda:0, cuda:2  H200 (sm_90), 132 SMs, 227 KiB of shared memory a block" in text
    assert "  cuda:1          A100 (sm_80), 108 SMs" in text
    assert "Kernel backends on H200 (sm_90)\n" in text
    assert "Kernel backends on A100 (sm_80)\n" in text
    assert "C compiler" in text
    assert [gpu["where"] for gpu in diagnose("cpu").to_json()["gpus"]] == [["cuda:0", "cuda:2"], ["cuda:1"]]
    assert "which is not here" not in str(diagnose("sm_80"))
    assert "which is not here" in str(diagnose("sm_100"))


def test_says_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_old() -> bool:
        warnings.warn("the driver is too old", UserWarning, stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", too_old)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(doctor, "_driver", lambda: "450.80")
    diagnosis = diagnose()
    assert diagnosis.no_gpu == "the driver is too old"
    assert re.search(r"^  NVIDIA driver +450\.80", str(diagnosis), re.MULTILINE)
    assert [target.device for target in diagnosis.targets] == [DeviceInfo.parse("cpu")]

    monkeypatch.setattr(torch.version, "cuda", None)
    diagnosis = diagnose()
    assert diagnosis.no_gpu == f"torch {torch.__version__} is built without CUDA"
    assert any("a build of torch with CUDA" in cure for cure in diagnosis.cures)


def test_what_rounded_activations_would_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = (("triton", "3.6.0"), ("flashinfer-python", "0.7.2"))
    monkeypatch.setattr("fp4_inductor.device._installed_libraries", lambda: libraries)
    text = str(diagnose("sm_103")).partition("fp4moe.activation_format': ...} allows it\n")[2]
    assert re.search(r"^  flashinfer_trtllm +mxfp4 weights, mxfp8: runs$", text, re.MULTILINE)
    assert re.search(r"^  flashinfer_trtllm +nvfp4 weights, nvfp4: runs$", text, re.MULTILINE)
    assert re.search(r"^  flashinfer_cutlass +nvfp4 weights, nvfp4: if named$", text, re.MULTILINE)
    (target,) = diagnose("sm_103").to_json()["devices"]
    (entry,) = (r for r in target["rounded"] if (r["format"], r["activation_format"]) == ("nvfp4", "nvfp4"))
    assert entry["backend"] == "flashinfer_trtllm"
    assert "flashinfer_cutlass" in entry["willing"]
    assert "allows it\n" not in str(diagnose("cpu"))


def test_what_flashinfer_builds_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def items(device: str = "sm_100") -> dict[str, Item]:
        return {item.name: item for item in diagnose(device).items}

    monkeypatch.setattr(doctor, "_version", lambda name: None)
    assert "nvcc" not in items(), "nothing is built without it"
    monkeypatch.setattr(doctor, "_version", lambda name: "0.7.2" if name == "flashinfer-python" else None)
    assert "nvcc" not in items("cpu")
    for name in ("CUDA_PATH", "FLASHINFER_NVCC", "FLASHINFER_CUBIN_DIR", "FLASHINFER_NO_DOWNLOAD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    monkeypatch.setenv("PATH", "")
    found = items()
    assert (found["nvcc"].found, found["ninja"].found) == (None, None)
    assert "/nowhere/bin/nvcc does not run" in found["nvcc"].cure
    assert found["ninja"].cure.startswith("pip install ninja")
    assert found["CUDA's headers"].found is None
    assert (
        "/nowhere/include has no cuda_runtime.h, cublasLt.h, curand_kernel.h, nvrtc.h" in found["CUDA's headers"].cure
    )
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (tmp_path / "include").mkdir()
    for name in ("cuda_runtime.h", "curand_kernel.h", "nvrtc.h"):
        (tmp_path / "include" / name).touch()
    assert items()["CUDA's headers"].cure.endswith(f"{tmp_path}/include has no cublasLt.h")
    (tmp_path / "include" / "cublasLt.h").touch()
    assert items()["CUDA's headers"] == Item("CUDA's headers", f"{tmp_path}/include", "FlashInfer's builds")
    assert found["kernels of TRTLLM"] == Item(
        "kernels of TRTLLM", "are downloaded at the first call", "flashinfer_trtllm"
    )
    monkeypatch.setenv("FLASHINFER_NO_DOWNLOAD", "1")
    assert "FLASHINFER_NO_DOWNLOAD is set" in items()["kernels of TRTLLM"].cure
    monkeypatch.setenv("FLASHINFER_CUBIN_DIR", "/nowhere")
    assert "FLASHINFER_CUBIN_DIR=/nowhere is no folder" in items()["kernels of TRTLLM"].cure
    monkeypatch.setenv("FLASHINFER_CUBIN_DIR", str(ROOT))
    assert items()["kernels of TRTLLM"] == Item("kernels of TRTLLM", str(ROOT), "flashinfer_trtllm")
    monkeypatch.setenv("FLASHINFER_NVCC", sys.executable)  # says a version, in a line without a release
    assert items()["nvcc"].found == sys.executable


def test_a_compiler_that_does_not_run_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("CC", "false")
    items = {item.name: item for item in diagnose("sm_90").items}
    assert items["C++ compiler"].found is None
    assert "no-such-compiler does not run" in items["C++ compiler"].cure
    assert items["C compiler"].found is None
    assert items["C compiler"].cure in diagnose("sm_90").cures


def test_versions_are_held_to_what_the_package_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._bounds()["torch"] == ">=2.11"
    pyproject = (ROOT / "pyproject.toml").read_text()
    for name, bounds in doctor._bounds().items():
        if name in doctor._LIBRARIES:
            assert any(f'"{name}{text}"' in pyproject for text in (bounds, ",".join(reversed(bounds.split(",")))))
    monkeypatch.setattr(doctor, "_version", lambda name: "2.10.1+cu130" if name == "torch" else None)
    (torch_item,) = (item for item in diagnose("cpu").items if item.name == "torch")
    assert torch_item.found == "2.10.1+cu130"
    assert torch_item.cure == "pip install -U torch    # torch 2.10.1+cu130 is installed, >=2.11 is needed"


@pytest.mark.parametrize(
    ("version", "bounds", "within"),
    [
        ("2.13.0+cpu", ">=2.11", True),
        ("2.9.1", ">=2.11", False),
        ("0.7.2.post1", ">=0.7.1,<0.8", True),
        ("0.7.2.post1", "<0.8,>=0.7.1", True),
        ("0.8.0", "<0.8,>=0.7.1", False),
        ("0.6.18.post1", "<0.8,>=0.7.1", False),
        ("5.23.0", "<6,>=5.17", True),
        ("5.9.0", "<6,>=5.17", False),
        ("1.0", "!=1.0", False),
    ],
)
def test_bounds(version: str, bounds: str, within: bool) -> None:
    assert doctor._within(version, bounds) is within
