"""Fitting the copy rate: it finds a planted rate, and refuses what it cannot fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memo_sim.cases import load_cases
from memo_sim.contract.errors import UsageError
from memo_sim.contract.validation import Expectation
from memo_sim.fit import fit_copy_rate, with_copy_rate
from memo_sim.validate import validate

SWAPPED = ("memo-t5-192k-a0875", "memo-t5-192k-a1000")


def test_it_finds_a_rate_that_was_planted() -> None:
    cases = [c for c in load_cases("memo-table5") if c.case in SWAPPED]
    planted = 8.7e9
    told = validate(cases, change=lambda hardware: with_copy_rate(hardware, planted))
    cases = [
        replace(c, expected=Expectation(status="ok", mfu=r.predicted.mfu))
        for c, r in zip(cases, told.cases, strict=True)
    ]
    fit = fit_copy_rate(cases, SWAPPED, 7e9, 11e9, 10e9)
    assert fit.rate == pytest.approx(planted, rel=0.01)
    assert abs(fit.fitted.cases[1].error.mfu or 1) < abs(fit.unfitted.cases[1].error.mfu or 0)


def test_unknown_cases_and_empty_ranges_are_refused() -> None:
    cases = load_cases("memo-table5")
    with pytest.raises(UsageError, match="no such case"):
        fit_copy_rate(cases, ("memo-t5-never",), 1e9, 2e9, 1e9)
    with pytest.raises(UsageError, match="range"):
        fit_copy_rate(cases, SWAPPED, 2e9, 1e9, 1e9)
