"""Times operators in passes that end before a deadline.

No point starts that is expected to end too late, judged by what the largest smaller one of its kind took:

    expected = seconds of that point x size / its size        size: FLOPs of products and attention, bytes of the rest

A small point is mostly overhead, so this expects too much rather than too little. So a table climbs step by step:

    1  the smallest point of every table, in any case: no profile does without
    2  of each table, the largest point that fits into an equal share of the time left; again and again, until it has
       its largest point or nothing fits; tables that are expected to need less come first and leave what they spare
    3  all other points that fit, in the order of what they decide (``order.py``)
    4  all points again, as long as a whole pass fits

On a quiet machine every table has its largest point after a few rounds. On a busy one the long points are left out, and
the profile names the tables that end below their largest point.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from memo_exec.probes.operators import Operator
from memo_exec.probes.order import kind_of, size_of, tables_of
from memo_exec.probes.timing import Sample

PASSES = 3
"""How many passes time all operators. A short load of the machine then disturbs at most one sample of an operator."""

Samples = dict[int, list[Sample]]
"""The samples of operators, by their index; of those alone that were timed."""


class Expected:
    """Expects how long it takes to time an operator, from what others of its kind took."""

    def __init__(self) -> None:
        self._took: dict[object, list[tuple[float, float]]] = defaultdict(list)
        """(Size, seconds) of each timed point of a kind, by size."""

    def learn(self, operator: Operator, seconds: float) -> None:
        """Remember that it took ``seconds`` to time an operator: its operands, warm-ups and repeats."""
        took = self._took[kind_of(operator)]
        took.insert(bisect_right(took, (size_of(operator), seconds)), (size_of(operator), seconds))

    def seconds(self, operator: Operator) -> float:
        """Return how long it is expected to take to time an operator; 0 if nothing of its kind was timed."""
        took, size = self._took[kind_of(operator)], size_of(operator)
        if not took:
            return 0.0
        smaller, seconds = took[max(0, bisect_right(took, (size, float("inf"))) - 1)]
        return seconds * max(1.0, size / smaller) if smaller else seconds


class TimeOne(Protocol):
    """Times one operator; while tables ``climb`` to their ends, it may repeat less when time is short."""

    def __call__(self, operator: Operator, *, climbing: bool) -> Sample:
        """Return the operator's time."""


def time_all(time_one: TimeOne, operators: Sequence[Operator], until: float, tell: Callable[[int], None]) -> Samples:
    """Time operators in several passes; return the samples of those that there was time for.

    Args:
        time_one: times one operator.
        operators: what to time, in the order of what they decide.
        until: when the last one has to end, by ``time.perf_counter``. The smallest point of every table is timed in
            any case.
        tell: receives how many measurements have been made.
    """
    expected, samples = Expected(), Samples()

    def timed(index: int, *, climbing: bool = False) -> None:
        start = time.perf_counter()
        sample = time_one(operators[index], climbing=climbing)
        expected.learn(operators[index], time.perf_counter() - start)
        samples.setdefault(index, []).append(sample)
        tell(sum(map(len, samples.values())))

    def fits(index: int) -> bool:
        return time.perf_counter() + expected.seconds(operators[index]) <= until

    begun = time.perf_counter()
    _climb(operators, partial(timed, climbing=True), expected, until)
    for i in range(len(operators)):
        if i not in samples and fits(i):
            timed(i)
    took = time.perf_counter() - begun
    for _ in range(PASSES - 1):
        begun = time.perf_counter()
        if len(samples) < len(operators) or begun + took > until:
            break
        for i in range(len(operators)):
            if not fits(i):
                return samples
            timed(i)
        took = time.perf_counter() - begun
    return samples


def _climb(operators: Sequence[Operator], timed: Callable[[int], None], expected: Expected, until: float) -> None:
    """Time the smallest point of every table, and then larger ones, up to its largest where there is time for it."""
    tables = tables_of(operators).values()
    for points in tables:
        timed(points[0])
    above = [points[1:] for points in tables]
    climbs = True
    while climbs:
        climbs = False
        above = sorted(filter(None, above), key=lambda points: expected.seconds(operators[points[-1]]))
        for n, points in enumerate(above):
            share = (until - time.perf_counter()) / (len(above) - n)
            fitting = [k for k, i in enumerate(points) if expected.seconds(operators[i]) <= share]
            if fitting:
                timed(points[fitting[-1]])
                del points[: fitting[-1] + 1]
                climbs = True
