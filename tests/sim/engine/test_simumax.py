"""SimuMax's measured steps of Megatron-LM on eight B200, compared row by row."""

from __future__ import annotations

import pytest

from memo_sim.contract.validation import CaseReport
from memo_sim.validation.cases import load_cases
from memo_sim.validation.validate import validate


@pytest.fixture(scope="module")
def reports() -> list[CaseReport]:
    return validate(load_cases("simumax-b200")).cases


def test_every_row_is_predicted_and_none_was_fitted(reports: list[CaseReport]) -> None:
    assert [report.predicted.status for report in reports] == ["ok"] * 8
    assert not any(report.fitted for report in reports)


def test_allocated_and_reserved_memory_of_every_row(reports: list[CaseReport]) -> None:
    for report in reports:
        assert report.error.allocated_gib == pytest.approx(0, abs=0.01), report.case
        assert report.error.reserved_gib == pytest.approx(0, abs=0.02), report.case


def test_steps_on_the_average(reports: list[CaseReport]) -> None:
    errors = [abs(report.error.step_ms or 0.0) for report in reports]
    assert sum(errors) / len(errors) < 0.05
    assert sum(error < 0.05 for error in errors) >= 7
