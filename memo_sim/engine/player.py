"""Plays programs in SimPy: serial lanes in program order, edges between them, and rates that fall under contention.

An instruction that takes w seconds alone is w units of work on its lane. While the set S of lanes is busy on its rank,
the lane does ``rates(S)[lane]`` units per second. When S changes, the rates are read again and the remaining time is
rescaled.

A segment (``segments.py``) is at most one event. It is no event when its lane continues and S stays the same. The work
done on a lane is piecewise linear in time, so the instants between a segment's instructions are interpolated:

      rate of compute     1.0 |-------|        |-----        work done   w ........./
                          0.8 |       |--------|                           ____----
                                      copy runs                        ___/             -> time

All pipeline stages are played together. Matched instructions of several stages (a send and its receive, a collective
over stages) start when the last of them is ready, and run at the lowest of their lanes' rates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import simpy

from memo_sim.contract.errors import MemoError
from memo_sim.engine.playback import Floats, Playback
from memo_sim.engine.segments import Segments, cut
from memo_sim.program.analysis.columns import Columns, Ints
from memo_sim.program.analysis.edges import Edges
from memo_sim.program.analysis.rendezvous import Rendezvous

Rates = Callable[[int], tuple[float, ...]]
"""Maps the set of busy lanes (bit ``1 << lane``) to every lane's rate, in (0, 1]."""

_IDLE = float("inf")


@dataclass(frozen=True)
class Part:
    """One pipeline stage to play: its instructions, the edges between them, and their durations alone."""

    columns: Columns
    edges: Edges
    seconds: Floats
    name: Callable[[int], str] = str
    """Returns the id of an instruction."""


def play(
    columns: Columns, edges: Edges, seconds: Floats, rates: Rates, *, name: Callable[[int], str] = str
) -> Playback:
    """Return when every instruction of a single stage starts and ends; ``seconds`` are their durations alone.

    Raises:
        MemoError: when instructions wait for each other in a cycle, which no program of ``lower`` does.
    """
    return play_stages([Part(columns, edges, seconds, name)], rates)[0]


def play_stages(parts: Sequence[Part], rates: Rates, all_rendezvous: Sequence[Rendezvous] = ()) -> list[Playback]:
    """Return the playback of each stage; lanes contend only with lanes of the same stage.

    Raises:
        MemoError: when instructions wait for each other in a cycle, which no programs of ``lower`` do.
    """
    first = np.cumsum([0] + [len(part.seconds) for part in parts])
    joined = Edges(
        np.concatenate([part.edges.producer + first[r] for r, part in enumerate(parts)]),
        np.concatenate([part.edges.consumer + first[r] for r, part in enumerate(parts)]),
    )
    every: Ints = np.concatenate([part.columns.lane for part in parts])
    used, of_used = np.unique(every, return_inverse=True)
    lanes: Ints = of_used + len(used) * np.repeat(np.arange(len(parts)), np.diff(first))
    seconds: Floats = np.concatenate([part.seconds for part in parts])
    met = [[int(first[stage] + i) for stage, i in rendezvous] for rendezvous in all_rendezvous]
    segments = cut(lanes, joined, len(used) * len(parts), np.array([i for each in met for i in each], dtype=np.int64))
    work = np.add.reduceat(seconds[segments.order], segments.first) if len(seconds) else np.zeros(0)
    clock = _run(segments, work.tolist(), _UsedRates(used.tolist(), rates), _met_segments(segments, met))

    def name(i: int) -> str:
        stage = int(np.searchsorted(first, i, side="right")) - 1
        return parts[stage].name(i - int(first[stage]))

    stuck = [s for s, limit in zip(clock.heads, segments.lane_bounds[1:], strict=True) if s < limit]
    if stuck:
        raise MemoError(
            "the program cannot be played: instructions wait for each other",
            got="; ".join(_waiting(segments, joined, clock, s, name) for s in stuck),
            hint="this is a bug in the lowering or in the derived edges",
        )
    start_s, end_s = _spans(segments, work, clock, seconds)
    bounds = [slice(int(a), int(b)) for a, b in pairwise(first)]
    return [
        Playback(columns=part.columns, edges=part.edges, start_s=start_s[mine], end_s=end_s[mine])
        for part, mine in zip(parts, bounds, strict=True)
    ]


def _met_segments(segments: Segments, met: list[list[int]]) -> dict[int, tuple[int, ...]]:
    """Return all segments of its group for every segment that is matched with other stages."""
    if not met:
        return {}
    segment = np.empty(len(segments.order), dtype=np.int64)
    segment[segments.order] = segments.of
    groups = [tuple(segment[each].tolist()) for each in met]
    return {s: group for group in groups for s in group}


class _UsedRates:
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


@dataclass(frozen=True)
class _Clock:
    """The result of the events: start and end of segments, the next segment of each lane, and the rates' breakpoints.

    ``points`` lists quadruples (segment, instant, work left, rate from then on).
    """

    start: list[float]
    end: list[float]
    heads: list[int]
    points: list[float]


