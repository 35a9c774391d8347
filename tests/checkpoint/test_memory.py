"""How much memory loading takes: one layer at a time, and no expert ever in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from fp4_inductor.bench.loading import layer_bytes, main, measure, write_checkpoint
from fp4_inductor.checkpoint import load
from fp4_inductor.checkpoint.files import CheckpointFiles

_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}
SMALL: dict[str, dict[str, Any]] = {
    "stacked": {
        **_HEADS,
        "model_type": "gpt_oss",
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "hidden_size": 1024,
        "intermediate_size": 1024,
    },
    "one by one": {
        **_HEADS,
        "model_type": "qwen3_moe",
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "hidden_size": 1024,
        "moe_intermediate_size": 768,
    },
}


class Widest(TorchDispatchMode):
    """Remembers the most elements of any tensor with data in a dtype that could hold an expert unpacked."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.dtype.itemsize > 1 and not leaf.is_meta:
                self.elements = max(self.elements, leaf.numel())
        return out


@pytest.mark.parametrize("kind", SMALL)
def test_no_expert_is_ever_unpacked(kind: str, tmp_path: Path) -> None:
    sizes = {**SMALL[kind], "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 512}
    sizes |= {"num_local_experts": 4, "num_experts": 4, "num_attention_heads": 2, "vocab_size": 64}
    assert write_checkpoint(tmp_path, sizes, 3_000_000) > 1
    with Widest() as seen:
        load(tmp_path)
    assert 0 < seen.elements < 512 * 256  # half of gate and up of one expert: nothing else here is as large


@pytest.mark.parametrize("kind", SMALL)
def test_the_peak_is_less_than_a_layer_above_what_is_held(kind: str, tmp_path: Path) -> None:
    layers = write_checkpoint(tmp_path, SMALL[kind], 300_000_000)
    assert layers > 2
    files = CheckpointFiles(tmp_path)
    layer, stored = layer_bytes(files), sum(tensor.nbytes for tensor in files.tensors.values())
    del files
    found = measure(tmp_path, torch.device("cpu"))
    assert 0.98 * stored < found.held < 1.01 * stored
    above = found.above(torch.device("cpu"))
    if above is None:
        pytest.skip("needs Linux and /proc/self/clear_refs, to measure one peak and not an earlier one")
    assert above > -0.1 * stored  # the measure measures
    assert above < layer + (64 << 20), (above, layer)  # pages of the file are given back every 64 MiB


def test_the_command_says_what_it_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {**SMALL["one by one"], "hidden_size": 128, "num_experts": 4}, 1, written=True)
    main([str(tmp_path)])
    said = capsys.readouterr().out
    assert "tensors in 1 files" in said
    assert "more of host memory, under a layer and 256 MB" in said
    assert "GB/s; reading alone" in said
    with pytest.raises(SystemExit):
        main(["--model", "gpt-oss-12b"])
    assert "did you mean 'gpt-oss-120b'" in capsys.readouterr().err
