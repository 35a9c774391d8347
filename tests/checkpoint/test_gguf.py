"""GGUF files of gpt-oss: bit for bit the checkpoint that they were converted from, or refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from fp4_values import nearest_bfloat16
from gguf_writer import F16, METADATA, Q8_0, Tensor, gguf_bytes, mxfp4, plain, q8_0, write_gguf
from gpt_oss_writer import write_gpt_oss
from models import MoEStack

import fp4_inductor
from fp4_inductor.checkpoint import load
from fp4_inductor.device import DeviceInfo
from fp4_inductor.errors import CheckpointError

EXPERTS = "model.layers.1.mlp.experts"


def decoded(stored: Tensor) -> torch.Tensor:
    """float64 of MXFP4 blocks, a byte at a time, by ggml's rule: doubled integers under half the power of two."""
    integers = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
    _, shape, content = stored
    values: list[float] = []
    for start in range(0, len(content), 17):
        half = 2.0 ** (content[start] - 128)
        block = content[start + 1 : start + 17]
        values += [integers[byte & 15] * half for byte in block] + [integers[byte >> 4] * half for byte in block]
    return torch.tensor(values, dtype=torch.float64).reshape(shape)


@pytest.mark.parametrize("by", ["file", "folder", "another name"])
def test_a_gguf_file_is_the_checkpoint_it_was_converted_from(by: str, tmp_path: Path) -> None:
    published, converted = tmp_path / "published", tmp_path / "converted"
    published.mkdir()
    converted.mkdir()
    write_gpt_oss(published)
    path, _, stored = write_gguf(converted)
    if by == "another name":
        path = path.rename(converted / "weights")
    model: Any = load(converted if by == "folder" else path)
    reference: Any = load(published)
    state = model.state_dict()
    assert state.keys() == reference.state_dict().keys()
    for name, expected in reference.state_dict().items():
        assert state[name].dtype == expected.dtype, name
        assert torch.equal(state[name], expected), name
    experts = model.get_submodule(EXPERTS)
    gate, up, down = (decoded(stored[f"blk.1.ffn_{part}_exps.weight"]) for part in ("gate", "up", "down"))
    assert torch.equal(experts.gate_up_proj[..., 0::2], nearest_bfloat16(gate).mT)
    assert torch.equal(experts.gate_up_proj[..., 1::2], nearest_bfloat16(up).mT)
    assert torch.equal(experts.down_proj, nearest_bfloat16(down).mT)
    ids = torch.randint(3, 250, (2, 20))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, reference(ids).logits)


def test_the_experts_compile_to_one_kernel(tmp_path: Path) -> None:
    path, _, stored = write_gguf(tmp_path, num_hidden_layers=1)
    rewrite(path, {**METADATA, "gpt-oss.block_count": 1}, stored)
    model: Any = load(path)
    options = {"fp4moe.strict": True, "fp4moe.on_unsupported": "error", "fp4moe.verify": "first_call"}
    compiled = torch.compile(MoEStack(model), backend="fp4moe", fullgraph=True, options=options)
    inputs = torch.randn(1, 12, 64).to(torch.bfloat16)
    with torch.no_grad():
        actual, expected = compiled(inputs).double(), MoEStack(model)(inputs).double()
    error = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.max()) < 1.5e-2
    report = fp4_inductor.explain(MoEStack(model), inputs, device="cpu")
    assert len(report.sites) == 1, report


def rewrite(path: Path, metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    path.write_bytes(gguf_bytes(metadata, tensors))


def test_other_types_are_what_they_stand_for(tmp_path: Path) -> None:
    path, tensors, stored = write_gguf(tmp_path)
    scale = torch.rand(256, 2).to(torch.float16)
    values = torch.randint(-128, 128, (256, 64), dtype=torch.int8)
    embedding = scale.double().repeat_interleave(32, dim=-1) * values
    query = tensors["model.layers.0.self_attn.q_proj.weight"]
    blocks = torch.randint(256, (64, 2, 16), dtype=torch.uint8)
    dense = mxfp4(blocks, torch.randint(118, 123, (64, 2), dtype=torch.uint8))
    changes = {
        "token_embd.weight": q8_0(scale, values),
        "blk.0.attn_q.weight": plain(query, F16),
        "blk.1.attn_output.weight": dense,
    }
    rewrite(path, METADATA, {**stored, **changes})
    model: Any = load(path, dtype=torch.float32)
    assert torch.equal(model.model.embed_tokens.weight.double(), embedding)
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight, query.to(torch.float16).float())
    output = model.model.layers[1].self_attn.o_proj
    assert torch.equal(output.weight.double(), decoded(dense))
    assert output.weight_packed.shape == (64, 32)


