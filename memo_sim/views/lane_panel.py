"""Draws a trace's lanes into given axes: one row of bars per lane, hatched stalls, layer numbers where they fit.

Everything is drawn to scale: work narrower than a bar can be is shown for narrow slices of time, as high as the share
of the slice that it fills (1 ms of every 220 ms is a low tick in each slice, not a solid bar).

Many stalls of compute are too short to be drawn one by one, such as exposed collectives inside a layer. The row
``waiting`` under the compute lane shows them: for narrow slices of time, the share in which compute was idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memo_sim.contract.trace import Trace
from memo_sim.contract.units import format_percent, format_seconds
from memo_sim.views.bars import Bar, Stall, bars_of, played_s, stalls_of
from memo_sim.views.palette import TEXT, lighter, phase_colour, wait_colour
from memo_sim.views.pictures import drawn

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

HEIGHTS = {"compute": 1.0, "waiting": 0.42}
OTHER_HEIGHT = 0.62
GAP = 0.16
NUMBERED = ("fwd", "rec", "bwd", "off", "pre")
"""Phases whose bars show their layer's number."""
DIGIT_PIXELS = 9.0
"""Width of a digit of a layer number, including the space around the number."""
SLICE_PIXELS = 6.0
"""Width of a slice of the row ``waiting``."""
BAR_PIXELS = 1.0
"""Narrower bars are shown in slices."""
THIN_PIXELS = 3.0
"""Width of their slices."""
LEAST_SHARE = 0.1
"""A slice in which a lane does anything is at least this high, so that it can be seen."""
BRIDGE_PIXELS = 0.5
"""A narrower gap inside a bar cannot be seen."""


