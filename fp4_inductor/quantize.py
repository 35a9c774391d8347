"""``quantize_``: replace a model's expert weights by FP4, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import nn
from tqdm import tqdm

from . import experts_interface
from .checkpoint.saving import saves_packed
from .errors import QuantizationError
from .formats import BlockFormat, get_format
from .modules import CarriedWeight, carried_weights, pack_parameter, transposed_experts
from .quant import PackedTensors, quantize

Filter: TypeAlias = "Callable[[str, nn.Parameter], bool | Literal['transposed']]"
"""Asked for every 3-D parameter by its full name. True: quantise it, stored as ``[E, N, K]`` or as a transformers
class declares. "transposed": quantise it, stored as ``[E, K, N]``. False: leave it as it is."""

_EXPERT_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def quantize_(model: nn.Module, format: str | BlockFormat, *, filter: Filter | None = None) -> nn.Module:
    """Quantise the expert weights of ``model`` in place, one parameter at a time.

    Without a filter these are the weights of every experts module of transformers (the classes under
    its ``use_experts_implementation``). A filter chooses them instead, in any model::

        fp4_inductor.quantize_(model, "nvfp4", filter=lambda name, _: name.endswith(("w13", "w2")))

    A model of transformers then saves itself packed: ``save_pretrained`` writes compressed-tensors' layout.

    No forward is changed: a quantised module dequantises where it reads the weight, in the weight's dtype.
    If interrupted, it leaves every weight either quantised or untouched.

    Args:
        model: in evaluation mode. Shapes, devices and values are checked before anything is changed.
        format: "mxfp4" or "nvfp4".
        filter: see ``Filter``.

    Returns:
        ``model``.

    Raises:
        UnknownNameError: no such format.
        QuantizationError: nothing to quantise, or a weight that cannot be; nothing was changed.
    """
    experts_interface.register()
    fmt = get_format(format)
    targets = list(_find(model, fmt, filter))
    if not targets:
        _refuse_nothing_found(model, fmt, filter)
    for target in targets:
        target.check(model.training)
    for target in tqdm(targets, desc=f"Quantising experts to {fmt}", unit="weight", disable=None):
        target.quantize()
    return saves_packed(model)


@dataclass(frozen=True, slots=True)
class _Target:
    module: nn.Module
    weight: CarriedWeight
    where: str
    layout_is_declared: bool

    @property
    def parameter(self) -> nn.Parameter:
        return self.module._parameters[self.weight.name]  # type: ignore[return-value]

    def check(self, training: bool) -> None:
        """Raises QuantizationError if the parameter cannot be quantised."""
        parameter, fmt = self.parameter, self.weight.format
        if type(parameter.data) is not torch.Tensor:
            kind = type(parameter.data).__name__
            self._refuse("a plain tensor", f"a {kind}", "quantise before the model is sharded or wrapped")
        if parameter.dtype not in _DTYPES:
            self._refuse("a floating-point weight", str(parameter.dtype), "load the model without its quantisation")
        if parameter.is_meta:
            self._refuse("a weight with data", "one on the meta device", "load the weights first")
        if len(devices := {str(p.device) for p in self.module.parameters(recurse=False)}) > 1:
            self._refuse("one device per module", ", ".join(sorted(devices)), "move the module to one device")
        if training and parameter.requires_grad:
            self._refuse("a model in evaluation mode", "one that trains this weight", "call model.eval()")
        k_axis = -2 if self.weight.transposed else -1
        if parameter.numel() == 0 or parameter.shape[k_axis] % fmt.block_size:
            got = f"{parameter.shape[k_axis]} in a weight of shape {list(parameter.shape)}"
            self._refuse(f"K, axis {k_axis}, to be a multiple of the block size {fmt.block_size}", got, self._axis_hint)
        if not bool(torch.stack(parameter.detach().aminmax()).to(torch.float32).isfinite().all()):
            self._refuse("finite weights", "NaN or infinity", "")

    @property
    def _axis_hint(self) -> str:
        parameter, fmt = self.parameter, self.weight.format
        other = -1 if self.weight.transposed else -2
        if not self.layout_is_declared and parameter.numel() and parameter.shape[other] % fmt.block_size == 0:
            return f"if K is axis {other}, let the filter return {True if self.weight.transposed else 'transposed'!r}"
        return "leave this weight out with filter=, or use a format with smaller blocks"

    def _refuse(self, needed: str, got: str, now: str) -> None:
        did = f"quantising to {self.weight.format}"
        raise QuantizationError(did, needed=needed, got=got, where=self.where, now=now)

    def quantize(self) -> None:
        dtype = self.parameter.dtype
        tensors = _quantize_experts(self.parameter.detach(), self.weight)
        pack_parameter(self.module, self.weight, tensors, dtype)


def _quantize_experts(values: torch.Tensor, weight: CarriedWeight) -> PackedTensors:
    """Quantise expert by expert, so that only one is ever held in float32.

    Args:
        values: ``float [E, N, K]``, or ``[E, K, N]`` if transposed.

    Returns:
        codes ``uint8 [E, N, K/2]``, scale ``[E, N, K/bs]``, global scale ``float32 [E, 1]`` or None.
    """
    if weight.transposed:
        values = values.transpose(-2, -1)
    experts = [quantize(matrix, weight.format) for matrix in values]
    codes, scale, global_scale = zip(*experts, strict=True)
    return PackedTensors(
        torch.stack(codes), torch.stack(scale), torch.stack(global_scale) if weight.format.has_global_scale else None
    )


def _find(model: nn.Module, fmt: BlockFormat, filter: Filter | None) -> Iterator[_Target]:
    for path, module in model.named_modules():
        declared = transposed_experts(module)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() != 3:
                continue
            where = f"{path}.{name}" if path else name
            if filter is None:
                chosen: bool | str = declared is not None and name in _EXPERT_WEIGHTS
            else:
                chosen = filter(where, parameter)
            if chosen:
                transposed = chosen == "transposed" or bool(declared)
                yield _Target(module, CarriedWeight(name, fmt, transposed), where, declared is not None)


def _refuse_nothing_found(model: nn.Module, fmt: BlockFormat, filter: Filter | None) -> None:
    did = f"quantising {type(model).__name__} to {fmt}"
    packed = sorted({w.format.name for module in model.modules() for w in carried_weights(module)})
    if packed:
        raise QuantizationError(did, needed="unquantised expert weights", got=f"experts already in {', '.join(packed)}")
    candidates = [name for name, p in model.named_parameters() if p.dim() == 3]
    names = ", ".join(candidates[:4]) + (", ..." if len(candidates) > 4 else "")
    if filter is not None:
        got = f"a filter that chose none of {len(candidates)} 3-D parameters"
        raise QuantizationError(did, needed="expert weights", got=got, where=names)
    raise QuantizationError(
        did,
        needed="experts modules of transformers",
        got=f"none, and {len(candidates)} other 3-D parameters",
        where=names,
        now="name the expert weights with filter=lambda name, parameter: ..." if candidates else "",
    )
