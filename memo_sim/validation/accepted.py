"""Compares a validation with the accepted accuracy, and writes a new accepted accuracy on request.

The accepted accuracy is a file in the repository. A change that makes predictions worse fails the tests until
the file is written again, and reviewers see that in the change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, expm1, log1p
from pathlib import Path

from memo_sim.contract import codec
from memo_sim.contract.accuracy import Accuracies, GroupAccuracy
from memo_sim.contract.catalog import DATA
from memo_sim.contract.errors import OutOfTolerance
from memo_sim.contract.units import counted, format_percent
from memo_sim.contract.validation import CaseReport, Validation
from memo_sim.validation.intervals import (
    ERRORS,
    LEAST_CASES,
    LEVEL,
    by_source_and_system,
    errors_document,
    errors_of,
    judged,
    load_errors,
)
from memo_sim.views.accuracy import judged_error, summarise

ACCEPTED = DATA / "accuracy.json"

WHOLE = 1e-9
"""Slack for a product that is a whole number but for rounding."""

ROUNDING = 5e-4
"""A mean error may grow by this fraction (0.05 %) and still pass: it allows for the rounding in the file."""


def accuracy_of(validation: Validation) -> Accuracies:
    """Return the accuracy of every source and system in ``validation``."""
    groups = by_source_and_system(validation)
    return Accuracies(groups={name: _group(cases) for name, cases in sorted(groups.items())})


def _group(cases: Sequence[CaseReport]) -> GroupAccuracy:
    predicted = [case for case in cases if not case.fitted]
    summary = next((s for s in summarise(cases) if not s.fitted), None)
    between = bounds([-log1p(e) for case in predicted if (e := judged_error(case)) is not None])
    return GroupAccuracy(
        cases=len(predicted),
        not_evaluated=sum(case.predicted.status == "invalid" for case in predicted),
        wrong_statuses=summary.statuses - summary.statuses_right if summary else 0,
        mean_abs_error={q: round(e.mean_abs, 4) for q, e in summary.errors.items()} if summary else {},
        low=round(expm1(between[0]), 4) if between else None,
        high=round(expm1(between[1]), 4) if between else None,
        level=LEVEL if between else None,
        quantity=next((q for case in predicted if (q := judged(case))), "") if between else "",
        errors={case.case: round(e, 4) for case in predicted if (e := judged_error(case)) is not None},
    )


def bounds(ratios: Sequence[float]) -> tuple[float, float] | None:
    """Return the shortest range around 0 that holds ``LEVEL`` of n + 1 cases; None for fewer than ``LEAST_CASES``.

    Of equally short ranges it is the lowest.
    """
    if len(ratios) < LEAST_CASES:
        return None
    ordered = sorted(ratios)
    held = min(len(ordered), ceil(LEVEL * (len(ordered) + 1) - WHOLE))
    ends = [(min(0.0, low), max(0.0, high)) for low, high in zip(ordered, ordered[held - 1 :], strict=False)]
    return min(ends, key=lambda end: (end[1] - end[0], end[0]))


def load_accepted(path: Path = ACCEPTED) -> Accuracies:
    """Return the accepted accuracy.

    Raises:
        BadInput: when the file cannot be read.
    """
    return codec.read(path, Accuracies)


def accept(validation: Validation, path: Path = ACCEPTED) -> Accuracies:
    """Write the accuracy of ``validation`` as accepted; keep the groups that it does not contain. Return all groups.

    The errors that intervals come from are written beside it; errors of sources that it does not contain are kept.
    """
    known = load_accepted(path).groups if path.exists() else {}
    found = Accuracies(groups=dict(sorted((known | accuracy_of(validation).groups).items())))
    beside = path.with_name(ERRORS.name)
    mine = {case.source for case in validation.cases}
    kept = [error for error in (load_errors(beside) if beside.exists() else ()) if error.source not in mine]
    codec.write(beside, errors_document([*kept, *errors_of(validation)]))
    codec.write(path, found)
    return found


def check_accepted(validation: Validation, accepted: Accuracies) -> None:
    """Compare every group of ``validation`` with the accepted accuracy.

    If ``validation`` holds only some cases of a group, only those cases are compared.

    Raises:
        OutOfTolerance: lists everything that got worse: errors, wrong statuses, rows that are no longer evaluated.
    """
    worse = []
    for name, found in accuracy_of(validation).groups.items():
        known = accepted.groups.get(name)
        worse += [f"{name}: {what}" for what in (_worse(found, known) if known else ["no accepted accuracy"])]
    if worse:
        raise OutOfTolerance(
            "predictions are worse than the accepted accuracy",
            got="; ".join(worse),
            hint="if this is intended, memo-sim validate --all --accept writes the new accuracy",
        )


def _worse(found: GroupAccuracy, known: GroupAccuracy) -> Iterator[str]:
    """Yield what got worse. If only some cases are present, their mean speed error is compared, and nothing else."""
    if found.wrong_statuses > known.wrong_statuses:
        yield f"{found.wrong_statuses} wrong statuses, {known.wrong_statuses} accepted"
    if found.not_evaluated > known.not_evaluated:
        yield f"{counted(found.not_evaluated, 'row')} not evaluated, {known.not_evaluated} accepted"
    bounds_by_quantity = known.mean_abs_error
    errors = found.mean_abs_error
    if found.cases < known.cases:
        held = [case for case in found.errors if case in known.errors]
        errors = {"speed": _mean_abs(found, held)} if held else {}
        bounds_by_quantity = {"speed": _mean_abs(known, held)} if held else {}
    for quantity, error in errors.items():
        bound = bounds_by_quantity.get(quantity, 0.0)
        if error > bound + ROUNDING:
            yield f"mean error of {quantity} {format_percent(error, 2)}, {format_percent(bound, 2)} accepted"
    for quantity in sorted(bounds_by_quantity.keys() - errors.keys()):
        yield f"{quantity} is no longer compared"


def _mean_abs(group: GroupAccuracy, cases: Sequence[str]) -> float:
    return sum(abs(group.errors[case]) for case in cases) / len(cases)
