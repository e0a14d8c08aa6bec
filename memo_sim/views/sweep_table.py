"""Shows the answers of a sweep: as rows, as a text table, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Sequence

from memo_sim.contract.goodput import Goodput
from memo_sim.contract.plain_text import in_csv, one_line
from memo_sim.contract.sweep import SweepLine
from memo_sim.contract.units import GIB, counted, format_bytes, format_seconds, format_tokens
from memo_sim.views.goodput_columns import goodput_cells, goodput_headers
from memo_sim.views.plan_table import layout_label
from memo_sim.views.rows import Row, alike, goodput_row, plan_row
from memo_sim.views.summary_text import not_read_lines
from memo_sim.views.text_table import text_table

OWN = ("model", "cluster", "system", "seq_len")
"""Values of a question that have a column of their own; the others stand together."""
HEADS = (
    *("model", "cluster", "system", "tokens", "asked", "answer", "batch", "layout"),
    *("step", "MFU %", "tokens/GPU/s", "device GiB"),
)
ALIGN = "lllrllrlrrrr"
NOTE = "batch: sequences of a step; device GiB: buffers of the plan on its fullest stage, without the reserve."
MOST_WORDS = 60
"""Characters of a reason that a table shows; the file has all of it."""


def sweep_rows(lines: Sequence[SweepLine]) -> list[Row]:
    """Return one row a question for data frames: what was asked, its status, and the best plan's figures."""
    return alike([_row(line) for line in lines])


def _row(line: SweepLine) -> Row:
    plan = plan_row(line.best)
    asked = {f"asked_{name}": _text(value) for name, value in line.question.items() if name not in OWN}
    plan |= {"plan_status": plan.pop("status", None), "plan_system": plan.pop("system", None)}
    about: Row = {"model": line.model, "cluster": line.cluster, "system": line.system, "seq_tokens": line.seq_tokens}
    why = line.failure.message.splitlines()[0] if line.failure else " ".join(line.why[:1])
    return {**about, "status": line.status, **asked, **_sums(line), **plan, "why": why, "elapsed_s": line.elapsed_s}


def _sums(line: SweepLine) -> Row:
    """Return the figures of the verdict that a plan's row does not have."""
    summary = line.summary
    if summary is None:
        return {}
    return {
        "devices": summary.devices,
        "tokens_per_step": summary.tokens_per_step,
        "device_hours_per_billion_tokens": summary.device_hours_per_billion_tokens,
        **goodput_row(summary),
        "needed_device_bytes": summary.device_memory.needed_bytes,
        "device_capacity_bytes": summary.device_memory.capacity_bytes,
    }


def _text(value: object) -> str | int | float | bool:
    if isinstance(value, list):
        return ",".join(map(str, value))
    assert isinstance(value, str | int | float)
    return value


def _shown(value: object) -> str:
    """Return a value as it is typed: ``4`` for 4.0."""
    return f"{value:g}" if isinstance(value, float) else str(_text(value))


def sweep_cells(lines: Sequence[SweepLine]) -> list[list[str | None]]:
    """Return the questions as the cells of a table below ``sweep_headers``; what all have in common is left out."""
    shared, goodputs = common(lines), _goodputs(lines)
    return [_cells(line, shared, goodputs) for line in lines]


def sweep_headers(lines: Sequence[SweepLine]) -> list[str]:
    """Return the headers of the table."""
    return [*HEADS, *goodput_headers(_goodputs(lines)), "why not"]


def _goodputs(lines: Sequence[SweepLine]) -> list[Goodput | None]:
    return [line.summary.goodput if line.summary else None for line in lines]


def _cells(line: SweepLine, shared: Collection[str], goodputs: Sequence[Goodput | None]) -> list[str | None]:
    others = " ".join(f"{n}={_shown(v)}" for n, v in line.question.items() if n not in OWN and n not in shared)
    best = line.best
    figures: list[str | None] = [None] * 6
    if best is not None:
        figures = [
            str(line.summary.tokens_per_step // line.seq_tokens) if line.summary else None,
            layout_label(best.layout),
            None if best.step_s is None else format_seconds(best.step_s),
            None if best.mfu is None else f"{100 * best.mfu:.2f}",
            None if best.tgs is None else f"{best.tgs:.1f}",
            f"{best.peak_device_bytes / GIB:.2f}",
        ]
    about = [line.model, line.cluster, line.system, format_tokens(line.seq_tokens), others or None]
    failures = goodput_cells(line.summary.goodput if line.summary else None, goodputs)
    return [*about, line.status, *figures, *failures, _why_not(line)]


def common(lines: Sequence[SweepLine]) -> dict[str, str]:
    """Return the values that several questions have in common, beside those with a column of their own."""
    if len(lines) < 2:
        return {}
    first = lines[0].question
    same = {n: v for n, v in first.items() if n not in OWN and all(line.question.get(n) == v for line in lines)}
    return {name: str(_text(value)) for name, value in same.items()}


def _why_not(line: SweepLine) -> str | None:
    """Return in short why there is no plan: what runs out and by how much, or the first words of the reason."""
    if line.best is not None:
        return None
    if line.summary is not None and line.summary.shortfall_bytes:
        memory = "host" if line.summary.status == "host_oom" else "device"
        return f"{memory} memory is short by {format_bytes(line.summary.shortfall_bytes)}"
    text = line.failure.message.splitlines()[0] if line.failure else next(iter(line.why), "")
    return text if len(text) <= MOST_WORDS else f"{text[:MOST_WORDS]}..."


def sweep_table(lines: Sequence[SweepLine]) -> str:
    """Return a table of the questions with their best plans; above it how many fit, and what all have in common."""
    count = {status: sum(line.status == status for line in lines) for status in ("fits", "does not fit", "failed")}
    told = ", ".join(f"{n} {status}" for status, n in count.items() if n)
    head = counted(len(lines), "question") + (f": {told}" if told else "")
    if shared := common(lines):
        head += f"; all with {', '.join(f'{one_line(name)}={one_line(text)}' for name, text in shared.items())}"
    notes = [NOTE, *not_read_lines(line.summary for line in lines)]
    headers = sweep_headers(lines)
    align = f"{ALIGN}{'r' * (len(headers) - len(HEADS) - 1)}l"
    return f"{head}\n\n{text_table(headers, sweep_cells(lines), align)}\n" + "\n".join(notes)


def sweep_csv(lines: Sequence[SweepLine]) -> str:
    """Return ``sweep_rows`` as CSV; a cell that a spreadsheet would compute is quoted (``plain_text.in_csv``)."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    rows = sweep_rows(lines)
    writer.writerow([in_csv(name) for name in (rows[0] if rows else {})])
    writer.writerows(["" if cell is None else in_csv(str(cell)) for cell in row.values()] for row in rows)
    return text.getvalue()
