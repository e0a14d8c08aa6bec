"""Lower bound of a pipeline's step time over all alphas, from one stage that is played alone (``stage_alone.py``).

A range of alphas is halved until its bound reaches the time of the best plan so far. The widest ranges have the ends
that the bounds of a few layers had before (``bounded_candidates.py``), which are known for each. Ranges that these
decide are not played, nor are ranges whose most swapped tokens leave too much on the device. Neighbours share an alpha,
so each is lowered once. The search ends at the first single alpha that may be faster.

      alpha     0        1/4        1/2        3/4        1
      bound     |-- 114 --|- 108 -|109|-- 110 --|-- 111 --|        none is below 107, the best so far
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from memo_sim.planning.alpha_search import Grid
from memo_sim.planning.lower_bounds import LowerBounds

WIDEST = 8
"""Grid steps of the widest range that is played: a wider one is too far below its alphas to decide anything."""


def edges_of(low: int, high: int, width: int) -> list[int]:
    """Return the grid steps from ``low`` to ``high`` that are one of both, or a multiple of ``width``."""
    return sorted({low, *range(-(-low // width) * width, high, width), high})


def least_step_s(
    bounds: LowerBounds,
    grid: Grid,
    low: int,
    high: int,
    limit_s: float,
    *,
    lacks: Callable[[int], bool] | None = None,
) -> float:
    """Return a lower bound of the step seconds at all grid steps from ``low`` to ``high``, if it reaches ``limit_s``.

    0 when an alpha may be faster. ``lacks``: whether a grid step does not fit on the device, nor any below; such steps
    do not count. It is asked for only where time does not decide.

    Raises:
        Infeasible: when a plan cannot be lowered, or the profile has not measured its work.
    """
    least_s = float("inf")
    # Nothing is recomputed at the highest step, and nothing is copied at the lowest: these are other programs.
    ends = [step for step in (0, grid.steps) if low <= step <= high]
    waiting = [(step, step) for step in ends]
    low, high = max(low, 1), min(high, grid.steps - 1)
    if low <= high:
        waiting += reversed(list(pairwise(edges_of(low, high, WIDEST))) or [(low, high)])
    widest, done = set(waiting), set[tuple[int, int]]()
    while waiting:
        first, last = one = waiting.pop()
        if one in done:
            continue
        done.add(one)
        found_s = _least_step_s(bounds, grid, first, last, limit_s, few=one in widest or first == last)
        if found_s >= limit_s:
            least_s = min(least_s, found_s)
        elif lacks is not None and lacks(last):
            continue
        elif first == last:
            return 0.0
        elif last - first == 1:
            waiting += [(last, last), (first, first)]
        else:
            middle = (first + last) // 2
            waiting += [(middle, last), (first, middle)]
    return least_s


def _least_step_s(bounds: LowerBounds, grid: Grid, first: int, last: int, limit_s: float, *, few: bool) -> float:
    """Return a range's lower bound; ``few``: whether those of a few layers and of passes are tried first."""
    low, high = grid.at(first), grid.at(last)
    if few:
        bound = bounds.between(low, high)
        if bounds.shortfall_bytes(bound):
            return float("inf")
        if bound.step_s >= limit_s:
            return bound.step_s
        if (passes_s := bounds.of_passes(low, high)) >= limit_s:
            return passes_s
    return bounds.of_one_stage(low, high, limit_s)
