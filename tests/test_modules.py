"""Weight carriers: what they compute, and that everything a module can be put through keeps their bits."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from fp4_inductor.formats import FORMATS, MXFP4, NVFP4, BlockFormat
from fp4_inductor.modules import CarriedWeight, WeightCarrier, carried_weights, pack_parameter
from fp4_inductor.quant import dequantize, quantize

E, N, K = 4, 48, 64


class Experts(nn.Module):
    """Keeps one weight as [E, N, K] and one as [E, K, N]."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.w13 = nn.Parameter((torch.randn(E, N, K) * 0.02).to(dtype))
        self.w2 = nn.Parameter((torch.randn(E, K, N) * 0.02).to(dtype))
        self.bias = nn.Parameter(torch.randn(E, 1, N).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, self.w13.mT) + torch.bmm(x, self.w2) + self.bias


def pack(module: Experts, fmt: BlockFormat) -> Experts:
    w13, w2 = module.w13.detach(), module.w2.detach()
    pack_parameter(module, CarriedWeight("w13", fmt), quantize(w13, fmt), w13.dtype)
    pack_parameter(module, CarriedWeight("w2", fmt, transposed=True), quantize(w2.mT, fmt), w2.dtype)
    return module


def carrier(fmt: BlockFormat, dtype: torch.dtype = torch.bfloat16) -> Experts:
    return pack(Experts(dtype), fmt).eval().requires_grad_(False)


def stored_bits(module: nn.Module) -> dict[str, torch.Tensor]:
    """Everything packed, as bytes."""
    names = [name for weight in carried_weights(module) for name in weight.tensor_names]
    return {name: module.get_parameter(name).detach().cpu().view(torch.uint8).clone() for name in names}


def assert_same_bits(module: nn.Module, bits: dict[str, torch.Tensor]) -> None:
    found = stored_bits(module)
    assert found.keys() == bits.keys()
    for name, expected in bits.items():
        assert torch.equal(found[name], expected), name


@pytest.fixture(params=FORMATS.values(), ids=str)
def fmt(request: pytest.FixtureRequest) -> BlockFormat:
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_properties_are_the_dequantised_weights(fmt: BlockFormat, dtype: torch.dtype) -> None:
    plain = Experts(dtype)
    expected13 = dequantize(*quantize(plain.w13.detach(), fmt), fmt, dtype)
    expected2 = dequantize(*quantize(plain.w2.detach().mT, fmt), fmt, dtype).mT
    module = pack(plain, fmt)
    assert module.w13.dtype == module.w2.dtype == dtype
    assert torch.equal(module.w13, expected13)
    assert torch.equal(module.w2, expected2)
    assert module.w2.shape == (E, K, N)


