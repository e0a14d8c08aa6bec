"""Plays programs: serial lanes in program order, edges between them, and rates that fall under contention.

The loop over events is SimPy's (``event_loop.py``), or one that gives the same numbers (``fast_loop.py``).

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

from memo_sim.contract.errors import MemoError
from memo_sim.engine.event_loop import Clock, Groups, Rates, UsedRates, run
from memo_sim.engine.playback import Floats, Playback
from memo_sim.engine.segments import Segments, cut
from memo_sim.program.analysis.columns import NUMBER, InstructionColumns, Ints, check_numbered
from memo_sim.program.analysis.edges import Edges, sorted_with_places
from memo_sim.program.analysis.rendezvous import AllRendezvous, all_rendezvous
from memo_sim.program.ir.instruction import Lane

AT_ONCE = 1 << 16
"""Instants that are interpolated at once, which needs a few MB."""

Loop = Callable[[Segments, Floats, UsedRates, Groups], Clock]
"""A loop over segments: SimPy's (``event_loop.py``) or one that gives the same (``fast_loop.py``)."""


@dataclass(frozen=True)
class Part:
    """One pipeline stage to play: its instructions, the edges between them, and their durations alone."""

    columns: InstructionColumns
    edges: Edges
    seconds: Floats
    name: Callable[[int], str] = str
    """Returns the id of an instruction."""


def play(
    columns: InstructionColumns, edges: Edges, seconds: Floats, rates: Rates, *, name: Callable[[int], str] = str
) -> Playback:
    """Return when every instruction of a single stage starts and ends; ``seconds`` are their durations alone.

    Raises:
        MemoError: when instructions wait for each other in a cycle, which no program of ``lower`` does.
    """
    return play_stages([Part(columns, edges, seconds, name)], rates)[0]


def play_stages(
    parts: Sequence[Part], rates: Rates, matched: AllRendezvous | None = None, *, loop: Loop = run
) -> list[Playback]:
    """Return the playback of each stage; lanes contend only with lanes of the same stage.

    Raises:
        MemoError: when instructions wait for each other in a cycle, which no programs of ``lower`` do.
    """
    first = np.cumsum([0] + [len(part.seconds) for part in parts])
    check_numbered(int(first[-1]), "instructions")
    first = first.astype(NUMBER)
    joined = Edges(
        _joined([part.edges.producer for part in parts], first),
        _joined([part.edges.consumer for part in parts], first),
    )
    used = np.flatnonzero(sum(np.bincount(part.columns.lane, minlength=len(Lane)) for part in parts))
    place = np.zeros(len(Lane), dtype=NUMBER)
    place[used] = np.arange(len(used))
    stages = len(used) * np.arange(len(parts), dtype=NUMBER)
    lanes = _joined([place[part.columns.lane] for part in parts], stages)
    seconds: Floats = np.concatenate([part.seconds for part in parts]) if len(parts) > 1 else parts[0].seconds
    matched = matched or all_rendezvous(())
    met: Ints = first[matched.stage] + matched.instruction
    segments = cut(lanes, joined, len(used) * len(parts), met)
    del lanes
    work = np.add.reduceat(seconds[segments.order], segments.first) if len(seconds) else np.zeros(0)
    groups = _groups(segments, met, matched.bounds)
    clock = loop(segments, work, UsedRates(used.tolist(), rates), groups)

    def name(i: int) -> str:
        stage = int(np.searchsorted(first, i, side="right")) - 1
        return parts[stage].name(i - int(first[stage]))

    stuck = clock.heads[clock.heads < segments.lane_bounds[1:]].tolist()
    if stuck:
        raise MemoError(
            "the program cannot be played: instructions wait for each other",
            got="; ".join(_waiting(segments, joined, clock, s, name) for s in stuck),
            hint="this is a bug in the lowering or in the derived edges",
        )
    del groups
    segments = segments.without_edges
    start_s, end_s = _spans(segments, work, clock, seconds)
    bounds = [slice(int(a), int(b)) for a, b in pairwise(first)]
    return [
        Playback(part.columns, part.edges, start_s=start_s[mine], end_s=end_s[mine], by_simpy=clock.by_simpy)
        for part, mine in zip(parts, bounds, strict=True)
    ]


def _joined(numbers: Sequence[Ints], bases: Ints) -> Ints:
    """Return the numbers of all parts, each counted from its own base; those of one part as they are."""
    if len(numbers) == 1:
        return numbers[0]
    return np.concatenate([each + base for each, base in zip(numbers, bases, strict=False)])