@dataclass(frozen=True)
class LanePanel:
    """The lanes of ``trace`` in a time window (seconds), drawn ``pixels`` wide; the axis counts units of ``unit_s``."""

    trace: Trace
    lanes: list[str]
    window: tuple[float, float]
    unit_s: float
    pixels: float

    @property
    def pixel_s(self) -> float:
        """Seconds per pixel."""
        return (self.window[1] - self.window[0]) / self.pixels

    @property
    def shown_s(self) -> float:
        """Seconds of the window in which the step ran; shown shares are fractions of them."""
        return max(min(self.window[1], played_s(self.trace)) - self.window[0], 1e-12)

    def draw(self, ax: Axes) -> list[str]:
        """Draw all rows; return the phases that are visible in them."""
        start, end = self.window
        bars = [
            b for b in bars_of(self.trace, bridge_s=BRIDGE_PIXELS * self.pixel_s) if b.end_s > start and b.start_s < end
        ]
        stalls = [s for s in stalls_of(self.trace) if s.end_s > start and s.start_s < end and s.lane == "compute"]
        ticks, labels, top = [], [], 0.0
        for row in row_names(self.lanes, stalls=bool(self.trace.waits)):
            height = HEIGHTS.get(row, OTHER_HEIGHT)
            bottom = top - height
            if row == "waiting":
                self._waiting(ax, stalls, bottom, height)
                waited = sum(min(s.end_s, end) - max(s.start_s, start) for s in stalls)
                labels.append(f"waiting {percent(waited / self.shown_s)}")
            else:
                own = [b for b in bars if b.lane == row]
                self._row(ax, own, bottom, height)
                if row == "compute":
                    draw_hatch(ax, stalls, (bottom, height), unit_s=self.unit_s, pixel_s=self.pixel_s)
                labels.append(f"{drawn(row)} {percent(self._busy(row))}")
            ticks.append(bottom + height / 2)
            top = bottom - (0.02 if row == "compute" else GAP)
        ax.set_ylim(top + GAP - 0.06, 0.06)
        ax.set_yticks(ticks, labels)
        for spine in ("top", "right", "left"):
            ax.spines[spine].set_visible(False)
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="x", color="#ececec", linewidth=0.6)
        ax.set_axisbelow(True)
        widths: dict[str, float] = {}
        for bar in bars:
            widths[bar.place.phase] = widths.get(bar.place.phase, 0.0) + self._width(bar)
        return [phase for phase, width in widths.items() if width >= 2]

    def _busy(self, lane: str) -> float:
        """Return the share of the window that the lane's spans fill."""
        start, end = self.window
        spans = self.trace.spans
        busy = sum(
            max(0.0, min(e, end) - max(s, start))
            for own, s, e in zip(spans.lanes, spans.start_s, spans.end_s, strict=True)
            if own == lane
        )
        return busy / self.shown_s

    def _row(self, ax: Axes, every: list[Bar], bottom: float, height: float) -> None:
        bars = [bar for bar in every if self._width(bar) >= BAR_PIXELS]
        self._slices(ax, [bar for bar in every if self._width(bar) < BAR_PIXELS], bottom, height)
        edge = 0.6 if _median([self._width(b) for b in bars]) > 5 else 0.0
        ax.broken_barh(
            [(b.start_s / self.unit_s, (b.end_s - b.start_s) / self.unit_s) for b in bars],
            (bottom, height),
            facecolors=[shade(b) for b in bars],
            edgecolors="white",
            linewidth=edge,
            snap=False,
        )
        for phase in NUMBERED:
            self._number(ax, [b for b in bars if b.place.phase == phase], bottom + height / 2)

    def _width(self, bar: Bar) -> float:
        return (bar.end_s - bar.start_s) / self.pixel_s

    def _number(self, ax: Axes, bars: list[Bar], middle: float) -> None:
        """Write layer numbers on the bars: on all, or where space is short on every 2nd, 5th, 10th … layer."""
        widest: dict[str, Bar] = {}
        for bar in bars:
            if bar.place.layer >= 0 and self._width(bar) >= self._width(widest.get(bar.place.where, bar)):
                widest[bar.place.where] = bar
        if not widest or bars[0].lane not in ("compute", "d2h", "h2d"):
            return
        digits = len(str(max(b.place.layer for b in widest.values())))
        pitch = _median([self._width(b) for b in widest.values()])
        if pitch < 2.5:
            return
        # A recomputed layer stands alone between two backward bars, so every number has to fit on its bar.
        steps = (1,) if bars[0].place.phase == "rec" else (1, 2, 5, 10, 20, 50)
        step = next((k for k in steps if k * pitch >= DIGIT_PIXELS * (digits + 0.6)), 0)
        for bar in widest.values():
            centre = (bar.start_s + bar.end_s) / 2
            inside = self.window[0] < centre < self.window[1]
            if inside and step and bar.place.layer % step == 0 and self._width(bar) >= pitch / 2:
                # A number wider than its bar may lie on hatching, so it gets its own background.
                wide = self._width(bar) < DIGIT_PIXELS * len(str(bar.place.layer))
                ground = {"boxstyle": "square,pad=0.08", "facecolor": shade(bar), "linewidth": 0}
                ax.text(
                    centre / self.unit_s,
                    middle,
                    str(bar.place.layer),
                    ha="center",
                    va="center",
                    fontsize=6.5,
                    color=number_colour(shade(bar)),
                    bbox=ground if wide else None,
                    clip_on=True,
                )

    def _slices(self, ax: Axes, bars: list[Bar], bottom: float, height: float) -> None:
        """Draw narrow bars: in each slice of time, the share of it that each phase fills, above one another."""
        import numpy as np

        if not bars:
            return
        slice_s = THIN_PIXELS * self.pixel_s
        count = int((self.window[1] - self.window[0]) / slice_s) + 1
        shares: dict[str, NDArray[np.float64]] = {}
        for bar in bars:
            share = shares.setdefault(phase_colour(bar.place.phase), np.zeros(count))
            middle = (bar.start_s + bar.end_s) / 2
            at = min(max(int((middle - self.window[0]) / slice_s), 0), count - 1)
            share[at] += bar.busy_s / slice_s
        total = np.sum(list(shares.values()), axis=0)
        shown = np.where(total > 0, np.clip(total, LEAST_SHARE, 1.0), 0.0)
        scale = np.divide(shown, total, out=np.zeros(count), where=total > 0)
        edges = (self.window[0] + slice_s * np.arange(count + 1)) / self.unit_s
        base = np.zeros(count)
        for colour, share in shares.items():
            top = base + share * scale
            ax.stairs(
                bottom + height * top, edges, baseline=bottom + height * base, fill=True, color=colour, linewidth=0
            )
            base = top

    def _waiting(self, ax: Axes, stalls: list[Stall], bottom: float, height: float) -> None:
        """Draw for each slice of time the share in which compute was idle, by the lane it waited for."""
        import numpy as np

        start, end = self.window[0], self.window[0] + self.shown_s
        count = max(1, int(self.shown_s / self.pixel_s / SLICE_PIXELS))
        edges = np.linspace(start, end, count + 1)
        base = np.zeros(count)
        ax.broken_barh([(start / self.unit_s, self.shown_s / self.unit_s)], (bottom, height), facecolors="#f1f1f1")
        for lane in waited_for(stalls):
            filled = np.zeros(count + 1)
            for stall in (s for s in stalls if s.waits_for == lane):
                filled += np.clip(edges, stall.start_s, stall.end_s) - stall.start_s
            share = np.diff(filled) / np.diff(edges)
            ax.stairs(
                bottom + height * (base + share),
                edges / self.unit_s,
                baseline=bottom + height * base,
                fill=True,
                color=wait_colour(lane),
                linewidth=0,
            )
            base = base + share


