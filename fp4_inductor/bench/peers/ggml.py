"""``ggml``: llama.cpp's kernels for a CPU, as the package llama-cpp-python ships them.

They round activations to eight bits. ``ggml_repack`` is what llama.cpp takes by default where it can: weights in a
layout of its own, which there is for MXFP4 alone.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ...device import DeviceInfo
from ...formats import BlockFormat
from ...layouts.gate_up import GATE_UP, reorder_gate_up, row_order
from ...random_layer import random_weights, route
from ...spec import MoESpec, Operand
from ..layers import Layer

FOLDER_VARIABLE = "FP4_INDUCTOR_GGML"
"""Environment variable that names the folder of libggml.so, in place of the installed llama_cpp's."""

_F32, _I32 = 0, 26
_TYPES = {"mxfp4": 39, "nvfp4": 40}
_MAX_NODES = 64


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Ggml:
    """H and I in multiples of 64; every expert's products are computed by token."""

    logits_dtype: torch.dtype | None = None

    def __init__(self, name: str, weights: tuple[str, ...], *, repacked: bool) -> None:
        self.name, self.weights, self._repacked = name, weights, repacked

    def missing(self, device: DeviceInfo) -> str:
        if device.family != "cpu":
            return "it is for CPUs"
        return (
            "" if _folder() else f"pip install llama-cpp-python, or name the folder of libggml.so in {FOLDER_VARIABLE}"
        )

    def layer(self, spec: MoESpec) -> Layer:
        return ggml_layer(spec, random_weights(spec, torch.device("cpu")), repacked=self._repacked)


def _folder() -> Path | None:
    named = os.environ.get(FOLDER_VARIABLE)
    found = None if named else importlib.util.find_spec("llama_cpp")
    places = [Path(named)] if named else []
    places += [Path(place) / "lib" for place in (found.submodule_search_locations or []) if found] if found else []
    return next((place for place in places if (place / "libggml.so").exists()), None)


@cache
def _library() -> Any:
    """Every function that is used here, found in whichever of the libraries has it."""
    folder = _folder()
    assert folder is not None, "missing() says so"
    parts = [ctypes.CDLL(str(folder / f"lib{name}.so"), ctypes.RTLD_GLOBAL) for name in ("ggml-base", "ggml-cpu")]
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
    signatures: dict[str, tuple[Any, ...]] = {
        "ggml_init": (pointer, _InitParams),
        "ggml_new_tensor_2d": (pointer, pointer, ctypes.c_int, number, number),
        "ggml_new_tensor_3d": (pointer, pointer, ctypes.c_int, number, number, number),
        "ggml_mul_mat_id": (pointer,) * 5,
        "ggml_add_id": (pointer,) * 5,
        "ggml_mul": (pointer,) * 4,
        "ggml_add": (pointer,) * 4,
        "ggml_scale": (pointer, pointer, pointer, ctypes.c_float),
        "ggml_swiglu": (pointer,) * 3,
        "ggml_swiglu_oai": (pointer, pointer, pointer, pointer, ctypes.c_float, ctypes.c_float),
        "ggml_view_2d": (pointer, pointer, pointer, number, number, size, size),
        "ggml_cont": (pointer,) * 3,
        "ggml_view_3d": (pointer, pointer, pointer, number, number, number, size, size, size),
        "ggml_new_graph": (pointer, pointer),
        "ggml_build_forward_expand": (None, pointer, pointer),
        "ggml_get_data": (pointer, pointer),
        "ggml_nbytes": (size, pointer),
        "ggml_tensor_overhead": (size,),
        "ggml_graph_overhead": (size,),
        "ggml_backend_cpu_init": (pointer,),
        "ggml_backend_cpu_set_n_threads": (None, pointer, ctypes.c_int),
        "ggml_backend_cpu_reg": (pointer,),
        "ggml_backend_cpu_buffer_type": (pointer,),
        "ggml_backend_reg_dev_get": (pointer, pointer, size),
        "ggml_backend_reg_get_proc_address": (pointer, pointer, ctypes.c_char_p),
        "ggml_backend_buft_name": (ctypes.c_char_p, pointer),
        "ggml_backend_alloc_ctx_tensors_from_buft": (pointer, pointer, pointer),
        "ggml_backend_tensor_set": (None, pointer, pointer, size, size),
        "ggml_backend_graph_compute": (ctypes.c_int, pointer, pointer),
    }
    functions = {}
    for name, (result, *arguments) in signatures.items():
        function = next(getattr(part, name) for part in parts if hasattr(part, name))
        function.restype, function.argtypes = result, arguments
        functions[name.removeprefix("ggml_")] = function
    return type("Functions", (), {name: staticmethod(function) for name, function in functions.items()})


def _context(tensors: int) -> int:
    ggml = _library()
    size = tensors * ggml.tensor_overhead() + 2 * ggml.graph_overhead()
    return int(ggml.init(_InitParams(size, None, True)))


def _buffer_type(repacked: bool) -> int:
    """Where weights stand: in plain memory, or in the layout that the processor's own kernels want."""
    ggml = _library()
    if not repacked:
        return int(ggml.backend_cpu_buffer_type())
    registry = ggml.backend_cpu_reg()
    address = ggml.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    types = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)
    found = types(ggml.backend_reg_dev_get(registry, 0))
    index = 0
    while (each := found[index]) is not None:
        if ggml.backend_buft_name(each) == b"CPU_REPACK":
            return int(each)
        index += 1
    raise RuntimeError("this ggml has no CPU_REPACK buffers")


