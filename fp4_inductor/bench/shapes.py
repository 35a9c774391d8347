"""The MoE blocks that are timed: those of well-known models, or any sizes written ``ExkxHxI``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import InvalidOptionError, UnknownNameError
from ..formats import BlockFormat
from ..spec import ActivationSpec, GateUpOrder, MoESpec, RouterSpec, Scoring

SOFTMAX_OF_TOPK = RouterSpec(Scoring.SOFTMAX, topk_before_scoring=True)
_SWIGLU = ActivationSpec("silu")
_GPT_OSS = ActivationSpec("silu", alpha=1.702, beta=1.0, limit=7.0)
_SIZES = "ExkxHxI, such as 32x4x2880x2880"


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one block. ``gpt_oss`` ones clamp their SwiGLU, interleave gate and up, and have biases."""

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    gpt_oss: bool = False

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """E, k, H, I."""
        return self.num_experts, self.top_k, self.hidden_size, self.intermediate_size

    def spec(self, fmt: BlockFormat) -> MoESpec:
        """The block from router logits to output, in bfloat16."""
        return MoESpec(
            *self.sizes,
            weight_format=fmt,
            activation=_GPT_OSS if self.gpt_oss else _SWIGLU,
            router=SOFTMAX_OF_TOPK,
            w13_order=GateUpOrder.INTERLEAVED if self.gpt_oss else GateUpOrder.GATE_UP,
            has_w13_bias=self.gpt_oss,
            has_w2_bias=self.gpt_oss,
        )


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("gpt-oss-20b", 32, 4, 2880, 2880, gpt_oss=True),
        Shape("gpt-oss-120b", 128, 4, 2880, 2880, gpt_oss=True),
        Shape("qwen3-30b-a3b", 128, 8, 2048, 768),
        Shape("mixtral-8x7b", 8, 2, 4096, 14336),
        Shape("deepseek-v3", 256, 8, 7168, 2048),
    )
}


def parse_shape(text: str) -> Shape:
    """The shape called ``text``, or of the sizes that it spells.

    Raises:
        UnknownNameError: neither a known name nor four numbers.
        InvalidOptionError: numbers that no block has.
    """
    if text in SHAPES:
        return SHAPES[text]
    numbers = re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)", text)
    if numbers is None:
        raise UnknownNameError("reading --shapes", text, [*SHAPES, _SIZES])
    num_experts, top_k, hidden_size, intermediate_size = map(int, numbers.groups())
    shape = Shape(text, num_experts, top_k, hidden_size, intermediate_size)
    if min(shape.sizes) < 1 or shape.top_k > shape.num_experts:
        raise InvalidOptionError("reading --shapes", needed=f"{_SIZES}, with 1 <= k <= E", got=text)
    return shape
