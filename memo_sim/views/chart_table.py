"""A figure as text: a table for each panel, one row for every value on the axis, one column for every line."""

from __future__ import annotations

from memo_sim.contract.figure import Figure, Line
from memo_sim.contract.units import format_tokens
from memo_sim.views.text_table import number, percent, text_table


def chart_table(figure: Figure) -> str:
    """Return the figure's numbers, how each was come by, and what is read off it."""
    tables = [f"{panel}\n{_table(figure, lines)}".lstrip("\n") for panel, lines in figure.panels.items()]
    notes = [
        f"{line.name}, {_value(p.x, figure.x_kind)}: {p.note}" for line in figure.lines for p in line.points if p.note
    ]
    blocks = [f"Figure {figure.name}. {figure.title}; {figure.y_label}", *tables, "\n".join(notes), *figure.findings]
    return "\n\n".join(block for block in blocks if block)


def _table(figure: Figure, lines: list[Line]) -> str:
    places = sorted({p.x for line in lines for p in line.points})
    values = [{p.x: p for p in line.points} for line in lines]
    rows: list[list[str | None]] = [
        [_value(x, figure.x_kind), *(_value(points[x].y, figure.y_kind) if x in points else None for points in values)]
        for x in places
    ]
    return text_table([figure.x_label, *(line.label for line in lines)], rows, "r" * (1 + len(values)))


def _value(value: float | None, kind: str) -> str | None:
    if value is None:
        return None
    if kind == "tokens":
        return format_tokens(round(value))
    return percent(value) if kind == "fraction" else number(value, 0 if value == round(value) else 1)
