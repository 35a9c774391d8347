"""Options: what is accepted, and what the refusals say."""

from __future__ import annotations

import pytest

from fp4_inductor import InvalidOptionError, Options, UnknownNameError
from fp4_inductor.options import split_options


def test_defaults_and_split() -> None:
    ours, rest = split_options({"fp4moe.backend": "cpu", "fp4moe.max_sites": 2, "max_autotune": True})
    assert ours == Options(backend="cpu", max_sites=2)
    assert rest == {"max_autotune": True}
    assert split_options(None) == (Options(), {})


def test_unknown_key_shows_the_nearest_name() -> None:
    with pytest.raises(UnknownNameError, match=r"did you mean 'fp4moe.backend'"):
        split_options({"fp4moe.backnd": "cpu"})


def test_a_key_without_its_prefix_is_ours() -> None:
    with pytest.raises(UnknownNameError, match=r"did you mean 'fp4moe.strict'"):
        split_options({"strict": True})


@pytest.mark.parametrize(
    ("key", "value", "needed"),
    [
        ("backend", 3, "a backend's name or None"),
        ("on_unsupported", "ignore", '"keep" or "error"'),
        ("strict", 1, "a bool"),
        ("autotune", "yes", "a bool"),
        ("max_sites", -1, "an int >= 0 or None"),
        ("expect_matches", True, "an int >= 0 or None"),
        ("release_original_weights", "yes", "a bool"),
        ("verify", "always", '"never" or "first_call"'),
        ("activation_format", "fp8", "'mxfp8' or 'nvfp4' or 'mxfp4' or None"),
        ("activation_format", 8, "'mxfp8' or 'nvfp4' or 'mxfp4' or None"),
    ],
)
def test_bad_value_says_what_is_needed(key: str, value: object, needed: str) -> None:
    with pytest.raises(InvalidOptionError) as error:
        split_options({f"fp4moe.{key}": value})
    assert f"fp4moe.{key}" in str(error.value)
    assert needed in str(error.value)
    assert repr(value) in str(error.value)
