"""Whether a run succeeded: no check failed, and every part compared something."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.gpu.row import Row


def failed(row: Row) -> bool:
    """Return whether a check or the calibration failed, or memo's results differ from autograd's."""
    memo = is_memo(row)
    if row.status == "error":
        return memo or row.part in ("checks", "calibrate")
    return memo and row.agrees is False


def compared(rows: Iterable[Row]) -> bool:
    """Return whether the rows of one part hold what the part is for.

    - checks: a memo plan whose losses were compared with autograd's;
    - suite: a memo plan with predicted and measured figures;
    - rivals: a memo plan and another system that both ran at one length;
    - calibrate, longest: a row that ran.
    """
    ran = [row for row in rows if row.status == "ok"]
    part = ran[0].part if ran else ""
    if part == "checks":
        return any(is_memo(row) and row.agrees is not None for row in ran)
    if part == "suite":
        return any(row.comparison is not None for row in ran)
    if part == "rivals":
        return bool({row.sequence for row in ran if is_memo(row)} & {row.sequence for row in ran if not is_memo(row)})
    return bool(ran)


def is_memo(row: Row) -> bool:
    """Return whether a row is of a memo plan, not of another system or of memo's hooks."""
    return row.rival.startswith("memo,")
