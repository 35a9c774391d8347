"""Tables of e2m1 values: every entry's code, and an error for any other value."""

from __future__ import annotations

import math

import pytest
import torch

from fp4_inductor import Fp4InductorError
from fp4_inductor.quant.e2m1 import decode
from fp4_inductor.quant.tables import e2m1_codes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_value_has_its_code(dtype: torch.dtype) -> None:
    codes = torch.arange(16, dtype=torch.uint8)[torch.randperm(16)].reshape(2, 8)
    assert torch.equal(e2m1_codes(decode(codes).to(dtype)), codes)


@pytest.mark.parametrize("value", [0.25, 5.0, -6.5, 1.5000001, 1e-30, 100.0, math.inf, -math.inf, math.nan])
def test_other_values_raise(value: float) -> None:
    table = decode(torch.arange(16, dtype=torch.uint8))
    table[torch.randint(16, ())] = value
    with pytest.raises(Fp4InductorError, match=r"needed a table of the e2m1 values .*, got other values"):
        e2m1_codes(table)


def test_values_that_only_float64_tells_apart_raise() -> None:
    with pytest.raises(Fp4InductorError, match="other values"):
        e2m1_codes(torch.tensor([1.0, 1.5 + 1e-12], dtype=torch.float64))
