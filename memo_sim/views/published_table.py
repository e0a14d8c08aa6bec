"""Shows predictions in the arrangement of the printed table: one column per length (or alpha), errors below values.

              64k     128k     ...
memo        48.8 %   51.9 %
  error     +1.8 %   +1.8 %
full        oom !    oom                     ! the source says otherwise
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memo_sim.contract.validation import CaseReport
from memo_sim.views.text_table import percent, text_table

SHORT = {"gpu_oom": "oom", "host_oom": "host oom", "invalid": "invalid", "ok": "ok"}


@dataclass(frozen=True, slots=True)
class Cell:
    """A case's place: its table (a model on a cluster), its row and its column."""

    block: str
    row: str
    column: str
    report: CaseReport


def published_table(cells: Sequence[Cell]) -> str:
    """Return one table per block; rows and columns are in the order of first occurrence."""
    blocks = list(dict.fromkeys(c.block for c in cells))
    return "\n\n".join(_block(name, [c for c in cells if c.block == name]) for name in blocks)


def _block(name: str, cells: Sequence[Cell]) -> str:
    columns = list(dict.fromkeys(c.column for c in cells))
    rows: list[list[str | None]] = []
    for row in dict.fromkeys(c.row for c in cells):
        at = {c.column: c.report for c in cells if c.row == row}
        rows.append([row, *(_value(at[c]) if c in at else "" for c in columns)])
        if any(report.error.mfu is not None for report in at.values()):
            rows.append(["  error", *(_error(at[c]) if c in at else "" for c in columns)])
    return text_table([name, *columns], rows, "l" + "r" * len(columns))


def _value(report: CaseReport) -> str:
    predicted = report.predicted
    shown = percent(predicted.mfu) if predicted.mfu is not None else SHORT[predicted.status]
    return f"{shown} !" if report.error.status is False else str(shown)


def _error(report: CaseReport) -> str:
    return percent(report.error.mfu, signed=True) or ""
