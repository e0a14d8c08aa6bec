"""Computes the accuracy of predictions against published measurements: errors by group and quantity, and statuses.

An error is predicted / expected - 1; the bias is the mean signed error. Rows on which a constant was fitted are counted
apart from rows that were only predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memo_sim.contract.validation import CaseReport, Measured

JUDGED: tuple[Measured, ...] = ("step_ms", "mfu", "tgs")
"""Speed quantities; the first one that was measured is judged."""

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
    """One group of rows, all fitted or all only predicted; ``statuses`` counts evaluated rows with a measured one."""

    group: str
    fitted: bool
    rows: int
    statuses_right: int
    statuses: int
    errors: dict[str, Errors]
    """By quantity; only those that some row of the group has."""


@dataclass(frozen=True)
class HeldOut:
    """The test of one class's intervals: rows of held-out sources in the interval made from the other sources.

    ``rows`` is 0 where too few rows are left after any source is held out.
    """

    name: str
    """The class (``class_label``)."""
    sources: int
    known: int
    """Rows of the class."""
    held_out: int
    """Sources that were held out."""
    rows: int
    """Rows of the sources that were held out."""
    inside: int
    by_source: float
    """Mean over the held-out sources of the share of a source's rows inside: what the intervals promise to be 0.8."""
    median_width: float
    """Median of (high - low) / predicted step time."""
    error: float
    """80 % of the held-out rows have a smaller |measured / predicted step time - 1|."""


def class_label(generation: str, framework: str, *, retries: bool) -> str:
    """Return the name of a class of predictions: ``Ampere, megatron class with allocation retries``."""
    return f"{generation}, {framework} class{' with allocation retries' if retries else ''}"


def summarise(cases: Sequence[CaseReport], groups: Sequence[str] | None = None) -> list[Accuracy]:
    """Return the accuracy of each group, in the order of first occurrence.

    ``groups`` names the group of each case (None: one group for all). A group's fitted rows follow its other rows.
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
    # A row that could not be evaluated is not a wrong prediction; its reason is listed.
    right = [c.error.status for c in cases if c.error.status is not None and c.predicted.status != "invalid"]
    return Accuracy(name, fitted, len(cases), sum(right), len(right), errors)


def judged_error(case: CaseReport) -> float | None:
    """Return the error of step time, or else of MFU or TGS; None where none is both predicted and measured."""
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
    """Return the rank of every value; equal values share the mean of their ranks."""
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) + 1) / 2 for v in values]