def test_storage_is_canonical(fmt: BlockFormat) -> None:
    module = carrier(fmt)
    assert module.get_parameter("w2_packed").shape == (E, N, K // 2)
    assert module.get_parameter("w2_packed").dtype == torch.uint8
    assert module.get_parameter("w2_block_scale").shape == (E, N, K // fmt.block_size)
    assert module.get_parameter("w2_block_scale").dtype == fmt.scale_dtype
    names = {name for name, _ in module.named_parameters()}
    assert ("w2_global_scale" in names) == fmt.has_global_scale
    assert not names & {"w13", "w2"}
    assert not any(p.requires_grad for p in module.parameters())


def test_is_still_the_original_class_and_says_what_it_is(fmt: BlockFormat) -> None:
    module = carrier(fmt)
    assert isinstance(module, Experts)
    assert isinstance(module, WeightCarrier)
    assert type(module).__name__ == "Fp4Experts"
    assert f"w13: {fmt} [{E}, {N}, {K}], read as bfloat16" in repr(module)
    assert f"w2: {fmt} [{E}, {K}, {N}], read as bfloat16" in repr(module)


def test_equal_layers_share_a_class_and_unequal_ones_do_not() -> None:
    assert type(carrier(MXFP4)) is type(carrier(MXFP4))
    assert type(carrier(MXFP4)) is not type(carrier(NVFP4))


def test_equal_layers_share_compiled_code(fmt: BlockFormat) -> None:
    layers = [carrier(fmt) for _ in range(3)]
    graphs = 0

    def count(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        nonlocal graphs
        graphs += 1
        return gm

    run = torch.compile(lambda module, x: module(x), backend=count, fullgraph=True)
    x = torch.randn(E, 5, K).bfloat16()
    for layer in layers:
        assert torch.equal(run(layer, x), layer(x))
    assert graphs == 1


@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.to(torch.float16),
        lambda m: m.half(),
        lambda m: m.type(torch.float16),
        lambda m: nn.Sequential(m).half()[0],
        lambda m: m.to("cpu", torch.float16),
    ],
    ids=["to", "half", "type", "parent", "device and dtype"],
)
def test_dtype_conversions_change_what_is_read_not_what_is_stored(convert, fmt: BlockFormat) -> None:  # type: ignore[no-untyped-def]
    module = carrier(fmt)
    bits, before = stored_bits(module), module.w13.float()
    module = convert(module)
    assert_same_bits(module, bits)
    assert module.w13.dtype == module.w2.dtype == module.bias.dtype == torch.float16
    assert module.get_parameter("w13_block_scale").dtype == fmt.scale_dtype
    torch.testing.assert_close(module.w13.float(), before, rtol=5e-3, atol=1e-6)
    assert_same_bits(module.bfloat16(), bits)
    assert torch.equal(module.w13.float(), before)


@pytest.mark.gpu
def test_moves_between_devices(fmt: BlockFormat) -> None:
    module = carrier(fmt)
    bits, expected = stored_bits(module), module.w13.clone()
    module.to("cuda", torch.float32)
    assert module.get_parameter("w13_packed").is_cuda
    assert_same_bits(module, bits)
    assert torch.equal(module.w13.to("cpu", torch.bfloat16), expected)
    assert_same_bits(module.cpu().bfloat16(), bits)


def test_to_empty_and_load_restores_a_meta_module(fmt: BlockFormat) -> None:
    module = carrier(fmt)
    x = torch.randn(E, 3, K).bfloat16()
    expected, state = module(x), copy.deepcopy(module.state_dict())
    empty = copy.deepcopy(module).to("meta").to_empty(device="cpu")
    assert empty.get_parameter("w13_block_scale").dtype == fmt.scale_dtype
    empty.load_state_dict(state)
    assert torch.equal(empty(x), expected)


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trip(fmt: BlockFormat, assign: bool) -> None:
    source, target = carrier(fmt), carrier(fmt)
    assert not torch.equal(source.w13, target.w13)
    target.load_state_dict(copy.deepcopy(source.state_dict()), assign=assign)
    assert_same_bits(target, stored_bits(source))
    assert torch.equal(target.w13, source.w13)
    assert not any(p.requires_grad for p in target.parameters())


def test_loading_is_strict(fmt: BlockFormat) -> None:
    module = carrier(fmt)
    state = module.state_dict()
    del state["w2_packed"]
    with pytest.raises(RuntimeError, match=r"Missing key.*w2_packed"):
        module.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*w13"):
        module.load_state_dict(Experts().state_dict())


@pytest.mark.parametrize("assign", [False, True])
def test_loading_refuses_to_convert_bits(assign: bool) -> None:
    module = carrier(MXFP4)
    bits = stored_bits(module)
    state = copy.deepcopy(module.state_dict())
    state["w2_block_scale"] = state["w2_block_scale"].view(torch.float8_e8m0fnu)
    with pytest.raises(RuntimeError, match=r"w2_block_scale: needed torch\.uint8, got torch\.float8_e8m0fnu"):
        module.load_state_dict(state, assign=assign, strict=False)
    assert bits.keys() == stored_bits(module).keys()


@pytest.mark.parametrize("how", ["torch", "safetensors"])
def test_saved_and_reloaded(how: str, fmt: BlockFormat, tmp_path: Path) -> None:
    module, other = carrier(fmt), carrier(fmt)
    path = tmp_path / "weights"
    if how == "torch":
        torch.save(module.state_dict(), path)
        state = torch.load(path, weights_only=True)
    else:
        safetensors = pytest.importorskip("safetensors.torch")
        safetensors.save_file(module.state_dict(), path)
        state = safetensors.load_file(path)
    other.load_state_dict(state)
    assert_same_bits(other, stored_bits(module))


def test_copies_keep_class_and_bits(fmt: BlockFormat, tmp_path: Path) -> None:
    module = carrier(fmt).half()
    torch.save(module, tmp_path / "module")
    copies = [copy.deepcopy(module), copy.copy(module), torch.load(tmp_path / "module", weights_only=False)]
    if fmt == MXFP4:  # torch pickles float8 storages only through torch.save
        copies.append(pickle.loads(pickle.dumps(module)))
    for other in copies:
        assert type(other) is type(module)
        assert_same_bits(other, stored_bits(module))
        assert torch.equal(other.w2, module.w2)
    copies[0].get_parameter("w13_packed").fill_(0x11)
    assert not torch.equal(copies[0].w13, module.w13)


@pytest.mark.parametrize("value", [torch.zeros(E, N, K), nn.Parameter(torch.zeros(E, N, K)), None], ids=str)
def test_assigning_to_a_packed_weight_says_what_to_do(value: object, fmt: BlockFormat) -> None:
    module = carrier(fmt)
    bits = stored_bits(module)
    with pytest.raises(
        AttributeError, match=rf"w13 is computed from packed {fmt} .* assign w13_packed, w13_block_scale"
    ):
        module.w13 = value  # type: ignore[assignment]
    assert_same_bits(module, bits)


def test_updates_in_place_are_seen(fmt: BlockFormat) -> None:
    module, other = carrier(fmt), carrier(fmt)
    for name in stored_bits(module):
        module.get_parameter(name).data.copy_(other.get_parameter(name))
    assert torch.equal(module.w13, other.w13)
    assert torch.equal(module.w2, other.w2)
