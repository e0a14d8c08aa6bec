"""Published tables predicted, each prediction at its place in the table that was printed."""

from __future__ import annotations

from memo_sim.contract.errors import UsageError, did_you_mean
from memo_sim.contract.progress import Progress
from memo_sim.contract.units import format_tokens
from memo_sim.contract.validation import CaseReport, Validation
from memo_sim.validation.cases import Case, CaseQuestion, load_cases
from memo_sim.validation.validate import validate
from memo_sim.views.published_table import Cell

TABLES = {"table3": "memo-table3", "table4": "memo-table4", "table5": "memo-table5"}
"""MEMO's tables, and the case files that hold their rows."""

VARIANTS = {"full": "full recompute", "tokenwise": "token-wise", "none": "keep", "selective": "selective recompute"}


def published(name: str, *, progress: Progress | None = None) -> tuple[Validation, list[Cell]]:
    """Return the validation of the table called ``name``, and the place of each of its cases.

    Raises:
        UsageError: when there is no such table.
    """
    if name not in TABLES:
        raise UsageError("no such table", got=repr(name), wanted=", ".join(TABLES), hint=did_you_mean(name, TABLES))
    cases = load_cases(TABLES[name])
    report = validate(cases, progress=progress)
    return report, cells(cases, report.cases)


def cells(cases: list[Case], reports: list[CaseReport]) -> list[Cell]:
    """Return each case's place: lengths are columns, but where alpha is given it is, and lengths are rows."""
    return [_cell(case.question, report) for case, report in zip(cases, reports, strict=True)]


def _cell(asked: CaseQuestion, report: CaseReport) -> Cell:
    length, block = format_tokens(asked.seq_tokens), f"{asked.model} on {asked.cluster}"
    if asked.alpha is not None:
        return Cell(block, length, f"{asked.alpha:g}", report)
    return Cell(block, _row(asked), length, report)


def _row(asked: CaseQuestion) -> str:
    """Return what a table's row is called: the system, and how its memory is served where that is what is compared."""
    if "recompute" not in asked.words:
        return asked.system
    plan = {"yes": ", planned memory", "no": ", caching allocator"}.get(asked.words.get("memory_plan", ""), "")
    return VARIANTS[asked.words["recompute"]] + plan
