"""Gives each prediction an interval, from the errors of other predictions of the same source and system.

The other predictions are those with a measurement on which nothing was fitted. Their log(measured / predicted) is
sorted. An interval of level L leaves (1 - L) / 2 of n + 1 cases below it and as many above it; where n is too small for
that, it reaches from the smallest to the largest. The interval of a published case is made without that case.

    n = 9, L = 0.8    |x . . . . . . . x|       the smallest and the largest of nine
    n = 19            x|x . . . . . . x|x       one of nineteen below, one above

The number of cases inside their own intervals is no test: order statistics leave the same number outside for any
errors. The test is an interval made without any case of a model (``held_out``). It contains ``LEVEL`` of that model's
cases if errors are alike for all models, and fewer if each model has its own error.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import Literal

import msgspec

from memo_sim.contract.validation import CaseReport, Interval, Measured, Validation
from memo_sim.views.accuracy import JUDGED, HeldOut

LEVEL = 0.8
LEAST_CASES = 5
"""With fewer cases there is no interval: they say too little about the spread of errors."""


def judged(report: CaseReport) -> Measured | None:
    """Return the speed quantity that is both predicted and measured; None where there is none."""
    return next((q for q in JUDGED if getattr(report.error, q) is not None), None)


def log_ratio(report: CaseReport) -> float | None:
    """Return log(measured / predicted); None for a fitted case or one without a measured speed."""
    quantity = judged(report)
    return None if quantity is None or report.fitted else -log(1 + getattr(report.error, quantity))


def bounds(ratios: Sequence[float]) -> tuple[float, float] | None:
    """Return the log ratios between which ``LEVEL`` of the cases lie; None for fewer than ``LEAST_CASES``."""
    if len(ratios) < LEAST_CASES:
        return None
    ordered = sorted(ratios)
    left_out = max(0, round((len(ordered) + 1) * (1 - LEVEL) / 2 - 0.499) - 1)
    return ordered[left_out], ordered[-1 - left_out]


def with_intervals(validation: Validation) -> Validation:
    """Return the validation with an interval for each prediction of speed."""
    groups: dict[tuple[str, str], list[int]] = {}
    for i, case in enumerate(validation.cases):
        groups.setdefault((case.source, case.system), []).append(i)
    ratios = [log_ratio(case) for case in validation.cases]
    cases = list(validation.cases)
    for members in groups.values():
        for i in members:
            others = [r for j in members if j != i and (r := ratios[j]) is not None]
            cases[i] = _with_interval(cases[i], others)
    return Validation(cases=cases)


def _with_interval(case: CaseReport, others: Sequence[float]) -> CaseReport:
    found = bounds(others)
    quantity = judged(case) or next((q for q in JUDGED if getattr(case.predicted, q) is not None), None)
    if found is None or quantity is None:
        return case
    predicted = getattr(case.predicted, quantity)
    interval = Interval(
        quantity=quantity,
        low=predicted * exp(found[0]),
        high=predicted * exp(found[1]),
        level=LEVEL,
        cases=len(others),
    )
    return msgspec.structs.replace(case, interval=interval)


def held_out(validation: Validation) -> dict[str, HeldOut]:
    """Return by ``<source>/<system>`` how many errors lie in intervals that were made without their group.

    A group is the rows of one model, or of one length where all rows have the same model. A group of one row is not
    counted, because every case's own interval already leaves that case out. A group that leaves too few other rows is
    not counted either.
    """
    return {name: _held_out(cases) for name, cases in by_source_and_system(validation).items()}


def by_source_and_system(validation: Validation) -> dict[str, list[CaseReport]]:
    """Return the cases by ``<source>/<system>``."""
    groups: dict[str, list[CaseReport]] = {}
    for case in validation.cases:
        groups.setdefault(f"{case.source}/{case.system}", []).append(case)
    return groups


def _held_out(cases: Sequence[CaseReport]) -> HeldOut:
    known = [(case, ratio) for case in cases if (ratio := log_ratio(case)) is not None]
    by: Literal["model", "length"] = "model" if len({case.model for case, _ in known}) > 1 else "length"
    groups: dict[str | int, list[float]] = {}
    for case, ratio in known:
        groups.setdefault(case.model if by == "model" else case.seq_tokens, []).append(ratio)
    tried = rows = inside = 0
    for name, ratios in groups.items():
        between = bounds([ratio for other, theirs in groups.items() if other != name for ratio in theirs])
        if between is None or len(ratios) == 1:
            continue
        tried, rows = tried + 1, rows + len(ratios)
        inside += sum(between[0] <= ratio <= between[1] for ratio in ratios)
    return HeldOut(by, tried, rows, inside)
