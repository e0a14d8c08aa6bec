"""Shows a figure document as a picture or as text tables.

A panel of the figure becomes one set of axes in the picture, and one table in the text: a row for every value on the
axis, a column for every line.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from memo_sim.contract import codec
from memo_sim.contract.figure import Figure, Line
from memo_sim.contract.units import format_percent, format_tokens
from memo_sim.views.palette import QUIET_TEXT
from memo_sim.views.pictures import DPI, check_kind, write_picture
from memo_sim.views.text_table import number, percent, text_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure as Picture

SIZE_IN = (8.0, 5.0)
WIDE_IN, PANEL_IN = 12.0, 3.6
"""Width of a figure with two panels per row, and the height of each panel."""
FINDING_IN, CHARACTERS_AN_INCH = 0.15, 16
"""Height of a line of findings, and how many characters fit on an inch of it."""
LINES_INSIDE = 6
"""A legend with more lines stands outside the axes."""
MOST_TICKS = 16
"""An axis with more places than this is linear, with ticks at round numbers instead of at the places."""
WIDE = 32.0
COLOURS = ("#3b76b5", "#f0a030", "#3f9b6b", "#8a63b8", "#c0504d", "#6b6b6b")
MARKERS = ("o", "s", "^", "D", "v", "P")
"""Lines differ in colour and marker, so that readers without colour vision can tell them apart; no pair repeats."""


def check_chart(path: str | Path) -> None:
    """Refuse a file that a figure cannot be written to. Called before the figure is computed.

    Raises:
        UsageError: when the file's format is unknown or the file cannot be written.
    """
    check_kind(path)
    codec.check_writable(Path(path))


def draw_chart(figure: Figure, path: str | Path) -> None:
    """Draw ``figure`` into ``path``; the name of the file decides the format.

    Raises:
        UsageError: when the file's format is unknown or the file cannot be written.
        ModuleNotFoundError: when matplotlib is not installed.
    """
    check_chart(path)
    write_picture(lambda: picture(figure), path)


def style(number: int) -> tuple[str, str]:
    """Return the colour and the marker of the figure's line number ``number``."""
    rounds, place = divmod(number, len(COLOURS))
    return COLOURS[place], MARKERS[(place + rounds) % len(MARKERS)]


def picture(figure: Figure) -> Picture:
    """Return the drawing: one panel, or rows of two panels, with the findings below."""
    from matplotlib.figure import Figure as Picture

    panels = figure.panels
    columns = 1 if len(panels) <= 1 else 2
    rows = max(1, ceil(len(panels) / columns))
    width, height = SIZE_IN if columns == 1 else (WIDE_IN, PANEL_IN * rows)
    findings = [part for text in figure.findings for part in wrap(text, int(width * CHARACTERS_AN_INCH))]
    drawn = Picture(
        figsize=(width, height + FINDING_IN * len(findings)), facecolor="white", layout="constrained", dpi=DPI
    )
    styles = {label: style(i) for i, label in enumerate(dict.fromkeys(line.label for line in figure.lines))}
    axes = [drawn.add_subplot(rows, columns, place) for place in range(1, len(panels) + 1)]
    for place, (ax, (panel, lines)) in enumerate(zip(axes, panels.items(), strict=True)):
        _draw(ax, figure, lines, styles)
        ax.set_title(panel or figure.title, fontsize=11)
        if place % columns == 0:
            ax.set_ylabel(figure.y_label)
    if columns > 1:
        drawn.suptitle(figure.title, fontsize=12)
    handles = {line.get_label(): line for ax in axes for line in ax.get_lines()}
    if columns > 1 or len(handles) > LINES_INSIDE:
        drawn.legend(handles=list(handles.values()), loc="outside right center", frameon=False)
    else:
        axes[0].legend(frameon=False)
    drawn.supxlabel("\n".join(findings), fontsize=8, color=QUIET_TEXT, x=0.01, ha="left")
    return drawn


def _draw(ax: Axes, figure: Figure, lines: list[Line], styles: dict[str, tuple[str, str]]) -> None:
    """Draw one panel."""
    from matplotlib.ticker import LogLocator

    for line in lines:
        colour, marker = styles[line.label]
        y = [float("nan") if p.y is None else p.y for p in line.points]
        ax.plot([p.x for p in line.points], y, label=line.label, color=colour, marker=marker)
    ax.set_xlabel(figure.x_label)
    places = sorted({p.x for line in lines for p in line.points})
    values = [p.y for line in figure.lines for p in line.points if p.y is not None]
    if len(places) <= MOST_TICKS:
        if _wide(places):
            ax.set_xscale("log", base=2)
            ax.minorticks_off()
            ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.set_xticks(places)
    if figure.y_kind == "number" and _wide(places) and _wide(values):
        ax.set_yscale("log", subs=())
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        ax.set_ylim(bottom=0)
        if figure.y_kind == "tokens" and values:
            ax.set_yticks(_powers(max(values)))
        _name_ticks(ax.yaxis, figure.y_kind)
    _name_ticks(ax.xaxis, figure.x_kind)
    ax.tick_params(axis="x", labelrotation=45 if figure.x_kind == "tokens" else 0)
    ax.grid(visible=True, alpha=0.3)


def _wide(values: Sequence[float]) -> bool:
    """Return whether the values differ so much that a linear axis would not show the small ones."""
    return bool(values) and min(values) > 0 and max(values) / min(values) >= WIDE


def _powers(highest: float) -> list[float]:
    """Return multiples of a power of two up to ``highest`` tokens, at most eight of them."""
    step = 2 ** ceil(log2(highest / 8))
    return [step * n for n in range(1, int(highest / step) + 1)]


def _name_ticks(axis: Axis, kind: str) -> None:
    if kind == "tokens":
        axis.set_major_formatter(lambda value, _: format_tokens(round(value)) if value > 0 else "0")
    elif kind == "fraction":
        axis.set_major_formatter(lambda value, _: format_percent(value, 0))


def chart_table(figure: Figure) -> str:
    """Return the figure as text: its numbers, the notes on single points, and the findings."""
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
