"""Finds the part of a step's memory requests that repeats from micro-batch to micro-batch.

    births   p p p | a b c | a b c | a b c | a b c | e e       p: before, e: after, "a b c": one period

Buffers are compared in the order of their births. A period is a number of births after which the same sizes and lives
come again, equally many instants later. Names play no part, so it is found in recorded requests as well.

A life may be longer than a period: in 1F1B a pipeline stage holds the activations of several micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memo_sim.program.analysis.columns import Ints

LEAST_TIMES = 4
"""How often a birth comes at least in the middle half of a step that repeats."""

RAREST = 8
"""Kinds of birth whose distances are tried as periods, the rarest first: one that comes once a micro-batch is best."""

MOST_OCCURRENCES = 64
"""Largest number of occurrences of such a birth in one period."""


@dataclass(frozen=True, eq=False)
class Period:
    """``times`` equal periods of ``births`` buffers and ``instants`` instants.

    ``order`` has all buffers by birth; those of one instant are in the order in which they were given.
    ``order[first : first + births * times]`` are the buffers that are born in a period, and ``begins`` is the instant
    at which the first one begins.
    """

    order: Ints
    first: int
    births: int
    times: int
    begins: int
    instants: int

    @property
    def ends(self) -> int:
        """The instant at which the last period ends."""
        return self.begins + self.times * self.instants

    @property
    def after(self) -> int:
        """Position in ``order`` of the first buffer born after the last period."""
        return self.first + self.times * self.births

    @property
    def buffers(self) -> Ints:
        """The buffers by period (row) and place in it (column)."""
        return self.order[self.first : self.after].reshape(self.times, self.births)


def find_period(lower: Ints, upper: Ints, size: Ints) -> Period | None:
    """Return the period that covers most births, or None when nothing repeats at least twice.

    ``lower``, ``upper`` and ``size`` are the buffers' lives [lower, upper) and sizes in any unit.
    """
    order = np.argsort(lower, kind="stable")
    low, life, sizes = lower[order], (upper - lower)[order], size[order]
    gap = np.diff(low, prepend=low[:1])
    kind = _kinds(gap, life, sizes)
    best: tuple[int, int, int] | None = None
    for births, at in _candidates(kind):
        equal = kind[births:] == kind[:-births]
        differ = np.flatnonzero(~equal)
        after = int(np.searchsorted(differ, at))
        start = int(differ[after - 1]) + 1 if after else 0
        end = (int(differ[after]) if after < len(differ) else len(equal)) + births
        if best is None or end - start - births > best[1] - best[0] - best[2]:
            best = (start, end, births)
    return None if best is None else _begun(order, low, low + life, best)


def _kinds(*columns: Ints) -> Ints:
    """Number the rows of ``columns`` so that equal rows, and only these, have equal numbers."""
    found = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, number = np.unique(column, return_inverse=True)
        _, found = np.unique(found * len(values) + number, return_inverse=True)
    return found


def _candidates(kind: Ints) -> list[tuple[int, int]]:
    """Return numbers of births after which births repeat, each with a position where they do."""
    inner = slice(len(kind) // 4, len(kind) - len(kind) // 4)  # a step begins and ends otherwise
    counts = np.bincount(kind[inner])
    often = np.flatnonzero(counts >= LEAST_TIMES)
    found = []
    for number in often[np.argsort(counts[often], kind="stable")][:RAREST].tolist():
        places = np.flatnonzero(kind == number)
        middle = int(places[len(places) // 2])
        for later in places[len(places) // 2 + 1 :][:MOST_OCCURRENCES].tolist():
            births = later - middle
            if later + births <= len(kind) and np.array_equal(kind[middle:later], kind[later : later + births]):
                found.append((births, middle))
                break
    return found


def _begun(order: Ints, low: Ints, high: Ints, found: tuple[int, int, int]) -> Period | None:
    """Return the period, begun at an instant where fewest of the births that repeat are alive.

    ``found``: the first birth that repeats, the first behind them, and the births of one period.
    """
    start, end, births = found
    instants = int(low[start + births] - low[start])
    if not instants:
        return None
    longest = int((high - low)[start : start + births].max())
    begins = np.flatnonzero(np.diff(low[: start + births], prepend=low[0] - 1)[start:]) + start
    later = begins + -(-longest // instants) * births  # where all that repeated births leave alive is there
    at = low[np.minimum(later, end - 1)]
    alive = np.searchsorted(low[start:end], at) - np.searchsorted(np.sort(high[start:end]), at, side="right")
    first = int(begins[int(alive.argmin())])
    times = (end - first) // births
    return Period(order, first, births, times, int(low[first]), instants) if times > 1 else None
