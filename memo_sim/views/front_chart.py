"""Draws the Pareto front of a question: each plan's step by what it needs of a device's and of a node's memory.

A plan of the front is beaten by no other in all three; the dashed line joins those that no other beats in the two that
the axes show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from memo_sim.contract.plan import PlanRow
from memo_sim.contract.result import Result
from memo_sim.contract.units import GIB, format_seconds, format_tokens
from memo_sim.views.chart import style
from memo_sim.views.palette import QUIET_TEXT
from memo_sim.views.pictures import DPI, drawn, write_picture
from memo_sim.views.plan_table import layout_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_IN = (13.0, 5.5)
MOST_NAMED, COLUMNS = 16, 4
"""Kinds of plan that the legend names below the axes, and how many on a line."""
Memory = Callable[[PlanRow], float]
PANELS: tuple[tuple[str, Memory], ...] = (
    (
        "device memory without the reserve, GiB",
        lambda plan: (plan.peak_device_bytes if plan.reserved_bytes is None else plan.reserved_bytes) / GIB,
    ),
    ("host memory of a node, GiB", lambda plan: plan.peak_host_bytes_per_node / GIB),
)


def draw_front(result: Result, path: str | Path) -> None:
    """Draw the front of an answer with a plan that fits into ``path``; the file's suffix decides the format.

    Raises:
        UsageError: when the file's format is unknown or the file cannot be written.
        ModuleNotFoundError: when matplotlib is not installed.
    """
    where = f"{drawn(result.model)} on {drawn(result.cluster)}, {format_tokens(result.seq_tokens)} tokens"
    of = "" if result.front_is_whole else ", of the plans that the search evaluated"
    write_picture(lambda: _figure(result.front, f"{where}: Pareto front{of}"), path)


def _figure(front: Sequence[PlanRow], title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_IN, facecolor="white", layout="constrained", dpi=DPI)
    axes = figure.subplots(1, len(PANELS), sharey=True)
    kinds = list(dict.fromkeys(plan.system for plan in front))
    for ax, (label, memory) in zip(axes, PANELS, strict=True):
        for number, kind in enumerate(kinds):
            colour, marker = style(number)
            mine = [plan for plan in front if plan.system == kind]
            named = drawn(kind) if number < MOST_NAMED else None
            x, y = [memory(plan) for plan in mine], [plan.step_s or 0.0 for plan in mine]
            ax.plot(x, y, marker, color=colour, alpha=0.8, label=named)
        _draw_frontier(ax, front, memory)
        ax.set_xlabel(label)
        ax.margins(0.08)
        ax.grid(visible=True, alpha=0.3)
    axes[0].set_ylabel("step, s")
    figure.suptitle(title, fontsize=12)
    handles = [line for line in axes[0].get_lines() if not str(line.get_label()).startswith("_")]
    figure.legend(handles=handles, loc="outside lower center", ncols=COLUMNS, frameon=False)
    return figure


def _draw_frontier(ax: Axes, front: Sequence[PlanRow], memory: Memory) -> None:
    """Join the plans that no other beats in step and in this memory, and name the fastest and the smallest."""
    best: list[PlanRow] = []
    for plan in sorted(front, key=lambda plan: (memory(plan), plan.step_s or 0.0)):
        if not best or (plan.step_s or 0.0) < (best[-1].step_s or 0.0):
            best.append(plan)
    ax.plot([memory(p) for p in best], [p.step_s or 0.0 for p in best], "--", color=QUIET_TEXT, linewidth=1, zorder=0)
    side = "right" if len(best) > 1 else "left"
    ends = ((best[0], (6, 5), "left", "bottom"), (best[-1], (0, -8), side, "top"))
    for plan, offset, ha, va in ends[len(best) == 1 :]:
        name = drawn(f"{layout_label(plan.layout)}, {format_seconds(plan.step_s or 0.0)}")
        at = (memory(plan), plan.step_s or 0.0)
        ax.annotate(name, at, offset, textcoords="offset points", ha=ha, va=va, fontsize=8, color=QUIET_TEXT, zorder=0)
