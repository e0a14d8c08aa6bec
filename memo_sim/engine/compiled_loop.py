"""The loop of ``event_loop.py`` compiled by numba: the same operations on the same numbers in the same order.

It is imported only by ``fast_loop.py``, where numba is installed. SimPy's queue never holds more than one event here,
so the loop keeps that event's instant itself.

The rates of a set of busy lanes come from Python. The loop stops where it needs a set that it has not met, before
anything has changed, and goes on from there when it is called again.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from memo_sim.engine.event_loop import IDLE, Clock, Groups, UsedRates
from memo_sim.engine.playback import Floats
from memo_sim.engine.segments import Segments
from memo_sim.program.analysis.columns import NUMBER

ENDED = -1
"""Returned instead of an unknown set of busy lanes: nothing is left to play."""

SIGNATURE = (
    "Tuple((int64, float64[:, ::1], int64))("
    "int64[::1], int32[::1], int32[::1], int32[::1], boolean[::1], float64[::1],"  # the segments and their work
    "int32[::1], int64[::1], int32[::1],"  # the groups
    "int64[::1], float64[:, ::1],"  # known rates
    "int32[::1], int64[::1], float64[::1], float64[::1], float64[::1], float64[::1], float64[::1], float64[::1],"
    "float64[::1], int64[::1], int64[::1], int64[::1], boolean[::1], float64[::1], float64[:, ::1], int64)"  # the state
)


def run_compiled(segments: Segments, work: Floats, rates_of: UsedRates, groups: Groups) -> Clock:
    """Play the segments as ``event_loop.run`` does; every number that is returned is the same to the last bit."""
    bounds, own = segments.lane_bounds, rates_of.lanes
    lanes, stages = len(bounds) - 1, (len(bounds) - 1) // own if own else 0
    lane_of = np.repeat(np.arange(lanes, dtype=NUMBER), np.diff(bounds))
    row_of = np.full(1 << own, -1, dtype=np.int64)
    rows, known = np.ones((16, own)), 0
    missing, heads = segments.waits.copy(), bounds[:-1].copy()
    start, end = np.zeros(len(work)), np.zeros(len(work))
    left, since, rate, finish = np.zeros(lanes), np.zeros(lanes), np.zeros(lanes), np.full(lanes, IDLE)
    soonest, busy = np.full(stages, IDLE), np.zeros(stages, dtype=np.int64)
    beside = np.full(lanes, -1, dtype=np.int64)
    arrived = np.zeros(len(groups.bounds) - 1, dtype=np.int64)
    changed = np.zeros(stages, dtype=np.bool_)
    clock = np.array([0.0, 0.0, 0.0])
    several = segments.several
    points, count = np.empty((2 * int(several.sum()) + 16, 4)), 0
    while stages:
        try:
            busy_lanes, points, count = _advance(
                *(bounds, segments.targets, segments.target_bounds, lane_of, several, work),
                *(groups.of, groups.bounds, groups.members),
                *(row_of, rows),
                *(missing, heads, start, end, left, since, rate, finish),
                *(soonest, busy, beside, arrived, changed, clock, points, count),
            )
        except SystemError as error:
            if isinstance(error.__cause__, KeyboardInterrupt):  # numba returns a result beside the interrupt
                raise KeyboardInterrupt from None
            raise
        if busy_lanes == ENDED:
            break
        if known == len(rows):
            rows = np.concatenate([rows, np.ones_like(rows)])
        rows[known] = rates_of(int(busy_lanes))
        row_of[busy_lanes] = known
        known += 1
    return Clock(start, end, heads, points[:count], by_simpy=False)


@njit(cache=True, error_model="numpy")
def _point(points, count, segment, now, rest, speed):
    """Return ``points`` with one more row; a longer copy when it is full.

    It copies number by number, because numba compiles ``longer[:count] = points`` for three seconds.
    """
    if count == len(points):
        longer = np.empty((2 * count, 4))
        for row in range(count):
            for column in range(4):
                longer[row, column] = points[row, column]
        points = longer
    points[count, 0] = segment
    points[count, 1] = now
    points[count, 2] = rest
    points[count, 3] = speed
    return points


@njit(cache=True, error_model="numpy")
def _first(finish, soonest, stage, own):
    """Return the stage that ends a segment first, the lowest of several, after the lanes of ``stage`` have changed."""
    least = np.inf
    for lane in range(stage * own, (stage + 1) * own):
        least = min(least, finish[lane])
    soonest[stage] = least
    found = 0
    for each in range(1, len(soonest)):
        if soonest[each] < soonest[found]:
            found = each
    return found


@njit(SIGNATURE, cache=True, error_model="numpy")
def _advance(  # noqa: PLR0912, PLR0915 - one loop
    bounds, targets, target_bounds, lane_of, several, work,
    group_of, group_bounds, members,
    row_of, rows,
    missing, heads, start, end, left, since, rate, finish,
    soonest, busy, beside, arrived, changed, clock, points, count,
):  # fmt: skip
    """Play until a set of busy lanes has no row in ``rows``, and return that set; at the end return ``ENDED``.

    ``clock``: the event's instant, the instant up to which segments have ended, and 1 once lanes have begun.
    """
    lanes, stages = len(heads), len(busy)
    own = lanes // stages
    reached = np.empty(lanes + 1, np.int64)
    while True:
        found = 0
        if clock[2] == 0.0:
            clock[2], now = 1.0, 0.0
            for lane in range(lanes):
                if heads[lane] < bounds[lane + 1] and missing[heads[lane]] == 0:
                    reached[found] = heads[lane]
                    found += 1
        else:
            for stage in range(stages):
                if changed[stage] and row_of[busy[stage]] < 0:
                    return busy[stage], points, count
            now = clock[1]
            for stage in range(stages):
                if not changed[stage]:
                    continue
                changed[stage] = False
                on = busy[stage]
                for own_lane in range(own):
                    if not on >> own_lane & 1:
                        continue
                    lane, least = stage * own + own_lane, rows[row_of[on], own_lane]
                    group, low, high = beside[lane], 0, 1
                    if group >= 0:
                        low, high = group_bounds[group], group_bounds[group + 1]
                        for each in range(low, high):
                            other = lane_of[members[each]]
                            least = min(least, rows[row_of[busy[other // own]], other % own])
                    for each in range(low, high):
                        other = lane_of[members[each]] if group >= 0 else lane
                        if rate[other] != least:
                            left[other] -= (now - since[other]) * rate[other]
                            since[other] = now
                            rate[other] = least
                            finish[other] = now + left[other] / least
                            if several[heads[other]]:
                                points = _point(points, count, heads[other], now, left[other], least)
                                count += 1
                            if other // own != stage:
                                _first(finish, soonest, other // own, own)
                _first(finish, soonest, stage, own)
            lane = _first(finish, soonest, 0, own) * own
            while finish[lane] != soonest[lane // own]:
                lane += 1
            if finish[lane] == np.inf:
                return ENDED, points, count
            clock[0] += max(0.0, finish[lane] - clock[0])
            now = clock[0]
            while True:
                segment = heads[lane]
                end[segment] = now
                following = segment + 1
                heads[lane] = following
                found = 0
                ready = following < bounds[lane + 1] and missing[following] == 0
                if ready:
                    reached[0], found = following, 1
                for at in range(target_bounds[segment], target_bounds[following]):
                    target = targets[at]
                    missing[target] -= 1
                    if missing[target] == 0 and heads[lane_of[target]] == target:
                        reached[found] = target
                        found += 1
                if not ready or found > 1 or beside[lane] >= 0 or group_of[following] >= 0:
                    break
                start[following] = since[lane] = now
                left[lane] = work[following]
                finish[lane] = now + left[lane] / rate[lane]
                if several[following]:
                    points = _point(points, count, following, now, left[lane], rate[lane])
                    count += 1
                lane = _first(finish, soonest, lane // own, own) * own
                while finish[lane] != soonest[lane // own]:
                    lane += 1
                now = max(now, finish[lane])
            finish[lane] = np.inf
            busy[lane // own] &= ~(1 << lane % own)
            changed[lane // own] = True
            group = beside[lane]
            if group >= 0:
                for each in range(group_bounds[group], group_bounds[group + 1]):
                    beside[lane_of[members[each]]] = -1
        for at in range(found):
            segment, low, high = reached[at], 0, 1
            group = group_of[segment]
            if group >= 0:
                arrived[group] += 1
                low, high = group_bounds[group], group_bounds[group + 1]
                if arrived[group] < high - low:
                    continue
            for each in range(low, high):
                begun = members[each] if group >= 0 else segment
                lane = lane_of[begun]
                beside[lane] = group
                busy[lane // own] |= 1 << lane % own
                changed[lane // own] = True
                start[begun] = since[lane] = now
                left[lane] = work[begun]
                rate[lane] = 0.0
        clock[1] = now
