"""A transformers model built without memory, and filled parameter by parameter."""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from .. import experts_interface
from ..errors import CheckpointError
from ..modules import CarriedWeight, pack_parameter
from ..quant import PackedTensors
from . import openai_gpt_oss
from .assemble import assemble, assembled_shape, orient, rows_of_pairs
from .files import CheckpointFiles
from .parts import some
from .placing import Placement
from .weights import Fp4Weight, PlainWeight

_CASTABLE = (torch.bfloat16, torch.float16, torch.float32)


def model_config(files: CheckpointFiles, hf_kwargs: Mapping[str, Any]) -> Any:
    """transformers' config of the model, without its quantisation.

    Raises:
        CheckpointError: no config, or none that transformers knows.
    """
    if not files.config:
        folder = str(files.folder)
        raise CheckpointError("reading a checkpoint's config", needed="config.json", got="none", where=folder)
    try:
        from transformers import AutoConfig
    except ImportError:
        raise CheckpointError(
            "building the model", needed="transformers", got="none", now='pip install "fp4_inductor[hf]"'
        ) from None
    if openai_gpt_oss.claims(files):
        return openai_gpt_oss.text_config(files)
    trust = {key: value for key, value in hf_kwargs.items() if key == "trust_remote_code"}
    try:
        config = AutoConfig.from_pretrained(files.folder, **trust)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            "reading a checkpoint's config",
            needed="one that transformers knows",
            got=str(error),
            where=str(files.folder),
        ) from error
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if hasattr(part, "quantization_config"):
            del part.quantization_config  # transformers must neither unpack nor refuse these weights
    return config


def build_on_meta(config: Any, dtype: torch.dtype, experts_implementation: str, hf_kwargs: Mapping[str, Any]) -> Any:
    """The model that ``config`` describes, unquantised and on the meta device.

    Raises:
        CheckpointError: transformers has no class for it.
    """
    experts_interface.register()
    try:
        with torch.device("meta"):
            model = _auto_class(config).from_config(config, dtype=dtype, **hf_kwargs)
    except ValueError as error:
        needed = "a language model, with images or without, that transformers knows"
        raise CheckpointError("building the model", needed=needed, got=str(error).splitlines()[0]) from error
    if model._can_set_experts_implementation():  # some classes compute experts in one way only
        model.set_experts_implementation(experts_implementation)
    return model


def _auto_class(config: Any) -> Any:
    """The class that makes what the config's ``architectures`` names: text alone, or text and images."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    named = (config.architectures or [""])[0]
    classes: Any = AutoModelForImageTextToText._model_mapping
    with_images = type(config) in classes
    if with_images and type(config) in AutoModelForCausalLM._model_mapping:
        with_images = classes[type(config)].__name__ == named
    return AutoModelForImageTextToText if with_images else AutoModelForCausalLM


def check_shapes(model: nn.Module, placements: Sequence[Placement]) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Hold the headers against the model before a byte is read.

    Returns:
        of each parameter that is packed: shape ``[..., N, K]``, and whether the module keeps it as ``[E, K, N]``.

    Raises:
        CheckpointError: a weight of another shape, or of a dtype that would have to be reinterpreted.
    """
    by_module: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for placement in placements:
        target = placement.targets[0]
        path, _, name = target.rpartition(".")
        if placement.is_fp4:
            parameter = model.get_submodule(path)._parameters.get(name)
            by_module[path][name] = assembled_shape(placement, 0 if parameter is None else parameter.shape[0])
        elif placement.converter is None:
            (weight,) = placement.weights
            assert isinstance(weight, PlainWeight)
            _check_tensor(_tensor(model, target), weight.dtype, weight.shape, weight.keys[0])
    checked: dict[str, tuple[tuple[int, ...], bool]] = {}
    for path, shapes in by_module.items():
        turned = orient(model.get_submodule(path), shapes)
        checked |= {f"{path}.{name}": (shape, turned[name]) for name, shape in shapes.items()}
    return checked


