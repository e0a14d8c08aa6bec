"""Draws live memory over time into given axes: buffer classes stacked as steps, the capacity, the peak.

If a curve has more steps than pixels, each pixel shows its fullest instant, so that no peak is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memo_sim.contract.trace import MemoryCurve
from memo_sim.contract.units import GIB, MIB, format_bytes, format_percent
from memo_sim.views.palette import CAPACITY, CLASSES, OTHER, QUIET_TEXT, TEXT, ordered_classes

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

CAPACITY_SHOWN = 0.5
"""Below this share of the capacity, the capacity is written as text: its line would make the curve too flat."""


@dataclass(frozen=True)
class Peak:
    """The fullest instant of a curve inside a window."""

    at_s: float
    bytes: int


@dataclass(frozen=True)
class MemoryPanel:
    """A memory curve in a time window (seconds) up to ``end_s``; the time axis counts units of ``unit_s`` seconds."""

    curve: MemoryCurve
    window: tuple[float, float]
    end_s: float
    unit_s: float
    pixels: float
    label: str
    capacity_bytes: int | None = None
    reserve_bytes: int = 0
    """Part of the capacity outside the curve."""
    held_bytes: int | None = None
    """Bytes of the planned arena, or those that an allocator reserves at the peak; ``held_as`` says which."""
    held_as: str = ""

    def draw(self, ax: Axes) -> list[str]:
        """Draw the stacked classes, the capacity and the peak; return the classes from bottom to top."""
        names = ordered_classes({n for n, c in self.curve.bytes_by_class.items() if any(c)})
        unit, scale = memory_unit(peak_of(self.curve, self.window).bytes)
        edges, heights = self._steps(names)
        base = 0.0 * heights.sum(axis=0)
        for name, height in zip(names, heights / scale, strict=True):
            ax.stairs(
                base + height,
                edges / self.unit_s,
                baseline=base,
                fill=True,
                color=CLASSES.get(name, OTHER),
                linewidth=0,
            )
            base = base + height
        ax.set_ylabel(f"{self.label}\n{unit}")
        self._mark(ax, scale)
        for spine in ("top", "right"):
            ax.spines[spine].set_visible(False)
        ax.grid(color="#ececec", linewidth=0.6)
        ax.set_axisbelow(True)
        return names

    def _steps(self, names: list[str]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return (edges of the steps, bytes of each class at each step)."""
        import numpy as np

        times = np.array(self.curve.time_s)
        live = np.array([self.curve.bytes_by_class[n] for n in names], dtype=np.float64).reshape(len(names), len(times))
        start, end = self.window[0], min(self.window[1], max(self.end_s, self.window[0]))
        first = max(0, int(np.searchsorted(times, start, side="right")) - 1)
        last = max(first + 1, int(np.searchsorted(times, end, side="left")))
        times, live = np.maximum(times[first:last], start), live[:, first:last]
        slices = int(self.pixels)
        if len(times) > 2 * slices:
            pixel = np.minimum((times - start) / (end - start) * slices, slices - 1).astype(np.int64)
            order = np.lexsort((live.sum(axis=0), pixel))
            fullest = order[np.flatnonzero(np.r_[pixel[order][1:] != pixel[order][:-1], True])]
            times = start + pixel[fullest] * ((end - start) / slices)
            live = live[:, fullest]
        return np.append(times, end), live

    def _mark(self, ax: Axes, scale: float) -> None:
        """Mark the peak and the capacity with its reserve, and leave space above for both texts."""
        peak = peak_of(self.curve, self.window)
        highest, capacity = peak.bytes / scale, self.capacity_bytes
        near = capacity is not None and peak.bytes >= CAPACITY_SHOWN * capacity
        right = peak.at_s > (self.window[0] + self.window[1]) / 2
        top = max(highest, capacity / scale) if capacity and near else highest
        ax.set_ylim(0, 1.22 * top if top else 1.0)
        ax.plot([peak.at_s / self.unit_s], [highest], marker="v", markersize=5, color=TEXT, clip_on=False)
        # Beside the capacity's line and the hatched reserve a text would be struck through: it stands above them.
        above = near and highest > 0.75 * top
        ax.annotate(
            self._peak_text(peak),
            (peak.at_s / self.unit_s, top if above else highest),
            xytext=(-6 if right else 6, 4),
            textcoords="offset points",
            ha="right" if right else "left",
            fontsize=7.5,
            color=TEXT,
            bbox={"boxstyle": "square,pad=0.15", "facecolor": "white", "alpha": 0.8, "linewidth": 0},
        )
        if capacity:
            self._capacity(ax, capacity / scale, self.reserve_bytes / scale, near=near, left=right)

    def _peak_text(self, peak: Peak) -> str:
        differs = self.held_bytes and format_bytes(self.held_bytes) != format_bytes(peak.bytes)
        held = self.held_bytes if differs else None
        text = f"peak {format_bytes(peak.bytes)}"
        if held:
            text += f" live, {self.held_as} {format_bytes(held)}"
        return (
            f"{text} ({format_percent((held or peak.bytes) / self.capacity_bytes, 0)} of capacity)"
            if self.capacity_bytes
            else text
        )

    def _capacity(self, ax: Axes, capacity: float, reserve: float, *, near: bool, left: bool) -> None:
        """Draw the capacity with its reserve below, on the side without the peak; far from the curve only write it."""
        text = f"capacity {format_bytes(self.capacity_bytes or 0)}"
        if reserve:
            text += f", of which reserve {format_bytes(self.reserve_bytes)}"
        if not near:
            corner = {"ha": "left" if left else "right", "va": "top", "fontsize": 7, "color": QUIET_TEXT}
            ax.text(0.004 if left else 1, 0.985, text, corner, transform=ax.transAxes)
            return
        ax.axhline(capacity, color=CAPACITY, linewidth=1.2)
        if reserve:
            band = ax.axhspan(capacity - reserve, capacity, facecolor="none", edgecolor=CAPACITY, linewidth=0)
            band.set(hatch="//////", alpha=0.45)
        ax.annotate(
            text,
            (0 if left else 1, capacity),
            xycoords=("axes fraction", "data"),
            xytext=(3 if left else -3, 3),
            textcoords="offset points",
            ha="left" if left else "right",
            fontsize=7,
            color=CAPACITY,
        )


def peak_of(curve: MemoryCurve, window: tuple[float, float] | None = None) -> Peak:
    """Return the first fullest instant of a curve, in the whole curve or inside a window."""
    totals = [sum(step) for step in zip(*curve.bytes_by_class.values(), strict=True)]
    ends = [*curve.time_s[1:], float("inf")]
    start, end = window or (float("-inf"), float("inf"))
    inside = [i for i in range(len(totals)) if ends[i] > start and curve.time_s[i] < end]
    if not inside:
        return Peak(at_s=max(start, 0.0), bytes=0)
    best = max(inside, key=lambda i: (totals[i], -i))
    return Peak(at_s=max(curve.time_s[best], start), bytes=totals[best])


def memory_unit(size_bytes: int) -> tuple[str, float]:
    """Return a readable unit for an axis up to ``size_bytes``, and the bytes in that unit."""
    for unit, scale in (("GiB", GIB), ("MiB", MIB)):
        if size_bytes >= 0.5 * scale:
            return unit, float(scale)
    return "KiB", 1024.0
