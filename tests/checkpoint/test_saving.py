"""``save_pretrained`` of packed models: compressed-tensors' layout, which decodes to the weights that were saved."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from exporter_decoder import decode_folder, expected_parameter
from family_models import build, missing
from fp4_values import nearest_bfloat16
from layout_writers import model_config, write_per_expert, write_stacked
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fp4_inductor.checkpoint import load
from fp4_inductor.errors import CheckpointError
from fp4_inductor.modules import carried_weights
from fp4_inductor.quantize import quantize_


def quantized(family: str, fmt: str, **changes: Any) -> Any:
    model = AutoModelForCausalLM.from_config(model_config(family, **changes), dtype=torch.bfloat16).eval()
    for name, value in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(value)
    return quantize_(model.requires_grad_(False), fmt)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    found = dict(model.named_parameters())
    for path, module in model.named_modules():
        for weight in carried_weights(module):
            found = {
                name: value for name, value in found.items() if name not in {f"{path}.{t}" for t in weight.tensor_names}
            }
            found[f"{path}.{weight.name}"] = getattr(module, weight.name)
    return found


def assert_same_weights(model: Any, other: Any) -> None:
    ours, theirs = weights_of(model), weights_of(other)
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_quantised_models_come_back(family: str, fmt: str, tmp_path: Path) -> None:
    model = quantized(family, fmt)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert_same_weights(model, again)
    with torch.no_grad():
        ids = torch.randint(3, 90, (1, 9))
        assert torch.equal(model(ids, use_cache=False).logits, again(ids, use_cache=False).logits)


@pytest.mark.parametrize("family", ["granitemoe", "aria", "nemotron_h"])
def test_families_whose_files_name_stacked_experts_otherwise_come_back(family: str, tmp_path: Path) -> None:
    if reason := missing(family):
        pytest.skip(reason)
    model: Any = quantize_(build(family), "nvfp4")
    model.save_pretrained(tmp_path)
    assert any(key.endswith("experts.0.down_proj.weight_packed") for key in load_file(tmp_path / "model.safetensors"))
    again: Any = load(tmp_path)
    assert_same_weights(model, again)
    with torch.no_grad():
        ids = torch.randint(3, 60, (1, 9))
        assert torch.equal(model(ids, use_cache=False).logits, again(ids, use_cache=False).logits)


@pytest.mark.parametrize("layout", ["modelopt nvfp4", "modelopt e4m3 per 32", "auto-round nvfp4", "deepseek"])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe"])
def test_loaded_models_come_back(family: str, layout: str, tmp_path: Path) -> None:
    write_per_expert(tmp_path / "first", layout, family)
    model: Any = load(tmp_path / "first")
    model.save_pretrained(tmp_path / "second")
    assert_same_weights(model, load(tmp_path / "second"))


def test_names_dtypes_and_the_direction_of_scales(tmp_path: Path) -> None:
    """What compressed-tensors and vLLM read: a global scale of one element, by which weights are divided."""
    write_per_expert(tmp_path / "first", "modelopt nvfp4")
    model: Any = load(tmp_path / "first")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    stem = "model.layers.1.mlp.experts.2.down_proj"
    assert {name.removeprefix(stem) for name in tensors if name.startswith(stem)} == {
        ".weight_packed",
        ".weight_scale",
        ".weight_global_scale",
    }
    experts = model.model.layers[1].mlp.experts
    packed, scale, divides = (tensors[f"{stem}.weight_{part}"] for part in ("packed", "scale", "global_scale"))
    assert torch.equal(packed, experts.down_proj_packed[2])
    assert packed.dtype == torch.uint8
    assert torch.equal(scale.view(torch.uint8), experts.down_proj_block_scale[2].view(torch.uint8))
    assert scale.dtype == torch.float8_e4m3fn
    assert divides.dtype == torch.float32
    assert divides.shape == (1,)
    torch.testing.assert_close(1 / divides, experts.down_proj_global_scale[2], rtol=1e-6, atol=0)
    config = json.loads((tmp_path / "config.json").read_text())
    said = config["quantization_config"]
    assert (said["quant_method"], said["format"]) == ("compressed-tensors", "nvfp4-pack-quantized")
    weights = said["config_groups"]["group_0"]["weights"]
    assert (weights["strategy"], weights["group_size"]) == ("tensor_group", 16)
    assert {"lm_head", "model.layers.0.mlp.gate"} <= set(said["ignore"])
    assert not [name for name in said["ignore"] if "experts" in name or "q_proj" in name]
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["dtype"] == "bfloat16"


def test_an_independent_decoder_reads_what_was_saved(tmp_path: Path) -> None:
    write_per_expert(tmp_path / "first", "auto-round nvfp4")  # gate and up have global scales of their own
    model: Any = load(tmp_path / "first")
    model.save_pretrained(tmp_path)
    stored = decode_folder(tmp_path)
    for path, module in model.named_modules():
        for weight in carried_weights(module):
            name = f"{path}.{weight.name}"
            assert torch.equal(getattr(module, weight.name), nearest_bfloat16(expected_parameter(name, stored))), name


def test_shards_replace_what_was_there(tmp_path: Path) -> None:
    model = quantized("qwen3_moe", "nvfp4", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path, max_shard_size=40_000)
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(names) > 2
    assert "model.safetensors" not in names
    again: Any = load(tmp_path)
    assert_same_weights(model, again)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    model.save_pretrained(tmp_path, max_shard_size="1MB")
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]


def test_the_class_stays_itself_in_copies(tmp_path: Path) -> None:
    model = quantized("qwen3_moe", "mxfp4")
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert type(other) is type(model)
        other.save_pretrained(tmp_path)
        assert_same_weights(model, load(tmp_path))


def test_what_the_layout_has_no_place_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized("qwen3_moe", "nvfp4")
    with pytest.raises(CheckpointError, match="push_to_hub"):
        model.save_pretrained(tmp_path, push_to_hub=True)
    with pytest.raises(CheckpointError, match="4GB"):
        model.save_pretrained(tmp_path, max_shard_size="big")
    experts = model.model.layers[0].mlp.experts
    experts.down_proj_global_scale = torch.nn.Parameter(torch.rand(4, 64), requires_grad=False)
    with pytest.raises(CheckpointError, match="one global scale for each matrix"):
        model.save_pretrained(tmp_path)
    write_stacked(tmp_path / "llama", "llama4_text", k_first=True)
    monkeypatch.setattr("fp4_inductor.modules._GATE_BEFORE_UP", frozenset())
    with pytest.raises(CheckpointError, match="which rows are gate's"):
        load(tmp_path / "llama").save_pretrained(tmp_path)
