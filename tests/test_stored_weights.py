"""The whole way for weights that no kernel could read as they are stored: laid out once, outside the compiled graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tolerances import assert_close_per_token
from torch import fx, nn

from fp4_inductor import Fp4InductorError, Fp4MoEPass, lowering_pass
from fp4_inductor.formats import MXFP4, NVFP4, BlockFormat
from fp4_inductor.quant import dequantize

E, H, INNER, TOP_K = 4, 128, 96, 2
VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
Tensor = torch.Tensor


@dataclass(frozen=True)
class Storage:
    """One way to store ``[E, N, K]``: tensors by name from canonical operands, and the user's decode of them."""

    fmt: BlockFormat
    store: Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]
    decode: Callable[[dict[str, Tensor], int, int], Tensor]
    global_shape: tuple[int, ...] = (E, 1)


def blockwise(values: Tensor, scale: Tensor) -> Tensor:
    return (values.unflatten(-1, (scale.shape[-1], -1)) * scale.unsqueeze(-1)).flatten(-2)


def nibbles(codes: Tensor, dim: int = -1) -> Tensor:
    return torch.stack((codes & 15, codes >> 4), dim=dim).int()


def values(codes: Tensor) -> Tensor:
    return torch.tensor(VALUES)[nibbles(codes)].flatten(-2)


def swizzle(scale: Tensor) -> Tensor:
    rows, groups = scale.shape
    padded = F.pad(scale, (0, -groups % 4, 0, -rows % 128))
    blocks = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return blocks.permute(0, 3, 2, 1, 4).contiguous()


def unswizzle(blocks: Tensor, rows: int, groups: int) -> Tensor:
    padded = blocks.permute(0, 3, 2, 1, 4).reshape(blocks.shape[0] * 128, blocks.shape[1] * 4)
    return padded[:rows, :groups]


def by_columns(t: dict[str, Tensor], rows: int, columns: int) -> Tensor:
    decoded = torch.tensor(VALUES)[nibbles(t["codes"], 2).flatten(1, 2)]
    scale = torch.exp2(t["scale"].float() - 127).repeat_interleave(32, dim=1)
    return (decoded * scale).to(torch.bfloat16).mT


def high_first(t: dict[str, Tensor], rows: int, columns: int) -> Tensor:
    decoded = torch.tensor(VALUES)[nibbles(t["codes"]).flip(-1)].flatten(-2)
    return blockwise(decoded, torch.exp2(t["scale"].float() - 127)).to(torch.bfloat16)


def by_table(t: dict[str, Tensor], rows: int, columns: int) -> Tensor:
    decoded = t["table"][nibbles(t["codes"])].flatten(-2)
    return torch.ldexp(decoded.unflatten(-1, (-1, 32)), t["scale"].int().unsqueeze(-1) - 127).flatten(-2)


