"""Shows the answers of a sweep: as rows, as a text table, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from memo_sim.contract.plain_text import in_csv, one_line
from memo_sim.contract.sweep import SweepLine
from memo_sim.contract.units import GIB, counted, format_seconds, format_tokens
from memo_sim.views.plan_table import layout_label
from memo_sim.views.rows import Row, alike, plan_row
from memo_sim.views.text_table import text_table

OWN = ("model", "cluster", "system", "seq_len")
"""Values of a question that have a column of their own; the others stand together."""
HEADS = (
    "model",
    "cluster",
    "system",
    "tokens",
    "asked",
    "answer",
    "layout",
    "step",
    "MFU %",
    "tokens/GPU/s",
    "device GiB",
)
ALIGN = "lllrlllrrrr"


def sweep_rows(lines: Sequence[SweepLine]) -> list[Row]:
    """Return one row a question for data frames: what was asked, its status, and the best plan's figures."""
    return alike([_row(line) for line in lines])


def _row(line: SweepLine) -> Row:
    plan = plan_row(line.best)
    asked = {f"asked_{name}": _text(value) for name, value in line.question.items() if name not in OWN}
    plan |= {"plan_status": plan.pop("status", None), "plan_system": plan.pop("system", None)}
    about: Row = {"model": line.model, "cluster": line.cluster, "system": line.system, "seq_tokens": line.seq_tokens}
    why = line.failure.message.splitlines()[0] if line.failure else " ".join(line.why[:1])
    return {**about, "status": line.status, **asked, **plan, "why": why, "elapsed_s": line.elapsed_s}


def _text(value: object) -> str | int | float | bool:
    if isinstance(value, list):
        return ",".join(map(str, value))
    assert isinstance(value, str | int | float)
    return value


def sweep_cells(line: SweepLine) -> list[str | None]:
    """Return one question as the cells of a table with ``HEADS``."""
    others = " ".join(f"{name}={_text(value)}" for name, value in line.question.items() if name not in OWN)
    best = line.best
    figures: list[str | None] = [None] * 5
    if best is not None:
        figures = [
            layout_label(best.layout),
            None if best.step_s is None else format_seconds(best.step_s),
            None if best.mfu is None else f"{100 * best.mfu:.2f}",
            None if best.tgs is None else f"{best.tgs:.1f}",
            f"{best.peak_device_bytes / GIB:.2f}",
        ]
    about = [line.model, line.cluster, line.system, format_tokens(line.seq_tokens), others or None]
    return [*about, line.status, *figures]


def sweep_table(lines: Sequence[SweepLine]) -> str:
    """Return a table of the questions with their best plans, and below it why questions failed."""
    count = {status: sum(line.status == status for line in lines) for status in ("fits", "does not fit", "failed")}
    head = f"{counted(len(lines), 'question')}: " + ", ".join(f"{n} {status}" for status, n in count.items() if n)
    table = text_table(HEADS, [sweep_cells(line) for line in lines], ALIGN)
    reasons = dict.fromkeys(one_line(line.failure.message.splitlines()[0]) for line in lines if line.failure)
    return "\n\n".join([head, table, *(["failed:\n" + "\n".join(f"- {text}" for text in reasons)] if reasons else [])])


def sweep_csv(lines: Sequence[SweepLine]) -> str:
    """Return ``sweep_rows`` as CSV; a cell that a spreadsheet would compute is quoted (``plain_text.in_csv``)."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    rows = sweep_rows(lines)
    writer.writerow([in_csv(name) for name in (rows[0] if rows else {})])
    writer.writerows(["" if cell is None else in_csv(str(cell)) for cell in row.values()] for row in rows)
    return text.getvalue()
