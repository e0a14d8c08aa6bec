"""The loop over segments: one event per change of rates.

Whatever is shown is played with SimPy's events. A search plays without SimPy. Where numba is installed and pays, both
use the loop of ``compiled_loop.py`` (``fast_loop.py``). All give the same numbers to the last bit.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from heapq import heappop, heappush, heapreplace

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
        self._known: dict[int, tuple[float, ...]] = {}

    def __call__(self, busy: int) -> tuple[float, ...]:
        """Return the rate of every lane while those of ``busy`` (bit ``1 << lane``) are busy."""
        found = self._known.get(busy)
        if found is None:
            rates = self._rates(sum(1 << each for lane, each in enumerate(self._used) if busy >> lane & 1))
            found = self._known[busy] = tuple(rates[each] for each in self._used)
        return found

    def of_busy(self, busy: int) -> tuple[tuple[int, float], ...]:
        """Return the busy lanes, each with its rate."""
        rates = self(busy)
        return tuple((lane, rates[lane]) for lane in range(self.lanes) if busy >> lane & 1)

    def rate_after(self, before: int, after: int) -> float:
        """Return the rate of the lane that is busy only ``after``; 0 where a lane that goes on changes its rate."""
        rates, later = self(before), self(after)
        both, new = before & after, after & ~before
        goes_on = all(rates[lane] == later[lane] for lane in range(self.lanes) if both >> lane & 1)
        return later[new.bit_length() - 1] if goes_on else 0.0


def events(  # noqa: PLR0912, PLR0915 - one loop, with local variables
    segments: Segments, work: Floats, rates_of: UsedRates, groups: Groups
) -> Generator[float, float, Clock]:
    """Play the segments; lanes are numbered over all stages.

    Yields the seconds until a segment ends after which the rates of a stage's lanes change, and is sent the instant.
    """
    bounds, several = segments.lane_bounds.tolist(), segments.several.tobytes()
    targets, target_bounds = array("i", segments.targets.tobytes()), array("i", segments.target_bounds.tobytes())
    only = array("i", segments.only_targets.tobytes())
    work_of = array("d", work.tobytes())
    lanes, own = len(bounds) - 1, rates_of.lanes
    """All lanes, and those of one stage."""
    lane_of = array("i", np.repeat(np.arange(lanes, dtype=NUMBER), np.diff(segments.lane_bounds)).tobytes())
    stage_of, bit_of = [lane // own for lane in range(lanes)], [1 << lane % own for lane in range(lanes)]
    group_of, missing = array("i", groups.of.tobytes()), array("i", segments.waits.tobytes())
    group_bounds, members, heads = groups.bounds.tolist(), groups.members.tolist(), bounds[:-1]
    start, end = array("d", bytes(work.nbytes)), array("d", bytes(work.nbytes))
    left, since, rate, finish = ([0.0] * lanes, [0.0] * lanes, [0.0] * lanes, [IDLE] * lanes)
    ends: list[tuple[float, int]] = []
    """A heap of (end, lane); an entry that is not the lane's ``finish`` any more counts for nothing."""
    busy = [0] * (lanes // own if own else 0)
    beside: list[tuple[int, ...]] = [()] * lanes
    """By lane: all lanes of the matched segments that it plays now."""
    arrived = [0] * (len(group_bounds) - 1)
    points = array("d")
    changed: set[int] = set()
    """Stages whose set of busy lanes has changed."""
    known: dict[int, tuple[tuple[int, float], ...]] = {}
    """By set of busy lanes: each of them with its rate."""
    takeovers: dict[tuple[int, int], float] = {}
    """By sets of busy lanes before and after a lane takes over from another: its rate, or 0 (``rate_after``)."""
    now = instant = 0.0
    """When the last segment ended, and when the last event was: rounding may order ends of one event differently."""
    ready = [heads[lane] for lane in range(lanes) if heads[lane] < bounds[lane + 1] and not missing[heads[lane]]]
    while True:
        # Segments begin that are ready on their own stages; matched ones once all of them are ready.
        for segment in ready:
            group, begun = group_of[segment], [segment]
            if group >= 0:
                arrived[group] += 1
                begun = members[group_bounds[group] : group_bounds[group + 1]]
                if arrived[group] < len(begun):
                    continue
                together = tuple([lane_of[each] for each in begun])
                for lane in together:
                    beside[lane] = together
            for each in begun:
                lane = lane_of[each]
                busy[stage_of[lane]] |= bit_of[lane]
                changed.add(stage_of[lane])
                start[each] = since[lane] = now
                left[lane] = work_of[each]
                rate[lane] = 0.0
        # The rates of busy lanes change. Matched lanes have the lowest of their rates.
        for stage in changed:
            on = busy[stage]
            if on not in known:
                known[on] = rates_of.of_busy(on)
            for own_lane, alone in known[on]:
                lane, speed = stage * own + own_lane, alone
                changing = beside[lane]
                if changing:
                    for each in changing:
                        least = rates_of(busy[stage_of[each]])[each % own]
                        if least < speed:  # noqa: PLR1730 - a call of min() is slower
                            speed = least
                elif rate[lane] != speed:
                    changing = (lane,)
                else:
                    continue
                for each in changing:
                    if rate[each] == speed:
                        continue
                    rest = left[each] = left[each] - (now - since[each]) * rate[each]
                    since[each] = now
                    rate[each] = speed
                    finish[each] = soon = now + rest / speed
                    heappush(ends, (soon, each))
                    if several[heads[each]]:
                        points.extend((heads[each], now, rest, speed))
        changed.clear()
        while ends and finish[ends[0][1]] != ends[0][0]:
            heappop(ends)
        if not ends:
            break
        soonest, lane = ends[0]
        # Rounding may leave the remaining time slightly below zero; the segment then ends now.
        now = instant = yield max(0.0, soonest - instant)
        while True:
            segment = heads[lane]
            end[segment] = now
            heads[lane] = following = segment + 1
            goes_on = following < bounds[lane + 1] and not missing[following]
            ready = []
            target = only[segment]
            if target >= 0:  # most segments: a slice takes longer
                missing[target] = more = missing[target] - 1
                if not more and heads[lane_of[target]] == target:
                    ready.append(target)
            else:
                for target in targets[target_bounds[segment] : target_bounds[following]]:
                    missing[target] = more = missing[target] - 1
                    if not more and heads[lane_of[target]] == target:
                        ready.append(target)
            if beside[lane]:
                break
            if goes_on:
                if ready or group_of[following] >= 0:
                    break
                # The lane continues at its rate and the set of busy lanes stays the same, so no event is needed.
            else:
                if len(ready) != 1:
                    break
                following = ready[0]
                stage, other = stage_of[lane], lane_of[following]
                on = busy[stage]
                after = on & ~bit_of[lane] | bit_of[other]
                if stage_of[other] != stage or group_of[following] >= 0 or after not in known:
                    break
                speed = takeovers.get((on, after), -1.0)
                if speed < 0.0:
                    speed = takeovers[on, after] = rates_of.rate_after(on, after)
                if not speed:
                    break
                # Another lane of the stage takes over and all others keep their rates, so no event is needed either.
                busy[stage], finish[lane] = after, IDLE
                lane = other
                rate[lane] = speed
            start[following] = since[lane] = now
            rest = left[lane] = work_of[following]
            finish[lane] = soon = now + rest / rate[lane]
            heapreplace(ends, (soon, lane))
            if several[following]:
                points.extend((following, now, rest, rate[lane]))
            while finish[ends[0][1]] != ends[0][0]:
                heappop(ends)
            soonest, lane = ends[0]
            if soonest > now:  # noqa: PLR1730 - a call of max() is slower
                now = soonest
        finish[lane] = IDLE
        busy[stage_of[lane]] &= ~bit_of[lane]
        changed.add(stage_of[lane])
        for each in beside[lane]:  # the other lanes of the match end in their own events, at the same instant
            beside[each] = ()
        if goes_on:
            ready.insert(0, following)
    of_points = np.frombuffer(points, dtype=np.float64).reshape(-1, 4)
    return Clock(np.frombuffer(start), np.frombuffer(end), np.array(heads, dtype=np.int64), of_points)


def run(segments: Segments, work: Floats, rates_of: UsedRates, groups: Groups) -> Clock:
    """Play the segments, one SimPy event per change of rates."""
    return driven_by_simpy(events(segments, work, rates_of, groups))


def driven_by_simpy(playing: Generator[float, float, Clock]) -> Clock:
    """Return what ``playing`` returns; what it yields becomes SimPy's events."""
    env, found = simpy.Environment(), list[Clock]()
    try:
        first_s = next(playing)
    except StopIteration as ended:
        clock: Clock = ended.value
        return clock

    def go_on(event: simpy.Event) -> None:
        try:
            wait_s = playing.send(env.now)
        except StopIteration as ended:
            found.append(ended.value)
        else:
            # There is never more than one event, so it is scheduled again: a new object takes 0.3 us.
            event.callbacks = [go_on]
            env.schedule(event, delay=wait_s)

    env.timeout(first_s).callbacks.append(go_on)
    env.run()
    return found[0]


def run_without_simpy(segments: Segments, work: Floats, rates_of: UsedRates, groups: Groups) -> Clock:
    """Play the segments as ``run`` does: there is never more than one event to wait for, so no queue is needed."""
    playing, instant = events(segments, work, rates_of, groups), 0.0
    try:
        wait_s = next(playing)
        while True:
            instant += wait_s
            wait_s = playing.send(instant)
    except StopIteration as ended:
        clock: Clock = ended.value
        return replace(clock, by_simpy=False)
