"""A100 and A800 are one chip on one kind of node: only the link between devices, and what was fitted on it, differ."""

from __future__ import annotations

import msgspec

from memo_sim.contract.catalog import load_hardware
from memo_sim.contract.hardware import Hardware

OF_THE_LINK = {"name", "collectives", "sources"}
FITTED_ON_ONE = {"d2h", "h2d", "system_attention", "device_malloc_s_per_gib", "device_free_s_per_gib"}
"""Of MEMO's tables: the copies of a node whose devices all swap, DeepSpeed's attention, mallocs of a full device."""


def fields(hardware: Hardware) -> dict[str, object]:
    """Return every number without its spread and its source."""
    found: dict[str, object] = msgspec.to_builtins(hardware)
    return {name: bare(value) for name, value in found.items() if name not in OF_THE_LINK | FITTED_ON_ONE}


def bare(value: object) -> object:
    if isinstance(value, dict):
        return {key: bare(each) for key, each in value.items() if key not in ("source", "spread")}
    return [bare(each) for each in value] if isinstance(value, list) else value


def test_what_is_the_chips_and_the_hosts_stands_in_both() -> None:
    a100, a800 = (fields(load_hardware(f"{name}-sxm4-80gb")) for name in ("a100", "a800"))
    assert a100 == a800
    assert {"device_deviation", "host_launch_s", "host_pass_s"} <= {name for name, value in a100.items() if value}


def test_a_number_taken_from_the_other_names_what_it_was_fitted_on() -> None:
    a100, a800 = (load_hardware(f"{name}-sxm4-80gb") for name in ("a100", "a800"))
    for name in ("host-launch", "host-pass"):
        assert a100.sources[name].kind == "fitted"
        assert a800.sources[name].cases == a100.sources[name].cases
        assert a100.name in a800.sources[name].text
