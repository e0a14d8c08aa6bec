"""Lower bound of a pipeline's step time over all alphas, from one stage that is played alone (``stage_alone.py``).

A range of alphas is halved until its bound reaches the time of the best plan so far. The widest ranges have the ends
that the bounds of a few layers had before (``bounded_candidates.py``), which are known for each. Ranges that these
decide are not played, nor are ranges whose most swapped tokens leave too much on the device. Neighbours share an alpha,
so each is lowered once. The search ends when the least bound is that of a single alpha. That plan may then be played:
many bounds are below the best time only because they are too low.

      alpha     0        1/4        1/2        3/4        1
      bound     |-- 114 --|- 108 -|109|-- 110 --|-- 111 --|        none is below 107, the best so far
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import inf

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
    played_s: Callable[[int], float] | None = None,
) -> float:
    """Return a lower bound of the step seconds at all grid steps from ``low`` to ``high``.

    It reaches ``limit_s``, or it is that of a single step. Both of these are asked for only where bounds do not decide:

    - ``lacks``: whether a grid step does not fit on the device, nor any below; such steps do not count.
    - ``played_s``: the step seconds of the plan at a grid step, infinite where it does not fit.

    Raises:
        Infeasible: when a plan cannot be lowered, or the profile has not measured its work.
    """
    # Nothing is recomputed at the highest step, and nothing is copied at the lowest: these are other programs.
    ranges = [(step, step) for step in (0, grid.steps) if low <= step <= high]
    low, high = max(low, 1), min(high, grid.steps - 1)
    if low <= high:
        ranges += pairwise(edges_of(low, high, WIDEST)) if low < high else [(low, high)]
    widest = set(ranges)
    # The bound that is known of each range, which may be the wider one's that it is a half of, and whether it is.
    waiting = [(0.0, first, last, False) for first, last in ranges]
    heapify(waiting)
    done = set[tuple[int, int]]()
    while waiting:
        known_s, first, last, own = heappop(waiting)
        if known_s >= limit_s:
            return known_s
        if not own:
            if (first, last) not in done:
                done.add((first, last))
                few = (first, last) in widest or first == last
                found_s = _least_step_s(bounds, grid, first, last, limit_s, few=few)
                heappush(waiting, (max(known_s, found_s), first, last, True))
        elif lacks is not None and lacks(last):
            continue
        elif first == last:
            if played_s is None or (found_s := played_s(first)) < limit_s:
                return known_s
            heappush(waiting, (found_s, first, last, True))
        else:
            middle = (first + last) // 2
            halves = [(first, middle), (middle, last)] if last - first > 1 else [(first, first), (last, last)]
            for half in halves:
                heappush(waiting, (known_s, *half, False))
    return inf


def _least_step_s(bounds: LowerBounds, grid: Grid, first: int, last: int, limit_s: float, *, few: bool) -> float:
    """Return a range's lower bound; ``few``: whether those of a few layers and of passes are tried first."""
    low, high = grid.at(first), grid.at(last)
    if few:
        if (few_s := max(bounds.step_s_between(low, high), bounds.of_passes(low, high))) >= limit_s:
            return few_s
        if bounds.shortfall_bytes(bounds.memory_between(low, high)):
            return inf
    return bounds.of_one_stage(low, high, limit_s)
