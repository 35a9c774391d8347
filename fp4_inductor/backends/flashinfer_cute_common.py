"""What FlashInfer's CuTe-DSL kernels share: reasons against a block, routes and weights as they take them.

Rows stand as the mode says; block scales lie in tiles, of which the kernels take a strided view that is made where they
are called. There are no biases. Knobs of SwiGLU are numbers, compiled into the kernel, one for all experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import torch

from ..device import DeviceInfo
from ..layouts.global_scales import linear_in_up
from ..layouts.padding import fit_columns, round_up
from ..layouts.scale_128x4 import to_scale_tiles
from ..plan import Prepared
from ..reasons import Reason, ReasonCode
from ..spec import ActivationSpec, MoESpec, Operand
from .flashinfer_common import ANOTHER, Mode, present_routes
from .flashinfer_weights import Placing
from .ops import ExpertsCall

NO_LIMIT = torch.finfo(torch.float32).max
MAX_ELEMENTS = 1 << 30
"""Of the hidden states of all routes in one call: kernels count in 32 bits, and keep them in a workspace."""
_TRITON = "pip install triton"
_WORD = 4
"""float32 numbers in 16 bytes, to which pointers of the kernels are aligned."""


def cute_reasons(spec: MoESpec, device: DeviceInfo) -> Iterator[Reason]:
    """What is against ``spec`` with any of these kernels, beside ``common_reasons``."""
    if device.library("triton") is None:
        # FlashInfer imports it beside them, and has none of them without it.
        yield Reason(
            ReasonCode.LIBRARY, "triton, which FlashInfer's CuTe-DSL kernels import", "none installed", _TRITON
        )
    limit = spec.activation.limit
    if isinstance(limit, float | int) and not 0 < limit <= NO_LIMIT:
        yield Reason(ReasonCode.ACTIVATION, "a limit above 0", str(limit), ANOTHER)
    biases = [name for name, has in (("w13", spec.has_w13_bias), ("w2", spec.has_w2_bias)) if has]
    if biases:
        yield Reason(ReasonCode.BIAS, "experts without biases", f"biases of {' and '.join(biases)}", ANOTHER)


def needs_common_globals(spec: MoESpec) -> bool:
    """Where a factor of up would not pass through the activation; beta is one for all experts."""
    return not linear_in_up(spec.activation, has_bias=False)


def routes(call: ExpertsCall) -> tuple[torch.Tensor, torch.Tensor]:
    """``present_routes``, weights in float32."""
    ids, weights = present_routes(call)
    return ids, weights.to(torch.float32)


def pieces(call: ExpertsCall) -> list[slice]:
    """Ranges of tokens, each few enough for one call."""
    num_tokens, top_k = call.topk_ids.shape
    most = max(1, MAX_ELEMENTS // (top_k * call.w2.codes.shape[1]))
    return [slice(start, start + most) for start in range(0, num_tokens, most)]


def joined(outputs: list[torch.Tensor], hidden_size: int) -> torch.Tensor:
    """[T, hidden_size] contiguous from the outputs of ``pieces``, whose columns may be padded."""
    cropped = [out[:, :hidden_size] for out in outputs]
    return torch.cat(cropped) if len(cropped) > 1 else cropped[0].contiguous()


def swiglu_knobs(activation: ActivationSpec) -> tuple[float, float, float]:
    """alpha, beta and limit as a kernel is compiled with them; RUNTIME ones have their values by now."""
    limit = NO_LIMIT if activation.limit is None else float(activation.limit)  # type: ignore[arg-type]
    return float(activation.alpha), float(activation.beta), limit  # type: ignore[arg-type]


@cache
def weight(name: str, suffix: str, mode: Mode, placing: Placing) -> dict[str, Prepared]:
    """Codes and tiles of block scales of ``name``, w13 or w2. Cached, so that equal layers share their recipes."""
    codes, scale = Operand(name), Operand(f"{name}_scale")
    return {
        name: Prepared(f"{name}_{suffix}", partial(_codes, name, mode, placing), (codes, scale)),
        f"{name}_scale": Prepared(f"{name}_scale_{suffix}", partial(_tiles, name, mode, placing), (scale,)),
    }


def _codes(name: str, mode: Mode, placing: Placing, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return placing.codes(name, mode.weights, codes, scale)


def _tiles(name: str, mode: Mode, placing: Placing, scale: torch.Tensor) -> torch.Tensor:
    return to_scale_tiles(placing.scales(name, mode.weights, scale)).view(mode.weights.scale_dtype)


def aligned_rows(*rows: torch.Tensor) -> torch.Tensor:
    """float32 [R, Ep] from R tensors [E]: Ep is a multiple of four, so that every row starts at 16 bytes."""
    stacked = torch.stack(rows)
    return fit_columns(stacked, round_up(stacked.shape[1], _WORD))
