"""Draws the compute lanes of all pipeline stages into given axes: a row per stage, a block per pass of a micro-batch.

A block's coloured part is as high as the share of its time in which the stage computes; gaps that can be seen are
hatched in the colour of what the stage waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memo_sim.views.bars import Pass, busy_share, passes_of, stalls_of
from memo_sim.views.lane_panel import DIGIT_PIXELS, draw_hatch, number_colour, percent
from memo_sim.views.palette import lighter, phase_colour
from memo_sim.views.step import Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW, GAP = 1.0, 0.22
LEAST_PIXELS = 2.0
"""A gap narrower than this does not divide a block."""


@dataclass(frozen=True)
class PipelinePanel:
    """All stages in a time window (seconds), drawn ``pixels`` wide; the axis counts units of ``unit_s`` seconds."""

    steps: Sequence[Step]
    window: tuple[float, float]
    unit_s: float
    pixels: float

    @property
    def height(self) -> float:
        """Height of all rows, in units of a row."""
        return len(self.steps) * (ROW + GAP)

    def draw(self, ax: Axes) -> list[str]:
        """Draw a row for each stage; return the phases that have blocks."""
        phases: dict[str, None] = {}
        ticks, labels = [], []
        for number, step in enumerate(self.steps):
            bottom = -(number + 1) * (ROW + GAP) + GAP
            phases |= dict.fromkeys(self._row(ax, step, bottom))
            ticks.append(bottom + ROW / 2)
            labels.append(f"stage {number + 1}  {percent(busy_share(step.trace))}")
        ax.set_ylim(-self.height + GAP - 0.08, 0.08)
        ax.set_yticks(ticks, labels)
        ax.tick_params(axis="y", length=0)
        for spine in ("top", "right", "left"):
            ax.spines[spine].set_visible(False)
        ax.grid(axis="x", color="#ececec", linewidth=0.6)
        ax.set_axisbelow(True)
        return list(phases)

    def _row(self, ax: Axes, step: Step, bottom: float) -> list[str]:
        pixel_s = (self.window[1] - self.window[0]) / self.pixels
        passes = passes_of(step.trace, bridge_s=LEAST_PIXELS * pixel_s)
        draw_hatch(
            ax,
            [stall for stall in stalls_of(step.trace) if stall.lane == "compute"],
            (bottom, ROW),
            unit_s=self.unit_s,
            pixel_s=pixel_s,
        )
        for share, colours in ((1.0, [lighter(_shade(p), 0.72) for p in passes]), (None, [_shade(p) for p in passes])):
            for one, colour in zip(passes, colours, strict=True):
                height = ROW * (share or one.busy_s / (one.end_s - one.start_s))
                bar = [(one.start_s / self.unit_s, (one.end_s - one.start_s) / self.unit_s)]
                ax.broken_barh(bar, (bottom, height), facecolors=colour, linewidth=0, snap=False)
        for one in passes:
            width = (one.end_s - one.start_s) / pixel_s
            if one.number >= 0 and width > DIGIT_PIXELS * (len(str(one.number)) + 0.8):
                ax.text(
                    (one.start_s + one.end_s) / 2 / self.unit_s,
                    bottom + ROW / 2 - 0.04,
                    str(one.number),
                    ha="center",
                    va="center",
                    fontsize=6.5,
                    color=number_colour(_shade(one)),
                    clip_on=True,
                )
        return [one.phase for one in passes if (one.end_s - one.start_s) / pixel_s >= LEAST_PIXELS]


def _shade(one: Pass) -> str:
    """Return a block's colour: its phase's, lighter for odd micro-batches so that neighbours differ."""
    colour = phase_colour(one.phase)
    return lighter(colour, 0.28) if one.number > 0 and one.number % 2 else colour
