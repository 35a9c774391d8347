"""Tables of e2m1 values that a model keeps in a buffer: the code of every entry, checked where it runs."""

from __future__ import annotations

import torch

from ..errors import Fp4InductorError
from .e2m1 import decode, encode

_library = torch.library.Library("fp4_inductor", "FRAGMENT")
_library.define("e2m1_codes(Tensor values) -> Tensor")


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """The codes of e2m1 values, as one op, so that a graph holds the check.

    Args:
        values: floats, every one an e2m1 value.

    Returns:
        ``uint8``, of the same shape.

    Raises:
        Fp4InductorError: when it runs on real tensors, if a value is none of e2m1's.
    """
    codes: torch.Tensor = torch.ops.fp4_inductor.e2m1_codes.default(values)
    return codes


def _checked_codes(values: torch.Tensor) -> torch.Tensor:
    codes = encode(values.to(torch.float32).nan_to_num())
    wrong = decode(codes).double() != values.double()
    if bool(wrong.any()):
        raise Fp4InductorError(
            "preparing FP4 weights that are decoded by a table",
            needed="a table of the e2m1 values 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives",
            got=f"other values, among them {values[wrong][:8].tolist()}",
            now='leave this model to torch.compile(model, backend="inductor")',
        )
    return codes


_library.impl("e2m1_codes", _checked_codes, "CompositeExplicitAutograd")


torch.library.register_fake(
    "fp4_inductor::e2m1_codes", lambda values: torch.empty_like(values, dtype=torch.uint8), lib=_library
)
