"""Fitting a constant: it finds a planted value, changes only its own numbers, and refuses invalid ranges and names."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.errors import UsageError
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.validation import Expectation
from memo_sim.planning.question import Question
from memo_sim.validation.cases import load_cases
from memo_sim.validation.fit import CONSTANTS, find_constant, fit, with_attention_factor, with_device_memory
from memo_sim.validation.validate import validate
from tests.refusals import refused

SWAPPED = ("memo-t5-192k-a0875", "memo-t5-192k-a1000")


def test_it_finds_a_planted_value() -> None:
    cases = [c for c in load_cases("memo-table5") if c.case in SWAPPED]
    constant, planted = find_constant("copy-rate"), 8.7
    told = validate(cases, change=lambda hardware: constant.change(hardware, planted * constant.scale))
    cases = [
        replace(c, expected=Expectation(status="ok", mfu=r.predicted.mfu))
        for c, r in zip(cases, told.cases, strict=True)
    ]
    found = fit(constant, cases, SWAPPED, low=7.0, high=11.0, unfitted=10.0)
    assert found.value == pytest.approx(planted, rel=0.01)
    assert abs(found.fitted.cases[1].error.mfu or 1) < abs(found.unfitted.cases[1].error.mfu or 0)


def test_unknown_cases_constants_and_empty_ranges_are_refused() -> None:
    cases, constant = load_cases("memo-table5"), find_constant("copy-rate")
    with refused(UsageError, got="memo-t5-never"):
        fit(constant, cases, ("memo-t5-never",), low=1.0, high=2.0, unfitted=1.0)
    with refused(UsageError, got="2 to 1 GB/s"):
        fit(constant, cases, SWAPPED, low=2.0, high=1.0, unfitted=1.0)
    with refused(UsageError, got="0 GB/s", wanted="d2h.all_devices"):
        fit(constant, cases, SWAPPED, low=1.0, high=2.0, unfitted=0.0)
    with refused(UsageError, got="'copyrate'", wanted="device-memory", hint="'copy-rate'"):
        find_constant("copyrate")


@pytest.mark.parametrize("name", CONSTANTS)
def test_every_constant_changes_the_profile_and_leaves_it_valid(name: str) -> None:
    _, hardware = load_cluster("a800-1x8")
    constant = CONSTANTS[name]
    changed = constant.change(hardware, 2 * constant.scale)
    assert changed != hardware
    assert msgspec.json.decode(msgspec.json.encode(changed), type=Hardware) == changed


def test_the_attention_factor_applies_to_its_system_only_and_once() -> None:
    cluster, hardware = load_cluster("a800-1x8")
    slowed = with_attention_factor(msgspec.structs.replace(hardware, system_attention={}), 2.0)

    def asked(system: str) -> Question:
        return Question(model=load_model("gpt-7b"), cluster=cluster, hardware=slowed, seq_tokens=65536, system=system)

    assert asked("memo").hardware == slowed
    once = asked("deepspeed-ulysses")
    again = replace(once, seq_tokens=4096)
    for table, measured in zip(once.hardware.attention, hardware.attention, strict=True):
        assert [row[2] for row in table.rows] == pytest.approx([row[2] / 2 for row in measured.rows])
    assert again.hardware == once.hardware


def test_device_memory_time_is_shared_by_malloc_and_free() -> None:
    _, hardware = load_cluster("a800-1x8")
    changed = with_device_memory(hardware, 0.05)
    assert changed.device_malloc_s_per_gib is not None
    assert changed.device_free_s_per_gib is not None
    assert changed.device_malloc_s_per_gib.value + changed.device_free_s_per_gib.value == pytest.approx(0.05)