def to_ggml_blocks(codes: torch.Tensor, scale: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """uint8 [E, N, bytes] from canonical codes and scales: scales before codes, column k beside k + bs/2."""
    half = fmt.block_size // 2
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).unflatten(-1, (-1, 2, half))
    packed = nibbles[..., 0, :] | nibbles[..., 1, :] << 4
    together = 1 if fmt.scale_encoding == "e8m0" else 64 // fmt.block_size
    scales = scale.view(torch.uint8).unflatten(-1, (-1, together))
    return torch.cat((scales, packed.unflatten(-2, (-1, together)).flatten(-2)), dim=-1).flatten(-2)


def ggml_layer(spec: MoESpec, weights: Mapping[Operand, torch.Tensor], *, repacked: bool) -> Layer:
    """The block on canonical weights; it is a SwiGLU, plain or gpt-oss's, and one global scale serves all experts."""
    ggml, fmt = _library(), spec.weight_format
    experts, hidden_size, intermediate_size = spec.num_experts, spec.hidden_size, spec.intermediate_size
    packed_context, plain_context = _context(2), _context(4)
    packed, bias = {}, {}
    for name, rows, columns in (("w13", spec.w13_rows, hidden_size), ("w2", hidden_size, intermediate_size)):
        packed[name] = ggml.new_tensor_3d(packed_context, _TYPES[fmt.name], columns, rows, experts)
        bias[name] = ggml.new_tensor_2d(plain_context, _F32, rows, experts)
    assert ggml.backend_alloc_ctx_tensors_from_buft(packed_context, _buffer_type(repacked))
    assert ggml.backend_alloc_ctx_tensors_from_buft(plain_context, _buffer_type(False))
    for name in packed:
        tensors = [weights[Operand(name)], weights[Operand(f"{name}_scale")]]
        tensors += [weights[Operand(f"{name}_bias")].float()] if spec.has_w13_bias else []
        if name == "w13":
            tensors = [reorder_gate_up(each, row_order(spec.w13_order), GATE_UP) for each in tensors]
        _set(packed[name], to_ggml_blocks(tensors[0], tensors[1], fmt))
        if spec.has_w13_bias:
            _set(bias[name], tensors[2])
    factors = {name: _global(weights, name) for name in packed}
    backend = ggml.backend_cpu_init()
    graphs: dict[int, tuple[int, int, int, int, int]] = {}

    def layer(hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        tokens = hidden.shape[0]
        if tokens not in graphs:
            graphs[tokens] = _graph(spec, packed, bias if spec.has_w13_bias else {}, factors, tokens)
        graph, inputs, ids, scores, result = graphs[tokens]
        chosen, routing = route(logits, spec.top_k)
        for tensor, value in ((inputs, hidden.float()), (ids, chosen.int()), (scores, routing)):
            ctypes.memmove(ggml.get_data(tensor), value.contiguous().data_ptr(), ggml.nbytes(tensor))
        ggml.backend_cpu_set_n_threads(backend, torch.get_num_threads())
        if ggml.backend_graph_compute(backend, graph):
            raise RuntimeError("ggml could not compute the graph")
        out = torch.empty(tokens, hidden_size)
        ctypes.memmove(out.data_ptr(), ggml.get_data(result), out.nbytes)
        return out.to(spec.out_dtype)

    return layer


def _set(tensor: int, value: torch.Tensor) -> None:
    value = value.contiguous()
    assert _library().nbytes(tensor) == value.nbytes
    _library().backend_tensor_set(tensor, value.data_ptr(), 0, value.nbytes)


def _global(weights: Mapping[Operand, torch.Tensor], name: str) -> float:
    scale = weights.get(Operand(f"{name}_global"))
    return 1.0 if scale is None else float(scale.flatten()[0])


def _graph(
    spec: MoESpec, packed: Mapping[str, int], bias: Mapping[str, int], factors: Mapping[str, float], tokens: int
) -> tuple[int, int, int, int, int]:
    """The graph for a token count, and its hidden states, ids, weights and result."""
    ggml, activation = _library(), spec.activation
    top_k, hidden_size, intermediate_size = spec.top_k, spec.hidden_size, spec.intermediate_size
    context = _context(_MAX_NODES)
    hidden = ggml.new_tensor_3d(context, _F32, hidden_size, 1, tokens)
    ids = ggml.new_tensor_2d(context, _I32, top_k, tokens)
    weights = ggml.new_tensor_3d(context, _F32, 1, top_k, tokens)

    def linear(name: str, inputs: int) -> int:
        out = ggml.mul_mat_id(context, packed[name], inputs, ids)
        if factors[name] != 1.0:
            out = ggml.scale(context, out, factors[name])
        return int(ggml.add_id(context, out, bias[name], ids) if bias else out)

    rows = linear("w13", hidden)
    if activation.limit is None:
        h = ggml.swiglu(context, rows)
    else:
        strides = 2 * intermediate_size * 4, 2 * intermediate_size * 4 * top_k
        gate, up = (
            ggml.cont(context, ggml.view_3d(context, rows, intermediate_size, top_k, tokens, *strides, offset))
            for offset in (0, intermediate_size * 4)
        )
        h = ggml.swiglu_oai(context, gate, up, activation.alpha, activation.limit)
    weighted = ggml.mul(context, linear("w2", h), weights)
    result = None
    for slot in range(top_k):
        row = hidden_size * 4
        part = ggml.view_2d(context, weighted, hidden_size, tokens, row * top_k, slot * row)
        result = part if result is None else ggml.add(context, result, part)
    if top_k == 1:
        result = ggml.cont(context, result)
    graph = ggml.new_graph(context)
    ggml.build_forward_expand(graph, result)
    assert ggml.backend_alloc_ctx_tensors_from_buft(context, ggml.backend_cpu_buffer_type())
    return graph, hidden, ids, weights, int(result)  # type: ignore[arg-type]
