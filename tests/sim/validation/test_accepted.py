"""The accepted accuracy: no case set may become worse, and only ``accept`` changes it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memo_sim.contract.errors import OutOfTolerance
from memo_sim.contract.validation import CaseError, CasePrediction, CaseReport, Expectation, Validation
from memo_sim.validation.accepted import accept, accuracy_of, bounds, check_accepted, load_accepted
from memo_sim.validation.cases import Case, list_case_files, load_cases
from memo_sim.validation.intervals import LEVEL
from memo_sim.validation.validate import validate
from tests.refusals import refused

SLOW = {"memo-table3", "vtrain-multi", "korthikanti", "mcore-fp8"}
"""These sets take minutes: layouts are searched, or many stages and micro-batches are simulated."""
IN_PART = {"vtrain-single": 6, "mpt-a100": 4, "mpt-h100": 4, "internevo": 4, "trl": 4, "nemo-fp8": 4}
"""Sets of rows that are alike: the default run checks every so many of them."""


ELSEWHERE = {"simumax-b200"}
"""Held by a test of its own, ``test_simumax.py``, which asks more of the same predictions."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow if n in SLOW or n in IN_PART else ())
        for n in list_case_files()
        if n not in ELSEWHERE
    ],
)
def test_no_case_set_is_worse_than_accepted(name: str) -> None:
    cases = load_cases(name)
    found = validate(cases, jobs=2 if name in SLOW else 1)
    check_accepted(found, load_accepted())
    if name == "memo-table4":
        table_4_without_a_memory_plan(cases, found.cases)


