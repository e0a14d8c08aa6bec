"""How well predictions meet published measurements: errors by group and quantity, and statuses.

Rows on which a constant was fitted are counted apart from those that were only predicted. The bias is the mean signed
error; an error is predicted / expected - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memo_sim.contract.validation import CaseReport, Measured

JUDGED: tuple[Measured, ...] = ("step_ms", "mfu")
"""The quantities of speed; of those that were measured the first counts."""

QUANTITIES = ("mfu", "tgs", "step_ms", "allocated_gib", "reserved_gib", "allocation_retries")


@dataclass(frozen=True)
class Errors:
    """Errors of one quantity over ``count`` rows."""

    count: int
    bias: float
    mean_abs: float
    max_abs: float
    worst: str
    """The case with the largest error."""


@dataclass(frozen=True)
class Accuracy:
    """One group of rows, all fitted or all only predicted; ``statuses``: evaluated rows that have one to meet."""

    group: str
    fitted: bool
    rows: int
    statuses_right: int
    statuses: int
    errors: dict[str, Errors]
    """By quantity; one that no row of the group has is not there."""


@dataclass(frozen=True)
class HeldOut:
    """How many rows of groups that were held out whole lie in the interval that the other groups' errors give.

    ``rows`` is 0 where too few groups are left to hold one out.
    """

    by: str
    """What a group has in common: model or length."""
    groups: int
    rows: int
    inside: int


def summarise(cases: Sequence[CaseReport], groups: Sequence[str] | None = None) -> list[Accuracy]:
    """Return the accuracy of each group, in the order in which they first occur.

    ``groups`` names the group of each case (None: one for all). Fitted rows follow the others.
    """
    by_group: dict[str, list[CaseReport]] = {}
    for case, name in zip(cases, groups or ["all"] * len(cases), strict=True):
        by_group.setdefault(name, []).append(case)
    return [
        _accuracy(name, fitted, chosen)
        for name, members in by_group.items()
        for fitted in (False, True)
        if (chosen := [c for c in members if c.fitted == fitted])
    ]


def _accuracy(name: str, fitted: bool, cases: Sequence[CaseReport]) -> Accuracy:
    errors = {}
    for quantity in QUANTITIES:
        known = [(c.case, e) for c in cases if (e := getattr(c.error, quantity)) is not None]
        if known:
            worst = max(known, key=lambda pair: abs(pair[1]))
            errors[quantity] = Errors(
                count=len(known),
                bias=sum(e for _, e in known) / len(known),
                mean_abs=sum(abs(e) for _, e in known) / len(known),
                max_abs=abs(worst[1]),
                worst=worst[0],
            )
    # A row that could not be evaluated is no wrong prediction; its reason is listed.
    right = [c.error.status for c in cases if c.error.status is not None and c.predicted.status != "invalid"]
    return Accuracy(name, fitted, len(cases), sum(right), len(right), errors)


def judged_error(case: CaseReport) -> float | None:
    """Return the error of speed, step time before MFU; None where neither is predicted and measured."""
    return next((e for q in JUDGED if (e := getattr(case.error, q)) is not None), None)


def rank_correlation(pairs: Sequence[tuple[float | None, float | None]]) -> float | None:
    """Return Spearman's rank correlation of predicted and measured values; None for fewer than three known pairs.

    >>> rank_correlation([(1.0, 10.0), (2.0, 20.0), (3.0, 15.0)])
    0.5
    """
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if len(known) < 3:
        return None
    ranks = [_ranks([pair[side] for pair in known]) for side in (0, 1)]
    mean = (len(known) + 1) / 2

    def product(x: Sequence[float], y: Sequence[float]) -> float:
        return sum((a - mean) * (b - mean) for a, b in zip(x, y, strict=True))

    spread = product(ranks[0], ranks[0]) * product(ranks[1], ranks[1])
    return product(*ranks) / spread**0.5 if spread else None


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of every value, equal ones the mean of theirs."""
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) + 1) / 2 for v in values]
