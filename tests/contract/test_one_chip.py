"""A100 and A800 profiles agree except for the link between devices, and what was fitted on either machine."""

from __future__ import annotations

import msgspec

from memo_sim.contract.catalog import load_hardware
from memo_sim.contract.hardware import Hardware

OF_THE_LINK = {"name", "collectives", "sources"}
FITTED_ON_ONE = {"d2h", "h2d", "system_attention", "device_malloc_s_per_gib", "device_free_s_per_gib"}
"""Fields fitted on MEMO's tables: copies while all devices swap, DeepSpeed's attention, mallocs on a full device."""


def fields(hardware: Hardware) -> dict[str, object]:
    """Return every number, without its spread and its source."""
    found: dict[str, object] = msgspec.to_builtins(hardware)
    return {name: bare(value) for name, value in found.items() if name not in OF_THE_LINK | FITTED_ON_ONE}


def bare(value: object) -> object:
    if isinstance(value, dict):
        return {key: bare(each) for key, each in value.items() if key not in ("source", "spread")}
    return [bare(each) for each in value] if isinstance(value, list) else value


def test_numbers_of_chip_and_host_are_in_both_profiles() -> None:
    a100, a800 = (fields(load_hardware(f"{name}-sxm4-80gb")) for name in ("a100", "a800"))
    assert a100 == a800
    assert {"device_deviation", "host_launch_s", "host_pass_s"} <= {name for name, value in a100.items() if value}


def test_a_number_copied_between_profiles_names_its_fitted_cases() -> None:
    a100, a800 = (load_hardware(f"{name}-sxm4-80gb") for name in ("a100", "a800"))
    for name in ("host-launch", "host-pass"):
        assert a100.sources[name].kind == "fitted"
        assert a800.sources[name].cases == a100.sources[name].cases
        assert a100.name in a800.sources[name].text
