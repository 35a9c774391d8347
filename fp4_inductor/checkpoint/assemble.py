"""Packed tensors of one parameter from the weights that fill it: experts stacked, gate and up joined, as bytes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NoReturn

import torch
from torch import nn

from ..errors import CheckpointError
from ..modules import gate_before_up, transposed_experts
from ..quant import PackedTensors
from .parts import some
from .placing import Placement
from .weights import Fp4Weight, Weight

_STACK, _JOIN, _ALTERNATE = "MergeModulelist", "Concatenate", "Interleave"
_TURN = "Transpose"
"""Says how an unquantised checkpoint is stored; in a packed one the axis of the blocks says it."""


def assembled_shape(placement: Placement, num_experts: int) -> tuple[int, ...]:
    """Shape ``[N, K]`` or ``[E, N, K]`` of the parameter that ``placement`` makes, from the headers alone.

    Args:
        num_experts: length of the parameter's first axis, so that a missing expert can be named.

    Raises:
        CheckpointError: operations that packed rows cannot go through, or weights that are missing.
    """
    names = [type(operation).__name__ for operation in placement.operations]
    unknown = [name for name in names if name not in (_STACK, _JOIN, _TURN, _ALTERNATE)]
    if unknown or len(placement.targets) > 1:
        what = ", ".join(unknown) or f"a split into {len(placement.targets)}"
        _refuse(placement, "rows that are only stacked or joined", f"{what}, which no packed weight goes through")
    if placement.converter is not None and len(placement.sources) != len(placement.converter.source_patterns):
        patterns = ", ".join(placement.converter.source_patterns)
        _refuse(placement, f"weights for each of {patterns}", f"{len(placement.sources)} of them")
    leading: tuple[int, ...] = ()
    if _STACK in names:
        for group in placement.sources:
            _check_experts(placement, group, num_experts)
        leading = (num_experts,)
    shapes = [weight.shape for weight in placement.weights]
    first = shapes[0]
    rows_of = [group[0].shape[-2] for group in placement.sources]
    if any((*shape[:-2], shape[-1]) != (*first[:-2], first[-1]) for shape in shapes) or any(
        len({weight.shape for weight in group}) > 1 for group in placement.sources
    ):
        _refuse(placement, "weights of one shape but for their rows", str(sorted({str(list(s)) for s in shapes})))
    row_axis = len(leading + first) - 2
    for name, operation in zip(names, placement.operations, strict=True):
        if name in (_STACK, _JOIN, _ALTERNATE) and operation.dim != (0 if name == _STACK else row_axis):
            _refuse(placement, "experts stacked first and rows joined", f"{name} over axis {operation.dim}")
        together = name == _ALTERNATE and operation.inverse
        if together and (len(rows_of) != 2 or len(set(rows_of)) != 1):
            _refuse(placement, "rows of gate and up that are put in turns", f"{name} of rows {rows_of}")
        if name == _ALTERNATE and not together and (len(weights_of := placement.weights) != 1 or rows_of[0] % 2):
            _refuse(placement, "rows of gate and up that are taken from their turns", f"{name} of {len(weights_of)}")
    return (*leading, *first[:-2], sum(rows_of), first[-1])


def assemble(placement: Placement, shape: tuple[int, ...]) -> PackedTensors:
    """The canonical tensors of ``placement``, read weight by weight into their place.

    Args:
        shape: ``[..., N, K]``, as ``assembled_shape`` says.

    Returns:
        codes ``uint8 [..., N, K/2]``, scale ``[..., N, K/bs]``, global scale ``float32 [..., 1]``, or
        ``[..., N]`` where rows differ, or None.
    """
    weights = _fp4(placement.weights)
    stacked = _STACK in {type(operation).__name__ for operation in placement.operations}
    if len(weights) == 1 and not stacked:
        tensors = weights[0].read()
        return _apart(tensors) if _takes_turns_apart(placement) else tensors
    fmt = weights[0].format
    codes = torch.empty(*shape[:-1], shape[-1] // 2, dtype=torch.uint8, device="cpu")
    scale = torch.empty(*shape[:-1], shape[-1] // fmt.block_size, dtype=fmt.scale_dtype, device="cpu")
    global_scales: list[torch.Tensor] = []
    slices = _rows(placement)
    for group, rows in zip(placement.sources, slices, strict=True):
        of_group = []
        for index, weight in enumerate(_fp4(group)):
            tensors = weight.read()
            (codes[index] if stacked else codes)[..., rows, :] = tensors.codes
            (scale[index] if stacked else scale)[..., rows, :] = tensors.scale
            of_group.append(tensors.global_scale)
        if fmt.has_global_scale:
            present = [number for number in of_group if number is not None]
            global_scales.append(torch.stack(present) if stacked else present[0])
    return PackedTensors(codes, scale, _join_global_scales(global_scales, slices, shape) if global_scales else None)


def _takes_turns_apart(placement: Placement) -> bool:
    return any(type(operation).__name__ == _ALTERNATE and not operation.inverse for operation in placement.operations)


def _apart(tensors: PackedTensors) -> PackedTensors:
    """Rows of gate and up in turns, ``[..., N, K/2]``, as all of gate's and then all of up's."""
    rows = tensors.codes.shape[-2]
    order = torch.cat([torch.arange(0, rows, 2, device="cpu"), torch.arange(1, rows, 2, device="cpu")])
    scale = tensors.scale.view(torch.uint8).index_select(-2, order).view(tensors.scale.dtype)
    global_scale = tensors.global_scale
    if global_scale is not None and global_scale.shape[-1] == rows:
        global_scale = global_scale.index_select(-1, order)
    return PackedTensors(tensors.codes.index_select(-2, order), scale, global_scale)


def _rows(placement: Placement) -> list[slice]:
    """Where the rows of each group go: one group after the other, or in turns."""
    counts = [group[0].shape[-2] for group in placement.sources]
    if _ALTERNATE in {type(operation).__name__ for operation in placement.operations}:
        return [slice(first, None, len(counts)) for first in range(len(counts))]
    ends = list(itertools.accumulate(counts))
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]


def orient(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, bool]:
    """Which parameters a module keeps as ``[E, K, N]``, by what its class declares, else by the shapes.

    Args:
        shapes: ``[..., N, K]`` of the weights that go into the module's parameters.

    Raises:
        CheckpointError: a parameter has another shape, or all of them read both ways.
    """
    readings = {name: _readings(module, name, shape) for name, shape in shapes.items()}
    clear = {reading[0] for name, reading in readings.items() if len(reading) == 1 and len(shapes[name]) == 3}
    if unclear := [name for name, reading in readings.items() if len(reading) > 1]:
        if len(clear) != 1:
            raise CheckpointError(
                "installing packed weights",
                needed="a parameter whose axes have different lengths, or a class that says which is K",
                got=f"{list(shapes[unclear[0]])}, which reads as [E, N, K] and as [E, K, N]",
                where=f"{type(module).__name__}.{unclear[0]}",
            )
        (common,) = clear
        return {name: common if name in unclear else reading[0] for name, reading in readings.items()}
    return {name: reading[0] for name, reading in readings.items()}


def _readings(module: nn.Module, name: str, shape: tuple[int, ...]) -> list[bool]:
    """Whether the parameter can be the weight as it stands (False) and turned (True)."""
    parameter = module._parameters.get(name)
    if parameter is None:
        got = f"{name} of {type(module).__name__}, which is none"
        raise CheckpointError("installing packed weights", needed="a parameter", got=got)
    declared = transposed_experts(module) if parameter.dim() == 3 else False
    candidates = [False, True] if declared is None else [declared]
    found = [turned for turned in candidates if tuple(parameter.mT.shape if turned else parameter.shape) == shape]
    if not found and declared and tuple(parameter.shape) == shape:
        raise CheckpointError(
            "installing packed weights",
            needed=f"blocks along K, {list(parameter.mT.shape)} or stored with K first",
            got=f"{list(shape)}: blocks along the rows that the module multiplies, which no kernel reads",
            where=f"{type(module).__name__}.{name}",
            now="export it again as NVFP4, or in gpt-oss' own layout (*_blocks and *_scales)",
        )
    if not found:
        *experts, n, k = parameter.mT.shape if declared else parameter.shape
        count = f"{experts[0]} experts of " if experts else ""
        raise CheckpointError(
            "installing packed weights",
            needed=f"the shape of config.json, {count}{n} x {k}",
            got=str(list(shape)),
            where=f"{type(module).__name__}.{name}",
        )
    return found


def rows_of_pairs(module: nn.Module, name: str, tensors: PackedTensors) -> PackedTensors:
    """``tensors`` with a pair of global scales for gate and up, ``[E, 2]``, spread over rows, ``[E, N]``.

    Raises:
        CheckpointError: a pair that differs, and a module that does not say which rows are gate's.
    """
    pair, rows = tensors.global_scale, tensors.codes.shape[-2]
    if pair is None or pair.shape[-1] != 2 or rows == 2:
        return tensors
    if bool((pair[:, 0] == pair[:, 1]).all()):
        return tensors._replace(global_scale=pair[:, :1].clone())
    concatenated = gate_before_up(module)
    if concatenated is None or "gate_up" not in name or rows % 2:
        raise CheckpointError(
            "installing packed weights",
            needed="a module that says which rows are gate's and which up's",
            got=f"{type(module).__name__}, and global scales that differ for the two",
            where=name,
        )
    spread = pair.repeat_interleave(rows // 2, dim=-1) if concatenated else pair.repeat(1, rows // 2)
    return tensors._replace(global_scale=spread)


def _join_global_scales(groups: list[torch.Tensor], slices: list[slice], shape: tuple[int, ...]) -> torch.Tensor:
    """One number per expert where all rows share it, else one per row."""
    if all(group.shape[-1] == 1 and torch.equal(group, groups[0]) for group in groups):
        return groups[0]
    joined = torch.empty(*shape[:-1], dtype=torch.float32, device="cpu")
    for group, rows in zip(groups, slices, strict=True):
        joined[..., rows] = group
    return joined


def _check_experts(placement: Placement, group: tuple[Weight, ...], num_experts: int) -> None:
    if len(group) == num_experts and len(group[0].shape) == 2:
        return
    parts = [weight.name.split(".") for weight in group]
    varying = [axis for axis in range(len(parts[0])) if len({part[axis] for part in parts}) > 1]
    missing = []
    if len(varying) == 1 and all(part[varying[0]].isdigit() for part in parts):
        ids = {int(part[varying[0]]) for part in parts}
        head, tail = ".".join(parts[0][: varying[0]]), ".".join(parts[0][varying[0] + 1 :])
        missing = [f"{head}.{expert}.{tail}" for expert in range(num_experts) if expert not in ids]
    _refuse(
        placement, f"{num_experts} experts", f"{len(group)} of shape {list(group[0].shape)}; missing: {some(missing)}"
    )


def _fp4(weights: tuple[Weight, ...]) -> list[Fp4Weight]:
    return [weight for weight in weights if isinstance(weight, Fp4Weight)]


def _refuse(placement: Placement, needed: str, got: str) -> NoReturn:
    raise CheckpointError("assembling packed weights", needed=needed, got=got, where=placement.targets[0])
