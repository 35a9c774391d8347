"""The public names: adding one is a decision, removing one breaks somebody."""

from __future__ import annotations

import inspect

import pytest

import fp4_inductor
from fp4_inductor import errors

FUNCTIONS = {"quantize_", "load", "explain", "list_backends"}
CLASSES = {"Options", "Fp4MoEPass", "DeviceInfo", "LoweringReport"}
ERRORS = {
    "Fp4InductorError",
    "CheckpointError",
    "InvalidOptionError",
    "NoBackendError",
    "QuantizationError",
    "UnknownNameError",
    "UnmatchedError",
    "VerificationError",
}


def test_the_list() -> None:
    assert set(fp4_inductor.__all__) == FUNCTIONS | CLASSES | ERRORS
    assert set(dir(fp4_inductor)) >= set(fp4_inductor.__all__)


def test_every_error_is_public_and_of_one_family() -> None:
    defined = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert defined == ERRORS
    assert all(issubclass(getattr(fp4_inductor, name), fp4_inductor.Fp4InductorError) for name in ERRORS)


@pytest.mark.parametrize("name", sorted(FUNCTIONS | CLASSES | ERRORS))
def test_each_resolves_and_is_documented(name: str) -> None:
    value = getattr(fp4_inductor, name)
    assert inspect.getdoc(value)
    assert inspect.isclass(value) is (name not in FUNCTIONS)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        _ = fp4_inductor.quantise