def _run(  # noqa: PLR0915 - locals are fast
    segments: Segments, work: list[float], rates_of: _UsedRates, met: dict[int, tuple[int, ...]]
) -> _Clock:
    """Play the segments, one SimPy event per change of the set of busy lanes; lanes are numbered over all stages."""
    env = simpy.Environment()
    bounds, targets, target_bounds = segments.lane_bounds, segments.targets, segments.target_bounds
    lanes, own = len(bounds) - 1, rates_of.lanes
    """All lanes, and those of one stage."""
    lane_of = [lane for lane in range(lanes) for _ in range(bounds[lane + 1] - bounds[lane])]
    missing, heads = list(segments.waits), bounds[:-1]
    start, end = [0.0] * len(work), [0.0] * len(work)
    left, since, rate, finish = ([0.0] * lanes, [0.0] * lanes, [0.0] * lanes, [_IDLE] * lanes)
    busy = [0] * (lanes // own if own else 0)
    beside: dict[int, tuple[int, ...]] = {}
    """By lane: all lanes of the matched segments that it plays now."""
    arrived: dict[tuple[int, ...], int] = {}
    points: list[float] = []
    changed: set[int] = set()
    """Stages whose set of busy lanes has changed."""
    ending = 0

    def begin(segment: int, lane: int, now: float) -> None:
        stage = lane // own
        busy[stage] |= 1 << lane % own
        changed.add(stage)
        start[segment] = since[lane] = now
        left[lane] = work[segment]
        rate[lane] = 0.0

    def arrive(segment: int, lane: int, now: float) -> None:
        """Begin a segment that is ready on its own stage, once all segments matched with it are ready too."""
        group = met.get(segment)
        if group is None:
            begin(segment, lane, now)
            return
        arrived[group] = arrived.get(group, 0) + 1
        if arrived[group] == len(group):
            together = tuple(lane_of[each] for each in group)
            for each, its_lane in zip(group, together, strict=True):
                beside[its_lane] = together
                begin(each, its_lane, now)

    def change(lane: int, speed: float, now: float) -> None:
        rest = left[lane] = left[lane] - (now - since[lane]) * rate[lane]
        since[lane] = now
        rate[lane] = speed
        finish[lane] = now + rest / speed
        points.extend((heads[lane], now, rest, speed))

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
        soonest = min(finish, default=_IDLE)
        if soonest < _IDLE:
            ending = finish.index(soonest)
            # Rounding may leave the remaining time slightly below zero; the segment then ends now.
            env.timeout(max(0.0, soonest - env.now)).callbacks.append(on_end)

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
            if not ready or reached or lane in beside or following in met:
                break
            # The lane continues at its rate and the set of busy lanes stays the same, so no event is needed.
            start[following] = since[lane] = now
            left[lane] = work[following]
            finish[lane] = now + left[lane] / rate[lane]
            points.extend((following, now, left[lane], rate[lane]))
            soonest = min(finish)
            lane, now = finish.index(soonest), max(now, soonest)
        finish[lane] = _IDLE
        stage = lane // own
        busy[stage] &= ~(1 << lane % own)
        changed.add(stage)
        for each in beside.pop(lane, ()):  # the other lanes of the match end in their own events, at the same instant
            beside.pop(each, None)
        for each in (following, *reached) if ready else reached:
            arrive(each, lane_of[each], now)
        settle(now)

    for lane in range(lanes):
        if heads[lane] < bounds[lane + 1] and not missing[heads[lane]]:
            arrive(heads[lane], lane, 0.0)
    settle(0.0)
    env.run()
    return _Clock(start=start, end=end, heads=heads, points=points)


def _spans(segments: Segments, work: Floats, clock: _Clock, seconds: Floats) -> tuple[Floats, Floats]:
    """Return start and end of every instruction, interpolated between the ends of its segment."""
    start, end = np.empty(len(seconds)), np.empty(len(seconds))
    if not len(seconds):
        return start, end
    points = np.array(clock.points).reshape(-1, 4)
    points = points[np.argsort(points[:, 0], kind="stable")]
    of_point = points[:, 0].astype(np.int64)
    # Work done is summed over all segments, so one search finds the linear piece of each instant. ``low`` and ``high``
    # keep it inside the segment, because a piece without work is ambiguous.
    done_before = np.cumsum(work) - work
    point_done = done_before[of_point] + (work[of_point] - points[:, 2])
    ordered = seconds[segments.order]
    inside = np.cumsum(ordered)
    inside -= (inside - ordered)[segments.first][segments.of]
    low = np.searchsorted(of_point, segments.of)
    high = np.searchsorted(of_point, segments.of, side="right") - 1
    wanted = done_before[segments.of] + inside
    piece = np.clip(np.searchsorted(point_done, wanted, side="right") - 1, low, high)
    ends = points[piece, 1] + (wanted - point_done[piece]) / points[piece, 3]
    segment_start, segment_end = np.array(clock.start), np.array(clock.end)
    ends = np.clip(ends, segment_start[segments.of], segment_end[segments.of])
    ends[segments.last] = segment_end
    starts = np.empty_like(ends)
    starts[1:] = ends[:-1]
    starts[segments.first] = segment_start
    start[segments.order] = starts
    end[segments.order] = np.maximum(starts, ends)
    return start, end


def _waiting(segments: Segments, edges: Edges, clock: _Clock, segment: int, name: Callable[[int], str]) -> str:
    """Return the text ``a waits for b, c`` for the segment that a lane cannot start."""
    first = int(segments.order[segments.first[segment]])
    position = {int(i): at for at, i in enumerate(segments.order)}
    ended = {s for bounds, head in zip(segments.lane_bounds, clock.heads, strict=False) for s in range(bounds, head)}
    producers = edges.producer[edges.consumer == first].tolist()
    waited = [name(p) for p in producers if int(segments.of[position[p]]) not in ended]
    return f"{name(first)} waits for {', '.join(waited)}"
