"""Holds a validation against the accuracy that was accepted, and accepts another when told to.

The accepted accuracy is a file in the repository: a change that makes a case set worse fails the tests until somebody
writes the file anew, which shows in the change itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import expm1
from pathlib import Path

from memo_sim.contract import codec
from memo_sim.contract.accuracy import Accuracies, GroupAccuracy
from memo_sim.contract.catalog import DATA
from memo_sim.contract.errors import OutOfTolerance
from memo_sim.contract.units import counted
from memo_sim.contract.validation import CaseReport, Validation
from memo_sim.validation.intervals import LEVEL, bounds, by_source_and_system, judged, log_ratio
from memo_sim.views.accuracy import judged_error, summarise

ACCEPTED = DATA / "accuracy.json"

ROUNDING = 5e-4
"""By how much a mean error may grow without being worse: a twentieth of a percent, what the file is rounded to."""


def accuracy_of(validation: Validation) -> Accuracies:
    """Return the accuracy of every source and system in ``validation``."""
    groups = by_source_and_system(validation)
    return Accuracies(groups={name: _group(cases) for name, cases in sorted(groups.items())})


def _group(cases: Sequence[CaseReport]) -> GroupAccuracy:
    predicted = [case for case in cases if not case.fitted]
    summary = next((s for s in summarise(cases) if not s.fitted), None)
    between = bounds([ratio for case in predicted if (ratio := log_ratio(case)) is not None])
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


def load_accepted(path: Path = ACCEPTED) -> Accuracies:
    """Return the accepted accuracy.

    Raises:
        BadInput: when the file cannot be read.
    """
    return codec.read(path, Accuracies)


def accept(validation: Validation, path: Path = ACCEPTED) -> Accuracies:
    """Write the accuracy of ``validation`` as accepted, beside that of the groups it does not hold; return it all."""
    known = load_accepted(path).groups if path.exists() else {}
    found = Accuracies(groups=dict(sorted((known | accuracy_of(validation).groups).items())))
    codec.write(path, found)
    return found


def check_accepted(validation: Validation, accepted: Accuracies) -> None:
    """Hold every group of ``validation`` against the accepted accuracy; of a part of a group, against that part's.

    Raises:
        OutOfTolerance: with everything that grew: errors, wrong statuses, rows that are not evaluated any more.
    """
    worse = []
    for name, found in accuracy_of(validation).groups.items():
        known = accepted.groups.get(name)
        worse += [f"{name}: {what}" for what in (_worse(found, known) if known else ["no accuracy was accepted"])]
    if worse:
        raise OutOfTolerance(
            "predictions are worse than what was accepted",
            got="; ".join(worse),
            hint="memo-sim validate --all --accept writes the accuracy anew, when that is meant",
        )


def _worse(found: GroupAccuracy, known: GroupAccuracy) -> Iterator[str]:
    """Yield what grew; the mean errors of a part of the cases are compared over that part, of speed alone."""
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
            yield f"mean error of {quantity} {error:.2%}, {bound:.2%} accepted"
    for quantity in sorted(bounds_by_quantity.keys() - errors.keys()):
        yield f"{quantity} is not compared any more"


def _mean_abs(group: GroupAccuracy, cases: Sequence[str]) -> float:
    return sum(abs(group.errors[case]) for case in cases) / len(cases)
