"""The time in which no kernel can be faster: bytes that must move, or operations."""

from __future__ import annotations

from dataclasses import dataclass

from ..spec import MoESpec


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device reaches: memory bandwidth in TB/s and matrix rate in TFLOP/s; None where it is not known."""

    bandwidth: float | None = None
    tflops: float | None = None


H200 = Rates(bandwidth=4.27, tflops=730)
"""Measured: a streaming read, and a large bfloat16 matrix product."""


def floor_us(spec: MoESpec, num_tokens: int, rates: Rates) -> float | None:
    """Microseconds of the slower of two limits; None where no rate is known.

    The bytes are codes and block scales of the distinct experts that ``num_tokens`` evenly routed tokens are
    expected to reach; the operations those of both matrix products.
    """
    limits = []
    if rates.bandwidth is not None:
        reached = 1 - (1 - spec.top_k / spec.num_experts) ** num_tokens
        limits.append(spec.packed_bytes * reached / (rates.bandwidth * 1e6))
    if rates.tflops is not None:
        flops = 2 * num_tokens * spec.top_k * spec.hidden_size * (spec.w13_rows + spec.intermediate_size)
        limits.append(flops / (rates.tflops * 1e6))
    return max(limits, default=None)
