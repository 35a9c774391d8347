"""``MoESpec``: what a mixture-of-experts block computes, as a value.

Recognition and kernel backends meet only here. A spec is frozen and hashable and holds no
``fx.Node``, no tensor and no SymInt, so identical layers share one, and a kernel is chosen for a
device that is not present.

Letters used in shapes throughout the project: T tokens, E experts, k ``top_k``, H hidden size,
I intermediate size, N output rows and K input columns of one GEMM, bs block size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import isinf
from typing import Literal

import torch

from .formats import BlockFormat


class Operand(Enum):
    """The inputs of a fused MoE op, in canonical form.

    Weights are canonical when codes are ``uint8 [E, N, K/2]`` (low nibble = even k), block scales
    ``[E, N, K/bs]`` in the format's ``scale_dtype``, and global scales ``float32 [E, 1]``, ``[E, N]``
    or ``[1, 1]``, all of which multiply to dequantise. For w13, N is 2I (I if not gated) and K is H;
    for w2, N is H and K is I.
    """

    HIDDEN = "hidden"  # [T, H] activation dtype
    TOPK_IDS = "topk_ids"  # [T, k] int64 or int32
    TOPK_WEIGHTS = "topk_weights"  # [T, k] float32, bfloat16 or float16
    ROUTER_LOGITS = "router_logits"  # [T, E], more columns where the router's spec says so
    ROUTER_BIAS = "router_bias"  # [E] added for selection only
    ROUTER_SCALE = "router_scale"  # 0-d, where the graph takes the scaling factor at run time
    ROUTER_EXPERT_SCALE = "router_expert_scale"  # [E]
    W13 = "w13"
    W13_SCALE = "w13_scale"
    W13_GLOBAL = "w13_global"
    W13_BIAS = "w13_bias"  # [E, 2I]
    W2 = "w2"
    W2_SCALE = "w2_scale"
    W2_GLOBAL = "w2_global"
    W2_BIAS = "w2_bias"  # [E, H]
    ALPHA = "alpha"  # 0-d, where the graph takes it at run time
    BETA = "beta"
    LIMIT = "limit"
    UP_LIMIT = "up_limit"

    def __str__(self) -> str:
        return self.value


ACTIVATION_KNOBS: Mapping[str, Operand] = {
    "alpha": Operand.ALPHA,
    "beta": Operand.BETA,
    "limit": Operand.LIMIT,
    "up_limit": Operand.UP_LIMIT,
}
"""The fields of ``ActivationSpec`` that a graph may take at run time, and the operand that then holds each."""


class Runtime(Enum):
    """Stands in a spec where a scalar is an input of the graph and must not be baked."""

    RUNTIME = "runtime"

    def __repr__(self) -> str:
        return "RUNTIME"

    __str__ = __repr__


RUNTIME = Runtime.RUNTIME


class GateUpOrder(Enum):
    """How gate and up rows share w13."""

    GATE_UP = "gate_up"  # rows [0, I) gate, [I, 2I) up
    UP_GATE = "up_gate"
    INTERLEAVED = "interleaved"  # rows g0, u0, g1, u1, ...

    def __str__(self) -> str:
        return self.value


class GlobalGrain(Enum):
    """Which rows of a weight share a global scale, by how the graph holds them, whatever their values are."""

    EXPERT = "expert"  # all rows of an expert
    HALF = "half"  # the gate rows of an expert one, its up rows another
    ROW = "row"  # none

    def __str__(self) -> str:
        return self.value


class Scoring(Enum):
    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SQRT_SOFTPLUS = "sqrt_softplus"
    SPARSEMIXER = "sparsemixer"  # softmax, for each slot, over the experts left whose logits are near the best

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Token counts a compiled graph accepts; ``max`` is None where unbounded."""

    min: int
    max: int | None

    @property
    def static(self) -> bool:
        return self.min == self.max

    def __str__(self) -> str:
        return str(self.min) if self.static else f"{self.min}..{'' if self.max is None else self.max}"


