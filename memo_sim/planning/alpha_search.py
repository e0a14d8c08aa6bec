"""Finds the alpha that is fastest in the engine, over multiples of 1 / ``RESOLUTION``.

With lower bounds, plans are not played when they cannot fit, or cannot be faster than the best plan so far. The result
is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memo_sim.contract.plan import Decisions, Prediction
from memo_sim.planning.lower_bounds import LowerBounds
from memo_sim.planning.space import with_alpha
from memo_sim.planning.subsequences import swap_each
from memo_sim.program.layout.partition import partition, swapped_parts

RESOLUTION = 64
STRIDES = (8, 1)
"""Strides of the descent. Step time has one valley, with small ripples where the rates of products change."""
Predict = Callable[[Decisions], Prediction]


@dataclass(frozen=True, slots=True)
class Grid:
    """The plans of one layout and recompute mode, at multiples of 1 / ``steps`` of alpha."""

    base: Decisions
    steps: int

    @classmethod
    def of(cls, base: Decisions, resolution: int = RESOLUTION) -> Grid:
        """Return the finest grid, up to ``resolution``, that the row blocks of ``base``'s longest subsequence allow."""
        return cls(base, max(1, min(resolution, partition(base)[0] // base.swap_granule)))

    def at(self, step: int) -> Decisions:
        """Return the plan at a grid step."""
        if self.base.layout.subsequences > 1:
            return swap_each(self.base, self._tokens_each(step))
        return with_alpha(self.base, self.base.recompute, step / self.steps)

    def step_of(self, decisions: Decisions) -> int:
        """Return the grid step of a plan."""
        return round(swapped_parts(decisions)[0] / partition(decisions)[0] * self.steps)

    def _tokens_each(self, step: int) -> int:
        """Return the tokens that every subsequence swaps at a grid step; at the last one, the longest swaps all."""
        longest, granule = partition(self.base)[0], self.base.swap_granule
        return longest if step == self.steps else longest * step // self.steps // granule * granule

    def refusal(self, step: int, predict: Callable[[Decisions], Prediction | None]) -> Prediction | None:
        """Return the prediction at a grid step when its plan runs out of memory, else None; None off the grid as well.

        ``predict`` may return None for a plan that fits.
        """
        prediction = predict(self.at(step)) if 0 <= step <= self.steps else None
        return prediction if prediction is not None and prediction.step_s is None else None


@dataclass(frozen=True, slots=True)
class AlphaSearch:
    """Result of a search over alpha: the best plan (nearest to fitting when none fits), and how many were played."""

    decisions: Decisions
    prediction: Prediction
    evaluated: int


class _Scan:
    """The plans of a grid; each is predicted at most once."""

    def __init__(self, grid: Grid, predict: Predict, bounds: LowerBounds | None) -> None:
        self.grid = grid
        self._predict = predict
        self._bounds = bounds
        self._seen: dict[int, tuple[Decisions, Prediction]] = {}

    def at(self, step: int) -> tuple[Decisions, Prediction]:
        """Return the plan at a grid step, with its prediction."""
        if step not in self._seen:
            decisions = self.grid.at(step)
            self._seen[step] = (decisions, self._predict(decisions))
        return self._seen[step]

    def time_of(self, step: int, *, limit_s: float = float("inf")) -> float:
        """Return the step time; infinite for plans that do not fit, or that cannot be faster than ``limit_s``."""
        if step not in self._seen and self._is_no_faster(step, limit_s):
            return float("inf")
        step_s = self.at(step)[1].step_s
        return step_s if step_s is not None else float("inf")

    def _is_no_faster(self, step: int, limit_s: float) -> bool:
        grid, bounds = self.grid, self._bounds
        return bounds is not None and bounds.reach(grid.at(step), limit_s, base=grid.base)

    def device_refuses(self, step: int) -> bool:
        """Return whether the plan at a grid step needs more device memory than there is."""
        if step not in self._seen and self._bounds and self._bounds.lack_device(self.grid.at(step)):
            return True
        return self.at(step)[1].status == "gpu_oom"

    def descend(self, starts: tuple[int, ...], lowest: int, highest: int) -> int:
        """Return the fastest grid step downhill from the best of ``starts``: first long strides, then single steps."""
        best = starts[0]
        for start in starts[1:]:
            if self.time_of(start, limit_s=self.time_of(best)) < self.time_of(best):
                best = start
        for stride in STRIDES:
            better = [best]
            while better:
                best = min(better, key=self.time_of)
                neighbours = [s for s in (best - stride, best + stride) if lowest <= s <= highest]
                limit_s = self.time_of(best)
                better = [s for s in neighbours if self.time_of(s, limit_s=limit_s) < limit_s]
        return best

    def result(self, step: int) -> AlphaSearch:
        """Return the result of the search with the plan at grid step ``step``."""
        return AlphaSearch(*self.at(step), len(self._seen))


def best_alpha(
    base: Decisions,
    predict: Predict,
    *,
    start: float,
    most: float = 1.0,
    bounds: LowerBounds | None = None,
    resolution: int = RESOLUTION,
) -> AlphaSearch:
    """Return the plan with ``base``'s recompute mode and the fastest alpha in the engine.

    Step time falls with alpha (less recompute) until copies stall compute, then it rises. The search starts from
    ``start`` (the linear program's answer), from 0 and from ``most`` (what host memory may hold), over multiples of 1 /
    ``resolution``. A plan that does not fit counts as infinitely slow. When no plan fits, alpha is 0.
    """
    scan = _Scan(Grid.of(base, resolution), predict, bounds)
    steps = scan.grid.steps
    starts = tuple(dict.fromkeys((round(most * steps), round(start * steps), 0)))
    found = scan.descend(starts, 0, steps)
    return scan.result(found if scan.time_of(found) < float("inf") else 0)


def least_that_fits(refuses: Callable[[int], bool], lowest: int, highest: int) -> int:
    """Return the smallest grid step that is not refused, or ``highest``; with more swapped rows, nothing needs more."""
    while lowest < highest:
        middle = (lowest + highest) // 2
        if refuses(middle):
            lowest = middle + 1
        else:
            highest = middle
    return lowest


def most_that_host_holds(grid: Grid, bounds: LowerBounds, lowest: int, highest: int) -> int:
    """Return the highest grid step that host memory may suffice for, or ``lowest``."""
    while lowest < highest:
        middle = (lowest + highest + 1) // 2
        lowest, highest = (lowest, middle - 1) if bounds.lack_host(grid.at(middle)) else (middle, highest)
    return lowest


def best_partial_swap(
    base: Decisions, predict: Predict, *, bounds: LowerBounds | None = None, resolution: int = RESOLUTION
) -> AlphaSearch | None:
    """Return the fastest plan that swaps some tokens and keeps the others; None when ``base`` has too few rows.

    As alpha grows, device memory falls, and host memory and copies rise. A bisection finds the smallest alpha that fits
    into device memory; the search for the fastest starts there and goes upward.
    """
    scan = _Scan(Grid.of(base, resolution), predict, bounds)
    lowest, highest = 1, scan.grid.steps - 1
    if highest < lowest:
        return None
    lowest = least_that_fits(scan.device_refuses, lowest, highest)
    if scan.at(lowest)[1].status != "ok":
        return scan.result(lowest)
    return scan.result(scan.descend((lowest,), lowest, scan.grid.steps - 1))
