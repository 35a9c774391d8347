"""Random FP4 weights and what they stand for, decoded here from bits in float64: nothing of the package is used."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


@dataclass
class Fp4:
    """codes ``uint8 [..., N, K]`` in 0..15, scale bits ``uint8 [..., N, K/bs]``, global scale float64."""

    codes: torch.Tensor
    scale_bits: torch.Tensor
    is_e4m3: bool
    global_scale: torch.Tensor

    def exact(self) -> torch.Tensor:
        """codes × scale × global, in float64."""
        values = _MAGNITUDES[(self.codes & 7).long()] * torch.where(self.codes >= 8, -1.0, 1.0)
        scale = e4m3_values(self.scale_bits) if self.is_e4m3 else torch.exp2(self.scale_bits.double() - 127)
        spread = scale.repeat_interleave(values.shape[-1] // scale.shape[-1], dim=-1)
        return values * spread * self.global_scale

    def packed(self) -> torch.Tensor:
        """Two codes a byte, the even one low: ``uint8 [..., N, K/2]``."""
        return self.codes[..., 0::2] | (self.codes[..., 1::2] << 4)

    def scales(self) -> torch.Tensor:
        return self.scale_bits.view(torch.float8_e4m3fn) if self.is_e4m3 else self.scale_bits


def e4m3_values(bits: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn from its bits, in float64."""
    mantissa, exponent = (bits & 7).double(), ((bits >> 3) & 15).double()
    value = torch.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * torch.exp2(exponent - 10))
    return torch.where(bits >= 128, -value, value)


def random_fp4(
    shape: tuple[int, ...], generator: torch.Generator, *, block: int, is_e4m3: bool, global_scale: float | None = None
) -> Fp4:
    """Random codes, all sixteen of them, under random scales; weights of a size that a model can run on."""
    codes = torch.randint(16, shape, dtype=torch.uint8, generator=generator)
    blocks = (*shape[:-1], shape[-1] // block)
    # e4m3 bytes 1 to 126 are 2^-9 to 448.
    low, high = (40, 127) if is_e4m3 else (117, 123)
    bits = torch.randint(low, high, blocks, dtype=torch.uint8, generator=generator)
    return Fp4(codes, bits, is_e4m3, torch.tensor(1.0 if global_scale is None else global_scale, dtype=torch.float64))


def nearest_bfloat16(exact: torch.Tensor) -> torch.Tensor:
    """float64 as bfloat16, rounded to float32 on the way, as torch itself casts."""
    return exact.to(torch.float32).to(torch.bfloat16)
