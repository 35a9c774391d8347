"""The weight carrier: a module whose parameters are packed and dequantise in its graph.

``pack_parameter`` replaces one parameter ``w``, of experts or of a linear layer, by parameters ``w_packed``,
``w_block_scale`` and, where the format has one, ``w_global_scale``, and turns ``w`` into a property that
dequantises them. Where all rows of an expert's gate share a global scale, and all of its up another, the two are held.
The module's forward is untouched: it reads ``self.w`` and computes what it always did, and a compiler
sees the dequantisation in plain ops. The module becomes an instance of a subclass of its own class;
equal layers share one subclass, so they also share compiled code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from .formats import BlockFormat
from .quant import PackedTensors, dequantize


@dataclass(frozen=True, slots=True)
class CarriedWeight:
    """A packed parameter.

    Attributes:
        transposed: the module stores it as ``[E, K, N]``.
        pairs: how the two global scales of an expert, ``[E, 2]``, share its rows: half of them each, or in turns. None
            where there is one for all rows, or one a row.
    """

    name: str
    format: BlockFormat
    transposed: bool = False
    pairs: Literal["halves", "turns"] | None = None

    @property
    def codes_name(self) -> str:
        return f"{self.name}_packed"

    @property
    def scale_name(self) -> str:
        return f"{self.name}_block_scale"

    @property
    def global_scale_name(self) -> str | None:
        return f"{self.name}_global_scale" if self.format.has_global_scale else None

    @property
    def dtype_name(self) -> str:
        """The attribute that holds the dtype to dequantise to."""
        return f"{self.name}_dtype"

    @property
    def tensor_names(self) -> tuple[str, ...]:
        names = (self.codes_name, self.scale_name, self.global_scale_name)
        return tuple(name for name in names if name is not None)


def carried_weights(module: nn.Module) -> tuple[CarriedWeight, ...]:
    """The packed parameters of a module, empty for one that carries none."""
    return module._carried_weights if isinstance(module, WeightCarrier) else ()


def global_scale_of(module: nn.Module, weight: CarriedWeight) -> torch.Tensor | None:
    """float32 ``[..., 1]`` or ``[..., N]``, as ``dequantize`` takes it; None where the format has none."""
    if weight.global_scale_name is None:
        return None
    stored: torch.Tensor = getattr(module, weight.global_scale_name)
    if weight.pairs is None:
        return stored
    experts, rows = getattr(module, weight.codes_name).shape[:2]
    if weight.pairs == "halves":
        return stored.unsqueeze(2).expand(experts, 2, rows // 2).flatten(1)
    return stored.unsqueeze(1).expand(experts, rows // 2, 2).flatten(1)


def transposed_experts(module: nn.Module) -> bool | None:
    """Whether an experts module of transformers stores its weights as ``[E, K, N]``; None for any other module.

    ``use_experts_implementation`` sets these attributes in ``__init__``, so transformers need not be imported.
    """
    has_gate, is_transposed = getattr(module, "has_gate", None), getattr(module, "is_transposed", None)
    return is_transposed if isinstance(has_gate, bool) and isinstance(is_transposed, bool) else None


_GATE_BEFORE_UP = frozenset({"Llama4TextExperts", "Step3p7Experts"})
"""transformers' classes that split ``gate_up_proj`` in halves, as their forward says and no attribute of theirs."""


def gate_before_up(module: nn.Module) -> bool | None:
    """Whether gate's rows of ``gate_up_proj`` stand before up's, False if they alternate; None where nothing says."""
    said = getattr(module, "is_concatenated", None)
    if isinstance(said, bool):
        return said
    known = module._unpacked_class if isinstance(module, WeightCarrier) else type(module)
    is_known = known.__module__.startswith("transformers.models.") and known.__name__ in _GATE_BEFORE_UP
    return True if is_known else None


def pack_parameter(module: nn.Module, weight: CarriedWeight, tensors: PackedTensors, dtype: torch.dtype) -> None:
    """Put packed tensors in the place of parameter ``weight.name``, in place.

    Args:
        module: holds the parameter as ``[N, K]`` or ``[E, N, K]``, or ``[E, K, N]`` where ``weight.transposed``.
        tensors: canonical; codes ``uint8 [..., N, K/2]``, scale ``[..., N, K/bs]``, global scale ``float32 [..., 1]``
            or ``[..., N]``.
        dtype: of the weight that the module's forward will read.
    """
    weight, tensors = _with_pairs(module, weight, tensors)
    carried = carried_weights(module)
    base: type = module._unpacked_class if isinstance(module, WeightCarrier) else type(module)
    del module._parameters[weight.name]
    for name, tensor in zip(weight.tensor_names, (t for t in tensors if t is not None), strict=True):
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    setattr(module, weight.dtype_name, dtype)
    module.__class__ = carrier_class(base, (*carried, weight))


