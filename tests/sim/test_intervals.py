"""Error intervals: from the others alone, order statistics, and what is left without one."""

from __future__ import annotations

from math import log

import pytest

from memo_sim.contract.validation import CaseError, CasePrediction, CaseReport, Expectation, Validation
from memo_sim.intervals import bounds, with_intervals, within
from memo_sim.views.accuracy import rank_correlation


def report(name: str, error: float | None, *, fitted: bool = False, system: str = "memo") -> CaseReport:
    """Return a case predicted at 100 ms and measured so that its error is ``error``."""
    measured = None if error is None else 100.0 / (1 + error)
    return CaseReport(
        case=name,
        source="s",
        system=system,
        predicted=CasePrediction(status="ok", step_ms=100.0),
        expected=Expectation(status="ok", step_ms=measured),
        error=CaseError(status=True, step_ms=error),
        fitted=fitted,
    )


def test_nine_cases_reach_from_the_least_to_the_largest_and_nineteen_leave_one_out_at_each_end() -> None:
    assert bounds([float(i) for i in range(9)]) == (0.0, 8.0)
    assert bounds([float(i) for i in range(19)]) == (1.0, 17.0)
    assert bounds([float(i) for i in range(39)]) == (3.0, 35.0)
    assert bounds([1.0, 2.0, 3.0, 4.0]) is None


def test_an_interval_is_made_of_the_other_cases_alone() -> None:
    errors = [-0.1, -0.05, 0.0, 0.05, 0.1, 1.0]
    cases = with_intervals(Validation(cases=[report(f"c{i}", e) for i, e in enumerate(errors)])).cases
    wild = cases[-1].interval
    assert wild is not None
    assert (wild.quantity, wild.cases, wild.level) == ("step_ms", 5, 0.8)
    assert (wild.low, wild.high) == (pytest.approx(100 / 1.1), pytest.approx(100 / 0.9))
    assert within(cases[-1]) is False
    # Its own error is in the others' intervals.
    assert cases[2].interval is not None
    assert cases[2].interval.low == pytest.approx(50.0)
    assert within(cases[2]) is True


def test_fitted_cases_and_other_systems_make_no_interval() -> None:
    mine = [report(f"c{i}", 0.1) for i in range(5)]
    others = [report("f", 3.0, fitted=True), *(report(f"o{i}", 5.0, system="fsdp") for i in range(5))]
    cases = with_intervals(Validation(cases=[*mine, report("open", None), *others])).cases
    asked, fitted = cases[5].interval, cases[6].interval
    assert asked is not None
    assert (asked.low, asked.high) == (pytest.approx(100 / 1.1), pytest.approx(100 / 1.1))
    assert within(cases[5]) is None
    assert fitted is not None
    assert log(fitted.high / 100) == pytest.approx(-log(1.1))
    assert cases[0].interval is None  # four others
    assert cases[-1].interval is None


def test_rank_correlation_sees_order_alone() -> None:
    assert rank_correlation([(1.0, 1.0), (2.0, 4.0), (3.0, 900.0)]) == pytest.approx(1.0)
    assert rank_correlation([(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]) == pytest.approx(-1.0)
    assert rank_correlation([(1.0, 1.0), (1.0, 1.0), (2.0, 2.0), (None, 5.0)]) == pytest.approx(1.0)
    assert rank_correlation([(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)]) is None
    assert rank_correlation([(1.0, 1.0), (2.0, None)]) is None
