"""Plays a program in SimPy: serial lanes in program order, edges between them, rates that fall when lanes contend.

Work is a fluid. An instruction of w seconds (alone on its machine) is w units of its lane's work; while the set of busy
lanes is S the lane does ``rates(S)[lane]`` units a second. Rates are read again whenever S changes, and what is left is
rescaled. A segment (``segments.py``) is one event; its lane's work clock is piecewise linear, so the instants between
its instructions are interpolated:

      rate of compute     1.0 |-------|        |-----        work done   w ........./
                          0.8 |       |--------|                           ____----
                                      copy runs                        ___/             -> time
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import simpy

from memo_sim.contract.errors import MemoError
from memo_sim.engine.playback import Floats, Playback
from memo_sim.engine.segments import Segments, cut
from memo_sim.program.columns import Columns
from memo_sim.program.edges import Edges
from memo_sim.program.instruction import Lane

Rates = Callable[[int], tuple[float, ...]]
"""From the busy lanes (bit ``1 << lane``) to every lane's rate, in (0, 1]."""

_IDLE = float("inf")
_LANES_OF = [tuple(lane for lane in range(len(Lane)) if busy >> lane & 1) for busy in range(1 << len(Lane))]


def play(
    columns: Columns, edges: Edges, seconds: Floats, rates: Rates, *, name: Callable[[int], str] = str
) -> Playback:
    """Return when every instruction starts and ends; ``seconds`` are their durations alone, ``name`` gives their ids.

    Raises:
        MemoError: when instructions wait for each other in a circle (no program of ``lower`` does).
    """
    segments = cut(columns, edges)
    work = np.add.reduceat(seconds[segments.order], segments.first) if len(seconds) else np.zeros(0)
    clock = _run(segments, work.tolist(), rates)
    stuck = [s for s, limit in zip(clock.heads, segments.lane_bounds[1:], strict=True) if s < limit]
    if stuck:
        raise MemoError(
            "the program cannot be played: instructions wait for each other",
            got="; ".join(_waiting(segments, edges, clock, s, name) for s in stuck),
            hint="this is a bug in the lowering or in the derived edges",
        )
    start_s, end_s = _spans(segments, work, clock, seconds)
    return Playback(columns=columns, edges=edges, start_s=start_s, end_s=end_s)


@dataclass(frozen=True)
class _Clock:
    """What the events left behind: segment starts and ends, the next segment of each lane, and the rates' breakpoints.

    ``points`` are quadruples (segment, instant, work left, rate from then on).
    """

    start: list[float]
    end: list[float]
    heads: list[int]
    points: list[float]


def _run(segments: Segments, work: list[float], rates: Rates) -> _Clock:
    """Play the segments, one SimPy event each."""
    env = simpy.Environment()
    bounds, targets, target_bounds = segments.lane_bounds, segments.targets, segments.target_bounds
    lane_of = [lane for lane in Lane for _ in range(bounds[lane + 1] - bounds[lane])]
    missing, heads = list(segments.waits), bounds[:-1]
    start, end = [0.0] * len(work), [0.0] * len(work)
    left, since, rate, finish = ([0.0] * len(Lane), [0.0] * len(Lane), [0.0] * len(Lane), [_IDLE] * len(Lane))
    known: dict[int, tuple[float, ...]] = {}
    points: list[float] = []
    busy = ending = 0

    def begin(segment: int, lane: int, now: float) -> None:
        nonlocal busy
        busy |= 1 << lane
        start[segment] = since[lane] = now
        left[lane] = work[segment]
        rate[lane] = 0.0

    def settle(now: float) -> None:
        """Read the rates of the lanes that are busy now, and wait for the one that ends first."""
        nonlocal ending
        current = known.get(busy)
        if current is None:
            current = known[busy] = rates(busy)
        for lane in _LANES_OF[busy]:
            if rate[lane] != current[lane]:
                rest = left[lane] = left[lane] - (now - since[lane]) * rate[lane]
                since[lane] = now
                speed = rate[lane] = current[lane]
                finish[lane] = now + rest / speed
                points.extend((heads[lane], now, rest, speed))
        soonest = min(finish)
        if soonest < _IDLE:
            ending = finish.index(soonest)
            # A rest rounded to a hair below zero ends now.
            env.timeout(max(0.0, soonest - now)).callbacks.append(on_end)

    def on_end(_: simpy.Event) -> None:
        nonlocal busy
        lane, now = ending, env.now
        segment = heads[lane]
        end[segment] = now
        finish[lane] = _IDLE
        busy &= ~(1 << lane)
        heads[lane] = following = segment + 1
        if following < bounds[lane + 1] and not missing[following]:
            begin(following, lane, now)
        for target in targets[target_bounds[segment] : target_bounds[following]]:
            missing[target] -= 1
            if not missing[target] and heads[lane_of[target]] == target:
                begin(target, lane_of[target], now)
        settle(now)

    for lane in Lane:
        if heads[lane] < bounds[lane + 1] and not missing[heads[lane]]:
            begin(heads[lane], lane, 0.0)
    settle(0.0)
    env.run()
    return _Clock(start=start, end=end, heads=heads, points=points)


def _spans(segments: Segments, work: Floats, clock: _Clock, seconds: Floats) -> tuple[Floats, Floats]:
    """Return start and end of every instruction: segment bounds as played, interpolated between them."""
    start, end = np.empty(len(seconds)), np.empty(len(seconds))
    if not len(seconds):
        return start, end
    points = np.array(clock.points).reshape(-1, 4)
    points = points[np.argsort(points[:, 0], kind="stable")]
    of_point = points[:, 0].astype(np.int64)
    # Work done counts through all segments, so that one search finds the piece that an instant lies on; ``low`` and
    # ``high`` keep it inside the segment where a piece of no work makes that ambiguous.
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
    """Return ``a waits for b, c`` for the segment that a lane is stuck at."""
    first = int(segments.order[segments.first[segment]])
    position = {int(i): at for at, i in enumerate(segments.order)}
    ended = {s for bounds, head in zip(segments.lane_bounds, clock.heads, strict=False) for s in range(bounds, head)}
    producers = edges.producer[edges.consumer == first].tolist()
    waited = [name(p) for p in producers if int(segments.of[position[p]]) not in ended]
    return f"{name(first)} waits for {', '.join(waited)}"
