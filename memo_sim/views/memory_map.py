"""Draws a placement as address over time: one rectangle per buffer, with curves of live, reserved and planned bytes.

The file's suffix decides the format (``.png``, ``.svg``, ``.pdf``). All rectangles are drawn as one image, and names
only where they fit, so that a picture of thousands of buffers stays small and readable.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memo_sim.contract.placement import Placement
from memo_sim.contract.requests import Phase
from memo_sim.contract.units import format_bytes
from memo_sim.views.memory_panel import memory_unit
from memo_sim.views.palette import CAPACITY, CLASSES, OTHER, QUIET_TEXT, TEXT, lighter, ordered_classes, phase_colour
from memo_sim.views.pictures import drawn, write_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN, HEIGHT_IN = 14.0, 7.4
LEFT_IN, RIGHT_IN, TOP_IN, BOTTOM_IN = 0.9, 1.5, 0.85, 0.55
BAND_IN, BAND_GAP_IN = 0.2, 0.06
"""Height of the strip of phases below the map, and the space above it."""
WITHOUT_CLASS = ("#4f93c8", "#f2b75f", "#76b38a", "#7b6fb0", "#d9603b", "#9aa5b1", "#c79b6b", "#6aa9a5")
"""Colours used in rotation where buffers have no class."""
SHADES = (0.0, 0.22, 0.4)
"""Shares of white used in rotation, so that neighbours of the same class look different."""
MOST_EDGES = 600
"""With more buffers there are no outlines: they would cover the rectangles."""
MOST_NAMES = 150
NAME_PT, BAND_PT, CHARACTER = 6.5, 6.0, 0.6
"""Font sizes of buffers' and phases' names, and a character's width as a fraction of the font size."""
MOST_CONSTANT, CONSTANT_SHOWN = 0.35, 0.12
"""A constant bottom above the first fraction of the arena is cut to the second fraction of the rest."""
RESERVED = "#6a3d9a"
OVER_LINES = {"facecolor": "white", "edgecolor": "none", "alpha": 0.9, "pad": 0.0}
"""The box of a label, so that a line which passes behind it does not strike it through."""
MOST_ABOVE = 2
"""If the caching allocator reserves more than this multiple of the arena, its curve is a note, not a line."""
MOST_HALOED = 300
"""With more steps, the line of live bytes is thin and has no white rim."""
Curve = tuple[Sequence[int], Sequence[int]]
"""Instants, and the bytes from each instant on."""
NO_CURVE: Curve = ((), ())
PHASE_KINDS = {"offload": "off", "prefetch": "pre", "update": "opt", "recompute": "rec", "optimizer": "opt"}
"""Palette phases by the second word of a phase's kind, where the names differ."""


def draw_memory_map(
    placement: Placement,
    path: str | Path,
    *,
    title: str = "",
    phases: Sequence[Phase] = (),
    reserved: Curve = NO_CURVE,
) -> None:
    """Draw ``placement`` into ``path``, with ``phases`` as a strip below it.

    ``reserved`` is what the caching allocator reserves for the same requests, in bytes from each instant on.

    Raises:
        UsageError: when the file's format is unknown or the file cannot be written.
        ModuleNotFoundError: when matplotlib is not installed.
    """
    write_picture(lambda: _figure(placement, title, phases, reserved), path)


def _figure(placement: Placement, title: str, phases: Sequence[Phase], reserved: Curve) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), facecolor="white")
    band = BAND_IN + BAND_GAP_IN if phases else 0.0
    width, height = WIDTH_IN - LEFT_IN - RIGHT_IN, HEIGHT_IN - TOP_IN - BOTTOM_IN - band
    left, right = LEFT_IN / WIDTH_IN, width / WIDTH_IN
    ax = figure.add_axes((left, (BOTTOM_IN + band) / HEIGHT_IN, right, height / HEIGHT_IN))
    heading = drawn(title) or "memory map"
    figure.text(left, 1 - 0.16 / HEIGHT_IN, heading, fontsize=12, weight="bold", va="top")
    figure.text(left, 1 - 0.42 / HEIGHT_IN, _subtitle(placement), fontsize=9, color=QUIET_TEXT, va="top")
    start, end = min(placement.lower, default=0), max(placement.upper, default=1)
    unit, scale = memory_unit(placement.arena_bytes)
    baseline = _baseline(placement, start, end) / scale
    far = max(reserved[1], default=0) > MOST_ABOVE * placement.arena_bytes
    bottom, top = 0.0, max(placement.arena_bytes, *([] if far else reserved[1]), 1e-9) / scale
    if MOST_CONSTANT * top < baseline < top:
        bottom = max(0.0, baseline - CONSTANT_SHOWN * (top - baseline))
    highest = top + 0.07 * (top - bottom)
    ax.set_xlim(start, end)
    ax.set_ylim(bottom, highest)
    _draw_buffers(ax, placement, scale)
    _draw_names(ax, placement, scale, ((end - start) / (72 * width), (highest - bottom) / (72 * height)))
    _draw_lines(ax, placement, scale)
    if far:
        figure.text(
            left + right, 1 - 0.42 / HEIGHT_IN, _reserves(reserved), fontsize=9, color=RESERVED, va="top", ha="right"
        )
    elif reserved[0]:
        _draw_reserved(ax, reserved, (start, end), scale)
    if bottom:
        _say_what_is_below(ax, baseline * scale)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set_ylabel(f"address ({unit})", fontsize=8.5)
    ax.tick_params(labelsize=8, labelbottom=not phases)
    for spine in ("top", "right"):
        ax.spines[spine].set_visible(False)
    lowest = ax
    if phases:
        lowest = figure.add_axes((left, BOTTOM_IN / HEIGHT_IN, right, BAND_IN / HEIGHT_IN), sharex=ax)
        _draw_phases(lowest, phases, (end - start) / (72 * width))
        lowest.tick_params(labelsize=8)
        lowest.set_ylabel("layer", fontsize=8.5, rotation=0, ha="right", va="center")
    lowest.set_xlabel("instant", fontsize=8.5)
    _draw_legend(ax, placement, width)
    return figure