def fill(
    model: Any,
    placements: Sequence[Placement],
    packed: Mapping[str, tuple[tuple[int, ...], bool]],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Put every weight in its place on ``device``, one parameter at a time.

    Args:
        packed: what ``check_shapes`` gave.

    Raises:
        CheckpointError: a scale that is no number, or a tensor that does not fit.
    """
    for placement in tqdm(placements, desc="Loading", unit="parameter", disable=None):
        if placement.is_fp4:
            (target,) = placement.targets
            _fill_packed(model, placement, *packed[target], device, dtype)
            continue
        for target, value in _plain_values(model, placement).items():
            _fill_plain(model, target, value, placement.weights[0].keys[0], device, dtype)


def _fill_packed(
    model: Any, placement: Placement, shape: tuple[int, ...], turned: bool, device: torch.device, dtype: torch.dtype
) -> None:
    path, _, name = placement.targets[0].rpartition(".")
    module = model.get_submodule(path)
    weight = placement.weights[0]
    assert isinstance(weight, Fp4Weight)
    tensors = rows_of_pairs(module, name, assemble(placement, shape))
    codes, scale, global_scale = tensors
    on_device = PackedTensors(
        codes.to(device), scale.to(device), None if global_scale is None else global_scale.to(device)
    )
    pack_parameter(module, CarriedWeight(name, weight.format, turned), on_device, dtype)


def _plain_values(model: Any, placement: Placement) -> dict[str, torch.Tensor]:
    """The tensors of weights that are not packed, stacked and joined by transformers where its table says so."""
    if placement.converter is None:
        return {placement.targets[0]: _read_plain(placement.weights[0])}
    converter = placement.converter
    for pattern, group in zip(placement.patterns, placement.sources, strict=True):
        for weight in group:
            converter.add_tensor(placement.targets[0], weight.name, pattern, partial(_read_plain, weight))
    made: dict[str, Any] = converter.convert(placement.targets[0], model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _read_plain(weight: Any) -> torch.Tensor:
    value: torch.Tensor = weight.read()
    return value


def _fill_plain(
    model: Any, target: str, value: torch.Tensor, where: str, device: torch.device, dtype: torch.dtype
) -> None:
    path, _, name = target.rpartition(".")
    module, empty = model.get_submodule(path), _tensor(model, target)
    _check_tensor(empty, value.dtype, tuple(value.shape), where)
    wanted = torch.float32 if _kept_in_float32(model, target, dtype) else empty.dtype
    value = value.to(device, wanted if empty.dtype in _CASTABLE else empty.dtype)
    if name in module._parameters:
        module._parameters[name] = nn.Parameter(value.contiguous(), requires_grad=False)
    else:
        module._buffers[name] = value.contiguous()


def _tensor(model: Any, name: str) -> torch.Tensor:
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    tensor: torch.Tensor | None = module._parameters.get(last, module._buffers.get(last))
    assert tensor is not None
    return tensor


def _check_tensor(empty: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], where: str) -> None:
    same_kind = dtype == empty.dtype or (dtype in _CASTABLE and empty.dtype in _CASTABLE)
    if shape != tuple(empty.shape) or not same_kind:
        raise CheckpointError(
            "loading a tensor",
            needed=f"{empty.dtype} of shape {list(empty.shape)}",
            got=f"{dtype} of shape {list(shape)}",
            where=where,
            now="a quantised weight needs its scales beside it; export the checkpoint again",
        )


def finish(model: Any, folder: Path, device: torch.device) -> nn.Module:
    """Tie weights, compute the buffers that no checkpoint holds, and make the model ready to generate.

    Raises:
        CheckpointError: a tensor that nothing has filled.
    """
    from transformers import GenerationConfig

    missing = {name for name, tensor in model.state_dict().items() if tensor.is_meta}
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    for module in model.modules():
        _compute_buffers(model, module, device)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if empty := [name for name, tensor in tensors if tensor.is_meta]:
        raise CheckpointError("finishing the model", needed="every tensor filled", got=some(empty) + " empty")
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    finished: nn.Module = model.eval().requires_grad_(False)
    return finished


def _kept_in_float32(model: Any, name: str, dtype: torch.dtype) -> bool:
    """Whether transformers, too, loads this tensor in float32 in a model of ``dtype``."""
    patterns = list(model._keep_in_fp32_modules_strict or ()) if dtype in (torch.float16, torch.bfloat16) else []
    if dtype == torch.float16:
        patterns += model._keep_in_fp32_modules or ()
    return any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns)


def _compute_buffers(model: Any, module: nn.Module, device: torch.device) -> None:
    """Let transformers compute a module's non-persistent buffers, over ones and over zeros: what differs was not."""
    names = [name for name in module._non_persistent_buffers_set if module.get_buffer(name).is_meta]
    if not names:
        return
    computed = []
    with _weights_put_away(module, names):
        for poison in (1, 0):
            for name in names:
                module._buffers[name] = torch.full_like(module.get_buffer(name), poison, device=device)
            model._init_weights(module)
            computed.append([module.get_buffer(name) for name in names])
    if left := [name for name, one, zero in zip(names, *computed, strict=True) if not torch.equal(one, zero)]:
        got = f"{some(left)} of {type(module).__name__} left empty"
        raise CheckpointError("computing buffers", needed="transformers to initialise them", got=got)


@contextlib.contextmanager
def _weights_put_away(module: nn.Module, buffers: Sequence[str]) -> Iterator[None]:
    """Initialising a module means its weights, too: all but ``buffers`` stand elsewhere meanwhile."""
    away: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for inner in module.modules():
        both: tuple[Any, ...] = (inner._parameters, inner._buffers)
        for held in both:
            loaded = {name: value for name, value in held.items() if not (inner is module and name in buffers)}
            away.append((held, loaded))
            held.update({name: None if value is None else value.to("meta") for name, value in loaded.items()})
    try:
        yield
    finally:
        for held, loaded in away:
            held.update(loaded)