def test_parts_of_a_split_file_are_one_checkpoint(tmp_path: Path) -> None:
    path, _, stored = write_gguf(tmp_path)
    expected = load(path).state_dict()
    path.unlink()
    names = sorted(stored)
    parts = [tmp_path / f"tiny-{number + 1:05}-of-00003.gguf" for number in range(3)]
    for number, part in enumerate(parts):
        metadata = {"split.no": number, "split.count": 3} | (METADATA if number == 0 else {})
        rewrite(part, metadata, {name: stored[name] for name in names[number::3]})
    state = load(tmp_path).state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    with pytest.raises(CheckpointError, match="all parts of one, got part 0 of 3"):
        load(parts[0])
    parts[1].unlink()
    with pytest.raises(CheckpointError, match="got part 0 of 3, part 2 of 3"):
        load(tmp_path)


def test_inspect_reads_it(tmp_path: Path) -> None:
    from fp4_inductor.checkpoint.files import CheckpointFiles
    from fp4_inductor.checkpoint.inspection import describe

    path, _, _ = write_gguf(tmp_path)
    page = "\n".join(describe(CheckpointFiles(path), DeviceInfo.parse("cpu")))
    assert "gpt-oss MXFP4 in GGUF" in page
    assert "in 4.25 bits each" in page
    assert "runs on" in page


