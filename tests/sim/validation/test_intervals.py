"""Error intervals: made from the other cases by order statistics; cases that get none."""

from __future__ import annotations

from math import log

import msgspec
import pytest

from memo_sim.contract.validation import CaseError, CasePrediction, CaseReport, Expectation, Validation
from memo_sim.validation.intervals import bounds, held_out, with_intervals
from memo_sim.views.accuracy import HeldOut, rank_correlation


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


def test_nine_cases_give_their_range_and_nineteen_leave_one_out_at_each_end() -> None:
    assert bounds([float(i) for i in range(9)]) == (0.0, 8.0)
    assert bounds([float(i) for i in range(19)]) == (1.0, 17.0)
    assert bounds([float(i) for i in range(39)]) == (3.0, 35.0)
    assert bounds([1.0, 2.0, 3.0, 4.0]) is None


def test_an_interval_is_made_from_the_other_cases_only() -> None:
    errors = [-0.1, -0.05, 0.0, 0.05, 0.1, 1.0]
    cases = with_intervals(Validation(cases=[report(f"c{i}", e) for i, e in enumerate(errors)])).cases
    wild = cases[-1].interval
    assert wild is not None
    assert (wild.quantity, wild.cases, wild.level) == ("step_ms", 5, 0.8)
    assert (wild.low, wild.high) == (pytest.approx(100 / 1.1), pytest.approx(100 / 0.9))
    assert cases[-1].expected.step_ms == 50.0
    # Its own error is in the others' intervals.
    assert cases[2].interval is not None
    assert cases[2].interval.low == pytest.approx(50.0)


def test_fitted_cases_and_other_systems_make_no_interval() -> None:
    mine = [report(f"c{i}", 0.1) for i in range(5)]
    others = [report("f", 3.0, fitted=True), *(report(f"o{i}", 5.0, system="fsdp") for i in range(5))]
    cases = with_intervals(Validation(cases=[*mine, report("open", None), *others])).cases
    asked, fitted = cases[5].interval, cases[6].interval
    assert asked is not None
    assert (asked.low, asked.high) == (pytest.approx(100 / 1.1), pytest.approx(100 / 1.1))
    assert fitted is not None
    assert log(fitted.high / 100) == pytest.approx(-log(1.1))
    assert cases[0].interval is None  # four others
    assert cases[-1].interval is None


def of(model: str, seq_tokens: int, *errors: float) -> list[CaseReport]:
    cases = (report(f"{model}-{seq_tokens}-{n}", error) for n, error in enumerate(errors))
    return [msgspec.structs.replace(case, model=model, seq_tokens=seq_tokens) for case in cases]


SPREAD = (-0.04, -0.03, -0.02, -0.01, 0.0, 0.01, 0.02, 0.03, 0.04)


def test_held_out_models_show_errors_that_own_intervals_cannot_show() -> None:
    alike = Validation(cases=[*of("a", 1, *SPREAD), *of("b", 1, *(e + 0.005 for e in SPREAD))])
    apart = Validation(cases=[*of("a", 1, *SPREAD), *of("b", 1, *(e + 0.5 for e in SPREAD))])

    def inside_their_own(validation: Validation) -> int:
        cases = with_intervals(validation).cases
        return sum(c.interval.low <= c.expected.step_ms <= c.interval.high for c in cases)

    assert inside_their_own(alike) == inside_their_own(apart) == 16
    assert held_out(alike) == {"s/memo": HeldOut("model", 2, 18, 16)}
    assert held_out(apart) == {"s/memo": HeldOut("model", 2, 18, 0)}


def test_lengths_are_held_out_where_there_is_one_model() -> None:
    found = held_out(Validation(cases=[*of("a", 1, *SPREAD), *of("a", 2, 0.0, 0.02, 0.5), *of("a", 3, 0.0)]))
    # Without the first length too few rows are left, and the third length has only one row.
    assert found == {"s/memo": HeldOut("length", 1, 3, 2)}


def test_too_few_groups_give_no_count() -> None:
    single = Validation(cases=[c for n, error in enumerate(SPREAD) for c in of("a", n, error)])
    assert held_out(single) == {"s/memo": HeldOut("length", 0, 0, 0)}
    short = Validation(cases=[*of("a", 1, *SPREAD[:4]), *of("b", 1, *SPREAD[:4])])
    assert held_out(short)["s/memo"].rows == 0
    fitted = [report(f"f{n}", error, fitted=True) for n, error in enumerate(SPREAD)]
    assert held_out(Validation(cases=fitted))["s/memo"].rows == 0


def test_rank_correlation_depends_on_order_only() -> None:
    assert rank_correlation([(1.0, 1.0), (2.0, 4.0), (3.0, 900.0)]) == pytest.approx(1.0)
    assert rank_correlation([(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]) == pytest.approx(-1.0)
    assert rank_correlation([(1.0, 1.0), (1.0, 1.0), (2.0, 2.0), (None, 5.0)]) == pytest.approx(1.0)
    assert rank_correlation([(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)]) is None
    assert rank_correlation([(1.0, 1.0), (2.0, None)]) is None
