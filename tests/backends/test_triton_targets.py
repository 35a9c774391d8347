"""``triton_w4a16`` says of a device, without asking it, whether its kernels fit."""

from __future__ import annotations

import dataclasses

import pytest
from moe_cases import SWIGLU

from fp4_inductor.backends import get_backend
from fp4_inductor.device import DeviceInfo
from fp4_inductor.formats import FORMATS, MXFP4, BlockFormat
from fp4_inductor.kernels.w4a16_config import FAMILIES, configs, shared_memory
from fp4_inductor.reasons import Reason, ReasonCode
from fp4_inductor.spec import MoESpec

BACKEND = get_backend("triton_w4a16")
SPEC = MoESpec(8, 2, 2880, 96, MXFP4, SWIGLU)


def device(arch: int, **changes: object) -> DeviceInfo:
    found = dataclasses.replace(DeviceInfo.parse(f"sm_{arch}"), libraries=(("triton", "3.6.0"),))
    return dataclasses.replace(found, **changes)  # type: ignore[arg-type]


def reasons(target: DeviceInfo, fmt: BlockFormat = MXFP4) -> tuple[Reason, ...]:
    return BACKEND.check(dataclasses.replace(SPEC, weight_format=fmt), target).reasons


def most(arch: int) -> int:
    return max(map(shared_memory, configs(arch)))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@pytest.mark.parametrize("arch", FAMILIES)
def test_the_last_byte_decides(arch: int, fmt: BlockFormat) -> None:
    assert not reasons(device(arch, shared_memory=most(arch)), fmt)
    (reason,) = reasons(device(arch, shared_memory=most(arch) - 1), fmt)
    assert reason.code is ReasonCode.CAPABILITY
    assert str(most(arch)) in reason.need
    assert str(most(arch) - 1) in reason.got


def test_a_large_device_cut_down_to_a_small_ones_memory_is_refused_where_it_must_be() -> None:
    """The table is the family's own: a consumer card's memory may not do for a data centre's tiles."""
    for arch in FAMILIES:
        cut = device(arch, shared_memory=48 * 1024)
        assert bool(reasons(cut)) == (most(arch) > 48 * 1024)


@pytest.mark.parametrize("capability", [(6, 1), (7, 0), (7, 5), (8, 7), (11, 0), (12, 2)])
def test_other_families_are_refused_by_name_with_what_is_known(capability: tuple[int, int]) -> None:
    name = f"sm_{capability[0]}{capability[1]}"
    (reason,) = reasons(device(90, capability=capability, name=""))
    assert reason.code is ReasonCode.CAPABILITY
    assert name in reason.got
    assert all(f"sm_{arch}" in reason.need for arch in FAMILIES)
    assert name not in reason.need


def test_a_device_with_everything_missing_hears_of_each() -> None:
    bare = device(86, shared_memory=0, libraries=())
    assert [reason.code for reason in reasons(bare)] == [ReasonCode.CAPABILITY, ReasonCode.LIBRARY]