def _groups(segments: Segments, met: Ints, bounds: Ints) -> Groups:
    """Return the segments that are matched with other stages; group g has ``met[bounds[g] : bounds[g + 1]]``."""
    segment = np.empty(len(segments.order), dtype=NUMBER)
    segment[segments.order] = segments.of
    return Groups.of_bounds(len(segments.first), segment[met], bounds)


def _spans(segments: Segments, work: Floats, clock: Clock, seconds: Floats) -> tuple[Floats, Floats]:
    """Return start and end of every instruction, interpolated between the ends of its segment."""
    pieces, order = _Pieces.of(segments, work, clock), segments.order
    start, end = np.empty(len(seconds)), np.empty(len(seconds))
    if not len(seconds):
        return start, end
    end[order[segments.last]] = clock.end
    pieces.interpolate(segments, clock, seconds, end)
    for at in range(1, len(order), AT_ONCE):
        mine = slice(at, min(at + AT_ONCE, len(order)))
        start[order[mine]] = end[order[mine.start - 1 : mine.stop - 1]]
    start[order[segments.first]] = clock.start
    return start, np.maximum(start, end, out=end)


@dataclass(frozen=True)
class _Pieces:
    """The linear pieces of the work done over time, of the segments with several instructions.

    Work done is summed over all segments, so one search finds the piece of each instant.
    """

    segments: Ints
    """The segments with several instructions."""
    begun: Floats
    """Work done before each of them."""
    low: Ints
    """Its first piece and its last one, which keep a search inside it: a piece without work is ambiguous."""
    high: Ints
    points: Ints
    """The clock's point with which each piece begins."""
    done: Floats
    """Work done at that point."""

    @classmethod
    def of(cls, segments: Segments, work: Floats, clock: Clock) -> _Pieces:
        """Return the pieces between the clock's points."""
        several = np.flatnonzero(segments.several).astype(NUMBER)
        done = np.cumsum(work)
        begun = done[several] - work[several]
        of_point, points = sorted_with_places(clock.points[:, 0].astype(NUMBER))
        point_done = work[of_point] - clock.points[points, 2]
        point_done += done[of_point] - work[of_point]
        low, high = (np.searchsorted(of_point, several, side=side) for side in ("left", "right"))
        return cls(several, begun, low, high - 1, points, point_done)

    def interpolate(self, segments: Segments, clock: Clock, seconds: Floats, end: Floats) -> None:
        """Write the ends of the instructions within segments to ``end``; the last one of a segment ends with it.

        Blocks of instructions follow each other, so that no array of all of them is needed: ``inside`` is the work done
        by the end of each.
        """
        last, inside_before, before_segment = segments.last, 0.0, 0.0
        for block in range(0, len(segments.order), AT_ONCE):
            order, of = segments.order[block : block + AT_ONCE], segments.of[block : block + AT_ONCE]
            each = seconds[order]
            inside = each.copy()
            inside[0] += inside_before
            np.cumsum(inside, out=inside)
            first = segments.first[of] - block
            begun = np.maximum(first, 0)
            before_first = np.where(first >= 0, inside[begun] - each[begun], before_segment)
            inside_before, before_segment = float(inside[-1]), float(before_first[-1])
            within = np.flatnonzero(last[of] - block != np.arange(len(of), dtype=NUMBER))
            of = of[within]
            mine = np.searchsorted(self.segments, of)
            wanted = self.begun[mine] + (inside[within] - before_first[within])
            found = np.searchsorted(self.done, wanted, side="right") - 1
            piece = np.clip(found, self.low[mine], self.high[mine])
            point = self.points[piece]
            ends = clock.points[point, 1] + (wanted - self.done[piece]) / clock.points[point, 3]
            end[order[within]] = np.clip(ends, clock.start[of], clock.end[of])


def _waiting(segments: Segments, edges: Edges, clock: Clock, segment: int, name: Callable[[int], str]) -> str:
    """Return the text ``a waits for b, c`` for the segment that a lane cannot start."""
    first = int(segments.order[segments.first[segment]])
    position = {int(i): at for at, i in enumerate(segments.order)}
    ended = {s for bounds, head in zip(segments.lane_bounds, clock.heads, strict=False) for s in range(bounds, head)}
    producers = edges.producer[edges.consumer == first].tolist()
    waited = [name(p) for p in producers if int(segments.of[position[p]]) not in ended]
    return f"{name(first)} waits for {', '.join(waited)}"
