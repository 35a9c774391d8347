"""Checkpoints that cannot be read exactly are refused, each with its reason and its cure."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from fp4_values import nearest_bfloat16, random_fp4
from layout_writers import Checkpoint, write_per_expert, write_stacked

from fp4_inductor.checkpoint import load
from fp4_inductor.errors import CheckpointError

EXPERT = "model.layers.0.mlp.experts.0.up_proj"
PROJECTION = "model.layers.1.self_attn.q_proj"


def changed(key: str, index: int, byte: int) -> Callable[[Checkpoint], None]:
    def change(made: Checkpoint) -> None:
        made.tensors[key] = made.tensors[key].clone()
        made.tensors[key].view(torch.uint8).view(-1)[index] = byte

    return change


def added(key: str, value: torch.Tensor) -> Callable[[Checkpoint], None]:
    return lambda made: made.tensors.update({key: value})


def removed(key: str) -> Callable[[Checkpoint], None]:
    def change(made: Checkpoint) -> None:
        del made.tensors[key]

    return change


def said(**quantization: Any) -> Callable[[Checkpoint], None]:
    def change(made: Checkpoint) -> None:
        path = made.folder / "config.json"
        content = json.loads(path.read_text())
        content["quantization_config"] |= quantization
        path.write_text(json.dumps(content))

    return change


def one_expert_in_mxfp4(made: Checkpoint) -> None:
    for key in [key for key in made.tensors if key.startswith(EXPERT)]:
        del made.tensors[key]
    weight = random_fp4((96, 64), torch.Generator(), block=32, is_e4m3=False)
    made.tensors |= {f"{EXPERT}.weight": weight.packed(), f"{EXPERT}.weight_scale": weight.scale_bits}
    said(quant_algo="MIXED_PRECISION")(made)


ODD = torch.zeros(96, 40, dtype=torch.uint8)
CASES: dict[str, tuple[str, Callable[[Checkpoint], None], str]] = {
    "awq": (
        "modelopt nvfp4",
        added(f"{EXPERT}.pre_quant_scale", torch.ones(64)),
        r"AWQ[\s\S]*pre_quant_scale[\s\S]*without AWQ",
    ),
    "svdquant": ("modelopt nvfp4", added(f"{PROJECTION}.svdquant_lora_a", torch.ones(4, 64)), "low-rank part"),
    "hadamard": ("modelopt nvfp4", added(f"{PROJECTION}.forward_hadamard_matrix", torch.ones(4, 4)), "rotated basis"),
    "rotation, quark": ("quark mxfp4", added(f"{PROJECTION}.input_rotation", torch.ones(8, 8)), "rotated basis"),
    "rotation, auto-round": ("auto-round nvfp4", said(spinquant_config={"r1": True, "online": True}), "rotated basis"),
    "transforms": (
        "compressed-tensors nvfp4",
        said(transform_config={"config_groups": {"R1": {"type": "hadamard"}}}),
        "rotated basis[\\s\\S]*R1",
    ),
    "gptq": ("modelopt nvfp4", added(f"{PROJECTION}.qweight", torch.ones(4, 4, dtype=torch.int32)), "INT4"),
    "int4": (
        "compressed-tensors mxfp4",
        added(f"{EXPERT}.weight_packed", torch.ones(96, 8, dtype=torch.int32)),
        "INT4 codes, packed in int32",
    ),
    "bitsandbytes": ("modelopt nvfp4", added(f"{PROJECTION}.weight.absmax", torch.ones(4)), "decoded by a table"),
    "ue5m3, auto-round": ("compressed-tensors mxfp4", said(data_type="nv_fp4_v2"), "e8m0 or as ue5m3"),
    "ue5m3, quark": (
        "quark mxfp4",
        said(global_quant_config={"weight": {"dtype": "fp4", "group_size": 32, "scale_format": "e5m3"}}),
        "e8m0 or as ue5m3",
    ),
    "ue5m3, with a global scale": (
        "compressed-tensors mxfp4",
        added(f"{EXPERT}.weight_global_scale", torch.ones(1)),
        "could be e8m0, e4m3 bits or ue5m3",
    ),
    "ue5m3, modelopt's names": (
        "modelopt mxfp4",
        added(f"{EXPERT}.weight_scale_2", torch.ones(())),
        "could be e8m0, e4m3 bits or ue5m3",
    ),
    "mxint4, auto-round": (
        "compressed-tensors mxfp4",
        said(data_type="mx_int", bits=4),
        r"e2m1 or as integers[\s\S]*mx_int[\s\S]*MXFP4 or NVFP4",
    ),
    "mxint4 in some layers": (
        "auto-round nvfp4",
        said(extra_config={EXPERT: {"bits": 4, "data_type": "mx_int"}}),
        "e2m1 or as integers",
    ),
    "integers, compressed-tensors": (
        "compressed-tensors mxfp4",
        said(config_groups={"group_0": {"weights": {"num_bits": 4, "type": "int"}}}),
        "e2m1 or as integers",
    ),
    "a multiplier where a divisor belongs": (
        "compressed-tensors nvfp4",
        added(f"{EXPERT}.weight_global_scale", torch.tensor([3e-4])),
        r"the global scale divides[\s\S]*looks like one that multiplies",
    ),
    "a divisor where a multiplier belongs": (
        "modelopt nvfp4",
        added(f"{EXPERT}.weight_scale_2", torch.tensor(8000.0)),
        r"the global scale multiplies[\s\S]*looks like one that divides",
    ),
    "mlx": (
        "modelopt nvfp4",
        lambda made: made.tensors.update(
            {
                f"{PROJECTION}.weight": torch.zeros(64, 8, dtype=torch.uint32),
                f"{PROJECTION}.scales": torch.full((64, 2), 120, dtype=torch.uint8),
            }
        ),
        r"MLX's layout[\s\S]*mlx_lm\.convert",
    ),
    "modelopt, not exported": (
        "modelopt nvfp4",
        added(f"{PROJECTION}.weight_quantizer._double_scale", torch.ones(())),
        "export_hf_checkpoint",
    ),
    "tensorrt-llm": (
        "modelopt nvfp4",
        added("transformer.layers.0.mlp.fc.weights_block_scaling_factor_interleaved", torch.ones(4)),
        "TensorRT-LLM checkpoint",
    ),
    "an engine's own layout": (
        "modelopt nvfp4",
        added("model.layers.0.mlp.experts.w13_blockscale_swizzled", torch.ones(4)),
        "re-ordered for its kernels",
    ),
    "nan scale": ("modelopt nvfp4", changed(f"{EXPERT}.weight_scale", 5, 0x7F), "1 that are NaN"),
    "negative nan scale": ("modelopt nvfp4", changed(f"{EXPERT}.weight_scale", 5, 0xFF), "1 that are NaN"),
    "negative scale": ("modelopt nvfp4", changed(f"{EXPERT}.weight_scale", 5, 0x90), "1 that are negative"),
    "nan e8m0": ("modelopt mxfp4", changed(f"{EXPERT}.weight_scale", 3, 255), "1 that are NaN"),
    "nan e8m0 by its name": ("deepseek", changed(f"{EXPERT}.scale", 3, 255), "1 that are NaN"),
    "global scale of zero that divides": (
        "compressed-tensors nvfp4",
        added(f"{EXPERT}.weight_global_scale", torch.zeros(1)),
        r"global scales[\s\S]*\[0\.0\]",
    ),
    "infinite global scale": ("modelopt nvfp4", added(f"{EXPERT}.weight_scale_2", torch.tensor(torch.inf)), "inf"),
    "negative global scale": ("modelopt nvfp4", added(f"{EXPERT}.weight_scale_2", torch.tensor(-1.0)), "-1.0"),
    "no whole blocks": ("modelopt mxfp4", added(f"{EXPERT}.weight", ODD), r"K = 80[\s\S]*whole blocks"),
    "mixed in one parameter": ("modelopt nvfp4", one_expert_in_mxfp4, "got mxfp4 and nvfp4"),
    "int8 beside fp4": (
        "modelopt nvfp4",
        lambda made: made.tensors.update(
            {"lm_head.weight": torch.ones(96, 64, dtype=torch.int8), "lm_head.weight_scale": torch.ones(96, 1)}
        ),
        "not understood beside FP4[\\s\\S]*lm_head.weight_scale",
    ),
    "two layouts": (
        "modelopt mxfp4",
        added(f"{EXPERT}.scale", torch.full((96, 2), 120, dtype=torch.uint8).view(torch.float8_e8m0fnu)),
        r"two: ModelOpt or Quark[\s\S]*DeepSeek-V4",
    ),
    "no scale": ("compressed-tensors nvfp4", removed(f"{EXPERT}.weight_scale"), f"missing: {EXPERT}.weight_scale"),
    "no global scale": (
        "compressed-tensors nvfp4",
        removed(f"{EXPERT}.weight_global_scale"),
        f"missing: {EXPERT}.weight_global_scale",
    ),
    "no global scale, modelopt": (
        "modelopt nvfp4",
        removed(f"{EXPERT}.weight_scale_2"),
        f"missing: {EXPERT}.weight_scale_2",
    ),
    "unexpected": ("modelopt nvfp4", added("model.layers.0.mlp.extra.weight", torch.ones(2)), "unexpected: .*extra"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_with_reason_and_cure(case: str, tmp_path: Path) -> None:
    layout, change, message = CASES[case]
    made = write_per_expert(tmp_path, layout)
    change(made)
    made.rewrite()
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    made = write_per_expert(tmp_path, "modelopt nvfp4")
    for key in [key for key in made.tensors if ".experts.2.up_proj" in key]:
        del made.tensors[key]
    made.rewrite()
    with pytest.raises(CheckpointError, match=r"needed 4 experts, got 3 .*missing: .*experts\.2\.up_proj\.weight"):
        load(tmp_path)


def test_scales_that_fit_no_axis_are_refused(tmp_path: Path) -> None:
    made = write_stacked(tmp_path, "qwen3_moe", k_first=False)
    key = "model.layers.0.mlp.experts.down_proj_weight_scale"
    made.tensors[key] = made.tensors[key][:, :, :5].contiguous()
    made.rewrite()
    with pytest.raises(CheckpointError, match=r"needed codes \[\.\.\., N, K/2\]"):
        load(tmp_path)


def test_square_parameters_of_a_silent_class_read_both_ways(tmp_path: Path) -> None:
    write_stacked(tmp_path, "llama4_text", k_first=True, intermediate_size=64)
    made = write_stacked(tmp_path, "llama4_text", k_first=True, intermediate_size=64)
    for key in [key for key in made.tensors if ".gate_up_proj" in key and "feed_forward" in key]:
        del made.tensors[key]
    for name, value in made.exact.items():
        if "gate_up_proj" in name:  # unquantised: nothing tells which axis of down_proj is K
            made.tensors[name] = value.to(torch.bfloat16).contiguous()
    made.rewrite()
    with pytest.raises(CheckpointError, match=r"reads as \[E, N, K\] and as \[E, K, N\]"):
        load(tmp_path)


def test_fp8_layers_beside_fp4_ones_are_decoded(tmp_path: Path) -> None:
    made = write_per_expert(tmp_path, "modelopt nvfp4", dense=False)
    exact: dict[str, torch.Tensor] = {}
    scales = {"q": torch.tensor(0.013), "k": torch.rand(32, 1) * 0.01 + 0.01, "v": torch.rand(32) * 0.01 + 0.01}
    for part, scale in scales.items():
        stem = f"model.layers.0.self_attn.{part}_proj"
        codes = torch.randn(64 if part == "q" else 32, 64).to(torch.float8_e4m3fn)
        made.tensors |= {f"{stem}.weight": codes, f"{stem}.weight_scale": scale}
        by_row = scale.double().reshape(-1, 1) if scale.dim() else scale.double()
        exact[f"{stem}.weight"] = codes.double() * by_row
    stem = "model.layers.0.self_attn.o_proj"
    codes = torch.randn(64, 64).to(torch.float8_e4m3fn)
    bits = torch.tensor([[118, 120], [119, 117]], dtype=torch.uint8)
    made.tensors |= {f"{stem}.weight": codes, f"{stem}.scale": bits.view(torch.float8_e8m0fnu)}
    tiles = torch.exp2(bits.double() - 127).repeat_interleave(48, 0)[:64].repeat_interleave(32, 1)
    exact[f"{stem}.weight"] = codes.double() * tiles
    said(weight_block_size=[48, 32])(made)
    made.rewrite()
    state = load(tmp_path).state_dict()
    for name, value in exact.items():
        assert torch.equal(state[name], nearest_bfloat16(value)), name
    made.tensors[f"{stem}.scale"] = torch.ones(3, 3)
    made.rewrite()
    with pytest.raises(CheckpointError, match="one for each 48 x 32"):
        load(tmp_path)


def header(**entries: Any) -> bytes:
    raw = json.dumps(entries).encode()
    return struct.pack("<Q", len(raw)) + raw


def entry(begin: int, end: int, shape: list[Any] | None = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


HOSTILE = {
    "empty": (b"", "a header of 0 bytes"),
    "not a header": (b"PK\x03\x04" + bytes(60), "a header of"),
    "a pickle": (b"\x80\x02}q\x00." + bytes(60), "a header of"),
    "a header longer than the file": (struct.pack("<Q", 1 << 40) + b"{}", "1099511627776 bytes"),
    "no JSON": (struct.pack("<Q", 4) + b"{,,}", "JSONDecodeError"),
    "no mapping": (struct.pack("<Q", 2) + b"[]", "no mapping"),
    "deep": (struct.pack("<Q", 200_000) + b"[" * 200_000, "RecursionError|JSONDecodeError"),
    "a name twice": (struct.pack("<Q", 16) + b'{"a": 1, "a": 2}', "stands twice"),
    "truncated": (header(a=entry(0, 8)) + bytes(4), "end at"),
    "more than it says": (header(a=entry(0, 8)) + bytes(12), "end at"),
    "overlap": (header(a=entry(0, 8), b=entry(4, 12)) + bytes(12), "next free one"),
    "gap": (header(a=entry(0, 4), b=entry(8, 12)) + bytes(12), "next free one"),
    "negative": (header(a=entry(-8, 0, [8])), "data_offsets"),
    "shape that lies": (header(a=entry(0, 8, [2, 5])) + bytes(8), "8 bytes for a"),
    "negative shape": (header(a=entry(0, 8, [-2, -4])) + bytes(8), "shape"),
    "a shape of words": (header(a=entry(0, 8, ["8"])) + bytes(8), "shape"),
    "unknown dtype": (header(a=entry(0, 8, dtype="F6_E2M3")) + bytes(8), "F6_E2M3"),
    "no offsets": (header(a={"dtype": "U8"}), "no dtype, shape and data_offsets"),
    "metadata of numbers": (header(__metadata__={"a": 1}), "mapping of strings"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused(case: str, tmp_path: Path) -> None:
    content, message = HOSTILE[case]
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"readable model.safetensors[\\s\\S]*({message})"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "model.bin", "a/b.safetensors"])
def test_an_index_names_safetensors_of_its_own_folder_only(name: str, tmp_path: Path) -> None:
    index = {"weight_map": {"a": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="in its own folder"):
        load(tmp_path)


def test_no_pickle_is_opened(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(CheckpointError, match="pickles run code"):
        load(tmp_path)


def test_a_file_beside_shards_that_do_not_name_it_is_two_checkpoints(tmp_path: Path) -> None:
    made = write_per_expert(tmp_path, "modelopt nvfp4", shards=2)
    made.rewrite()
    with pytest.raises(CheckpointError, match=r"two: model\.safetensors, and the shards"):
        load(tmp_path)


def test_a_second_load_reads_what_is_there_now(tmp_path: Path) -> None:
    made = write_per_expert(tmp_path, "modelopt nvfp4")
    before = load(tmp_path).state_dict()
    made.tensors["model.norm.weight"] = made.tensors["model.norm.weight"] + 1
    changed(f"{PROJECTION}.weight", 0, 0x35)(made)
    made.rewrite()
    after = load(tmp_path).state_dict()
    different = {
        name for name in before if not torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8))
    }
    assert different == {"model.norm.weight", f"{PROJECTION}.weight_packed"}
