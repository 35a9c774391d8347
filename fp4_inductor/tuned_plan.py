"""``fp4moe.autotune``: the chosen backend's plan, with configurations timed on this device for this layer's sizes.

Timing happens here, while a graph is compiled. What was chosen stands in the plan as text, so calls look nothing up
and a CUDA graph never sees a timer.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from tqdm import tqdm

from .autotune import CandidateFailedError, Choices, Key, tune
from .backends import get_backend
from .device import DeviceInfo
from .plan import KernelPlan, prepare, run_plan
from .random_layer import inputs, random_weights, route
from .select import Selection
from .spec import ACTIVATION_KNOBS, RUNTIME, GivenRouting, MoESpec, Operand, TokenRange
from .timing import cuda_graph_us

logger = logging.getLogger(__name__)

_COUNTS = tuple(4**power for power in range(8))
"""Token counts that are timed where a graph takes any: each stands for those from half to twice as many."""
_REPLAYS = 10


@runtime_checkable
class TunableBackend(Protocol):
    """A kernel backend whose plans come in configurations; here a configuration is text that only it reads."""

    name: str
    tuned_parts: tuple[str, ...]
    """What ``variants`` changes, in the order in which it is tuned."""

    def plan(self, spec: MoESpec, device: DeviceInfo, table: str = "") -> KernelPlan:
        """As for every backend; with the table that ``table`` wrote, or its own."""
        ...

    def config(self, spec: MoESpec, device: DeviceInfo, num_tokens: int) -> str:
        """What its own table says for ``num_tokens``."""
        ...

    def variants(self, config: str, part: str, device: DeviceInfo) -> tuple[str, ...]:
        """``config``, then what differs from it in ``part`` and may run on ``device``."""
        ...

    def table(self, rows: Sequence[tuple[int | None, str]]) -> str:
        """Rows of the most tokens each is for (the last: None) and its configuration."""
        ...


class Timer(Protocol):
    def __call__(self, config: str, num_tokens: int) -> float:
        """Time of a layer call; raises ``CandidateFailedError``."""
        ...


def tuned(selection: Selection) -> Selection:
    """``selection`` with a tuned plan, if its backend has configurations and its device is the current one."""
    spec, device = selection.spec, selection.device
    backend = None if selection.chosen is None else get_backend(selection.chosen)
    if not isinstance(backend, TunableBackend) or spec.weight_on_input:
        return selection
    if not torch.cuda.is_available() or device != DeviceInfo.current(torch.device("cuda")):
        return selection
    with _device_timer(backend, spec, device) as timer:
        table = tuned_table(backend, spec, device, kept_choices(), timer)
    logger.info("autotuned %s for %s on %s: %s", backend.name, spec, device, table)
    return replace(selection, plan=backend.plan(spec, device, table))


def tuned_table(backend: TunableBackend, spec: MoESpec, device: DeviceInfo, choices: Choices, timer: Timer) -> str:
    """The best configurations by token count, in ``backend``'s own text."""
    rows: list[tuple[int | None, str]] = []
    for count in token_counts(spec.num_tokens):
        config = backend.config(spec, device, count)
        for part in backend.tuned_parts:
            candidates = backend.variants(config, part, device)
            key = {**_key(backend, spec, device), "tokens": count, "part": part, "from": config}
            config = tune(key, candidates, partial(timer, num_tokens=count), choices)
        if rows and rows[-1][1] == config:
            rows.pop()
        rows.append((2 * count, config))
    return backend.table([*rows[:-1], (None, rows[-1][1])])


def token_counts(tokens: TokenRange) -> tuple[int, ...]:
    """Which counts are timed for a graph that takes ``tokens``; at least one."""
    if tokens.static:
        return (max(tokens.min, 1),)
    most = math.inf if tokens.max is None else tokens.max
    return tuple(c for c in _COUNTS if c * 2 >= tokens.min and c <= most * 2) or (max(tokens.min, 1),)


def kept_choices() -> Choices:
    """Choices beside what Inductor keeps."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return _choices_in(Path(cache_dir()) / "fp4_inductor_autotune")


_choices_in = cache(Choices)


def _key(backend: TunableBackend, spec: MoESpec, device: DeviceInfo) -> Key:
    """What a measurement depends on; not the router, which is not timed, nor the tokens, of which each is."""
    layer = replace(spec, router=GivenRouting(), num_tokens=TokenRange(0, None), weights_transposed=False)
    return {
        "backend": backend.name,
        "layer": repr(layer),
        "device": device.name,
        "arch": device.arch_name,
        "sm_count": device.sm_count,
        "libraries": str(device.libraries),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "source": _source_hash(),
    }


@cache
def _source_hash() -> str:
    """Of what a call runs."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for folder in ("kernels", "layouts", "backends"):
        for file in sorted((here / folder).glob("*.py")):
            digest.update(file.name.encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _device_timer(backend: TunableBackend, spec: MoESpec, device: DeviceInfo) -> Iterator[Timer]:
    """A timer on random weights of one layer, which are made when first needed and freed at the end."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from triton.errors import TritonError

    spec = replace(spec, router=GivenRouting())
    prepared: dict[str, torch.Tensor] = {}
    weights: dict[Operand, torch.Tensor] = {}
    what = f"autotuning {backend.name} for {spec}"
    bar = tqdm(desc="autotuning FP4 experts", unit="candidate", disable=None, delay=2, leave=False)

    def timer(config: str, num_tokens: int) -> float:
        plan = backend.plan(spec, device, backend.table([(None, config)]))
        if not prepared:
            logger.info("%s: takes about a minute, once", what)
            weights.update(_weights(spec))
            prepared.update(prepare(plan, weights))
            for operand in set(weights) - {arg for arg in plan.args if isinstance(arg, Operand)}:
                del weights[operand]
        bar.update()
        calls = [_call(plan, {**weights, **given}, prepared) for given in _inputs(spec, num_tokens)]
        return cuda_graph_us(calls, replays=_REPLAYS)

    def checked(config: str, num_tokens: int) -> float:
        try:
            with unset_fake_temporarily(), torch.no_grad():
                return timer(config, num_tokens)
        except (TritonError, torch.OutOfMemoryError) as error:
            raise CandidateFailedError(str(error)) from error

    try:
        with bar:
            yield checked
    finally:
        if prepared:
            prepared.clear()
            weights.clear()
            torch.cuda.empty_cache()


def _call(
    plan: KernelPlan, operands: dict[Operand, torch.Tensor], prepared: dict[str, torch.Tensor]
) -> Callable[[], torch.Tensor]:
    return lambda: run_plan(plan, operands, prepared)


def _weights(spec: MoESpec) -> dict[Operand, torch.Tensor]:
    """Canonical weights on the current device, and a value for each knob that is given at run time."""
    rng = torch.Generator("cuda").manual_seed(0)  # the user's own numbers stay what they are
    found = random_weights(spec, torch.device("cuda"), rng)
    for field, operand in ACTIVATION_KNOBS.items():
        if getattr(spec.activation, field) is RUNTIME:
            found[operand] = torch.tensor(1.0, dtype=torch.float64)
    return found


def _inputs(spec: MoESpec, num_tokens: int) -> Iterator[dict[Operand, torch.Tensor]]:
    """What differs from call to call."""
    for hidden, logits in inputs(spec, num_tokens, torch.device("cuda")):
        ids, weights = route(logits, spec.top_k)
        yield {
            Operand.HIDDEN: hidden,
            Operand.TOPK_IDS: ids,
            Operand.TOPK_WEIGHTS: weights.to(spec.weights_dtype),
        }
