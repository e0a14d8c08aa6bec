"""Plays programs: serial lanes in program order, edges between them, and rates that fall under contention.

The loop over events is driven by SimPy (``event_loop.py``), or is one that gives the same numbers (``fast_loop.py``).

An instruction that takes w seconds alone is w units of work on its lane. While the set S of lanes is busy on its rank,
the lane does ``rates(S)[lane]`` units per second. When S changes, the rates are read again and the remaining time is
rescaled.

The end of a segment (``segments.py``) is an event, unless its lane continues and S stays the same, or another lane
takes over and the rates of all others stay the same, as after a collective that compute waits for. The work done on a
lane is piecewise linear in time, so the instants between a segment's instructions are interpolated:

      rate of compute     1.0 |-------|        |-----        work done   w ........./
                          0.8 |       |--------|                           ____----
                                      copy runs                        ___/             -> time

All pipeline stages are played together. Matched instructions of several stages (a send and its receive, a collective
over stages) start when the last of them is ready, and run at the lowest of their lanes' rates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

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
    seconds: Callable[[], Floats]
    """Returns the durations; the player asks twice, so that they need no memory while the loop runs."""
    name: Callable[[int], str] = str
    """Returns the id of an instruction."""


def play(
    columns: InstructionColumns, edges: Edges, seconds: Floats, rates: Rates, *, name: Callable[[int], str] = str
) -> Playback:
    """Return when every instruction of a single stage starts and ends; ``seconds`` are their durations alone.

    Raises:
        MemoError: when instructions wait for each other in a cycle, which no program of ``lower`` does.
    """
    return play_stages([Part(columns, edges, lambda: seconds, name)], rates)[0]


def play_stages(
    parts: Sequence[Part], rates: Rates, matched: AllRendezvous | None = None, *, loop: Loop = run
) -> list[Playback]:
    """Return the playback of each stage; lanes contend only with lanes of the same stage.

    Raises:
        MemoError: when instructions wait for each other in a cycle, which no programs of ``lower`` do.
    """
    first = np.cumsum([0] + [len(part.columns.lane) for part in parts])
    check_numbered(int(first[-1]), "instructions")
    first = first.astype(NUMBER)
    used = np.flatnonzero(sum(np.bincount(part.columns.lane, minlength=len(Lane)) for part in parts))
    segments, groups = _cut(parts, first, used, matched or all_rendezvous(()))
    work = _work(segments, parts, len(used))
    clock = loop(segments, work, UsedRates(used.tolist(), rates), groups)
    del groups

    def name(i: int) -> str:
        stage = int(np.searchsorted(first, i, side="right")) - 1
        return parts[stage].name(i - int(first[stage]))

    stuck = clock.heads[clock.heads < segments.lane_bounds[1:]].tolist()
    if stuck:
        joined = _joined_edges(parts, first)
        raise MemoError(
            "the program cannot be played: instructions wait for each other",
            got="; ".join(_waiting(segments, joined, clock, s, name) for s in stuck),
            hint="this is a bug in the lowering or in the derived edges",
        )
    segments = segments.without_edges
    pieces, clock = _Pieces(segments, work, clock.points), clock.without_points
    del work
    spans = _spans(segments, pieces, clock, parts, len(used))
    return [
        Playback(part.columns, part.edges, start_s=start_s, end_s=end_s, by_simpy=clock.by_simpy)
        for part, (start_s, end_s) in zip(parts, spans, strict=True)
    ]


def _cut(parts: Sequence[Part], first: Ints, used: Ints, matched: AllRendezvous) -> tuple[Segments, Groups]:
    """Return the segments of all stages, and those that are matched.

    ``first``: the number of each stage's first instruction. ``used``: the lanes that any stage uses.
    """
    place = np.zeros(len(Lane), dtype=NUMBER)
    place[used] = np.arange(len(used))
    stages = len(used) * np.arange(len(parts), dtype=NUMBER)
    lanes = _joined([place[part.columns.lane] for part in parts], stages)
    met: Ints = first[matched.stage] + matched.instruction
    segments = cut(lanes, _joined_edges(parts, first), len(used) * len(parts), met)
    return segments, _groups(segments, met, matched.bounds)


def _work(segments: Segments, parts: Sequence[Part], own: int) -> Floats:
    """Return the seconds of every segment alone; ``own``: the number of lanes of a stage."""
    work = np.zeros(len(segments.first))
    for part, (stage, mine) in zip(parts, _stages(segments, parts, own), strict=True):
        if len(stage.order):
            work[mine] = np.add.reduceat(part.seconds()[stage.order], stage.first)
    return work


def _joined_edges(parts: Sequence[Part], first: Ints) -> Edges:
    """Return the edges of all stages, with instructions numbered through the stages."""
    return Edges(
        _joined([part.edges.producer for part in parts], first),
        _joined([part.edges.consumer for part in parts], first),
    )


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


def _spans(
    segments: Segments, pieces: _Pieces, clock: Clock, parts: Sequence[Part], own: int
) -> Iterator[tuple[Floats, Floats]]:
    """Yield start and end of every instruction of each stage, interpolated between the ends of its segment.

    ``own``: the number of lanes of a stage. Stages follow each other, so that no array of all of them is needed.
    """
    for part, (stage, mine) in zip(parts, _stages(segments, parts, own), strict=True):
        order, total = stage.order, len(stage.order)
        start, end = np.empty(total), np.empty(total)
        if total:
            end[order[stage.last]] = clock.end[mine]
            pieces.interpolate(stage, clock, part.seconds(), end)
            for block in range(1, total, AT_ONCE):
                here = slice(block, min(block + AT_ONCE, total))
                start[order[here]] = end[order[here.start - 1 : here.stop - 1]]
            start[order[stage.first]] = clock.start[mine]
        yield start, np.maximum(start, end, out=end)


def _stages(segments: Segments, parts: Sequence[Part], own: int) -> Iterator[tuple[_Stage, slice]]:
    """Yield each stage with the numbers of its segments; ``own``: the number of its lanes."""
    at = 0
    for number, part in enumerate(parts):
        total = len(part.columns.lane)
        mine = slice(*segments.lane_bounds[[number * own, (number + 1) * own]].tolist())
        order, first = segments.order[at : at + total], segments.first[mine]
        yield _Stage(order - NUMBER(at) if at else order, first - NUMBER(at) if at else first, mine.start), mine
        at += total


@dataclass(frozen=True)
class _Stage:
    """The segments of one stage, numbered in it, with ``before`` segments of earlier stages."""

    order: Ints
    first: Ints
    before: int

    @property
    def last(self) -> Ints:
        """The last entry of ``order`` that each segment covers."""
        return np.append(self.first[1:], len(self.order)).astype(NUMBER) - 1

    @property
    def of(self) -> Ints:
        """The segment of each entry of ``order``."""
        return np.repeat(np.arange(len(self.first), dtype=NUMBER), self.last - self.first + 1)


class _Pieces:
    """The linear pieces of the work done over time, of the segments with several instructions.

    Work done is summed over all segments, so one search finds the piece of each instant.
    """

    def __init__(self, segments: Segments, work: Floats, points: Floats) -> None:
        """The pieces lie between the clock's ``points``."""
        self._segments = several = np.flatnonzero(segments.several).astype(NUMBER)
        """The segments with several instructions."""
        done = np.cumsum(work)
        self._begun = done[several] - work[several]
        """Work done before each of them."""
        of_point, places = sorted_with_places(points[:, 0].astype(NUMBER))
        self._instant, self._rate = points[places, 1], points[places, 3]
        """The instant at which each piece begins, and its rate."""
        point_done = work[of_point] - points[places, 2]
        point_done += done[of_point] - work[of_point]
        self._done = point_done
        """Work done at that instant."""
        self._low, high = (np.searchsorted(of_point, several, side=side) for side in ("left", "right"))
        self._high = high - 1
        """Each segment's first piece and its last one, which keep a search inside it: a piece without work is
        ambiguous."""
        self._inside_before = self._before_segment = 0.0
        """Work done before the next block of instructions, and before the segment to which the last one belongs."""

    def interpolate(self, stage: _Stage, clock: Clock, seconds: Floats, end: Floats) -> None:
        """Write the ends of a stage's instructions within segments to ``end``; the last of a segment ends with it.

        Stages come in order. Blocks of instructions follow each other, so that no array of all of them is needed:
        ``inside`` is the work done by the end of each.
        """
        of_all, last = stage.of, stage.last
        for block in range(0, len(stage.order), AT_ONCE):
            order, of = stage.order[block : block + AT_ONCE], of_all[block : block + AT_ONCE]
            each = seconds[order]
            inside = each.copy()
            inside[0] += self._inside_before
            np.cumsum(inside, out=inside)
            first = stage.first[of] - block
            begun = np.maximum(first, 0)
            before_first = np.where(first >= 0, inside[begun] - each[begun], self._before_segment)
            self._inside_before, self._before_segment = float(inside[-1]), float(before_first[-1])
            within = np.flatnonzero(last[of] - block != np.arange(len(of), dtype=NUMBER))
            of = of[within] + stage.before
            mine = np.searchsorted(self._segments, of)
            wanted = self._begun[mine] + (inside[within] - before_first[within])
            found = np.searchsorted(self._done, wanted, side="right") - 1
            piece = np.clip(found, self._low[mine], self._high[mine])
            ends = self._instant[piece] + (wanted - self._done[piece]) / self._rate[piece]
            end[order[within]] = np.clip(ends, clock.start[of], clock.end[of])


def _waiting(segments: Segments, edges: Edges, clock: Clock, segment: int, name: Callable[[int], str]) -> str:
    """Return the text ``a waits for b, c`` for the segment that a lane cannot start."""
    first = int(segments.order[segments.first[segment]])
    position = {int(i): at for at, i in enumerate(segments.order)}
    of = segments.of
    ended = {s for bounds, head in zip(segments.lane_bounds, clock.heads, strict=False) for s in range(bounds, head)}
    producers = edges.producer[edges.consumer == first].tolist()
    waited = [name(p) for p in producers if int(of[position[p]]) not in ended]
    return f"{name(first)} waits for {', '.join(waited)}"
