"""The adapters: what they say where their library is missing, and that they call it as it asks to be called."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp4_inductor.bench.peers import PEERS, marlin, triton_kernels
from fp4_inductor.bench.shapes import Shape, parse_shape
from fp4_inductor.device import DeviceInfo
from fp4_inductor.formats import MXFP4, NVFP4, BlockFormat
from fp4_inductor.random_layer import inputs

CPU, H200, B200 = torch.device("cpu"), DeviceInfo.parse("sm_90"), DeviceInfo.parse("sm_100")
BY_NAME = {peer.name: peer for peer in PEERS}


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to install stand-ins in, the only place to import from where no real one is."""
    for name in ("triton_kernels", "vllm", "flashinfer"):
        if any((Path(folder) / name).exists() for folder in sys.path if folder):
            pytest.skip(f"{name} is installed here, and this asks what is said where it is not")
    monkeypatch.delenv(marlin.LIBRARY, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("triton_kernels", "vllm", "flashinfer"):
            del sys.modules[name]


def install(folder: Path, *files: str) -> None:
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")


def test_the_names() -> None:
    assert list(BY_NAME) == ["triton_kernels", "marlin", "flashinfer", "grouped_mm"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("triton_kernels", "neither triton_kernels nor vLLM is installed"),
        ("marlin", "vLLM is not installed, and FP4_INDUCTOR_MARLIN_LIBRARY does not name its _moe_C library"),
        ("flashinfer", "flashinfer is not installed"),
        ("grouped_mm", ""),
    ],
)
def test_what_is_not_installed_says_so(name: str, said: str, packages: Path) -> None:
    assert BY_NAME[name].missing(H200) == said


def test_another_project_named_triton_kernels(packages: Path) -> None:
    install(packages, "triton_kernels/__init__.py", "triton_kernels/softmax.py")
    assert BY_NAME["triton_kernels"].missing(H200).startswith("the installed triton_kernels has no matmul_ogs")


def test_triton_kernels_under_its_own_name(packages: Path) -> None:
    install(packages, "triton_kernels/__init__.py", "triton_kernels/matmul_ogs.py")
    assert BY_NAME["triton_kernels"].missing(H200) == ""


def test_triton_kernels_as_vllm_carries_it(packages: Path) -> None:
    carried = "vllm/third_party/triton_kernels"
    install(packages, "vllm/__init__.py", f"{carried}/__init__.py", f"{carried}/matmul_ogs.py")
    (packages / f"{carried}/swiglu.py").write_text("from triton_kernels import matmul_ogs\n", encoding="utf-8")
    assert BY_NAME["triton_kernels"].missing(H200) == ""
    import triton_kernels.swiglu as found  # type: ignore[import-not-found, unused-ignore]

    assert Path(found.__file__) == packages / carried / "swiglu.py"
    assert "vllm" not in sys.modules, "importing vLLM takes seconds"


