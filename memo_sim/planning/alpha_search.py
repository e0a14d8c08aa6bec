"""Finds the alpha that is fastest in the engine, over multiples of 1 / ``RESOLUTION``.

With lower bounds, plans are not played when they cannot fit, or cannot be faster than the best plan so far, nor where a
few layers tell the step time (``engine/layers.py``). Of the plan that is found, the time is always the engine's. The
result is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memo_sim.contract.plan import Decisions, Prediction
from memo_sim.planning.lower_bounds import ROUNDING, LowerBounds
from memo_sim.planning.space import with_alpha
from memo_sim.planning.subsequences import swap_each
from memo_sim.program.layout.partition import partition, swapped_parts

RESOLUTION = 64
STRIDES = (8, 1)
"""Strides of the descent. Step time has one valley, with small ripples where the rates of products change."""
MOST_UNTOLD = 2
"""Plans of a grid whose step time few layers do not tell, after which no others are asked for if none told."""

Predict = Callable[[Decisions], Prediction]
Refused = Callable[[Decisions], Prediction | None]
Span = tuple[float, float]
"""The least and the most step seconds of a plan, which differ by rounding."""


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
    """The plans of a grid; each is played at most once, and only where few of its layers do not tell enough."""

    def __init__(self, grid: Grid, predict: Predict, refused: Refused | None, bounds: LowerBounds | None) -> None:
        """``refused``: None where ``predict`` tells."""
        self.grid = grid
        self._predict = predict
        self._refused = refused
        self._bounds = bounds
        self._seen: dict[int, tuple[Decisions, Prediction]] = {}
        self._fitting: dict[int, Prediction | None] = {}
        """Of plans that were not played: why they do not fit, or None."""
        self._near: dict[int, Span | None] = {}
        """Of plans that few layers were asked for: the step seconds, or None where these do not tell."""

    def at(self, step: int) -> tuple[Decisions, Prediction]:
        """Return the plan at a grid step, with its prediction."""
        if step not in self._seen:
            decisions = self.grid.at(step)
            self._seen[step] = (decisions, self._predict(decisions))
        return self._seen[step]

    def refusal(self, step: int) -> Prediction | None:
        """Return the prediction at a grid step when its plan does not fit, else None; it is not played for that."""
        if step in self._seen or self._refused is None:
            prediction = self.at(step)[1]
            return prediction if prediction.step_s is None else None
        if step not in self._fitting:
            self._fitting[step] = self._refused(self.grid.at(step))
        return self._fitting[step]

    def device_refuses(self, step: int) -> bool:
        """Return whether the plan at a grid step needs more device memory than there is; it is not played for that."""
        if step not in self._seen and self._bounds and self._bounds.lack_device(self.grid.at(step), lowered=False):
            return True
        refusal = self.refusal(step)
        return refusal is not None and refusal.status == "gpu_oom"

    def is_faster(self, step: int, other: int) -> bool:
        """Return whether the plan at ``step`` fits and is faster than the one at ``other``, which fits or was played.

        It is played only where neither a few layers nor lower bounds tell, and the other one only where the two are
        equal but for rounding.
        """
        least_s, most_s = self._span(other)
        if step not in self._seen and self._bounds is not None:
            if self._bounds.reach(self.grid.at(step), most_s):
                return False
            near = self._of_few_layers(step)
            if near is not None and near[0] >= most_s:
                return False
            if near is not None and near[1] < least_s:
                return self.refusal(step) is None
        step_s = self._step_s(step)
        return step_s < least_s or (step_s < most_s and step_s < self._step_s(other))

    def _span(self, step: int) -> Span:
        """Return the least and the most step seconds of a plan that fits or was played; others are played."""
        near = None if step in self._seen else self._of_few_layers(step)
        return near or (self._step_s(step),) * 2

    def _of_few_layers(self, step: int) -> Span | None:
        """Return the least and the most step seconds of a plan if it fits; None where few layers do not tell.

        With more swapped tokens more copies are late, and then layers do not repeat.
        """
        if self._bounds is None or step in self._near:
            return self._near.get(step)
        untold = [each for each, near in self._near.items() if near is None]
        if step >= min(untold, default=step + 1) or len(untold) == len(self._near) == MOST_UNTOLD:
            return None
        step_s = self._bounds.of_few_layers(self.grid.at(step))
        self._near[step] = None if step_s is None else (step_s * (1 - ROUNDING), step_s * (1 + ROUNDING))
        return self._near[step]

    def _step_s(self, step: int) -> float:
        """Return the step time of a plan, which is played for it; infinite when it does not fit."""
        step_s = self.at(step)[1].step_s
        return step_s if step_s is not None else float("inf")

    def descend(self, starts: tuple[int, ...], lowest: int, highest: int) -> int:
        """Return the fastest grid step downhill from the best of ``starts``: first long strides, then single steps.

        The plan at the first start fits or was played.
        """
        best = starts[0]
        for start in starts[1:]:
            if self.is_faster(start, best):
                best = start
        for stride in STRIDES:
            better = [best]
            while better:
                best = better[-1] if len(better) > 1 and self.is_faster(better[-1], better[0]) else better[0]
                neighbours = [s for s in (best - stride, best + stride) if lowest <= s <= highest]
                better = [s for s in neighbours if self.is_faster(s, best)]
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
    refused: Refused | None = None,
    bounds: LowerBounds | None = None,
    resolution: int = RESOLUTION,
) -> AlphaSearch:
    """Return the plan with ``base``'s recompute mode and the fastest alpha in the engine.

    Step time falls with alpha (less recompute) until copies stall compute, then it rises. The search starts from
    ``start`` (the linear program's answer), from 0 and from ``most`` (what host memory may hold), over multiples of 1 /
    ``resolution``. A plan that does not fit counts as infinitely slow. When no plan fits, alpha is 0.

    ``refused``: as ``predict``, of a plan that does not fit; None for one that fits. With it, memory needs no play.
    """
    scan = _Scan(Grid.of(base, resolution), predict, refused, bounds)
    steps = scan.grid.steps
    starts = tuple(dict.fromkeys((round(most * steps), round(start * steps), 0)))
    scan.at(starts[0])
    found = scan.descend(starts, 0, steps)
    return scan.result(found if scan.refusal(found) is None else 0)


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
    base: Decisions,
    predict: Predict,
    *,
    refused: Refused | None = None,
    bounds: LowerBounds | None = None,
    resolution: int = RESOLUTION,
) -> AlphaSearch | None:
    """Return the fastest plan that swaps some tokens and keeps the others; None when ``base`` has too few rows.

    As alpha grows, device memory falls, and host memory and copies rise. A bisection finds the smallest alpha that fits
    into device memory; the search for the fastest starts there and goes upward. ``refused``: see ``best_alpha``.
    """
    scan = _Scan(Grid.of(base, resolution), predict, refused, bounds)
    lowest, highest = 1, scan.grid.steps - 1
    if highest < lowest:
        return None
    lowest = least_that_fits(scan.device_refuses, lowest, highest)
    if scan.refusal(lowest) is not None:
        return scan.result(lowest)
    return scan.result(scan.descend((lowest,), lowest, scan.grid.steps - 1))
