"""Formats tables and numbers as plain text, with the same bytes on a terminal, in a pipe and in a file.

>>> print(text_table(["plan", "step"], [["memo", "57.7 s"], ["full-recompute", "69 s"]], "lr"))
plan              step
memo            57.7 s
full-recompute    69 s
"""

from __future__ import annotations

from collections.abc import Sequence

from memo_sim.contract.plain_text import one_line
from memo_sim.contract.units import format_percent

MOST_PERCENT = 100.0
"""From this fraction on, a number is shown as a factor. A signed fraction is shown as 1 plus itself."""

ALL_DIGITS = 100.0
"""From this number on, every digit before the point is shown."""

BLANK = "-"
"""Text of an empty cell: the value is unknown or does not apply."""


Cells = tuple[list[str], list[list[str | None]], str]
"""Headers, rows and alignment of a table."""


def text_table(headers: Sequence[str], rows: Sequence[Sequence[str | None]], align: str = "") -> str:
    """Return a table without a final newline.

    ``align`` has ``l`` or ``r`` for each column (missing ones are left-aligned). A cell of None is shown as ``BLANK``.
    Cells hold names from files; each stays on its line.
    """
    headers = [one_line(header) for header in headers]
    cells = [[BLANK if cell is None else one_line(cell) for cell in row] for row in rows]
    align = align.ljust(len(headers), "l")
    widths = [max(len(row[c]) for row in [headers, *cells]) for c in range(len(headers))]
    lines = []
    for row in [headers, *cells]:
        parts = [
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(row, widths, align, strict=False)
        ]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def warning_lines(warnings: Sequence[str]) -> list[str]:
    """Return the block of warnings that stands before an answer's figures; empty when there is none."""
    return ["\n".join(f"WARNING: {one_line(text)}" for text in warnings)] if warnings else []


def percent(fraction: float | None, *, digits: int = 1, signed: bool = False) -> str | None:
    """Return a fraction in percent (``53.6 %``), optionally with its sign; as a factor from 100 on (``x101``)."""
    if fraction is None:
        return None
    if abs(fraction) >= MOST_PERCENT:
        return f"x{fraction + signed:,.0f}"
    return format_percent(fraction, digits, signed=signed)


def number(value: float | None, digits: int = 1) -> str | None:
    """Return a number with ``digits`` decimals."""
    return None if value is None else f"{value:.{digits}f}"


def three_digits(value: float | None) -> str | None:
    """Return a number with three significant digits at least, without an exponent (``1,203``, ``7.03``)."""
    if value is None:
        return None
    return f"{value:,.0f}" if value >= ALL_DIGITS else f"{value:.3g}"
