"""SimPy's loop over segments: one event per change of the set of busy lanes.

It is the loop that plays whatever is shown. ``compiled_loop.py`` has the same loop for a search, where numba is
installed; both give the same numbers to the last bit.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np
import simpy

from memo_sim.engine.playback import Floats
from memo_sim.engine.segments import Segments
from memo_sim.program.analysis.columns import NUMBER, Ints

Rates = Callable[[int], tuple[float, ...]]
"""Maps the set of busy lanes (bit ``1 << lane``) to every lane's rate, in (0, 1]."""

IDLE = float("inf")


@dataclass(frozen=True)
class Groups:
    """Segments that start together on several stages: group g has ``members[bounds[g] : bounds[g + 1]]``."""

    of: Ints
    """The group of every segment, or -1."""
    bounds: Ints
    members: Ints

    @classmethod
    def of_bounds(cls, segments: int, members: Ints, bounds: Ints) -> Groups:
        """Return the groups among ``segments`` segments."""
        of = np.full(segments, -1, dtype=NUMBER)
        of[members] = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        return cls(of, bounds, members)


@dataclass(frozen=True)
class Clock:
    """The result of the events: start and end of segments, the next segment of each lane, and the rates' breakpoints.

    ``points`` has rows (segment, instant, work left, rate from then on), of segments with several instructions. Nothing
    is interpolated in the others, which are most.
    """

    start: Floats
    end: Floats
    heads: Ints
    points: Floats
    by_simpy: bool = True
    """Whether SimPy's loop made it."""

    @property
    def without_points(self) -> Clock:
        """The same without the breakpoints."""
        return replace(self, points=np.zeros((0, 4)))


