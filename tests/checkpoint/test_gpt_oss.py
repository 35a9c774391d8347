"""Loading gpt-oss: bit for bit what transformers dequantises, with the experts still packed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from gpt_oss_writer import write_gpt_oss, write_tensors
from transformers import AutoModelForCausalLM, Mxfp4Config

from fp4_inductor.checkpoint import load
from fp4_inductor.errors import CheckpointError
from fp4_inductor.modules import carried_weights

FIXTURES = Path(__file__).parents[3] / "shared" / "fixtures"


def dequantised_by_transformers(folder: Path, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    config = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if ".experts." in name:  # older versions leave these in bfloat16
            parameter.data = parameter.data.to(dtype)
    return model


def assert_same_logits(model: Any, reference: Any) -> None:
    ids = torch.randint(3, 250, (2, 20))
    for implementation in ("grouped_mm", "batched_mm", "eager"):
        model.set_experts_implementation(implementation)
        reference.set_experts_implementation(implementation)
        with torch.no_grad():
            logits, expected = model(ids).logits, reference(ids).logits
        assert logits.isfinite().all()
        assert logits.std() > 0.01
        if logits.dtype == torch.float32:  # sums of products depend on the weights' strides
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(logits, expected), implementation


def assert_same_weights(model: nn.Module, reference: nn.Module) -> None:
    parameters = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for path, module in model.named_modules():
        parameters |= {f"{path}.{weight.name}": getattr(module, weight.name) for weight in carried_weights(module)}
    for name, expected in [*reference.named_parameters(), *reference.named_buffers()]:
        assert parameters[name].dtype == expected.dtype, name
        assert torch.equal(parameters[name], expected), name


def assert_complete(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    assert not [name for name, tensor in tensors if tensor.is_meta or tensor.requires_grad]
    assert not model.training
    carriers = [module for module in model.modules() if carried_weights(module)]
    assert len(carriers) == model.config.num_hidden_layers
    assert all(getattr(m, w.name).dtype == dtype for m in carriers for w in carried_weights(m))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt_oss")
    write_gpt_oss(folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_logits_are_those_of_transformers(tiny: Path, dtype: torch.dtype) -> None:
    model, reference = load(tiny, dtype=dtype), dequantised_by_transformers(tiny, dtype)
    assert_complete(model, dtype)
    assert_same_weights(model, reference)
    assert_same_logits(model, reference)


def test_shards_ties_and_scaled_rotary_embedding(tmp_path: Path) -> None:
    tensors = write_gpt_oss(tmp_path, shards=3, tie_word_embeddings=True, rope_parameters=YARN, seed=1)
    assert "lm_head.weight" not in tensors
    model: Any = load(tmp_path)
    assert_complete(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    reference: Any = dequantised_by_transformers(tmp_path)
    assert torch.equal(model.model.rotary_emb.inv_freq, reference.model.rotary_emb.inv_freq)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert_same_logits(model, reference)


def test_a_checkpoint_of_another_writer() -> None:
    folder = FIXTURES / "gptoss_tiny"
    if not folder.exists():
        pytest.skip(f"needs {folder}")
    model = load(folder)
    assert_complete(model)
    assert_same_logits(model, dequantised_by_transformers(folder))


def test_generates_with_the_checkpoints_settings(tiny: Path) -> None:
    model: Any = load(tiny)
    assert model.generation_config.eos_token_id == [2, 3]
    assert not hasattr(model.config, "quantization_config")
    ids = torch.randint(3, 250, (1, 9))
    out = model.generate(ids)
    assert out.shape[1] <= 9 + 5
    assert torch.equal(out, dequantised_by_transformers(tiny).generate(ids))


def test_packed_parameters_are_the_files_bytes(tmp_path: Path) -> None:
    tensors = write_gpt_oss(tmp_path)
    state = load(tmp_path).state_dict()
    name = "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(state[f"{name}_packed"], tensors[f"{name}_blocks"].flatten(-2))
    assert torch.equal(state[f"{name}_block_scale"], tensors[f"{name}_scales"])


def test_parameters_outlive_the_file(tmp_path: Path) -> None:
    tensors = write_gpt_oss(tmp_path)
    model = load(tmp_path)
    write_tensors(tmp_path, {name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(model.state_dict()[f"{name}_packed"], tensors[f"{name}_blocks"].flatten(-2))


class LargestFloat(TorchDispatchMode):
    """Remembers the most elements of any floating-point tensor with data."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and not leaf.is_meta:
                self.largest = max(self.largest, leaf.numel())
        return out


