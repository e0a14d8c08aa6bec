"""Divides lanes into segments: runs of instructions that the engine plays as one event.

Consecutive instructions of a lane form a segment when edges enter only at the first and leave only at the last. Other
lanes cannot observe the instants in between, so these are interpolated.

      lane       i0 i1 i2 i3 i4          segments: [i0 i1] [i2] [i3 i4]
      edges in         ^                 (an edge into i2, an edge out of i2)
      edges out        |->
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from memo_sim.program.analysis.columns import NUMBER, Flags, Ints
from memo_sim.program.analysis.edges import Edges, sorted_with_places

FEW = 32
"""Largest number of lanes whose instructions are found lane by lane; those of more are sorted, in twice the memory."""


@dataclass(frozen=True)
class Segments:
    """Segments, numbered lane by lane and in program order inside a lane.

    ``order`` lists all instructions in that order. Segment s covers ``order[first[s] : last[s] + 1]``. Lane l has the
    segments from ``lane_bounds[l]`` to before ``lane_bounds[l + 1]``.
    """

    order: Ints
    first: Ints
    lane_bounds: Ints
    targets: Ints
    """Consumer segments of all edges, by producer: ``targets[target_bounds[s] : target_bounds[s + 1]]`` for s."""
    target_bounds: Ints

    @property
    def of(self) -> Ints:
        """The segment of each entry of ``order``."""
        return np.repeat(np.arange(len(self.first), dtype=NUMBER), self.last - self.first + 1)

    @property
    def last(self) -> Ints:
        """The last entry of ``order`` that each segment covers."""
        found = np.empty(len(self.first), dtype=NUMBER)
        found[:-1] = self.first[1:]
        found[-1:] = len(self.order)
        found -= 1
        return found

    @property
    def only_targets(self) -> Ints:
        """The consumer of each segment that has one edge; -1 of the others."""
        found = np.full(len(self.first), -1, dtype=NUMBER)
        one = np.flatnonzero(np.diff(self.target_bounds) == 1)
        found[one] = self.targets[self.target_bounds[one]]
        return found

    @property
    def several(self) -> Flags:
        """Whether each segment has several instructions."""
        found: Flags = self.last > self.first
        return found

    @property
    def waits(self) -> Ints:
        """Number of edges that enter each segment, in a new array."""
        return np.bincount(self.targets, minlength=len(self.first)).astype(NUMBER)

    @property
    def without_edges(self) -> Segments:
        """The same segments without the edges between them, which only a loop needs."""
        none = np.zeros(0, dtype=NUMBER)
        return replace(self, targets=none, target_bounds=none)


def cut(lanes: Ints, edges: Edges, count: int, alone: Ints) -> Segments:
    """Return the segments of instructions on ``count`` lanes; each instruction in ``alone`` gets its own segment."""
    total = len(lanes)
    lane, order = _by_lane(lanes, count)
    has_in = np.zeros(total, dtype=bool)
    has_in[edges.consumer] = True
    has_in[alone] = True
    has_out = np.zeros(total, dtype=bool)
    has_out[edges.producer] = True
    has_out[alone] = True
    begins = has_in[order]
    begins[1:] |= has_out[order][:-1] | (lane[1:] != lane[:-1])
    begins[:1] = True
    del has_in, has_out
    of = np.cumsum(begins, dtype=NUMBER)
    of -= 1
    first = np.flatnonzero(begins).astype(NUMBER)
    lane_bounds = np.searchsorted(lane[first], np.arange(count + 1, dtype=lane.dtype))
    del lane, begins

    segment = np.empty(total, dtype=NUMBER)
    segment[order] = of
    del of
    producer, consumer = segment[edges.producer], segment[edges.consumer]
    del segment
    leaving, by_producer = np.bincount(producer, minlength=len(first)), sorted_with_places(producer)[1]
    return Segments(
        order=order,
        first=first,
        lane_bounds=lane_bounds,
        targets=consumer[by_producer],
        target_bounds=np.append(0, np.cumsum(leaving)).astype(NUMBER),
    )


def _by_lane(lanes: Ints, count: int) -> tuple[Ints, Ints]:
    """Return the lanes of all instructions in increasing order, and the instructions, each lane's in program order."""
    if count > FEW:
        return sorted_with_places(lanes)
    order, sizes = np.empty(len(lanes), dtype=NUMBER), np.bincount(lanes, minlength=count)
    at = 0
    for lane, size in enumerate(sizes.tolist()):
        order[at : at + size] = np.flatnonzero(lanes == lane) if size else 0
        at += size
    return np.repeat(np.arange(count, dtype=lanes.dtype), sizes), order