def from_swizzled(t: dict[str, Tensor], rows: int, columns: int) -> Tensor:
    scale = torch.stack([unswizzle(each, rows, columns // 16) for each in t["scale"]]).float()
    return (blockwise(values(t["codes"]), scale) * t["gs"].unsqueeze(-1)).to(torch.bfloat16)


def by_halves(t: dict[str, Tensor], rows: int, columns: int) -> Tensor:
    gs = t["gs"].repeat_interleave(rows // 2, dim=1).unsqueeze(-1)
    return blockwise(values(t["codes"]), t["scale"].float() * gs).to(torch.bfloat16)


def dividing(t: dict[str, Tensor], rows: int, columns: int) -> Tensor:
    return blockwise(values(t["codes"]), t["scale"].float() / t["inverse"].unsqueeze(-1)).to(torch.bfloat16)


def of_parts(t: dict[str, Tensor], rows: int, columns: int) -> Tensor:
    one = [dequantize(t[f"codes_{e}"], t[f"scale_{e}"], t[f"gs_{e}"], NVFP4) for e in range(E)]
    return torch.stack(one)


def as_parts(codes: Tensor, scale: Tensor, gs: Tensor) -> dict[str, Tensor]:
    named = {"codes": codes, "scale": scale, "gs": gs}
    return {f"{name}_{e}": value[e].clone() for name, value in named.items() for e in range(E)}


def of_halves(t: dict[str, Tensor], rows: int, columns: int) -> Tensor:
    return torch.cat([dequantize(t[f"codes_{h}"], t[f"scale_{h}"], t[f"gs_{h}"], NVFP4) for h in range(2)], dim=1)


def as_halves(codes: Tensor, scale: Tensor, gs: Tensor) -> dict[str, Tensor]:
    named = {"codes": codes.chunk(2, dim=1), "scale": scale.chunk(2, dim=1), "gs": gs.chunk(2, dim=1)}
    return {f"{name}_{half}": value[half].clone() for name, value in named.items() for half in range(2)}


STORAGES = {
    "columns": Storage(MXFP4, lambda c, s, g: {"codes": c.mT.contiguous(), "scale": s.mT.contiguous()}, by_columns),
    "high nibble first": Storage(MXFP4, lambda c, s, g: {"codes": (c << 4) | (c >> 4), "scale": s}, high_first),
    "table": Storage(
        MXFP4,
        lambda c, s, g: {"codes": c, "scale": s, "table": torch.tensor(VALUES, dtype=torch.bfloat16)},
        by_table,
    ),
    "swizzled": Storage(
        NVFP4, lambda c, s, g: {"codes": c, "scale": torch.stack([swizzle(x) for x in s]), "gs": g}, from_swizzled
    ),
    "halves": Storage(NVFP4, lambda c, s, g: {"codes": c, "scale": s, "gs": g}, by_halves, (E, 2)),
    "dividing": Storage(NVFP4, lambda c, s, g: {"codes": c, "scale": s, "inverse": 1 / g}, dividing),
    "parts": Storage(NVFP4, as_parts, of_parts),
    "gate and up apart": Storage(NVFP4, as_halves, of_halves, (E, 2)),
}


class StoredMoE(nn.Module):
    """Own model code, whose weights are stored in some way; ``exact`` are the same in float64."""

    def __init__(self, storage: Storage) -> None:
        super().__init__()
        self.storage, self.exact, fmt = storage, {}, storage.fmt
        self.gate = nn.Linear(H, E, bias=False, dtype=torch.bfloat16)
        self.sizes = {"w13": (2 * INNER, H), "w2": (H, INNER)}
        for name, (rows, columns) in self.sizes.items():
            codes = torch.randint(0, 256, (E, rows, columns // 2), dtype=torch.uint8)
            blocks = (E, rows, columns // fmt.block_size)
            low, high = (120, 124) if fmt is MXFP4 else (0x28, 0x48)
            scale = torch.randint(low, high, blocks, dtype=torch.uint8).view(fmt.scale_dtype)
            gs = torch.rand(storage.global_shape) * 0.03 + 0.01
            for key, value in storage.store(codes, scale, gs).items():
                self.register_buffer(f"{name}_{key}", value)
            wide = gs.repeat_interleave(rows // gs.shape[1], dim=1)
            self.exact[name] = dequantize(codes, scale, wide if fmt is NVFP4 else None, fmt, torch.float64)
        self.requires_grad_(False)

    def weight(self, name: str) -> Tensor:
        stored = {key.removeprefix(f"{name}_"): value for key, value in self.named_buffers() if key.startswith(name)}
        return self.storage.decode(stored, *self.sizes[name])

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.softmax(self.gate(x).float(), dim=-1).topk(TOP_K, dim=-1)
        values, perm = ids.flatten().sort()
        offs = torch.histc(values.float(), bins=E, min=0, max=E - 1).cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(x[perm // TOP_K], self.weight("w13").mT, offs=offs).chunk(2, dim=-1)
        out = F.grouped_mm(F.silu(gate) * up, self.weight("w2").mT, offs=offs)
        return torch.zeros_like(x).index_add(0, perm // TOP_K, (out * weights.flatten()[perm, None]).to(x.dtype))

    def reference(self, x: Tensor) -> Tensor:
        """``[T, H]`` float64, every product written out."""
        weights, ids = torch.softmax(self.gate(x).float(), dim=-1).topk(TOP_K, dim=-1)
        gate, up = torch.einsum("tknh,th->tkn", self.exact["w13"][ids], x.double()).chunk(2, dim=-1)
        out = torch.einsum("tkhi,tki->tkh", self.exact["w2"][ids], F.silu(gate) * up)
        return (out * weights.double().unsqueeze(-1)).sum(1)


@pytest.fixture
def compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """The graphs that are left once weights are folded."""
    torch._dynamo.reset()
    graphs: list[fx.GraphModule] = []
    fold = lowering_pass.fold

    def watched(gm: fx.GraphModule, *args: Any) -> Any:
        graphs.append(gm)
        return fold(gm, *args)

    monkeypatch.setattr(lowering_pass, "fold", watched)
    return graphs


def fused_calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if str(node.target).startswith("fp4_inductor.")]


@pytest.mark.parametrize("name", list(STORAGES))
def test_stored_weights_are_laid_out_once(name: str, compiled_graphs: list[fx.GraphModule]) -> None:
    model, x = StoredMoE(STORAGES[name]), torch.randn(9, H).bfloat16()
    options = {"fp4moe.expect_matches": 1, "fp4moe.strict": True}
    compiled = torch.compile(model, backend="fp4moe", fullgraph=True, options=options)
    with torch.no_grad():
        assert_close_per_token(compiled(x), model.reference(x), torch.bfloat16)
        (graph,) = compiled_graphs
        (fused,) = fused_calls(graph.graph)
        packed = [node for node in fused.all_input_nodes if node.meta["val"].dtype.itemsize == 1]
        assert packed
        assert all(node.op == "placeholder" for node in packed)


@pytest.mark.parametrize("name", ["columns", "table", "swizzled"])
def test_stored_weights_in_the_pass_alone(name: str) -> None:
    from torch._inductor import config

    torch._dynamo.reset()
    model, x = StoredMoE(STORAGES[name]), torch.randn(9, H).bfloat16()
    seen: list[int] = []

    class Watched(Fp4MoEPass):
        def __call__(self, graph: fx.Graph) -> None:
            super().__call__(graph)
            seen.append(len(fused_calls(graph)))

    with torch.no_grad(), config.patch(post_grad_custom_pre_pass=Watched(), fx_graph_cache=False):
        out = torch.compile(model, fullgraph=True)(x)
    assert seen[0] >= 1
    assert_close_per_token(out, model.reference(x), torch.bfloat16)


def test_a_table_that_changes_is_seen() -> None:
    torch._dynamo.reset()
    model, x = StoredMoE(STORAGES["table"]), torch.randn(5, H).bfloat16()
    compiled = torch.compile(model, backend="fp4moe", options={"fp4moe.expect_matches": 1})
    with torch.no_grad():
        before = compiled(x)
        model.w13_table.neg_()
        model.exact["w13"].neg_()
        assert not torch.equal(compiled(x), before)
        assert_close_per_token(compiled(x), model.reference(x), torch.bfloat16)
        model.w13_table.mul_(1.25)
        with pytest.raises(Fp4InductorError, match=r"needed a table of the e2m1 values .* got other values"):
            compiled(x)
