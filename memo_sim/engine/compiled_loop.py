"""Plays segments in the loop of ``event_loop.py`` compiled by numba (``native_loop.py``), with the same numbers.

SimPy's queue never holds more than one event here, so a search lets the loop keep that event's instant itself. What is
shown is played with SimPy's events: the loop then goes from one event to the next.

The rates of a set of busy lanes come from Python. The loop stops where it needs a set that it has not met, and goes on
from there when it is called again.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

import numpy as np

from memo_sim.engine.event_loop import IDLE, Clock, Groups, UsedRates, driven_by_simpy
from memo_sim.engine.native import Native, Source
from memo_sim.engine.native_loop import advance
from memo_sim.engine.playback import Floats
from memo_sim.engine.segments import Segments
from memo_sim.program.analysis.columns import NUMBER

ENDED, FULL, EVENT = -1, -2, -3
"""Returned instead of an unknown set of busy lanes: nothing is left to play, there is no room for more points, or the
next event is the caller's."""

ROOM = 2
"""Changes of its rate for which there is room at first, for each segment with several instructions; memory that is not
written is not used."""

SOURCE = Source(
    advance,
    (
        *("int64", "int64", "int64", "int64"),
        *("int64*", "int32*", "int32*", "int32*", "uint8*", "float64*"),  # the segments and their work
        *("int32*", "int64*", "int32*"),  # the groups
        *("int64*", "float64*"),  # known rates
        *("int32*", "int64*", "float64*", "float64*", "float64*", "float64*", "float64*", "float64*"),  # the state
        *("float64*", "int64*", "int64*", "int64*", "uint8*", "float64*", "int64*"),
        *("float64*", "int64*"),  # the points
    ),
)


class CompiledLoop:
    """A ``player.Loop`` that gives what ``event_loop.run`` gives, to the last bit."""

    def __init__(self, *, compiles: bool = True) -> None:
        """Load the loop; ``compiles``: compile it where no file holds it. Raises what ``Native`` raises."""
        self._advance = Native(SOURCE, compiles=compiles)

    def __call__(self, segments: Segments, work: Floats, rates_of: UsedRates, groups: Groups) -> Clock:
        """Play the segments without SimPy."""
        try:
            next(self._events(segments, work, rates_of, groups, stepwise=False))
        except StopIteration as ended:
            clock: Clock = ended.value
            return replace(clock, by_simpy=False)
        raise AssertionError("the loop stopped before an event of the caller's (a bug)")

    def with_simpy(self, segments: Segments, work: Floats, rates_of: UsedRates, groups: Groups) -> Clock:
        """Play the segments with SimPy's events."""
        return driven_by_simpy(self._events(segments, work, rates_of, groups, stepwise=True))

    def _events(
        self, segments: Segments, work: Floats, rates_of: UsedRates, groups: Groups, *, stepwise: bool
    ) -> Generator[float, float, Clock]:
        """As ``event_loop.events``; without ``stepwise``, no event is yielded."""
        bounds, own = segments.lane_bounds, rates_of.lanes
        lanes, stages = len(bounds) - 1, (len(bounds) - 1) // own if own else 0
        lane_of = np.repeat(np.arange(lanes, dtype=NUMBER), np.diff(bounds))
        row_of = np.full(1 << own, -1, dtype=np.int64)
        rows, known = np.ones((16, own)), 0
        missing, heads = segments.waits, bounds[:-1].copy()
        start, end = np.zeros(len(work)), np.zeros(len(work))
        left, since, rate, finish = np.zeros(lanes), np.zeros(lanes), np.zeros(lanes), np.full(lanes, IDLE)
        soonest, busy = np.full(stages, IDLE), np.zeros(stages, dtype=np.int64)
        beside = np.full(lanes, -1, dtype=np.int64)
        arrived = np.zeros(len(groups.bounds) - 1, dtype=np.int64)
        changed, reached = np.zeros(stages, dtype=np.uint8), np.empty(lanes + 1, dtype=np.int64)
        clock, count = np.zeros(4), np.zeros(1, dtype=np.int64)
        several = segments.several
        continued = int(several.sum())
        """Most points that the loop writes where it cannot stop: one for each segment with which a lane continues."""
        points = np.empty(((1 + ROOM) * continued + 1, 4))
        call = None
        while stages:
            if call is None:
                call = self._advance.bound(
                    *(stages, own, len(points) - continued, int(stepwise)),
                    *(bounds, segments.targets, segments.target_bounds, lane_of, several.view(np.uint8), work),
                    *(groups.of, groups.bounds, groups.members),
                    *(row_of, rows),
                    *(missing, heads, start, end, left, since, rate, finish),
                    *(soonest, busy, beside, arrived, changed, clock, reached),
                    *(points, count),
                )
            found = call()
            if found == EVENT:
                clock[0] = yield float(clock[3])
                continue
            if found == ENDED:
                break
            if found == FULL:
                points = np.concatenate([points[: count[0]], np.empty_like(points)])
                call = None
                continue
            if known == len(rows):
                rows = np.concatenate([rows, np.ones_like(rows)])
                call = None
            rows[known] = rates_of(found)
            row_of[found] = known
            known += 1
        return Clock(start, end, heads, points[: count[0]])