def percent(share: float) -> str:
    """Return a share of the time, with a decimal where whole percents would hide what is left."""
    return format_percent(share) if 0 < share < 0.0995 or 0.99 < share < 1 else format_percent(share, 0)


def draw_hatch(ax: Axes, stalls: list[Stall], row: tuple[float, float], *, unit_s: float, pixel_s: float) -> None:
    """Hatch the stalls that can be seen, in the colours of what they wait for; ``row`` is (bottom, height)."""
    for lane in waited_for(stalls):
        own = joined([s for s in stalls if s.waits_for == lane], 2 * pixel_s)
        seen = [s for s in own if s.end_s - s.start_s > 2 * pixel_s]
        ax.broken_barh(
            [(s.start_s / unit_s, (s.end_s - s.start_s) / unit_s) for s in seen],
            row,
            facecolors="white",
            edgecolors=wait_colour(lane),
            hatch="//////",
            linewidth=0.0,
            snap=False,
        )


def row_names(lanes: list[str], *, stalls: bool) -> list[str]:
    """Return the rows of a panel from top to bottom: the lanes, and ``waiting`` under compute or without it first."""
    if stalls and "compute" not in lanes:
        return ["waiting", *lanes]
    return [row for lane in lanes for row in ((lane, "waiting") if lane == "compute" and stalls else (lane,))]


def panel_height(lanes: list[str], *, stalls: bool) -> float:
    """Return the height of all rows, in units of the compute lane's height."""
    return sum(HEIGHTS.get(row, OTHER_HEIGHT) + GAP for row in row_names(lanes, stalls=stalls))


def shade(bar: Bar) -> str:
    """Return a bar's colour: its phase's colour, lighter for odd layers so that neighbours differ."""
    colour = phase_colour(bar.place.phase)
    return lighter(colour, 0.28) if bar.place.layer > 0 and bar.place.layer % 2 else colour


def number_colour(background: str) -> str:
    """Return white or black, whichever is easier to read on ``background``."""
    red, green, blue = (int(background[i : i + 2], 16) for i in (1, 3, 5))
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 145 else TEXT


def joined(stalls: list[Stall], bridge_s: float) -> list[Stall]:
    """Return the stalls with near neighbours joined: the lane ran less than ``bridge_s`` and half the time between."""
    found: list[Stall] = []
    stood_s = 0.0
    for stall in sorted(stalls, key=lambda s: s.start_s):
        length = stall.end_s - stall.start_s
        last = found[-1] if found else None
        near = last is not None and stall.start_s - last.end_s <= bridge_s
        if last is not None and near and stood_s + length >= (stall.end_s - last.start_s) / 2:
            found[-1] = Stall(last.lane, last.waits_for, last.start_s, stall.end_s, stall.instruction)
            stood_s += length
        else:
            found.append(stall)
            stood_s = length
    return found


def waited_for(stalls: list[Stall]) -> list[str]:
    """Return the lanes that are waited for, the longest total wait first."""
    total: dict[str, float] = {}
    for stall in stalls:
        total[stall.waits_for] = total.get(stall.waits_for, 0.0) + stall.end_s - stall.start_s
    return sorted(total, key=lambda lane: -total[lane])


def wait_labels(trace: Trace, window: tuple[float, float]) -> dict[str, str]:
    """Return a legend such as ``d2h 1.2 s`` for each lane that compute waits for inside the window."""
    total: dict[str, float] = {}
    for stall in stalls_of(trace):
        inside = min(stall.end_s, window[1]) - max(stall.start_s, window[0])
        if stall.lane == "compute" and inside > 0:
            total[stall.waits_for] = total.get(stall.waits_for, 0.0) + inside
    ordered = sorted(total, key=lambda name: -total[name])
    return {lane: f"{drawn(lane)} {format_seconds(total[lane])}" for lane in ordered}


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
