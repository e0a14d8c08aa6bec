"""A table as HTML, for notebooks. Names come from files: every cell is escaped."""

from __future__ import annotations

from collections.abc import Sequence
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


def _escaped(text: str) -> str:
    return escape(one_line(text))
