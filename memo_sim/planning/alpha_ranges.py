"""Lower bound of a pipeline's step time over all alphas, from one stage that is played alone (``stage_alone.py``).

A range of alphas is halved until its bound reaches the time of the best plan so far. Ranges that the cheaper bounds of
a few layers decide are not played. The search ends at the first single alpha that may be faster.

      alpha     0        1/4        1/2        3/4        1
      bound     |---- 114 ----|- 108 -|- 109 -|---- 111 --|        none is below 107, the best so far
"""

from __future__ import annotations

from memo_sim.planning.alpha_search import Grid
from memo_sim.planning.lower_bounds import LowerBounds

WIDEST = 8
"""Grid steps of the widest range that is played: a wider one is too far below its alphas to decide anything."""


def least_step_s(bounds: LowerBounds, grid: Grid, low: int, high: int, limit_s: float) -> float:
    """Return a lower bound of the step seconds at all grid steps from ``low`` to ``high``, if it reaches ``limit_s``.

    0 when an alpha may be faster.

    Raises:
        Infeasible: when a plan cannot be lowered, or the profile has not measured its work.
    """
    least_s = float("inf")
    # Nothing is recomputed at the highest step, and nothing is copied at the lowest: these are other programs.
    ends = [step for step in (0, grid.steps) if low <= step <= high]
    waiting = [(step, step) for step in ends]
    low, high = max(low, 1), min(high, grid.steps - 1)
    if low <= high:
        waiting.append((low, high))
    while waiting:
        first, last = waiting.pop()
        found_s = _least_step_s(bounds, grid, first, last, limit_s)
        if found_s >= limit_s:
            least_s = min(least_s, found_s)
        elif first == last:
            return 0.0
        elif last - first == 1:
            waiting += [(last, last), (first, first)]
        else:
            middle = (first + last) // 2
            waiting += [(middle, last), (first, middle)]
    return least_s


def _least_step_s(bounds: LowerBounds, grid: Grid, first: int, last: int, limit_s: float) -> float:
    low, high = grid.at(first), grid.at(last)
    if 0 < last - first <= WIDEST:
        return bounds.of_one_stage(low, high, limit_s)
    bound = bounds.between(low, high)
    if bounds.shortfall_bytes(bound):
        return float("inf")
    if bound.step_s >= limit_s or last > first:
        return bound.step_s
    return max(bound.step_s, bounds.of_one_stage(low, high, limit_s))
