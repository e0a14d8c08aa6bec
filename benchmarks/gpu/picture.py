"""Draws the rows: tokens per second of every system by length, and predicted / measured of every point."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu.row import Row
from memo_sim.contract.units import format_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_IN, HEIGHT_IN, DPI = 13.0, 5.2, 130
TARGET = 0.05
"""Target accuracy of a step and of a copy lane; the picture shows it as a band."""
MEMO_COLOURS = ("#b8401c", "#f2b75f", "#d9603b", "#e58fa6", "#8c4a00", "#f0a030")
RIVAL_COLOURS = ("#3b76b5", "#7fb8d6", "#3f9b6b", "#8a63b8", "#9aa5b1", "#c79b6b", "#6aa9a5", "#5c5c5c")
MARKS = {"step_s": "o", "peak_device_bytes": "s", "d2h": "v", "h2d": "^"}
LABELS = {"step_s": "step", "peak_device_bytes": "peak device memory", "d2h": "d2h lane", "h2d": "h2d lane"}


def draw(rows: list[Row], path: Path) -> None:
    """Draw the rows that ran, and save the picture to ``path``.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _speeds(left, [row for row in rows if row.part == "rivals" and row.tokens_per_s])
    _ratios(right, [row for row in rows if row.part == "suite" and row.comparison])
    figure.savefig(path, dpi=DPI)


def _speeds(axes: Axes, rows: list[Row]) -> None:
    axes.set_title("tokens per second, same layers and data")
    lengths = sorted({row.sequence for row in rows})
    systems = list(dict.fromkeys(row.rival for row in rows))
    colours = _colours(systems)
    for i, system in enumerate(systems):
        found = {row.sequence: row.tokens_per_s or 0.0 for row in rows if row.rival == system}
        places = [lengths.index(n) + (i - len(systems) / 2) * 0.8 / len(systems) for n in found]
        axes.bar(places, list(found.values()), width=0.8 / len(systems), color=colours[system], label=system)
    axes.set_xticks(range(len(lengths)), [format_tokens(n) for n in lengths])
    axes.set_xlabel("sequence length, tokens")
    if systems:
        axes.legend(fontsize=6.5)


def _colours(systems: list[str]) -> dict[str, str]:
    """Return warm colours for memo's systems and cold ones for the rivals."""
    found: dict[str, str] = {}
    for ours, colours in ((True, MEMO_COLOURS), (False, RIVAL_COLOURS)):
        chosen = [name for name in systems if name.startswith("memo") == ours]
        found |= {name: colours[i % len(colours)] for i, name in enumerate(chosen)}
    return found


def _ratios(axes: Axes, rows: list[Row]) -> None:
    axes.set_title("predicted / measured, memo's plans")
    names = [f"{row.model} {format_tokens(row.sequence)} {row.policy}" for row in rows]
    for field, mark in MARKS.items():
        points = [(i, value) for i, row in enumerate(rows) if (value := _ratio(row, field)) is not None]
        if points:
            places, values = zip(*points, strict=True)
            axes.scatter(places, values, marker=mark, s=22, label=LABELS[field])
    axes.axhspan(1 - TARGET, 1 + TARGET, color="#3f9b6b", alpha=0.15)
    axes.axhline(1.0, color="#5c5c5c", linewidth=0.8)
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=6)
    if rows:
        axes.legend(fontsize=6.5)


def _ratio(row: Row, field: str) -> float | None:
    ratio = row.comparison.ratio if row.comparison else None
    if ratio is None:
        return None
    return ratio.lanes.get(field) if field in ("d2h", "h2d") else float(getattr(ratio, field))
