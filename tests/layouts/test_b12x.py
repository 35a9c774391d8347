"""What b12x's packing keeps of NVFP4 scales, beside FlashInfer's own packing."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from flashinfer_source import module
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_bits import assert_prepares, same_bits

from fp4_inductor.layouts.b12x import require_packable, require_packable_globals
from fp4_inductor.layouts.exactness import InexactWeightsError

ROWS, BLOCKS = 64, 4
E4M3 = torch.float8_e4m3fn


@pytest.fixture
def packing() -> ModuleType:
    return module("fused_moe.cute_dsl.blackwell_sm12x.moe_w4a16_prepare")


def unpacked(packing: ModuleType, scale: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """float64 [E, N, S] of what FlashInfer packs: block scale times global scale, over what kernels put in."""
    packed, factors = packing._permute_nvfp4_scales(
        scale, alpha, size_k=16 * BLOCKS, size_n=ROWS, a_dtype=torch.bfloat16
    )
    half = (packed.view(torch.uint8).to(torch.int32) << 7).to(torch.int16).view(torch.float16).double()
    order = torch.tensor([0, 2, 1, 3])
    columns = half.reshape(len(scale), BLOCKS, -1, 4)[..., order].reshape(len(scale), BLOCKS, ROWS)
    perm, _ = packing._scale_perms()
    rows = torch.empty_like(columns)
    rows[..., torch.tensor(perm)] = columns
    return (rows * (factors.double()[:, None, None] * 2.0**-126)).transpose(1, 2)


def layer(top: int, bottom: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scales whose bytes lie in [bottom, top] with both ends among them, codes without zeros, global scales."""
    bits = torch.randint(bottom, top + 1, (2, ROWS, BLOCKS), dtype=torch.uint8)
    bits[0, 0, 0], bits[1, 3, 2] = top, bottom
    codes = torch.full((2, ROWS, 8 * BLOCKS), 0x11, dtype=torch.uint8)
    return bits.view(E4M3), codes, torch.rand(2) * 0.01


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 0x7E), st.integers(0, 0x7E))
def test_agrees_with_flashinfer_on_what_is_lost(top: int, bottom: int) -> None:
    packing = module("fused_moe.cute_dsl.blackwell_sm12x.moe_w4a16_prepare")
    scale, codes, alpha = layer(top, min(top, bottom))
    kept = torch.equal(unpacked(packing, scale, alpha), scale.double() * alpha.double()[:, None, None])
    if bool((scale.double() == 0).any()):
        codes[scale.view(torch.uint8).repeat_interleave(8, dim=-1) == 0] = 0
    try:
        assert same_bits(require_packable(scale, codes), scale)
    except InexactWeightsError:
        assert not kept
    else:
        assert kept


def test_blocks_of_zeros_may_have_any_scale() -> None:
    scale, codes, _ = layer(0x7E, 1)
    with pytest.raises(InexactWeightsError, match="expert"):
        require_packable(scale, codes)
    codes[:] = 0x08
    assert same_bits(require_packable(scale, codes), scale)


def test_global_scales_stay_finite(packing: ModuleType) -> None:
    scale, _, _ = layer(0x40, 0x40)
    for alpha in (torch.tensor([255.9, 1e-30]), torch.tensor([2.0**9, 1.0])):
        finite = bool(unpacked(packing, scale, alpha).isfinite().all())
        assert finite == bool((alpha < 256).all())
    with pytest.raises(InexactWeightsError, match="below 256"):
        require_packable_globals(torch.tensor([1.0, 256.0]))


def test_conditions_trace_and_own_their_memory() -> None:
    scale, codes, alpha = layer(0x60, 0x40)
    assert_prepares(require_packable, scale, codes)
    assert_prepares(require_packable_globals, alpha)