def _with_pairs(
    module: nn.Module, weight: CarriedWeight, tensors: PackedTensors
) -> tuple[CarriedWeight, PackedTensors]:
    """Global scales of rows as pairs, where a module of transformers says which rows are gate's and that is all."""
    numbers, concatenated = tensors.global_scale, gate_before_up(module)
    experts_of_both = concatenated is not None and "gate_up" in weight.name
    if numbers is None or numbers.is_meta or numbers.dim() != 2 or not experts_of_both:
        return weight, tensors
    rows = tensors.codes.shape[1]
    if numbers.shape[1] != rows or rows <= 2 or rows % 2:
        return weight, tensors
    halves = numbers.unflatten(1, (2, -1)) if concatenated else numbers.unflatten(1, (-1, 2)).mT
    if not bool((halves == halves[:, :, :1]).all()):
        return weight, tensors
    pairs: Literal["halves", "turns"] = "halves" if concatenated else "turns"
    return replace(weight, pairs=pairs), tensors._replace(global_scale=halves[:, :, 0].clone())


class WeightCarrier(nn.Module):
    """What every carrier adds to its module's class. Instances are made by ``pack_parameter``."""

    _carried_weights: tuple[CarriedWeight, ...] = ()
    _unpacked_class: type = nn.Module

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> WeightCarrier:
        """Move packed tensors as bytes, so that ``.to(dtype)`` changes what they decode to, not them."""
        packed = {id(self._parameters[name]) for weight in self._carried_weights for name in weight.tensor_names}
        for weight in self._carried_weights:
            device = self._parameters[weight.codes_name].device  # type: ignore[union-attr]
            probe = fn(torch.empty(0, dtype=getattr(self, weight.dtype_name), device=device))
            setattr(self, weight.dtype_name, probe.dtype)

        def apply(tensor: torch.Tensor) -> torch.Tensor:
            return _apply_to_bytes(fn, tensor) if id(tensor) in packed else fn(tensor)

        super()._apply(apply, recurse)  # type: ignore[no-untyped-call]
        return self

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        for weight in self._carried_weights:
            if name == weight.name:
                _refuse_assignment(self, weight)
        super().register_parameter(name, param)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Refuse other dtypes: copying them would convert numbers where bits are meant."""
        for name in (name for weight in self._carried_weights for name in weight.tensor_names):
            found, needed = state_dict.get(prefix + name), self._parameters[name]
            if found is not None and needed is not None and found.dtype != needed.dtype:
                error_msgs.append(f"dtype mismatch for {prefix + name}: needed {needed.dtype}, got {found.dtype}.")
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """The dynamic class has no importable name: pickle what it is made of."""
        reduced: tuple[Any, ...] = tuple(super().__reduce_ex__(protocol))
        return (_new_carrier, (self._unpacked_class, self._carried_weights), *reduced[2:])

    def extra_repr(self) -> str:
        lines = [super().extra_repr()]
        for weight in self._carried_weights:
            *experts, rows, half = self._parameters[weight.codes_name].shape  # type: ignore[union-attr]
            shape = [*experts, 2 * half, rows] if weight.transposed else [*experts, rows, 2 * half]
            dtype = str(getattr(self, weight.dtype_name)).removeprefix("torch.")
            lines.append(f"{weight.name}: {weight.format} {shape}, read as {dtype}")
        return "\n".join(line for line in lines if line)


@functools.cache
def carrier_class(base: type, weights: tuple[CarriedWeight, ...]) -> type[WeightCarrier]:
    """The one subclass of ``base`` that carries ``weights``."""
    namespace: dict[str, Any] = {weight.name: _weight_property(weight) for weight in weights}
    namespace |= {
        "__module__": base.__module__,
        "__doc__": f"{base.__qualname__} with {', '.join(f'{w.name} in {w.format}' for w in weights)}.",
        "_carried_weights": weights,
        "_unpacked_class": base,
    }
    return type(f"Fp4{base.__name__}", (WeightCarrier, base), namespace)


def _new_carrier(base: type, weights: tuple[CarriedWeight, ...]) -> WeightCarrier:
    cls = carrier_class(base, weights)
    return cls.__new__(cls)


def _weight_property(weight: CarriedWeight) -> property:
    fmt, transposed = weight.format, weight.transposed
    codes_name, scale_name, dtype_name = weight.codes_name, weight.scale_name, weight.dtype_name

    def read(self: WeightCarrier) -> torch.Tensor:
        global_scale = global_scale_of(self, weight)
        values = dequantize(
            getattr(self, codes_name), getattr(self, scale_name), global_scale, fmt, getattr(self, dtype_name)
        )
        return values.transpose(-2, -1) if transposed else values

    def write(self: WeightCarrier, value: object) -> None:
        _refuse_assignment(self, weight)

    return property(read, write, doc=f"The weight that {codes_name} and its scales stand for.")


def _refuse_assignment(module: WeightCarrier, weight: CarriedWeight) -> None:
    parts = ", ".join(weight.tensor_names)
    raise AttributeError(
        f"{type(module).__name__}.{weight.name} is computed from packed {weight.format} parameters and cannot be "
        f"assigned: assign {parts}, or quantise the module after its weights are set."
    )


def _apply_to_bytes(fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    as_bytes = tensor.view(torch.uint8)
    moved = fn(as_bytes)
    if moved.dtype != torch.uint8:  # Module.type converts integers, too
        moved = as_bytes.to(moved.device)
    return moved.view(tensor.dtype)
