"""Draws plans and runs side by side: where the step goes, and what fills a device at its peak."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from memo_sim.contract.difference import Difference, Share, Side
from memo_sim.contract.units import format_bytes, format_seconds
from memo_sim.views.difference_table import letter
from memo_sim.views.memory_panel import memory_unit
from memo_sim.views.palette import CLASSES, OTHER, PHASES, QUIET_TEXT, WAITS, lighter, ordered_classes
from memo_sim.views.pictures import DPI, drawn, write_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

LEFT_IN, SIDE_IN, HEIGHT_IN = 9.0, 0.9, 5.2
"""Width without sides, width of each side's two bars, and height."""
LEAST = 0.01
"""Shares of less than this fraction of the longest step are merged."""
COLOURS = dict(PHASES.values()) | {"waits": WAITS["compute"]}
SHADES = (0.0, 0.35, 0.6, 0.2, 0.5)
"""How much lighter the shares of one part of the step are, one after the other."""
BAR = 0.62
ROOM = 1.12
"""Height of the axes, as a multiple of the highest bar, which has its figure above."""


def draw_difference(found: Difference, path: str | Path) -> None:
    """Draw the steps by part and operator, and the peaks of memory by class, into ``path``.

    Raises:
        UsageError: when the file's format is unknown or the file cannot be written.
        ModuleNotFoundError: when matplotlib is not installed.
    """
    write_picture(lambda: picture(found), path)


def picture(found: Difference) -> Figure:
    """Return the drawing: two panels of stacked bars, one bar for each side."""
    from matplotlib.figure import Figure

    count = len(found.sides)
    size = (LEFT_IN + 2 * SIDE_IN * max(2, count), HEIGHT_IN)
    drawing = Figure(figsize=size, facecolor="white", layout="constrained", dpi=DPI)
    time, memory = drawing.subplots(1, 2)
    names = [f"{letter(at)}\n{side.origin}" for at, side in enumerate(found.sides)]
    _step(time, found, names)
    _memory(memory, found, names)
    title = "   ".join(f"{letter(at)}: {_named(side)}" for at, side in enumerate(found.sides))
    drawing.suptitle(title, fontsize=10)
    drawing.supxlabel("\n".join(found.verdict), fontsize=8, color=QUIET_TEXT, x=0.01, ha="left")
    return drawing


def _named(side: Side) -> str:
    """Return a side's file, with the cluster that its figures are for."""
    name = drawn(Path(side.name).name).strip()
    return f"{name}, {drawn(side.cluster)}" if side.cluster else name


def _step(ax: Axes, found: Difference, names: list[str]) -> None:
    """Draw where the step goes; parts of the step lie above each other in the order of the first side's time."""
    shares = stacked(found)
    seen: dict[str, int] = {}
    base = [0.0] * len(names)
    for share in shares:
        number = seen[share.group] = seen.get(share.group, -1) + 1
        colour = lighter(COLOURS.get(share.group, OTHER), SHADES[number % len(SHADES)])
        label = f"{share.group}: {share.name}" if share.name else share.group
        heights = [max(0.0, seconds) for seconds in share.seconds]
        ax.bar(names, heights, BAR, bottom=base, color=colour, label=drawn(label), edgecolor="white", linewidth=0.4)
        base = [low + height for low, height in zip(base, heights, strict=True)]
    for at, side in enumerate(found.sides):
        ax.annotate(format_seconds(side.step_s), (at, base[at]), ha="center", va="bottom", fontsize=9)
    ax.set_ylabel("step, s")
    ax.set_title("where the step goes", fontsize=10)
    _finish(ax)


def stacked(found: Difference) -> list[Share]:
    """Return the shares of the picture from bottom to top: large ones by themselves, others merged by their group."""
    least = LEAST * max(side.step_s for side in found.sides)
    groups = [group.group for group in sorted(found.groups, key=lambda group: -max(group.seconds))]
    shown, small = list[Share](), list[Share]()
    for group in groups:
        mine = sorted((s for s in found.shares if s.group == group), key=lambda share: -max(share.seconds))
        own = [share for share in mine if max(share.seconds) >= least]
        rest = _merged(mine[len(own) :], group, "others" if own else "", len(found.sides))
        shown += own
        if max(rest.seconds) >= least:
            shown.append(rest)
        else:
            small.append(rest)
    return [*shown, _merged(small, "everything else", "", len(found.sides))]


def _merged(shares: Sequence[Share], group: str, name: str, sides: int) -> Share:
    seconds = [sum(share.seconds[at] for share in shares) for at in range(sides)]
    return Share(group=group, name=name, seconds=seconds, difference_s=[], of_difference=[])


def _memory(ax: Axes, found: Difference, names: list[str]) -> None:
    """Draw live bytes by class at each side's peak; a side that does not know its classes has one grey bar."""
    unit, scale = memory_unit(max(side.peak_device_bytes for side in found.sides))
    base = [0.0] * len(names)
    for name in ordered_classes({name for side in found.sides for name in side.peak_by_class}):
        heights = [side.peak_by_class.get(name, 0) / scale for side in found.sides]
        colour = CLASSES.get(name, OTHER)
        ax.bar(names, heights, BAR, bottom=base, color=colour, label=name, edgecolor="white", linewidth=0.4)
        base = [low + height for low, height in zip(base, heights, strict=True)]
    rest = [max(0.0, side.peak_device_bytes / scale - low) for side, low in zip(found.sides, base, strict=True)]
    if any(height > base[at] / 1000 for at, height in enumerate(rest)):
        ax.bar(names, rest, BAR, bottom=base, color=lighter(OTHER, 0.5), label="not by class", linewidth=0)
    for at, side in enumerate(found.sides):
        text = format_bytes(side.peak_device_bytes)
        ax.annotate(text, (at, base[at] + rest[at]), ha="center", va="bottom", fontsize=9)
    ax.set_ylabel(f"device memory at the peak, {unit}")
    ax.set_title("memory by class, without the reserve", fontsize=10)
    _finish(ax)


def _finish(ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=7.5)
    ax.margins(x=0.15)
    # Bars without height would keep the axis at their top, and the title would strike the figures through.
    bars = cast("Sequence[Rectangle]", ax.patches)
    ax.set_ylim(0, ROOM * max((bar.get_y() + bar.get_height() for bar in bars), default=1.0) or 1.0)
    for spine in ("top", "right"):
        ax.spines[spine].set_visible(False)
    ax.grid(axis="y", color="#ececec", linewidth=0.6)
    ax.set_axisbelow(True)
