"""``DeviceInfo``: devices that are not here, as values."""

from __future__ import annotations

import pytest
import torch

from fp4_inductor import DeviceInfo, UnknownNameError


@pytest.mark.parametrize("name", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"])
def test_known_architectures(name: str) -> None:
    device = DeviceInfo.parse(name)
    assert device.family == "cuda"
    assert device.arch_name == name
    assert device.shared_memory >= 99 * 1024


def test_cpu() -> None:
    assert DeviceInfo.current(torch.device("cpu")) == DeviceInfo.parse("cpu")
    assert DeviceInfo.parse("cpu").arch is None


def test_unknown_architecture_shows_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean"):
        DeviceInfo.parse("sm_91")


@pytest.mark.gpu
def test_present_gpu_agrees_with_the_table() -> None:
    here = DeviceInfo.current(torch.device("cuda"))
    known = DeviceInfo.parse(here.arch_name)
    assert here.capability == known.capability
    assert here.shared_memory >= known.shared_memory
