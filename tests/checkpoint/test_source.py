"""The arguments of ``load``, and the page of ``inspect``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from gpt_oss_writer import write_gpt_oss
from layout_writers import write_per_expert, write_stacked
from safetensors.torch import load_file, save_file

from fp4_inductor.__main__ import main
from fp4_inductor.checkpoint import load
from fp4_inductor.checkpoint.source import resolve_device, resolve_dtype
from fp4_inductor.errors import CheckpointError


@pytest.mark.parametrize("shards", [1, 5])
def test_a_model_of_the_hub_is_found_where_it_was_downloaded(shards: int, tmp_path: Path) -> None:
    """A cache as huggingface_hub keeps it, without a network."""
    pytest.importorskip("huggingface_hub")
    revision = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--org--tiny"
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    made = write_per_expert(snapshot, "modelopt nvfp4", shards=shards)
    state = load("org/tiny", cache_dir=tmp_path, local_files_only=True).state_dict()
    assert torch.equal(state["model.norm.weight"], made.plain["model.norm.weight"])
    with pytest.raises(CheckpointError, match="no such folder, and LocalEntryNotFoundError"):
        load("org/other", cache_dir=tmp_path, local_files_only=True)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, message in ((tmp_path / "absent", "no such folder"), (tmp_path / "file", "got a file")):
        with pytest.raises(CheckpointError, match=message):
            load(path)


@pytest.mark.parametrize("indexed", [True, False])
def test_a_tensor_in_two_shards_is_refused(indexed: bool, tmp_path: Path) -> None:
    made = write_per_expert(tmp_path, "modelopt nvfp4", shards=2)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    save_file({**load_file(second), "model.norm.weight": made.plain["model.norm.weight"]}, second)
    save_file({**load_file(first), "model.norm.weight": made.plain["model.norm.weight"]}, first)
    if not indexed:
        (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=rf"model\.norm\.weight in two files, {first.name} and {second.name}"):
        load(tmp_path)


def test_shards_without_their_index_are_read(tmp_path: Path) -> None:
    made = write_per_expert(tmp_path, "modelopt nvfp4", shards=3)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert torch.equal(load(tmp_path).state_dict()["model.norm.weight"], made.plain["model.norm.weight"])
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"needed model\.safetensors or model\.safetensors\.index\.json"):
        load(tmp_path)


def test_links_of_a_snapshot_are_followed(tmp_path: Path) -> None:
    write_per_expert(tmp_path / "blobs", "modelopt nvfp4")
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    load(tmp_path / "snapshot")


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}])
def test_one_device_for_all(device_map: Any) -> None:
    where = resolve_device(None, device_map)
    assert where.type == ("cuda" if device_map == "auto" and torch.cuda.is_available() else "cpu")


def test_several_devices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="one device for the whole model"):
        resolve_device(None, {"model": 0, "lm_head": "cpu"})
    with pytest.raises(CheckpointError, match="one device for the whole model"):
        resolve_device(None, {"": "disk"})
    with pytest.raises(CheckpointError, match="device or device_map"):
        load(tmp_path, device="cpu", device_map="auto")


def test_dtypes_by_every_name() -> None:
    assert resolve_dtype(torch.bfloat16, torch.float16, {}) == torch.float16
    assert resolve_dtype("float32", None, {}) == torch.float32
    assert resolve_dtype("auto", None, {"dtype": "float16"}) == torch.float16
    assert resolve_dtype("auto", None, {"text_config": {"torch_dtype": "float32"}}) == torch.float32
    assert resolve_dtype("auto", None, {}) == torch.bfloat16
    for wrong in ("int8", "no_such", torch.float64):
        with pytest.raises(CheckpointError, match=r"one of torch\.bfloat16"):
            resolve_dtype(wrong, None, {})


def test_arguments_reach_the_model(tmp_path: Path) -> None:
    write_per_expert(tmp_path, "modelopt nvfp4")
    model: Any = load(tmp_path, device_map="cpu", torch_dtype="float16", attn_implementation="eager")
    assert model.lm_head.weight.dtype == torch.float16
    assert model.model.layers[0].mlp.experts.gate_up_proj.dtype == torch.float16
    assert model.model.layers[0].self_attn.q_proj.weight.dtype == torch.float16
    assert model.config._attn_implementation == "eager"


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(["inspect", *arguments])
    return capsys.readouterr().out


def test_inspect_reads_headers_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_per_expert(tmp_path, "compressed-tensors nvfp4", shards=3)
    for file in tmp_path.glob("*.safetensors"):
        length = int.from_bytes(file.read_bytes()[:8], "little")
        with file.open("r+b") as stream:  # the same size, and nothing but holes after the header
            size = file.stat().st_size
            stream.truncate(8 + length)
            stream.truncate(size)
    page = inspected(capsys, str(tmp_path), "--device", "sm_90")
    for said in (
        "compressed-tensors NVFP4 or MXFP4",
        "files     3",
        "0-1     model.layers.*.mlp.experts.*.gate_proj.weight  4 x 96 x 64",
        "4x top-2 H=64 I=96 nvfp4",
        "runs on triton_w4a16",
        "not flashinfer_trtllm: ",
    ):
        assert said in page, page


def test_inspect_knows_stacked_experts_and_biases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gpt_oss(tmp_path / "a")
    assert "4x top-2 H=64 I=96 mxfp4×bfloat16 swiglu(alpha=1.702, beta=1.0" in inspected(
        capsys, str(tmp_path / "a"), "--device", "cpu"
    )
    write_stacked(tmp_path / "b", "qwen3_moe", k_first=False)
    assert "H=64 I=96 nvfp4" in inspected(capsys, str(tmp_path / "b"), "--device", "cpu")
    shutil.rmtree(tmp_path / "b" / "nothing", ignore_errors=True)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    del config["num_experts_per_tok"]
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    assert "nothing to choose a kernel for" in inspected(capsys, str(tmp_path / "b"), "--device", "cpu")


def test_inspect_says_what_load_would_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = write_per_expert(tmp_path, "modelopt nvfp4")
    made.tensors["model.layers.0.mlp.experts.0.up_proj.pre_quant_scale"] = torch.ones(64)
    made.rewrite()
    with pytest.raises(SystemExit):
        main(["inspect", str(tmp_path)])
    assert "AWQ" in capsys.readouterr().err