def table_4_without_a_memory_plan(cases: list[Case], reports: list[CaseReport]) -> None:
    rows = zip(cases, reports, strict=True)
    found = {c.question.seq_tokens // 1024: r for c, r in rows if c.question.words.get("memory_plan") == "no"}
    assert [r.predicted.status for r in found.values()] == ["ok"] * 4 + ["gpu_oom"] * 4
    assert all(r.error.status for r in found.values())
    # MEMO 5.2 prints 6 and 16; a factor of two is accepted.
    assert {k: r.expected.allocation_retries for k, r in found.items() if r.expected.allocation_retries} == {
        128: 6,
        256: 16,
    }
    for length in (128, 256):
        error = found[length].error.allocation_retries
        assert error is not None
        assert 0.5 <= 1 + error <= 2


def rows_of(name: str, system: str, model: str = "") -> list[Case]:
    rows = [c for c in load_cases(name) if c.question.system == system]
    return [c for c in rows if model in ("", c.question.model)]


def every(name: str, step: int) -> list[Case]:
    return load_cases(name)[::step]


MEGATRON = (4, 128, 640)
"""Thousands of tokens, for 7B only: from 64K on, each of 30B's rows takes up to a minute."""
MOST_STAGES = 8
"""Each row with more stages takes up to ten seconds."""
HELD = {
    "memo-7b": lambda: rows_of("memo-table3", "memo", "gpt-7b")[::4],
    "memo-30b": lambda: rows_of("memo-table3", "memo", "gpt-30b")[1::6],
    "deepspeed-ulysses": lambda: rows_of("memo-table3", "deepspeed-ulysses")[::6],
    "megatron-lm": lambda: [
        c for c in rows_of("memo-table3", "megatron-lm", "gpt-7b") if c.question.seq_tokens >> 10 in MEGATRON
    ],
    "korthikanti": lambda: [c for c in rows_of("korthikanti", "megatron-lm") if c.question.integers["pp"] == 1],
    "vtrain-multi": lambda: [
        c for c in rows_of("vtrain-multi", "megatron-lm") if c.question.integers["pp"] <= MOST_STAGES
    ][::4],
    "mcore-fp8": lambda: rows_of("mcore-fp8", "megatron-lm")[:1],
    **{name: partial(every, name, step) for name, step in IN_PART.items()},
}
"""Rows of the other sets that the default run checks: some of MEMO's, and a few others that take seconds."""


@pytest.mark.parametrize("rows", HELD.values(), ids=HELD.keys())
def test_rows_of_the_slow_sets_are_checked_in_the_default_run(rows: Callable[[], list[Case]]) -> None:
    check_accepted(validate(rows()), load_accepted())


def test_every_case_set_and_system_has_an_accepted_accuracy() -> None:
    groups = {f"{c.source}/{c.question.system}" for name in list_case_files() for c in load_cases(name)}
    assert set(load_accepted().groups) == groups


def report(name: str, error: float, *, right: bool = True, status: str = "ok", fitted: bool = False) -> CaseReport:
    return CaseReport(
        case=name,
        source="s",
        system="memo",
        predicted=CasePrediction(status=status, mfu=0.5),  # type: ignore[arg-type]
        expected=Expectation(status="ok", mfu=0.5 / (1 + error)),
        error=CaseError(status=right, mfu=error),
        fitted=fitted,
    )


GOOD = [report(f"c{i}", error) for i, error in enumerate((-0.02, -0.01, 0.0, 0.01, 0.02))]


def test_an_accepted_accuracy_is_read_back_and_passes_its_own_check(tmp_path: Path) -> None:
    path, found = tmp_path / "accuracy.json", Validation(cases=GOOD)
    group = accept(found, path).groups["s/memo"]
    assert (group.cases, group.wrong_statuses, group.not_evaluated) == (5, 0, 0)
    assert group.mean_abs_error == {"mfu": 0.012}
    assert (group.low, group.high) == (-0.0196, 0.0204)
    assert load_accepted(path) == accuracy_of(found)
    check_accepted(found, load_accepted(path))
    check_accepted(Validation(cases=GOOD[1:4]), load_accepted(path))


def test_some_cases_are_compared_with_the_same_cases(tmp_path: Path) -> None:
    accept(Validation(cases=GOOD), tmp_path / "a.json")
    still = report("c2", 0.02)  # within the mean of all, but this row was right
    with refused(OutOfTolerance, got=("s/memo", "speed 1.50 %", "0.50 %")):
        check_accepted(Validation(cases=[GOOD[1], still]), load_accepted(tmp_path / "a.json"))


@pytest.mark.parametrize(
    ("worse", "grew"),
    [
        (report("c5", 0.5), ("mfu 9.33 %", "1.20 %")),
        (report("c5", 0.0, right=False), ("1 wrong status", "0")),
        (msgspec.structs.replace(report("c5", 0.0, status="invalid"), error=CaseError()), ("1 row not", "0")),
    ],
)
def test_everything_that_got_worse_is_named(tmp_path: Path, worse: CaseReport, grew: tuple[str, str]) -> None:
    accept(Validation(cases=GOOD), tmp_path / "a.json")
    with refused(OutOfTolerance, got=("s/memo", *grew), hint="--accept"):
        check_accepted(Validation(cases=[*GOOD, worse]), load_accepted(tmp_path / "a.json"))


def test_fitted_rows_change_nothing(tmp_path: Path) -> None:
    accept(Validation(cases=GOOD), tmp_path / "a.json")
    check_accepted(Validation(cases=[*GOOD, report("f", 3.0, fitted=True)]), load_accepted(tmp_path / "a.json"))


def test_a_group_without_accepted_accuracy_fails_and_accepting_it_keeps_the_others(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    accept(Validation(cases=GOOD), path)
    other = [msgspec.structs.replace(c, system="fsdp") for c in GOOD]
    with refused(OutOfTolerance, got="s/fsdp", hint="--accept"):
        check_accepted(Validation(cases=other), load_accepted(path))
    assert set(accept(Validation(cases=other), path).groups) == {"s/fsdp", "s/memo"}


class TestBounds:
    """The range that holds four fifths of one source's errors."""

    def test_it_is_the_shortest_range_around_zero(self) -> None:
        assert bounds([-0.9, -0.02, -0.01, 0.0, 0.01, 0.02, 0.03, 0.04, 0.05]) == (-0.02, 0.05)
        assert bounds([-0.02, -0.01, 0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.9]) == (-0.02, 0.05)
        assert bounds([n / 100 for n in range(-10, 10)]) == (-0.1, 0.06)  # of several, the lowest
        assert bounds([-0.5, 0.1, 0.1, 0.1, 0.2]) == (-0.5, 0.2)
        assert bounds([1.0, 2.0, 3.0, 4.0]) is None

    @given(st.lists(st.floats(-1, 1), min_size=5, max_size=60))
    def test_it_holds_zero_and_four_fifths_of_all_rows_and_one(self, ratios: list[float]) -> None:
        found = bounds(ratios)
        assert found is not None
        low, high = found
        assert low <= 0 <= high
        inside = sum(low <= ratio <= high for ratio in ratios)
        assert inside >= min(len(ratios), LEVEL * (len(ratios) + 1) - 1e-9)