def _baseline(placement: Placement, start: int, end: int) -> int:
    """Return the height in bytes of the arena's bottom that the same buffers fill for the whole time."""
    rows = zip(placement.offset_bytes, placement.size_bytes, placement.lower, placement.upper, strict=True)
    unit, top = placement.alignment_bytes, 0
    for offset, size, lower, upper in sorted(rows):
        if offset > top or lower > start or upper < end:
            break
        top = offset + -(-size // unit) * unit
    return top


def _say_what_is_below(ax: Axes, bottom_bytes: float) -> None:
    ax.text(
        0.004,
        0.008,
        f"the lowest {format_bytes(bottom_bytes)} never change and are cut off here",
        transform=ax.transAxes,
        fontsize=8,
        color=TEXT,
        bbox={"boxstyle": "square,pad=0.25", "facecolor": "white", "alpha": 0.85, "linewidth": 0},
    )


def _subtitle(placement: Placement) -> str:
    arena, bound = placement.arena_bytes, placement.lower_bound_bytes
    good = "equal to the lower bound: optimal" if arena == bound else f"lower bound {format_bytes(bound)}"
    solver = f" by {drawn(placement.solver)}" if placement.solver else ""
    return f"arena {format_bytes(arena)}{solver}, {good}"


def _draw_buffers(ax: Axes, placement: Placement, scale: float) -> None:
    """Draw the rectangles, coloured by class, with different shades for neighbours."""
    import numpy as np
    from matplotlib.collections import PolyCollection

    lower, upper = np.array(placement.lower, float), np.array(placement.upper, float)
    low = np.array(placement.offset_bytes, float) / scale
    high = low + np.array(placement.size_bytes, float) / scale
    corners = np.stack(
        [np.stack([lower, low], 1), np.stack([lower, high], 1), np.stack([upper, high], 1), np.stack([upper, low], 1)],
        axis=1,
    )
    few = len(low) <= MOST_EDGES
    boxes = PolyCollection(
        list(corners),
        facecolors=_colours(placement),
        edgecolors="white" if few else "none",
        linewidths=0.5 if few else 0.0,
        antialiaseds=few,  # without outlines, smoothed edges would let the background through
        rasterized=True,
    )
    ax.add_collection(boxes)


def _colours(placement: Placement) -> list[str]:
    """Return a colour for every buffer: its class's colour, in a shade by its rank in address and birth."""
    count = len(placement.ids)
    rank = [0] * count
    ordered = sorted(range(count), key=lambda i: (placement.offset_bytes[i], placement.lower[i]))
    for position, i in enumerate(ordered):
        rank[i] = position
    if not placement.classes:
        return [WITHOUT_CLASS[r % len(WITHOUT_CLASS)] for r in rank]
    return [
        lighter(CLASSES.get(name, OTHER), SHADES[r % len(SHADES)])
        for name, r in zip(placement.classes, rank, strict=True)
    ]


def _draw_names(ax: Axes, placement: Placement, scale: float, a_pt: tuple[float, float]) -> None:
    """Write names on the buffers with room for them, the largest first; ``a_pt``: instants and units per point."""
    bottom = ax.get_ylim()[0]
    lives = [upper - lower for lower, upper in zip(placement.lower, placement.upper, strict=True)]
    order = sorted(range(len(lives)), key=lambda i: -placement.size_bytes[i] * lives[i])
    for i in order[:MOST_NAMES]:
        name = drawn(placement.ids[i].rpartition("/")[2])
        low = max(bottom, placement.offset_bytes[i] / scale)
        high = (placement.offset_bytes[i] + placement.size_bytes[i]) / scale
        wide = lives[i] / a_pt[0] >= CHARACTER * NAME_PT * len(name) + 3
        if wide and (high - low) / a_pt[1] >= NAME_PT + 1:
            middle = placement.lower[i] + lives[i] / 2, (low + high) / 2
            ax.text(*middle, name, ha="center", va="center", fontsize=NAME_PT, color=TEXT)


def _draw_lines(ax: Axes, placement: Placement, scale: float) -> None:
    """Draw the live sum as steps, and the arena's top."""
    import numpy as np
    from matplotlib.patheffects import Normal, Stroke

    times, live = live_curve(placement)
    few = len(times) <= MOST_HALOED
    ax.step(
        times,
        np.array(live, float) / scale,
        where="post",
        color=TEXT,
        linewidth=1.0 if few else 0.4,
        alpha=1.0 if few else 0.65,
        label="live",
        path_effects=[Stroke(linewidth=2.4, foreground="white", alpha=0.85), Normal()] if few else [],
    )
    arena = placement.arena_bytes / scale
    ax.axhline(arena, color=CAPACITY, linewidth=1.1, linestyle=(0, (5, 2)), label="arena")
    ax.annotate(
        f"arena {format_bytes(placement.arena_bytes)}, most live {format_bytes(max(live, default=0))}",
        (0, arena),
        xycoords=("axes fraction", "data"),
        xytext=(4, 3),
        textcoords="offset points",
        fontsize=8,
        color=CAPACITY,
        bbox=OVER_LINES,
    )


def _draw_reserved(ax: Axes, reserved: Curve, life: tuple[int, int], scale: float) -> None:
    """Draw the bytes that the caching allocator reserves; a step starts with what the step before left reserved."""
    heights = [size / scale for size in reserved[1]]
    times = [life[0], *reserved[0], life[1]]
    ax.step(times, [heights[-1], *heights, heights[-1]], where="post", color=RESERVED, linewidth=1.1, label="caching")
    ax.annotate(
        _reserves(reserved),
        (1, max(heights)),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=RESERVED,
        bbox=OVER_LINES,
    )


def _reserves(reserved: Curve) -> str:
    return f"the caching allocator reserves {format_bytes(max(reserved[1]))}"


def live_curve(placement: Placement) -> tuple[list[int], list[int]]:
    """Return the instants at which the live bytes change, and the live bytes from each instant on."""
    changes: dict[int, int] = {}
    for lower, upper, size in zip(placement.lower, placement.upper, placement.size_bytes, strict=True):
        changes[lower] = changes.get(lower, 0) + size
        changes[upper] = changes.get(upper, 0) - size
    times = sorted(changes)
    live, total = [], 0
    for time in times:
        total += changes[time]
        live.append(total)
    return times, live


def _draw_phases(ax: Axes, phases: Sequence[Phase], instants_a_pt: float) -> None:
    """Draw the strip of phases: the colour of the kind in two alternating shades, and the name where it fits."""
    ax.broken_barh(
        [(phase.lower, phase.upper - phase.lower) for phase in phases],
        (0, 1),
        facecolors=[
            lighter(phase_colour(_palette_phase(phase.kind)), 0.35 + 0.25 * (number % 2))
            for number, phase in enumerate(phases)
        ],
        linewidth=0,
    )
    for phase in phases:
        label = drawn(_place(phase))
        if (phase.upper - phase.lower) / instants_a_pt >= CHARACTER * BAND_PT * len(label):
            middle = (phase.lower + phase.upper) / 2
            ax.text(middle, 0.48, label, ha="center", va="center", fontsize=BAND_PT, color=TEXT)
    ax.set_ylim(0, 1)
    ax.set_yticks([])
    for spine in ("top", "right", "left"):
        ax.spines[spine].set_visible(False)


def _place(phase: Phase) -> str:
    """Return the short name of a phase: the number of its layer, or its place."""
    parts = phase.name.split("/")
    place = parts[-2] if len(parts) > 1 else parts[0]
    return place[1:] if place[:1] == "l" and place[1:].isdigit() else place


def _palette_phase(kind: str) -> str:
    place, _, word = kind.partition(".")
    word = word.partition(".")[0]
    return place if place in ("embed", "head") and word in ("fwd", "bwd") else PHASE_KINDS.get(word, word or place)


def _draw_legend(ax: Axes, placement: Placement, width_in: float) -> None:
    """Draw the legend: the lines, then the classes from the top of the palette to its bottom."""
    from matplotlib.patches import Patch

    names = reversed(ordered_classes(set(placement.classes)))
    lines: list[Any] = ax.get_legend_handles_labels()[0]
    ax.legend(
        handles=[*lines, *(Patch(color=CLASSES.get(name, OTHER), label=drawn(name)) for name in names)],
        loc="upper left",
        bbox_to_anchor=(1 + 0.08 / width_in, 1.0),
        borderaxespad=0,
        frameon=False,
        fontsize=8,
        handlelength=1.5,
    )
