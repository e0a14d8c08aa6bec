"""SimuMax's measured steps of Megatron-LM on eight B200, compared row by row."""

from __future__ import annotations

import pytest

from memo_sim.contract.validation import CaseReport
from memo_sim.validation.accepted import check_accepted, load_accepted
from memo_sim.validation.cases import load_cases
from memo_sim.validation.validate import validate


def test_every_row_is_predicted() -> None:
    """One test of all that is asked, so that the rows are predicted once."""
    found = validate(load_cases("simumax-b200"))
    check_accepted(found, load_accepted())
    none_was_fitted(found.cases)
    allocated_and_reserved_memory_of_every_row(found.cases)
    steps_on_the_average(found.cases)


def none_was_fitted(reports: list[CaseReport]) -> None:
    assert [report.predicted.status for report in reports] == ["ok"] * 8
    assert not any(report.fitted for report in reports)


def allocated_and_reserved_memory_of_every_row(reports: list[CaseReport]) -> None:
    for report in reports:
        assert report.error.allocated_gib == pytest.approx(0, abs=0.01), report.case
        assert report.error.reserved_gib == pytest.approx(0, abs=0.02), report.case


def steps_on_the_average(reports: list[CaseReport]) -> None:
    errors = [abs(report.error.step_ms or 0.0) for report in reports]
    assert sum(errors) / len(errors) < 0.05
    assert sum(error < 0.05 for error in errors) >= 7
