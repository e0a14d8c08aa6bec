"""Draws a sweep: length against MFU, speed and memory, and which questions no other of their length beats in both.

A line joins the lengths of questions that are otherwise the same; a length at which nothing fits is a gap in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from memo_sim.contract.plan import PlanRow
from memo_sim.contract.sweep import SweepLine
from memo_sim.contract.units import GIB, format_tokens
from memo_sim.views.chart import style
from memo_sim.views.palette import QUIET_TEXT
from memo_sim.views.pictures import DPI, drawn, write_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_IN = (13.0, 8.0)
NAME_WIDTH_PT, NAME_HEIGHT_PT = 4.6, 11.0
"""Width of a letter and height of a line of names in the picture, at 8 points."""
MOST_NAMED = 24
"""Lines that the legend names; more would not fit beside the axes."""
MOST_TICKS = 14
NAMED_ROOM = 1.08
WIDE = 16.0
"""An axis whose greatest value is so many times its least is logarithmic."""
Value = Callable[[PlanRow], float | None]
PANELS: tuple[tuple[str, Value], ...] = (
    ("MFU, %", lambda plan: None if plan.mfu is None else 100 * plan.mfu),
    ("tokens per GPU and second", lambda plan: plan.tgs),
    ("device memory without the reserve, GiB", lambda plan: plan.peak_device_bytes / GIB),
)


def draw_sweep(lines: Sequence[SweepLine], path: str | Path) -> None:
    """Draw the answers into ``path``; the file's suffix decides the format.

    Raises:
        UsageError: when the file's format is unknown or the file cannot be written.
        ModuleNotFoundError: when matplotlib is not installed.
    """
    write_picture(lambda: _figure(lines), path)


def series(lines: Sequence[SweepLine]) -> dict[str, list[SweepLine]]:
    """Return the lines that differ in their length alone, by a name of what tells them from the others."""
    about = [{n: v for n, v in _about(line).items() if n != "seq_len"} for line in lines]
    names = list(dict.fromkeys(name for each in about for name in each))
    differ = [name for name in names if len({str(each.get(name)) for each in about}) > 1]
    found: dict[str, list[SweepLine]] = {}
    for line, each in zip(lines, about, strict=True):
        told = [str(each[n]) if n in ("model", "cluster", "system") else f"{n} {each[n]}" for n in differ if n in each]
        found.setdefault(", ".join(told) or line.model, []).append(line)
    return {name: sorted(mine, key=lambda line: line.seq_tokens) for name, mine in found.items()}


def _about(line: SweepLine) -> dict[str, object]:
    return {**line.question, "model": line.model, "cluster": line.cluster, "system": line.system}


def front(lines: Sequence[SweepLine]) -> list[SweepLine]:
    """Return the answers that no other beats in tokens per GPU and second and in device memory.

    Only answers about one model and one length are compared; those of a front stand together, least memory first.
    """
    return [line for mine in fronts(lines).values() for line in mine]


def fronts(lines: Sequence[SweepLine]) -> dict[tuple[str, int], list[SweepLine]]:
    """Return the front of each model and length that has a plan, the shortest length first."""
    tasks = sorted({(line.model, line.seq_tokens) for line in lines if line.best})
    return {task: _front(line for line in lines if (line.model, line.seq_tokens) == task) for task in tasks}


def _front(lines: Iterable[SweepLine]) -> list[SweepLine]:
    best: list[SweepLine] = []
    for line in sorted((line for line in lines if line.best), key=_memory_and_speed):
        if not best or _memory_and_speed(line)[1] < _memory_and_speed(best[-1])[1]:
            best.append(line)
    return best


def _memory_and_speed(line: SweepLine) -> tuple[float, float]:
    assert line.best is not None
    return line.best.peak_device_bytes / GIB, -(line.best.tgs or 0.0)


def _figure(lines: Sequence[SweepLine]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_IN, facecolor="white", layout="constrained", dpi=DPI)
    axes = [figure.add_subplot(2, 2, place) for place in range(1, 5)]
    by_name = series(lines)
    for number, (name, mine) in enumerate(by_name.items()):
        colour, marker = style(number)
        none = "" if any(line.best for line in mine) else " (none fits)"
        label = drawn(name) + none if number < MOST_NAMED else None
        for ax, (_, value) in zip(axes, PANELS, strict=False):
            y = [value(line.best) if line.best else None for line in mine]
            shown = [float("nan") if each is None else each for each in y]
            ax.plot([line.seq_tokens for line in mine], shown, label=label, color=colour, marker=marker)
        points = [_memory_and_speed(line) for line in mine if line.best]
        axes[3].plot([x for x, _ in points], [-y for _, y in points], marker, color=colour, alpha=0.8)
    lengths = sorted({line.seq_tokens for line in lines})
    for ax, (label, _) in zip(axes, PANELS, strict=False):
        _lengths(ax, lengths)
        ax.set_ylabel(label)
        _scale(ax)
    names = _draw_fronts(axes[3], fronts(lines))
    models, clusters = sorted({line.model for line in lines}), sorted({line.cluster for line in lines})
    title, on = "the best plan of each question", f" on {drawn(clusters[0])}" if len(clusters) == 1 else ""
    figure.suptitle(
        f"{drawn(models[0])}{on}: {title}" if len(models) == 1 else f"{title.capitalize()}{on}", fontsize=12
    )
    if len(by_name) > 1:
        handles = [line for line in axes[0].get_lines() if not str(line.get_label()).startswith("_")]
        figure.legend(handles=handles, loc="outside right center", frameon=False)
    missing = len(lines) - sum(line.best is not None for line in lines)
    if missing:
        figure.supxlabel(
            f"{missing} of {len(lines)} questions have no plan that fits",
            fontsize=8,
            color=QUIET_TEXT,
            x=0.01,
            ha="left",
        )
    figure.draw_without_rendering()
    _place_names(axes[3], names)
    return figure


def _lengths(ax: Axes, lengths: list[int]) -> None:
    """Name the lengths of the axis, which is logarithmic where they differ much."""
    if len(lengths) > 1 and lengths[-1] >= 8 * lengths[0]:
        ax.set_xscale("log", base=2)
        ax.minorticks_off()
    if len(lengths) <= MOST_TICKS:
        ax.set_xticks(lengths)
    ax.xaxis.set_major_formatter(lambda value, _: format_tokens(round(value)) if value > 0 else "0")
    ax.tick_params(axis="x", labelrotation=45)
    ax.set_xlabel("tokens of a sequence")


def _draw_fronts(
    ax: Axes, by_task: Mapping[tuple[str, int], Sequence[SweepLine]]
) -> list[tuple[str, tuple[float, float]]]:
    """Join the answers of each model and length that no other beats; return their names, and the fastest of each."""
    several = len({model for model, _ in by_task}) > 1
    names: list[tuple[str, tuple[float, float]]] = []
    for (model, tokens), best in by_task.items():
        points = [_memory_and_speed(line) for line in best]
        ax.plot([x for x, _ in points], [-y for _, y in points], "--", color=QUIET_TEXT, linewidth=1, zorder=0)
        if len(by_task) <= MOST_NAMED:
            x, y = points[-1]
            names.append((drawn(f"{model} {format_tokens(tokens)}" if several else format_tokens(tokens)), (x, -y)))
    if any(len(best) > 1 for best in by_task.values()):
        ax.set_title("dashed: at its length no other question is faster in less memory", fontsize=9, color=QUIET_TEXT)
    ax.set_xlabel("device memory without the reserve, GiB")
    ax.set_ylabel("tokens per GPU and second")
    ax.margins(0.1)
    ax.set_xlim(0, NAMED_ROOM * ax.get_xlim()[1])  # names stand beside the points
    _scale(ax)
    return names


def _place_names(ax: Axes, names: Sequence[tuple[str, tuple[float, float]]]) -> None:
    """Write each name beside its point: inside the axes, and below the names above it that it would cover."""
    room = ax.get_window_extent()
    point = ax.figure.dpi / 72
    taken: list[tuple[float, float, float]] = []
    for name, place in sorted(names, key=lambda each: -each[1][1]):
        x, y = ax.transData.transform(place)
        width, height = NAME_WIDTH_PT * len(name) * point, NAME_HEIGHT_PT * point
        left = x + 6 * point if x + 6 * point + width < room.x1 else x - 6 * point - width
        bottom = y + 5 * point
        while (above := _covered(taken, left, width, bottom, height)) is not None:
            bottom = above - height
        taken.append((left, width, bottom))
        ax.annotate(
            name,
            place,
            xytext=((left - x) / point, (bottom - y) / point),
            textcoords="offset points",
            fontsize=8,
            color=QUIET_TEXT,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
        )


def _covered(
    taken: Sequence[tuple[float, float, float]], left: float, width: float, bottom: float, height: float
) -> float | None:
    """Return the bottom of the lowest name that a name at this place would cover; None where the place is free."""
    hit = [b for x, w, b in taken if x < left + width and left < x + w and b < bottom + height and bottom < b + height]
    return min(hit, default=None)


def _scale(ax: Axes) -> None:
    """Begin the vertical axis at zero, or make it logarithmic where values differ much."""
    from matplotlib.ticker import LogLocator

    values = [y for line in ax.get_lines() for y in np.asarray(line.get_ydata(), dtype=float).tolist() if y > 0]
    if values and max(values) >= WIDE * min(values):
        ax.set_yscale("log", subs=())
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    else:
        ax.set_ylim(0, NAMED_ROOM * max(values, default=1.0))
    ax.yaxis.set_major_formatter(_number)
    ax.grid(visible=True, alpha=0.3)


def _number(value: float, _: float) -> str:
    return f"{value:,.10g}"
