"""Places a step that repeats (``program/arena/periods.py``) in time that grows with one period, not with the step.

Where no buffer born in a period lives on into the next, any solver places a short step, and the addresses of its first
period are used for all periods:

    the step     | before | 0 | 1 | 2 | 3 | ... | n | after |
    the short    | before | 0 |                 | n | after |

Otherwise (pipeline stages hold several micro-batches) first fit goes from period to period. It places the buffers of
two periods in one of its orders (``greedy.py``) beside those that are still alive, and keeps the first period's:

    | before | 0 | 1 |        places "before", 0 and 1, keeps "before" and 0
    | before | 0 | 1 | 2 |    places 1 and 2 beside what is alive, keeps 1; and so on

What is alive where a period begins, with sizes, addresses and remaining lives, decides all that follows. If it is what
was alive some periods earlier, the addresses of these periods come again and again until the last period, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np

from memo_sim.memory.greedy import ORDERS, fitted, order_of
from memo_sim.memory.problem import Clock, Ints, Problem
from memo_sim.program.arena.periods import Period, find_period

LEAST_BUFFERS = 2_000
"""Steps with fewer buffers are placed without periods: all solvers are fast there and may use any address."""

LEAST_PERIODS = 4
"""Steps with fewer periods are placed as a whole."""

TRIED = 6
"""Periods after which the orders are compared; the best goes on to the end, others only if they are still better."""


def period_of(problem: Problem) -> Period | None:
    """Return the period of a step of many buffers, or None when there are few, or most of the step does not repeat."""
    if problem.count < LEAST_BUFFERS:
        return None
    period = find_period(problem.lower, problem.upper, problem.size)
    if period is None or period.times < LEAST_PERIODS or 2 * period.buffers.size < problem.count:
        return None
    return period


@dataclass(frozen=True, eq=False)
class Short:
    """The step with its first and last period only; ``kept`` has each buffer's number in the whole step."""

    problem: Problem
    kept: Ints
    period: Period

    def repeated(self, offsets: Ints) -> Ints:
        """Return offsets of the whole step, given those of the short one."""
        before, births = self.period.first, self.period.births
        found = np.empty(len(self.period.order), dtype=np.int64)
        found[self.kept] = offsets
        found[self.period.buffers] = offsets[before : before + births]
        return found


def short_step(problem: Problem, period: Period) -> Short | None:
    """Return the short step; None when a buffer lives on into another period, or dies between the first and the last.

    So buffers of the first period meet only each other and those that are alive in every period.
    """
    before, buffers, after = period.order[: period.first], period.buffers, period.order[period.after :]
    second, ends = period.begins + period.instants, period.ends
    late, early = problem.upper[buffers[-1]] > ends, problem.lower[after] < ends
    dies = problem.upper[before]
    if (problem.upper[buffers[0]] > second).any() or late.any() or early.any():
        return None
    if ((dies > second) & (dies < ends)).any():
        return None
    gone = (period.times - 2) * period.instants
    kept = np.concatenate([before, buffers[0], buffers[-1], after])
    lower, upper = problem.lower[kept], problem.upper[kept]
    later = np.arange(len(kept)) >= len(before) + period.births
    short = replace(
        problem,
        lower=np.where(later, lower - gone, lower),
        upper=np.where(later | (upper >= ends), upper - gone, upper),
        size=problem.size[kept],
    )
    return Short(short, kept, period)


def solve_by_periods(problem: Problem, period: Period, clock: Clock) -> Ints | None:
    """Return the best offsets of all orders in units; None when ``clock`` runs out before the first are found.

    No order needs less for ``TRIED`` periods than the live sum of their buffers. An order that needs no more goes on
    before others are tried.
    """
    first = period.order[: period.first + period.births * (TRIED + 1)]
    least = int(problem.part(first).live.max(initial=0))
    names, tried = iter(ORDERS), list[tuple[int, int, _FirstFit]]()
    best, most = None, None
    while most is None or most > problem.lower_bound:
        while not tried or tried[0][0] > least:
            name = next(names, None)
            if name is None:
                break
            one = _FirstFit(problem, period, order_of(problem, name))
            if one.go_on(clock, periods=TRIED):
                heappush(tried, (problem.peak(one.offsets), ORDERS.index(name), one))
        if not tried:
            break
        peak, _, one = heappop(tried)
        if most is not None and peak >= most:
            break
        if one.go_on(clock, below=most):
            best, most = one.offsets, problem.peak(one.offsets)
    return best


class _FirstFit:
    """First fit from period to period in one order, which may stop after some periods and go on later."""

    def __init__(self, problem: Problem, period: Period, order: Ints) -> None:
        self._problem, self._period = problem, period
        self._rank = np.empty(problem.count, dtype=np.int64)
        self._rank[order] = np.arange(problem.count)
        self.offsets = np.zeros(problem.count, dtype=np.int64)
        self._alive = order[:0]
        self._seen: dict[bytes, int] = {}
        self._placed = 0
        """How many periods are placed."""
        self._highest = 0
        """The highest peak so far, buffers of the next period included, which are placed again."""

    def go_on(self, clock: Clock, *, periods: int | None = None, below: int | None = None) -> bool:
        """Place all periods, or ``periods`` in all if given.

        Return False when ``clock`` runs out, or when a peak is not ``below``.
        """
        problem, period, offsets = self._problem, self._period, self.offsets
        last = period.times - 1
        """The period with which all that is left is placed."""
        while self._placed <= last and self._placed != periods:
            if clock.left_s == 0 or (below is not None and self._highest >= below):
                return False
            number = self._placed
            begin = period.first + period.births * number if number else 0
            if number:
                self._alive = self._alive[problem.upper[self._alive] > problem.lower[period.order[begin]]]
                earlier = self._seen.setdefault(_state(problem, period, number, self._alive, offsets), number)
                if earlier < number < last:
                    again = earlier + np.arange(last - number) % (number - earlier)
                    offsets[period.buffers[number:last]] = offsets[period.buffers[again]]
                    end = period.first + period.births * last
                    self._alive = np.concatenate([self._alive, period.order[begin:end]])
                    self._placed = last
                    continue
            end = period.first + period.births * (number + 1) if number < last else problem.count
            ahead = end + period.births if number < last else end
            chosen = period.order[begin:ahead]
            fitted(problem, chosen[np.argsort(self._rank[chosen])], offsets, beside=self._alive)
            self._alive = np.concatenate([self._alive, period.order[begin:end]])
            self._highest = max(self._highest, problem.peak(offsets))
            self._placed += 1
        return below is None or self._highest < below


def _state(problem: Problem, period: Period, number: int, alive: Ints, offsets: Ints) -> bytes:
    """Return what decides the addresses of period ``number`` and of all later ones."""
    began = period.begins + number * period.instants
    death = problem.upper[alive]
    lasting = death >= period.ends
    rows = np.stack((offsets[alive], problem.size[alive], np.where(lasting, death, death - began), lasting))
    return rows[:, np.lexsort(rows)].tobytes()