def test_experts_never_exist_unpacked(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path, num_local_experts=32)
    with LargestFloat() as seen:
        load(tmp_path)
    assert seen.largest < 32 * 64 * 96


def test_one_graph(tiny: Path) -> None:
    model = load(tiny, attn_implementation="eager")
    graphs = []

    def keep(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(gm)
        return gm

    ids = torch.randint(3, 250, (1, 9))
    with torch.no_grad():
        actual = torch.compile(model, backend=keep, fullgraph=True)(ids, use_cache=False).logits
        assert torch.equal(actual, model(ids, use_cache=False).logits)
    assert len(graphs) == 1


def spoiled(folder: Path, **changes: torch.Tensor | None) -> None:
    """Rewrite a checkpoint with tensors (by ``__`` for ``.``) replaced, added, or removed where None."""
    tensors = write_gpt_oss(folder)
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        tensors.pop(key, None)
        if tensor is not None:
            tensors[key] = tensor
    write_tensors(folder, tensors)


EXPERTS = "model__layers__0__mlp__experts__"
SCALES = torch.full((4, 64, 3), 120, dtype=torch.uint8)
NAN_SCALES = SCALES.index_put((torch.tensor(1), torch.tensor(2), torch.tensor(0)), torch.tensor(255, dtype=torch.uint8))
ONE_BLOCK_LESS: dict[str, torch.Tensor | None] = {
    EXPERTS + "down_proj_blocks": torch.zeros(4, 64, 2, 16, dtype=torch.uint8),
    EXPERTS + "down_proj_scales": torch.zeros(4, 64, 2, dtype=torch.uint8),
}
REFUSALS: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "missing": (
        {"model__norm__weight": None, "lm_head__weight": None},
        r"missing: lm_head\.weight, model\.norm\.weight; unexpected: none",
    ),
    "missing scales": ({EXPERTS + "down_proj_scales": None}, r"missing: model\.layers\.0\..*down_proj_scales"),
    "missing blocks": (
        {EXPERTS + "down_proj_blocks": None},
        r"missing: .*experts\.down_proj; unexpected: .*down_proj_scales",
    ),
    "unexpected": ({"model__extra": torch.ones(1)}, r"missing: none; unexpected: model\.extra"),
    "shape": ({"model__norm__weight": torch.ones(65)}, r"of shape \[64\], got torch\.float32 of shape \[65\]"),
    "dtype": ({"model__norm__weight": torch.ones(64, dtype=torch.uint8)}, r"got torch\.uint8 of shape \[64\]"),
    "expert shape": (ONE_BLOCK_LESS, "4 experts of 64 x 96"),
    "block shape": (
        {EXPERTS + "down_proj_blocks": torch.zeros(4, 64, 2, 16, dtype=torch.uint8)},
        r"scales \[4, 64, 3\] for codes \[4, 64, 32\], K = 64",
    ),
    "scales as numbers": ({EXPERTS + "down_proj_scales": SCALES.float()}, "got torch.float32 scales"),
    "nan": ({EXPERTS + "down_proj_scales": NAN_SCALES}, r"1 that are NaN \(byte 255\)[\s\S]*down_proj_scales"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_checkpoint_that_does_not_fit_is_refused(case: str, tmp_path: Path) -> None:
    changes, said = REFUSALS[case]
    spoiled(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=said):
        load(tmp_path)


def test_ignored_buffers_are_no_error(tmp_path: Path) -> None:
    spoiled(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    assert_complete(load(tmp_path))


def test_scales_under_the_name_of_their_format_are_bits(tmp_path: Path) -> None:
    spoiled(tmp_path, **{EXPERTS + "down_proj_scales": SCALES.view(torch.float8_e8m0fnu)})
    state = load(tmp_path).state_dict()
    assert torch.equal(state["model.layers.0.mlp.experts.down_proj_block_scale"], SCALES)


def test_checkpoints_without_fp4_are_named(tmp_path: Path) -> None:
    write_tensors(tmp_path, {"a.weight": torch.ones(2), "b.weight": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"gpt-oss MXFP4 as published[\s\S]*a\.weight, b\.weight"):
        load(tmp_path)


def in_openais_names(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write the tensors of a gpt-oss checkpoint as OpenAI names and joins them."""
    renamed: dict[str, torch.Tensor] = {
        "embedding.weight": tensors["model.embed_tokens.weight"],
        "unembedding.weight": tensors["lm_head.weight"],
        "norm.scale": tensors["model.norm.weight"].float(),
    }
    for layer in range(2):
        old, new = f"model.layers.{layer}", f"block.{layer}"
        for kind in ("weight", "bias"):
            parts = [tensors[f"{old}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
            renamed[f"{new}.attn.qkv.{kind}"] = torch.cat(parts)
            renamed[f"{new}.attn.out.{kind}"] = tensors[f"{old}.self_attn.o_proj.{kind}"]
            renamed[f"{new}.mlp.gate.{kind}"] = tensors[f"{old}.mlp.router.{kind}"]
        renamed[f"{new}.attn.sinks"] = tensors[f"{old}.self_attn.sinks"]
        renamed[f"{new}.attn.norm.scale"] = tensors[f"{old}.input_layernorm.weight"].float()
        renamed[f"{new}.mlp.norm.scale"] = tensors[f"{old}.post_attention_layernorm.weight"].float()
        for number, name in ((1, "gate_up_proj"), (2, "down_proj")):
            for part in ("blocks", "scales"):
                renamed[f"{new}.mlp.mlp{number}_weight.{part}"] = tensors[f"{old}.mlp.experts.{name}_{part}"]
            renamed[f"{new}.mlp.mlp{number}_bias"] = tensors[f"{old}.mlp.experts.{name}_bias"]
    write_tensors(folder, {name: tensor.contiguous() for name, tensor in renamed.items()})


OPENAI = {
    "num_hidden_layers": 2,
    "num_experts": 4,
    "experts_per_token": 2,
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "swiglu_limit": 7.0,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 8,
    "initial_context_length": 64,
    "rope_theta": 150000.0,
    "rope_scaling_factor": 4.0,
    "rope_ntk_alpha": 1.0,
    "rope_ntk_beta": 32.0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}


def test_openais_own_files_are_the_same_model(tmp_path: Path) -> None:
    published, original = tmp_path / "published", tmp_path / "original"
    published.mkdir()
    original.mkdir()
    in_openais_names(original, write_gpt_oss(published, rope_parameters=YARN))
    (original / "config.json").write_text(json.dumps(OPENAI))
    model, reference = load(original), load(published)
    for (name, tensor), (other, expected) in zip(
        model.state_dict().items(), reference.state_dict().items(), strict=True
    ):
        assert name == other
        assert torch.equal(tensor, expected), name
    assert torch.equal(model.model.rotary_emb.inv_freq, reference.model.rotary_emb.inv_freq)
    assert_same_logits(model, reference)


def test_openais_files_need_openais_config(tmp_path: Path) -> None:
    in_openais_names(tmp_path, write_gpt_oss(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"head_dim": 16, "num_attention_heads": 4}))
    with pytest.raises(CheckpointError, match="num_key_value_heads"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**OPENAI, "num_key_value_heads": 4}))
    with pytest.raises(CheckpointError, match="needed 192 rows, got 128"):
        load(tmp_path)


def test_unreadable_folders(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        load(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"needed model\.safetensors .*, got nothing"):
        load(tmp_path)
    write_gpt_oss(tmp_path, shards=2)
    second = tmp_path / "model-00002-of-00002.safetensors"
    content = second.read_bytes()
    second.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="readable model-00002"):
        load(tmp_path)
    second.unlink()
    with pytest.raises(CheckpointError, match="readable model-00002"):
        load(tmp_path)
    second.write_bytes(content)
    index = tmp_path / "model.safetensors.index.json"
    mapping = json.loads(index.read_text())
    mapping["weight_map"]["absent.weight"] = second.name
    index.write_text(json.dumps(mapping))
    with pytest.raises(CheckpointError, match=r"1 missing, such as absent\.weight"):
        load(tmp_path)
    index.write_text("{")
    with pytest.raises(CheckpointError, match=r"a readable model\.safetensors\.index\.json"):
        load(tmp_path)


def test_unusable_configs(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(CheckpointError, match="one that transformers knows"):
        load(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"needed config\.json"):
        load(tmp_path)


@pytest.mark.gpu
def test_loads_to_a_gpu(tiny: Path) -> None:
    model: Any = load(tiny, device="cuda")
    assert_complete(model)
    assert {t.device.type for t in model.state_dict().values()} == {"cuda"}
    assert model.model.rotary_emb.inv_freq.is_cuda
    ids = torch.randint(3, 250, (1, 20))
    with torch.no_grad():
        logits, expected = model(ids.cuda()).logits.cpu(), load(tiny)(ids).logits
    assert ((logits - expected).norm() / expected.norm()).item() < 0.02