class UsedRates:
    """The rates of the lanes that the programs use; these are numbered from 0, so that idle ones cost nothing."""

    def __init__(self, used: list[int], rates: Rates) -> None:
        self.lanes = len(used)
        self._used = used
        self._rates = rates
        self._known: dict[int, tuple[tuple[int, ...], tuple[float, ...]]] = {}

    def __call__(self, busy: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Return the busy lanes, and the rate of every lane."""
        found = self._known.get(busy)
        if found is None:
            on = tuple(lane for lane in range(self.lanes) if busy >> lane & 1)
            rates = self._rates(sum(1 << self._used[lane] for lane in on))
            found = self._known[busy] = on, tuple(rates[lane] for lane in self._used)
        return found


def run(  # noqa: PLR0915 - locals are fast
    segments: Segments, work: Floats, rates_of: UsedRates, groups: Groups
) -> Clock:
    """Play the segments, one SimPy event per change of the set of busy lanes; lanes are numbered over all stages."""
    env = simpy.Environment()
    bounds, several = segments.lane_bounds.tolist(), segments.several.tobytes()
    targets, target_bounds = array("i", segments.targets.tobytes()), array("i", segments.target_bounds.tobytes())
    work_of = array("d", work.tobytes())
    lanes, own = len(bounds) - 1, rates_of.lanes
    """All lanes, and those of one stage."""
    lane_of = array("i", np.repeat(np.arange(lanes, dtype=NUMBER), np.diff(segments.lane_bounds)).tobytes())
    group_of, missing = array("i", groups.of.tobytes()), array("i", segments.waits.tobytes())
    group_bounds, members, heads = groups.bounds.tolist(), groups.members.tolist(), bounds[:-1]
    start, end = array("d", bytes(work.nbytes)), array("d", bytes(work.nbytes))
    left, since, rate, finish = ([0.0] * lanes, [0.0] * lanes, [0.0] * lanes, [IDLE] * lanes)
    ends: list[tuple[float, int]] = []
    """A heap of (end, lane); an entry that is not the lane's ``finish`` any more counts for nothing."""
    busy = [0] * (lanes // own if own else 0)
    beside: dict[int, tuple[int, ...]] = {}
    """By lane: all lanes of the matched segments that it plays now."""
    arrived = [0] * (len(group_bounds) - 1)
    points = array("d")
    changed: set[int] = set()
    """Stages whose set of busy lanes has changed."""
    ending = 0

    def begin(segment: int, lane: int, now: float) -> None:
        stage = lane // own
        busy[stage] |= 1 << lane % own
        changed.add(stage)
        start[segment] = since[lane] = now
        left[lane] = work_of[segment]
        rate[lane] = 0.0

    def arrive(segment: int, lane: int, now: float) -> None:
        """Begin a segment that is ready on its own stage, once all segments matched with it are ready too."""
        group = group_of[segment]
        if group < 0:
            begin(segment, lane, now)
            return
        arrived[group] += 1
        every = members[group_bounds[group] : group_bounds[group + 1]]
        if arrived[group] == len(every):
            together = tuple(lane_of[each] for each in every)
            for each, its_lane in zip(every, together, strict=True):
                beside[its_lane] = together
                begin(each, its_lane, now)

    def change(lane: int, speed: float, now: float) -> None:
        rest = left[lane] = left[lane] - (now - since[lane]) * rate[lane]
        since[lane] = now
        rate[lane] = speed
        finish[lane] = soon = now + rest / speed
        heappush(ends, (soon, lane))
        if several[heads[lane]]:
            points.extend((heads[lane], now, rest, speed))

    def first() -> float:
        """Return the first end, after dropping the entries before it that count for nothing."""
        while ends and finish[ends[0][1]] != ends[0][0]:
            heappop(ends)
        return ends[0][0] if ends else IDLE

    def settle(now: float) -> None:
        """Update the rates of the busy lanes, and schedule an event at the first end."""
        nonlocal ending
        for stage in changed:
            base = stage * own
            on, current = rates_of(busy[stage])
            for lane in on:
                together = beside.get(base + lane)
                if together is None:
                    if rate[base + lane] != current[lane]:
                        change(base + lane, current[lane], now)
                    continue
                least = min(rates_of(busy[each // own])[1][each % own] for each in together)
                for each in together:
                    if rate[each] != least:
                        change(each, least, now)
        changed.clear()
        soonest = first()
        if soonest < IDLE:
            ending = ends[0][1]
            # Rounding may leave the remaining time slightly below zero; the segment then ends now.
            env.timeout(max(0.0, soonest - env.now)).callbacks.append(on_end)  # noqa: F821 - deleted at the end

    def on_end(_: simpy.Event) -> None:
        """End the segment that ends first, and the next ones for as long as the set of busy lanes stays the same."""
        lane, now = ending, env.now
        while True:
            segment = heads[lane]
            end[segment] = now
            heads[lane] = following = segment + 1
            ready = following < bounds[lane + 1] and not missing[following]
            reached = []
            for target in targets[target_bounds[segment] : target_bounds[following]]:
                missing[target] -= 1
                if not missing[target] and heads[lane_of[target]] == target:
                    reached.append(target)
            if not ready or reached or lane in beside or group_of[following] >= 0:
                break
            # The lane continues at its rate and the set of busy lanes stays the same, so no event is needed.
            start[following] = since[lane] = now
            rest = left[lane] = work_of[following]
            finish[lane] = soon = now + rest / rate[lane]
            heappush(ends, (soon, lane))
            if several[following]:
                points.extend((following, now, rest, rate[lane]))
            soonest = first()
            lane, now = ends[0][1], max(now, soonest)
        finish[lane] = IDLE
        stage = lane // own
        busy[stage] &= ~(1 << lane % own)
        changed.add(stage)
        for each in beside.pop(lane, ()):  # the other lanes of the match end in their own events, at the same instant
            beside.pop(each, None)
        for each in (following, *reached) if ready else reached:
            arrive(each, lane_of[each], now)
        settle(now)  # noqa: F821 - deleted at the end

    for lane in range(lanes):
        if heads[lane] < bounds[lane + 1] and not missing[heads[lane]]:
            arrive(heads[lane], lane, 0.0)
    settle(0.0)
    env.run()
    del settle, on_end  # they refer to each other, and would hold these arrays until Python's collector runs
    of_points = np.frombuffer(points, dtype=np.float64).reshape(-1, 4)
    return Clock(np.frombuffer(start), np.frombuffer(end), np.array(heads, dtype=np.int64), of_points)
