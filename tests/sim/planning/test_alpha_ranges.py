"""Bounds of all alphas of a pipeline are those of trying every one, whatever the ranges in between."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, cast

import pytest

from memo_sim.planning.alpha_ranges import WIDEST, edges_of, least_step_s


@dataclass(frozen=True)
class Found:
    step_s: float


@dataclass(frozen=True)
class Steps:
    """Stands for a grid of alphas: its plans are the steps."""

    steps: int

    def at(self, step: int) -> int:
        return step


class Bounds:
    """Bounds of ranges: exact from one stage, a tenth too low from a few layers, and less so from passes."""

    def __init__(self, step_s: list[float]) -> None:
        self.step_s = step_s

    def step_s_between(self, low: int, high: int) -> float:
        return 0.9 * min(self.step_s[low : high + 1])

    def memory_between(self, low: int, high: int) -> Found:
        return Found(self.step_s_between(low, high))

    def shortfall_bytes(self, bound: Found) -> int:
        return 0

    def of_passes(self, low: int, high: int) -> float:
        return 0.95 * min(self.step_s[low : high + 1])

    def of_one_stage(self, low: int, high: int, enough_s: float) -> float:
        return min(self.step_s[low : high + 1])


@pytest.mark.parametrize("seed", range(40))
def test_ranges_find_what_every_alpha_gives(seed: int) -> None:
    chance = random.Random(seed)
    steps = chance.choice([1, 4, 13, 64])
    times = [chance.uniform(90, 110) for _ in range(steps + 1)]
    low = chance.randint(0, steps)
    high, fits = chance.randint(low, steps), chance.randint(0, steps + 1)
    limit_s = chance.uniform(88, 108)
    counted = [times[step] for step in range(low, high + 1) if step >= fits or step in (0, steps)]
    grid, bounds = cast("Any", Steps(steps)), cast("Any", Bounds(times))
    lacks = (lambda step: step < fits and step not in {0, steps}) if chance.random() < 0.7 else None
    if lacks is None:
        counted = times[low : high + 1]
    found_s = least_step_s(bounds, grid, low, high, limit_s, lacks=lacks)
    least_s = min(counted, default=float("inf"))
    if least_s < limit_s:
        assert found_s == least_s
    else:
        assert limit_s <= found_s <= least_s


def test_widest_ranges_share_their_ends() -> None:
    assert edges_of(0, 64, WIDEST) == list(range(0, 65, WIDEST))
    assert edges_of(1, 63, WIDEST) == [1, *range(WIDEST, 63, WIDEST), 63]
    assert edges_of(5, 5, WIDEST) == [5]
    assert edges_of(5, 7, WIDEST) == [5, 7]
