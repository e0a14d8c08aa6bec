"""A chart of a page as inline SVG: lines or points over two linear axes that begin where their values do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import Any

WIDTH, HEIGHT = 480, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 30, 42
MOST_TICKS = 6
ROOM = 0.06
"""Fraction of an axis that stays free beyond its outermost values."""

Point = tuple[float, float, str]
"""x, y, and what a reader sees when the pointer rests on it."""


@dataclass(frozen=True)
class Line:
    """Points of one colour; ``joined`` by a line or not, and ``marked`` each or not."""

    name: str
    colour: str
    points: Sequence[Point]
    joined: bool = True
    marked: bool = True


@dataclass(frozen=True)
class Chart:
    """A chart with its axes' names; ``from_zero`` begins the y axis at zero."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    from_zero: bool = False

    @property
    def drawing(self) -> dict[str, Any]:
        """The chart in the units of its drawing, for the template; no ticks and lines without a point."""
        points = [point for line in self.lines for point in line.points]
        if not points:
            return {"width": WIDTH, "height": HEIGHT, "x_ticks": [], "y_ticks": [], "lines": []}
        x_low, x_high = _range([x for x, _, _ in points], from_zero=False)
        y_low, y_high = _range([y for _, y, _ in points], from_zero=self.from_zero)

        def at_x(x: float) -> float:
            return round(LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT), 1)

        def at_y(y: float) -> float:
            return round(HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM), 1)

        return {
            "width": WIDTH,
            "height": HEIGHT,
            "left": LEFT,
            "right": WIDTH - RIGHT,
            "top": TOP,
            "bottom": HEIGHT - BOTTOM,
            "x_ticks": [(at_x(tick), text) for tick, text in _ticks(x_low, x_high)],
            "y_ticks": [(at_y(tick), text) for tick, text in _ticks(y_low, y_high)],
            "lines": [
                {
                    "colour": line.colour,
                    "path": " ".join(f"{at_x(x)},{at_y(y)}" for x, y, _ in line.points) if line.joined else "",
                    "points": [{"x": at_x(x), "y": at_y(y), "text": text} for x, y, text in line.points if line.marked],
                }
                for line in self.lines
            ],
        }


def _range(values: Sequence[float], *, from_zero: bool) -> tuple[float, float]:
    low, high = (0.0 if from_zero else min(values)), max(values)
    room = (high - low) * ROOM or abs(high) * ROOM or 1.0
    return (low if from_zero else low - room), high + room


def _ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Return round numbers inside the range, and their texts with as many decimals as tell them apart."""
    least = (high - low) / MOST_TICKS
    power = 10.0 ** floor(log10(least))
    pace = next(n * power for n in (1, 2, 5, 10) if n * power >= least)
    decimals = max(0, -floor(log10(pace) + 1e-9))
    first = ceil(low / pace - 1e-9)
    found = [n * pace for n in range(first, first + 2 * MOST_TICKS) if n * pace <= high]
    return [(tick, f"{tick:,.{decimals}f}") for tick in found]
