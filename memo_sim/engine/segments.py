"""Runs of instructions that the engine plays as one event.

Inside a lane, consecutive instructions can be played together when no edge comes in except at the first and none goes
out except at the last: nothing outside can see the instants between them, and interpolation gives those back.

      lane       i0 i1 i2 i3 i4          segments: [i0 i1] [i2] [i3 i4]
      edges in         ^                 (an edge into i2, an edge out of i2)
      edges out        |->
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memo_sim.program.analysis.columns import Ints
from memo_sim.program.analysis.edges import Edges


@dataclass(frozen=True)
class Segments:
    """Segments numbered lane by lane, in program order inside a lane.

    ``order`` lists all instructions that way; ``of`` gives the segment of each entry of ``order``; segment s covers
    ``order[first[s] : last[s] + 1]``. Lane l has segments ``lane_bounds[l]`` to ``lane_bounds[l + 1]``.
    """

    order: Ints
    of: Ints
    first: Ints
    last: Ints
    lane_bounds: list[int]
    waits: list[int]
    """Edges that come into each segment."""
    targets: list[int]
    """Consumers of every edge, by producing segment: those of s are ``targets[target_bounds[s] : ...[s + 1]]``."""
    target_bounds: list[int]


def cut(lanes: Ints, edges: Edges, count: int, alone: Ints) -> Segments:
    """Return the segments of instructions on ``count`` lanes; those of ``alone`` are segments by themselves."""
    total = len(lanes)
    order = np.argsort(lanes, kind="stable")
    lane = lanes[order]
    has_in = np.zeros(total, dtype=bool)
    has_in[edges.consumer] = True
    has_in[alone] = True
    has_out = np.zeros(total, dtype=bool)
    has_out[edges.producer] = True
    has_out[alone] = True
    begins = has_in[order]
    begins[1:] |= has_out[order][:-1] | (lane[1:] != lane[:-1])
    begins[:1] = True
    of = np.cumsum(begins) - 1
    first = np.flatnonzero(begins)
    last = np.append(first[1:], total)[: len(first)] - 1

    segment = np.empty(total, dtype=np.int64)
    segment[order] = of
    producer, consumer = segment[edges.producer], segment[edges.consumer]
    by_producer = np.argsort(producer, kind="stable")
    numbers = np.arange(len(first) + 1)
    return Segments(
        order=order,
        of=of,
        first=first,
        last=last,
        lane_bounds=np.searchsorted(lane[first], np.arange(count + 1)).tolist(),
        waits=np.bincount(consumer, minlength=len(first)).tolist(),
        targets=consumer[by_producer].tolist(),
        target_bounds=np.searchsorted(producer[by_producer], numbers).tolist(),
    )
