"""How far a prediction may be off, by how far others of its kind were.

Of the predictions of one source and system whose truth is known and on which nothing was fitted, the log of
measured / predicted is sorted; an interval of level L leaves (1 - L) / 2 of n + 1 cases below and above it, and where n
is too small for that it reaches from the least to the largest. A published case's own interval is made from the others
alone.

    n = 9, L = 0.8    |x . . . . . . . x|       the least and the largest of nine
    n = 19            x|x . . . . . . x|x       one of nineteen below, one above

How many cases lie in their own intervals says nothing: order statistics leave as many outside whatever the errors are.
What can fail is an interval that has seen none of a model's cases (``held_out``): it holds ``LEVEL`` of them where
errors of one model are like those of another, and fewer where each model has an error of its own.
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
"""Fewer say nothing of how errors scatter."""


def judged(report: CaseReport) -> Measured | None:
    """Return the quantity of speed that is both predicted and measured; None where neither is."""
    return next((q for q in JUDGED if getattr(report.error, q) is not None), None)


def log_ratio(report: CaseReport) -> float | None:
    """Return log(measured / predicted) of a case that nothing was fitted on, None where there is none."""
    quantity = judged(report)
    return None if quantity is None or report.fitted else -log(1 + getattr(report.error, quantity))


def bounds(ratios: Sequence[float]) -> tuple[float, float] | None:
    """Return the log ratios between which ``LEVEL`` of such cases lie; None for fewer than ``LEAST_CASES``."""
    if len(ratios) < LEAST_CASES:
        return None
    ordered = sorted(ratios)
    left_out = max(0, round((len(ordered) + 1) * (1 - LEVEL) / 2 - 0.499) - 1)
    return ordered[left_out], ordered[-1 - left_out]


def with_intervals(validation: Validation) -> Validation:
    """Return the reports, each prediction of speed with its interval."""
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
    """Return by ``<source>/<system>`` how intervals hold the errors of groups that they were not made from.

    A group is a model's rows; of one length, where all rows are one model's. Groups of a single row are left out of the
    count: to hold those out is what every case's own interval does. So are those that leave too few others.
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