NAN = mxfp4(torch.zeros(4, 64, 3, 16, dtype=torch.uint8), torch.full((4, 64, 3), 255, dtype=torch.uint8))
ONE = plain(torch.ones(64), 0)
INFINITE = q8_0(torch.full((256, 2), float("inf")).to(torch.float16), torch.ones(256, 64, dtype=torch.int8))
SQUARE = mxfp4(torch.zeros(4, 64, 2, 16, dtype=torch.uint8), torch.zeros(4, 64, 2, dtype=torch.uint8))
WRONG: dict[str, tuple[dict[str, Any], dict[str, Tensor | None], str]] = {
    "another family": ({"general.architecture": "llama"}, {}, r"family gpt-oss, got 'llama'[\s\S]*rows of some"),
    "no family": ({"general.architecture": None}, {}, "family gpt-oss, got 'None'"),
    "another size": ({"gpt-oss.attention.head_count": 8}, {}, "head_count 8, got 4"),
    "another type": ({}, {"output.weight": (14, (256, 256), bytes(256 * 210))}, r"got Q6_K: output\.weight"),
    "a type of tomorrow": ({}, {"output.weight": (99, (64,), bytes(64))}, "got type 99"),
    "experts in another type": ({}, {"blk.0.ffn_down_exps.weight": plain(torch.ones(4, 64, 96), F16)}, "type MXFP4"),
    "a packed embedding": ({}, {"token_embd.weight": SQUARE}, "experts and attention alone"),
    "a packed row": ({}, {"blk.0.attn_q.weight": (39, (64,), bytes(34))}, "matrices of experts and attention"),
    "experts without an axis": (
        {},
        {"blk.0.ffn_down_exps.weight": (39, (64, 96), bytes(64 * 51))},
        "4 experts of 64 x 96",
    ),
    "no up": ({}, {"blk.0.ffn_up_exps.weight": None}, r"missing: blk\.0\.ffn_up_exps\.weight"),
    "no gate": ({}, {"blk.0.ffn_gate_exps.bias": None}, r"got blk\.0\.ffn_up_exps\.bias"),
    "gate and up that differ": (
        {},
        {"blk.0.ffn_up_exps.weight": SQUARE},
        r"ffn_gate_exps\.weight and blk\.0\.ffn_up_exps\.weight of one shape",
    ),
    "no norm": ({}, {"output_norm.weight": None}, r"missing: model\.norm\.weight"),
    "one tensor more": ({}, {"rope_freqs.weight": ONE}, r"got rope_freqs\.weight"),
    "an odd part of experts": ({}, {"blk.0.ffn_gate_exps.x": ONE, "blk.0.ffn_up_exps.x": ONE}, r"ffn_gate_exps\.x"),
    "one layer more": ({}, {"blk.2.attn_norm.weight": ONE}, r"unexpected: blk\.2\.attn_norm\.weight"),
    "another shape": ({}, {"output_norm.weight": plain(torch.ones(65), 0)}, r"of shape \[65\]"),
    "experts of another shape": ({}, {"blk.0.ffn_down_exps.weight": SQUARE}, "4 experts of 64 x 96"),
    "NaN": ({}, {"blk.0.ffn_down_exps.weight": NAN}, r"NaN \(byte 255\)"),
    "an infinite scale": ({}, {"token_embd.weight": INFINITE}, "NaN or infinity"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_placed_exactly_is_refused(case: str, tmp_path: Path) -> None:
    metadata, changes, said = WRONG[case]
    path, _, stored = write_gguf(tmp_path)
    merged = {**METADATA, **metadata}
    tensors = {**stored, **changes}
    rewrite(
        path,
        {name: "None" if value is None else value for name, value in merged.items()},
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
    )
    with pytest.raises(CheckpointError, match=said):
        load(path)


def test_the_config_comes_from_beside_the_file(tmp_path: Path) -> None:
    path, _, _ = write_gguf(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(
        CheckpointError, match=r"config\.json of the same model, general\.architecture gpt-oss, got llama"
    ):
        load(path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json beside the file, got none[\s\S]*converted from"):
        load(path)


def test_two_files_are_two_checkpoints(tmp_path: Path) -> None:
    path, _, stored = write_gguf(tmp_path)
    rewrite(tmp_path / "other.gguf", METADATA, {"other.weight": ONE})
    with pytest.raises(CheckpointError, match="one GGUF file, or all parts of one"):
        load(tmp_path)
    assert load(path)
    rewrite(tmp_path / "other.gguf", METADATA, {name: stored[name] for name in list(stored)[:2]})
    with pytest.raises(CheckpointError, match="in two files"):
        load(tmp_path)


def test_a_name_alone_makes_no_gguf(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"\x80\x02}q\x00." + bytes(60))
    for path in (file, tmp_path):
        with pytest.raises(CheckpointError, match=r"needed (a folder, or a GGUF file|model\.safetensors)"):
            load(path)


def head(tensors: int = 0, entries: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries)


def named(name: bytes, *numbers: int, layout: str) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack(layout, *numbers)


A, B = (0, (8,), bytes(32)), (0, (16,), bytes(64))
WHOLE = gguf_bytes({}, {"a": A, "b": B})
HOSTILE = {
    "a beginning alone": (b"GGUF", "4 bytes from byte 4"),
    "version 1": (head(version=1), "version 1"),
    "the other byte order": (head(version=3 << 24), "other byte order"),
    "tensors without end": (head(tensors=1 << 60), "1152921504606846976 tensors"),
    "entries without end": (head(entries=1 << 60), "1152921504606846976 entries"),
    "a name without end": (head(entries=1) + struct.pack("<Q", 1 << 63) + bytes(64), "9223372036854775808 bytes"),
    "a name that is no text": (head(entries=1) + named(b"\xff\xfe", 4, 1, layout="<II") + bytes(8), "UnicodeDecode"),
    "a name twice": (head(entries=2) + 2 * named(b"a", 4, 1, layout="<II"), "a twice"),
    "metadata of no type": (head(entries=1) + named(b"a", 13, 1, layout="<II"), "metadata of type 13"),
    "lists of lists": (head(entries=1) + named(b"a", 9, 9, 1, layout="<IIQ") + bytes(32), "a list of type 9"),
    "a list without end": (head(entries=1) + named(b"a", 9, 4, 1 << 62, layout="<IIQ"), "numbers in a file"),
    "texts without end": (head(entries=1) + named(b"a", 9, 8, 1 << 61, layout="<IIQ"), "texts in a file"),
    "alignment of none": (gguf_bytes({"general.alignment": 0}, {"a": A}), "alignment 0"),
    "alignment of 24": (gguf_bytes({"general.alignment": 24}, {"a": A}), "alignment 24"),
    "alignment in words": (gguf_bytes({"general.alignment": "x"}, {"a": A}), "alignment x"),
    "no axes": (gguf_bytes({}, {"a": (0, (), bytes(32)), "b": B}), "0 axes for a"),
    "five axes": (gguf_bytes({}, {"a": (0, (1,) * 5, bytes(32))}), "5 axes for a"),
    "an empty axis": (gguf_bytes({}, {"a": (0, (8, 0), b""), "b": B}), r"shape \[8, 0\]"),
    "a shape without end": (gguf_bytes({}, {"a": (0, (1 << 62, 1 << 62), bytes(32))}), "where a ends at"),
    "rows of half a block": (gguf_bytes({}, {"a": (Q8_0, (4, 48), bytes(204))}), "no whole blocks of 32"),
    "tensors twice": (head(2) + 2 * named(b"a", 1, 8, 0, 0, layout="<IQIQ") + bytes(96), "a twice"),
    "overlap": (gguf_bytes({}, {"a": A, "b": B}, offsets={"b": 0}), "next free one"),
    "gap": (gguf_bytes({}, {"a": A, "b": B}, offsets={"b": 64}) + bytes(32), "next free one"),
    "beyond the end": (gguf_bytes({}, {"a": A, "b": B}, offsets={"a": 1 << 62}), "next free one"),
    "off the alignment": (gguf_bytes({}, {"a": A, "b": B}, offsets={"b": 33}) + bytes(32), "next free one"),
    "truncated": (WHOLE[:-8], "where b ends at"),
    "more than it says": (WHOLE + bytes(32), "tensors end at"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused(case: str, tmp_path: Path) -> None:
    content, said = HOSTILE[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"readable model.gguf[\\s\\S]*({said})"):
        load(path)


def test_every_cut_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    whole = gguf_bytes(METADATA, {"a": A, "b": B})
    for length in range(4, len(whole), 3):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"readable model\.gguf"):
            load(path)
