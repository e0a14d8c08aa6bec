"""A table as HTML, for notebooks. Names come from files: every cell is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from memo_sim.contract.plain_text import one_line
from memo_sim.views.text_table import BLANK


def html_table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str | None]]) -> str:
    """Return a table; a cell of None is shown as ``BLANK``, and each line of the caption stands on its own."""
    lines = "<br>".join(map(_escaped, caption.splitlines()))
    head = "".join(f"<th>{_escaped(name)}</th>" for name in heads)
    body = "".join(
        f"<tr>{''.join(f'<td>{BLANK if cell is None else _escaped(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<table><caption>{lines}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def rows_as_html(
    caption: str, rows: Sequence[Mapping[str, str | float | None]], names: Sequence[str] | None = None
) -> str:
    """Return rows for data frames as a table: all their columns, or those of ``names``."""
    shown = list(names or (rows[0] if rows else []))
    return html_table(caption, shown, [[_cell(row[name]) for name in shown] for row in rows])


def _cell(value: str | float | None) -> str | None:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else None if value is None else str(value)


def _escaped(text: str) -> str:
    return escape(one_line(text))
