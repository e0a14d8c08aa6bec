"""The loop of ``event_loop.py`` compiled by numba: the same operations on the same numbers in the same order.

It allocates nothing and raises nothing, so that its code needs neither Python nor numba's runtime (``native.py``).
"""

from __future__ import annotations


def _note(points, count, segment, now, rest, speed):
    """Write one more row of ``points``, of four numbers."""
    at = 4 * count[0]
    points[at] = segment
    points[at + 1] = now
    points[at + 2] = rest
    points[at + 3] = speed
    count[0] += 1


def _first(finish, soonest, stages, stage, own):
    """Return the stage that ends a segment first, the lowest of several, after the lanes of ``stage`` have changed."""
    least = finish[stage * own]
    for lane in range(stage * own + 1, (stage + 1) * own):
        least = min(least, finish[lane])
    soonest[stage] = least
    found = 0
    for each in range(1, stages):
        if soonest[each] < soonest[found]:
            found = each
    return found


def _alike(rows, own, before, after, row_before, row_after):
    """Return whether lanes that are busy before and after have equal rates."""
    for lane in range(own):
        if (before & after) >> lane & 1 and rows[row_before * own + lane] != rows[row_after * own + lane]:
            return False
    return True


def advance(  # noqa: PLR0912, PLR0915 - one loop
    stages, own, room, stepwise,
    bounds, targets, target_bounds, lane_of, several, work,
    group_of, group_bounds, members,
    row_of, rows,
    missing, heads, start, end, left, since, rate, finish,
    soonest, busy, beside, arrived, changed, clock, reached, points, count,
):  # fmt: skip
    """Play until a set of busy lanes has no row in ``rows``, and return that set; at the end return -1.

    Where ``points`` have ``room`` rows, it returns -2 before it changes a lane's rate. A later call goes on from there,
    because what it does again until then changes nothing. If ``stepwise``, it returns -3 before every event and goes on
    from there in a later call, once the caller has written the event's instant.

    There are ``stages`` with ``own`` lanes each. ``clock``: the event's instant, the instant up to which segments have
    ended, 1 once lanes have begun and 2 before an event of the caller's, and the seconds until that event.
    ``reached``: space for one number more than there are lanes. ``count``: the rows of ``points``.
    """
    lanes = stages * own
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
                    return busy[stage]
            now = clock[1]
            for stage in range(stages):
                if not changed[stage]:
                    continue
                on = busy[stage]
                for own_lane in range(own):
                    if not on >> own_lane & 1:
                        continue
                    lane, least = stage * own + own_lane, rows[row_of[on] * own + own_lane]
                    group, low, high = beside[lane], 0, 1
                    if group >= 0:
                        low, high = group_bounds[group], group_bounds[group + 1]
                        for each in range(low, high):
                            other = lane_of[members[each]]
                            least = min(least, rows[row_of[busy[other // own]] * own + other % own])
                    for each in range(low, high):
                        other = lane_of[members[each]] if group >= 0 else lane
                        if rate[other] != least:
                            if count[0] >= room:
                                return -2
                            left[other] -= (now - since[other]) * rate[other]
                            since[other] = now
                            rate[other] = least
                            finish[other] = now + left[other] / least
                            if several[heads[other]]:
                                _note(points, count, heads[other], now, left[other], least)
                            if other // own != stage:
                                _first(finish, soonest, stages, other // own, own)
                changed[stage] = 0
                _first(finish, soonest, stages, stage, own)
            lane = _first(finish, soonest, stages, 0, own) * own
            while finish[lane] != soonest[lane // own]:
                lane += 1
            if finish[lane] == float("inf"):
                return -1
            wait_s = max(0.0, finish[lane] - clock[0])
            if not stepwise:
                clock[0] += wait_s
            elif clock[2] == 1.0:
                clock[2], clock[3] = 2.0, wait_s
                return -3
            else:
                clock[2] = 1.0
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
                if beside[lane] >= 0:
                    break
                stage = lane // own
                if ready:
                    if found > 1 or group_of[following] >= 0:
                        break
                else:
                    if found != 1:
                        break
                    following = reached[0]
                    other, on = lane_of[following], busy[stage]
                    after = on & ~(1 << lane % own) | 1 << other % own
                    if other // own != stage or group_of[following] >= 0 or row_of[after] < 0:
                        break
                    if not _alike(rows, own, on, after, row_of[on], row_of[after]):
                        break
                    busy[stage] = after
                    finish[lane] = float("inf")
                    lane = other
                    rate[lane] = rows[row_of[after] * own + lane % own]
                start[following] = since[lane] = now
                left[lane] = work[following]
                finish[lane] = now + left[lane] / rate[lane]
                if several[following]:
                    _note(points, count, following, now, left[lane], rate[lane])
                lane = _first(finish, soonest, stages, stage, own) * own
                while finish[lane] != soonest[lane // own]:
                    lane += 1
                now = max(now, finish[lane])
            finish[lane] = float("inf")
            busy[lane // own] &= ~(1 << lane % own)
            changed[lane // own] = 1
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
                changed[lane // own] = 1
                start[begun] = since[lane] = now
                left[lane] = work[begun]
                rate[lane] = 0.0
        clock[1] = now
