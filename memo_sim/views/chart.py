"""A figure as a picture: its lines, with markers where values are and gaps where none is."""

from __future__ import annotations

import io
from math import ceil, log2
from pathlib import Path
from typing import TYPE_CHECKING

from memo_sim.contract import codec
from memo_sim.contract.errors import UsageError
from memo_sim.contract.figure import Figure
from memo_sim.contract.units import format_tokens
from memo_sim.views.palette import QUIET_TEXT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure as Picture

FORMATS = (".png", ".svg", ".pdf")
DPI = 150
SIZE_IN = (8.0, 5.0)
COLOURS = ("#3b76b5", "#f0a030", "#3f9b6b", "#8a63b8", "#c0504d")
MARKERS = ("o", "s", "^", "D", "v")
"""Lines differ in colour and marker, so that they are told apart without colour vision too; no pair comes twice."""


def check_chart(path: str | Path) -> None:
    """Refuse a file that a figure cannot be drawn into, before the figure is computed.

    Raises:
        UsageError: when the file's kind or place is not possible.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise UsageError("not a kind of picture", where=str(path), got=repr(suffix), wanted=", ".join(FORMATS))
    codec.check_writable(Path(path))


def draw_chart(figure: Figure, path: str | Path) -> None:
    """Draw ``figure`` into ``path``; the name of the file decides the format.

    Raises:
        UsageError: when the file's kind or place is not possible.
        ModuleNotFoundError: when matplotlib is not installed.
    """
    check_chart(path)
    suffix = Path(path).suffix.lower()
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "memo"}):
        raw = io.BytesIO()
        stamp = {".png": "Software", ".svg": "Date", ".pdf": "CreationDate"}[suffix]
        _picture(figure).savefig(raw, format=suffix[1:], dpi=DPI, metadata={stamp: None})
    codec.write_bytes(path, raw.getvalue())


def style(number: int) -> tuple[str, str]:
    """Return the colour and the marker of a line, by its place among the figure's."""
    rounds, place = divmod(number, len(COLOURS))
    return COLOURS[place], MARKERS[(place + rounds) % len(MARKERS)]


def _picture(figure: Figure) -> Picture:
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=SIZE_IN, facecolor="white", layout="constrained")
    ax: Axes = picture.add_subplot()
    for i, line in enumerate(figure.lines):
        colour, marker = style(i)
        y = [float("nan") if p.y is None else p.y for p in line.points]
        x = [p.x for p in line.points]
        ax.plot(x, y, label=line.label, color=colour, marker=marker)
    ax.set_title(figure.title, fontsize=11)
    ax.set_xlabel(figure.x_label)
    ax.set_ylabel(figure.y_label)
    ax.set_ylim(bottom=0)
    ax.set_xticks(sorted({p.x for line in figure.lines for p in line.points}))
    values = [p.y for line in figure.lines for p in line.points if p.y is not None]
    if figure.y_kind == "tokens" and values:
        ax.set_yticks(_powers(max(values)))
    _name_ticks(ax.xaxis, figure.x_kind)
    _name_ticks(ax.yaxis, figure.y_kind)
    ax.tick_params(axis="x", labelrotation=45 if figure.x_kind == "tokens" else 0)
    ax.grid(visible=True, alpha=0.3)
    ax.legend(frameon=False)
    picture.supxlabel("\n".join(figure.findings), fontsize=8, color=QUIET_TEXT, x=0.01, ha="left")
    return picture


def _powers(highest: float) -> list[float]:
    """Return multiples of a power of two up to ``highest`` tokens, eight at most."""
    step = 2 ** ceil(log2(highest / 8))
    return [step * n for n in range(1, int(highest / step) + 1)]


def _name_ticks(axis: Axis, kind: str) -> None:
    if kind == "tokens":
        axis.set_major_formatter(lambda value, _: format_tokens(round(value)) if value > 0 else "0")
    elif kind == "fraction":
        axis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