@dataclass(frozen=True, slots=True)
class ActivationSpec:
    """``act(gate) * (up + beta)`` if gated, else ``act(gate)``.

    ``act(x) = x * s(x)`` by kind: silu ``s = sigmoid(alpha * x)``; gelu and gelu_tanh ``s = Phi(x)``, exact and by
    tanh; relu ``s = (x > 0)``; relu2 ``s = relu(x)``. A ``limit`` bounds gate and up, up by ``up_limit`` where that
    is given:

    - bound "clamp": ``gate = min(gate, limit)`` and ``up = clamp(up, -limit, limit)`` go in;
    - bound "clamp_activated": ``act(gate) = min(act(gate), limit)`` comes out, up as before;
    - bound "softcap": ``cap(x) = limit * tanh(x / limit)`` stands for x where it is a factor, so that the result is
      ``cap(gate) * s(gate) * (cap(up) + beta)``.

    A field that is ``RUNTIME`` is an operand of the graph (``ACTIVATION_KNOBS``).
    """

    kind: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
    gated: bool = True
    alpha: float | Runtime = 1.0
    beta: float | Runtime = 0.0
    limit: float | Runtime | None = None
    up_limit: float | Runtime | None = None
    bound: Literal["clamp", "clamp_activated", "softcap"] = "clamp"

    def __str__(self) -> str:
        name = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}.get(self.kind, self.kind)
        if not self.gated:
            name = self.kind
        knobs = []
        if self.alpha != 1.0:
            knobs.append(f"alpha={self.alpha}")
        if self.beta != 0.0:
            knobs.append(f"beta={self.beta}")
        if self.limit is not None:
            bound = {"clamp": "limit", "clamp_activated": "limit_after", "softcap": "softcap"}[self.bound]
            knobs.append(f"{bound}={self.limit}")
        if self.up_limit is not None:
            knobs.append(f"up={self.up_limit}")
        return f"{name}({', '.join(knobs)})" if knobs else name


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How ids ``[T, k]`` and weights ``[T, k]`` come from logits ``[T, E]``.

    Attributes:
        scoring: function from logits to scores.
        topk_before_scoring: top-k is taken on the logits and only the k survivors are scored.
        ids_given: something else chooses the experts, as a table by token; their scores still become weights.
        has_bias: a ``[E]`` bias is added to the scores, or to the logits if top-k is taken on them, for selection
            only, never to the weights.
        num_groups, topk_groups: group-limited top-k (1, 1 where there are no groups).
        group_score: how a group is scored: sum of its best two experts, or its best expert.
        group_fill: value that masked-out experts get before top-k.
        renormalize: weights are divided by their sum, plus ``renormalize_eps``, but at least ``renormalize_min``.
        scaling_factor: constant that multiplies the weights; RUNTIME where it is a graph input.
        has_expert_scale: weights are at last multiplied by their expert's element of a ``[E]`` vector.
        num_shared_experts: columns of the logits behind the E of the routed experts, for experts that every token
            goes to: they are scored, and count in the sum of weights, but are not chosen.
        num_null_experts: columns of the logits behind the E, and elements of the bias, for experts that compute
            nothing: a slot that chooses one gets id 0 and weight 0.
        sparsity_threshold: of the sparsemixer: an expert counts whose logit x and the best b of those left are so
            near that ``(b - x) / max(|x|, b)`` is at most this.
        dtype: dtype in which the scores are computed; if some step between logits and finished weights rounds to
            less, that one. Finished weights are rounded to ``MoESpec.weights_dtype`` alone.
    """

    scoring: Scoring
    topk_before_scoring: bool = False
    ids_given: bool = False
    has_bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    group_score: Literal["top2_sum", "max"] = "top2_sum"
    group_fill: float = float("-inf")
    renormalize: bool = False
    renormalize_eps: float = 0.0
    renormalize_min: float = 0.0
    scaling_factor: float | Runtime = 1.0
    has_expert_scale: bool = False
    num_shared_experts: int = 0
    num_null_experts: int = 0
    sparsity_threshold: float = 0.0
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        choice = ["ids"] if self.ids_given else ["bias", "topk"] if self.has_bias else ["topk"]
        if self.num_groups > 1:
            score = "top2" if self.group_score == "top2_sum" else "max"
            fill = "" if isinf(self.group_fill) else f" fill {self.group_fill:g}"
            choice.insert(-1, f"groups({self.topk_groups}/{self.num_groups} by {score}{fill})")
        if self.num_null_experts:
            choice[-1] += f"(+{self.num_null_experts} null)"
        scoring = str(self.scoring)
        if self.scoring is Scoring.SPARSEMIXER:
            scoring += f"({self.sparsity_threshold:g})"
        late = self.topk_before_scoring or self.ids_given or self.scoring is Scoring.SPARSEMIXER
        steps = [*choice, scoring] if late else [scoring, *choice]
        if self.renormalize:
            shared = f"with {self.num_shared_experts} shared" if self.num_shared_experts else ""
            floor = f"min={self.renormalize_min:g}" if self.renormalize_min else ""
            eps = f"eps={self.renormalize_eps:g}" if self.renormalize_eps else ""
            knobs = ", ".join(filter(None, (shared, floor, eps)))
            steps.append(f"renorm({knobs})" if knobs else "renorm")
        if self.scaling_factor != 1.0:
            steps.append(f"scale({self.scaling_factor})")
        if self.has_expert_scale:
            steps.append("expert_scale")
        return "→".join(steps)


@dataclass(frozen=True, slots=True)
class GivenRouting:
    """Ids and weights are taken as the graph computes them."""

    def __str__(self) -> str:
        return "given"


@dataclass(frozen=True, slots=True)
class ExpertRange:
    """The experts ``[start, end)`` that live here, of ``total``; ids outside contribute nothing."""

    start: int
    end: int
    total: int


@dataclass(frozen=True, slots=True)
class MoESpec:
    """One MoE block: ``(hidden, ids, weights, w13, w2, ...) -> [T, H]``.

    ``weights_dtype`` is the dtype of the routing weights and by that the numerics of the combine:
    float32 weights sum in float32 and round once; lower ones round every product.
    ``weight_on_input``: routing weights multiply the hidden states that go into an expert, in the wider of both
    dtypes and rounded to ``act_dtype``, instead of what comes out.
    ``weights_transposed`` tells people how the model stores its weights ([E, K, N]); codes are
    canonical for kernels either way.
    ``w13_global`` and ``w2_global``: EXPERT also where the format has no global scales.
    ``activation_format``: what kernels may round activations to, "nvfp4", "mxfp4" or "mxfp8", beside
    ``act_dtype``: a permission of the user's, of which the graph says nothing.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    weight_format: BlockFormat
    activation: ActivationSpec
    act_dtype: torch.dtype = torch.bfloat16
    weights_dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype = torch.bfloat16
    num_tokens: TokenRange = TokenRange(0, None)
    router: RouterSpec | GivenRouting = GivenRouting()
    w13_order: GateUpOrder = GateUpOrder.GATE_UP
    weights_transposed: bool = False
    has_w13_bias: bool = False
    has_w2_bias: bool = False
    w13_global: GlobalGrain = GlobalGrain.EXPERT
    w2_global: GlobalGrain = GlobalGrain.EXPERT
    weight_on_input: bool = False
    local_experts: ExpertRange | None = None
    activation_format: str | None = None

    @property
    def w13_rows(self) -> int:
        return self.intermediate_size * (2 if self.activation.gated else 1)

    @property
    def packed_bytes(self) -> int:
        """Bytes of codes and block scales of all experts."""
        weights = self.num_experts * self.hidden_size * (self.w13_rows + self.intermediate_size)
        return self.weight_format.num_bytes(weights)

    def __str__(self) -> str:
        dtype = str(self.act_dtype).removeprefix("torch.")
        if self.activation_format is not None:
            dtype = f"({dtype}|{self.activation_format})"
        biases = " +bias" if self.has_w13_bias or self.has_w2_bias else ""
        grains = {"w13": self.w13_global, "w2": self.w2_global}
        biases += "".join(f" {name}_global/{grain}" for name, grain in grains.items() if grain != GlobalGrain.EXPERT)
        return (
            f"{self.num_experts}x top-{self.top_k} H={self.hidden_size} I={self.intermediate_size} "
            f"{self.weight_format}×{dtype} {self.activation}{biases} T={self.num_tokens} router={self.router}"
        )