def test_marlin_from_a_file_that_is_not_there(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(marlin.LIBRARY, str(packages / "gone.so"))
    assert (
        BY_NAME["marlin"].missing(H200)
        == f"FP4_INDUCTOR_MARLIN_LIBRARY names {packages / 'gone.so'}, which does not exist"
    )


def test_flashinfer_is_not_compiled_in_silence(packages: Path) -> None:
    install(packages, "flashinfer/__init__.py", "flashinfer/jit/__init__.py")
    folders = f"from pathlib import Path\nFLASHINFER_AOT_DIR = FLASHINFER_JIT_DIR = Path({str(packages)!r})\n"
    (packages / "flashinfer/jit/env.py").write_text(folders, encoding="utf-8")
    peer = BY_NAME["flashinfer"]
    assert "for sm_90, this is sm_100" in peer.missing(B200)
    assert "fused_moe_90 is not built" in peer.missing(H200)
    install(packages, "fused_moe_90/fused_moe_90.so")
    assert peer.missing(H200) == ""


def test_marlins_number_for_float4_e2m1f() -> None:
    """vLLM's ``ScalarType.float_(2, 1, finite_values_only=True, nan_repr=NONE).id``."""
    assert marlin._FLOAT4_E2M1F_ID == 562949953487106


MARLIN_OPS = (
    "topk_softmax(Tensor! weights, Tensor! ids, Tensor! source, Tensor logits, bool renormalize, Tensor? bias, "
    "Tensor? is_padding) -> ()",
    "moe_align_block_size(Tensor ids, int experts, int block, Tensor! order, Tensor! owner, Tensor! count, "
    "Tensor? map, Tensor(a!)? scatter=None) -> ()",
    "moe_sum(Tensor input, Tensor! output, Tensor? ids=None, Tensor? map=None) -> ()",
    "moe_wna16_marlin_gemm(Tensor! a, Tensor? c, Tensor! codes, Tensor? bias, Tensor! scales, Tensor? a_scales, "
    "Tensor? global_scale, Tensor? zeros, Tensor! workspace, Tensor order, Tensor! owner, Tensor! count, "
    "Tensor! weights, int moe_block_size, int top_k, bool mul_topk_weights, int b_type_id, int size_m, int size_n, "
    "int size_k, bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float, int thread_k, int thread_n, "
    "int blocks_per_sm) -> Tensor",
)


class MarlinStub:
    """The four operations on a CPU: routing and sum as they are, and a GEMM that checks what it is given."""

    def __init__(self, fmt: BlockFormat) -> None:
        self.fmt, self.gemms, self.blocks = fmt, [], []  # type: ignore[var-annotated]

    def topk_softmax(self, weights: Any, ids: Any, source: Any, logits: Any, renormalize: bool, *none: Any) -> None:
        assert logits.dtype == torch.float32
        assert renormalize
        values, found = logits.topk(ids.shape[1], dim=-1)
        weights.copy_(values.softmax(-1))
        ids.copy_(found)

    def align(self, ids: Any, experts: int, block: int, order: Any, owner: Any, count: Any, *none: Any) -> None:
        counts = ids.flatten().bincount(minlength=experts)
        filled = int(((counts + block - 1) // block).sum())
        assert order.numel() >= filled * block, "room for every expert's last block"
        assert owner.numel() >= filled
        self.blocks.append(block)

    def moe_sum(self, given: Any, out: Any, *none: Any) -> None:
        torch.sum(given, dim=1, out=out)

    def gemm(self, a: Any, c: Any, codes: Any, bias: Any, scales: Any, a_scales: Any, glob: Any, *rest: Any) -> Any:
        top_k, weighs, kind, size_m, size_n, size_k = rest[7:13]
        experts = codes.shape[0]
        assert tuple(a.shape) == (size_m, size_k)
        assert tuple(c.shape) == (size_m * top_k, size_n)
        assert tuple(codes.shape) == (experts, size_k // 16, 2 * size_n)
        assert codes.dtype == torch.int32
        assert tuple(scales.shape) == (experts, size_k // self.fmt.block_size, size_n)
        assert scales.dtype == (torch.float8_e8m0fnu if self.fmt is MXFP4 else torch.float8_e4m3fn)
        assert (glob is None) == (self.fmt is MXFP4)
        assert size_k % 128 == size_n % 128 == 0
        assert kind == 562949953487106
        self.gemms.append((size_m, size_n, size_k, top_k, weighs, None if bias is None else tuple(bias.shape)))
        return c.fill_(len(self.gemms))


@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=str)
def test_marlin_is_called_as_its_schema_asks(fmt: BlockFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(torch.ops._moe_C, "moe_sum"):
        pytest.skip("vLLM's own operations are loaded in this process")
    stub = MarlinStub(fmt)
    monkeypatch.setattr(marlin, "CUDA", CPU)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    shape = Shape("tiny gpt-oss", 6, 2, 320, 96, gpt_oss=True)
    with torch.library._scoped_library("_moe_C", "FRAGMENT") as library:
        for schema, run in zip(MARLIN_OPS, (stub.topk_softmax, stub.align, stub.moe_sum, stub.gemm), strict=True):
            library.define(schema)
            library.impl(schema.split("(")[0], run, "CPU")
        layer = BY_NAME["marlin"].layer(shape.spec(fmt))
        hidden, logits = inputs(shape.spec(fmt), 9, CPU)[0]
        with torch.compiler.set_stance("force_eager"):
            out = layer(hidden, logits.float())
    assert stub.blocks == [8]
    assert stub.gemms == [(9, 256, 512, 2, False, (6, 256)), (18, 512, 128, 1, True, (6, 512))]
    assert out.shape == hidden.shape
    assert bool((out == 4).all()), "both slots of the second GEMM, padding cut off"


def test_triton_kernels_keeps_its_rows_even(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales are filled up to four a row, weights stand [E, K, N], knobs come from the spec."""
    wrapped: list[tuple[int, ...]] = []

    def wrap(tensor: torch.Tensor, dtype: object = None) -> torch.Tensor:
        wrapped.append(tuple(tensor.shape))
        return tensor

    ogs = SimpleNamespace(
        PrecisionConfig=SimpleNamespace,
        FlexCtx=SimpleNamespace,
        FusedActivation=lambda *given: given,
        FnSpecs=lambda *given: given,
        matmul_ogs=lambda x, w, bias, routed, **knobs: (x, w, bias, knobs),
    )
    layout = SimpleNamespace(
        make_default_matmul_mxfp4_w_layout=lambda **knobs: ("values", {}),
        make_default_matmul_mxfp4_w_scale_layout=lambda **knobs: ("scales", {}),
    )
    tensor = SimpleNamespace(FP4="FP4", convert_layout=lambda given, *to, **knobs: given, wrap_torch_tensor=wrap)
    stubs = {
        "triton_kernels": SimpleNamespace(matmul_ogs=ogs),
        "triton_kernels.matmul_ogs_details.opt_flags": SimpleNamespace(update_opt_flags_constraints=lambda flags: None),
        "triton_kernels.numerics": SimpleNamespace(InFlexData=SimpleNamespace),
        "triton_kernels.routing": SimpleNamespace(
            routing=lambda logits, k, sm_first: (SimpleNamespace(gate_scal=k), "gather", "scatter")
        ),
        "triton_kernels.swiglu": SimpleNamespace(swiglu_fn="swiglu_fn"),
        "triton_kernels.tensor": tensor,
        "triton_kernels.tensor_details": SimpleNamespace(layout=layout),
    }
    for name, stub in stubs.items():
        monkeypatch.setitem(sys.modules, name, stub)  # type: ignore[arg-type]
    monkeypatch.setattr(triton_kernels, "CUDA", CPU)
    for shape, knobs, biases in (
        (Shape("tiny gpt-oss", 6, 2, 320, 96, gpt_oss=True), (1.702, 7.0), ((6, 192), (6, 320))),
        (parse_shape("6x2x320x96"), (1.0, torch.finfo(torch.float32).max), (None, None)),
    ):
        wrapped.clear()
        spec = shape.spec(MXFP4)
        (inner, w2, w2_bias, last) = BY_NAME["triton_kernels"].layer(spec)(*inputs(spec, 3, CPU)[0])  # type: ignore[misc]
        _, w13, w13_bias, first = inner
        assert (w13.shape, w2.shape) == ((6, 160, 192), (6, 48, 320)), "two codes a byte along K"
        assert wrapped == [(6, 160, 192), (6, 12, 192), (6, 48, 320), (6, 4, 320)]
        assert first["fused_activation"] == (("swiglu", "swiglu_fn", ("alpha", "limit")), knobs, 2)
        assert first["gather_indx"] == "gather"
        assert (last["scatter_indx"], last["gammas"]) == ("scatter", 2)
        assert tuple(None if bias is None else tuple(bias.shape) for bias in (w13_bias, w2_bias)) == biases
