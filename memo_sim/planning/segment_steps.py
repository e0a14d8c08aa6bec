"""Plays segments (``engine/segments.py``) of lanes that do not slow each other, each after those that it waits for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memo_sim.engine.playback import Floats
from memo_sim.engine.segments import Segments
from memo_sim.program.analysis.columns import Ints


@dataclass(frozen=True)
class Steps:
    """Segments in program order of their first instructions; so each comes after those it waits for.

    Lists of numbers, because an object for each segment would have Python look for cycles all the time.
    """

    order: Ints
    """The segments."""
    lanes: list[int]
    """The lane of each; lanes that start anew behind the repeated window have numbers of their own."""
    stops: list[int]
    """Step n waits for ``producers[stops[n - 1] : stops[n]]``, which are steps, too."""
    producers: list[int]

    @classmethod
    def of(cls, segments: Segments, lane: Ints) -> Steps:
        """Return the steps of ``segments``; ``lane``: of every instruction."""
        firsts = segments.order[segments.first]
        order = np.argsort(firsts)
        step = np.empty_like(order)
        step[order] = np.arange(len(order))
        producer, consumer = np.repeat(step, np.diff(segments.target_bounds)), step[segments.targets]
        by_consumer = np.argsort(consumer, kind="stable")
        stops = np.cumsum(np.bincount(consumer, minlength=len(order)))
        return cls(order, lane[firsts[order]].tolist(), stops.tolist(), producer[by_consumer].tolist())

    def played(self, work: Floats, free: list[float]) -> list[float]:
        """Return when each step starts, when its lane and its producers are all that it waits for.

        ``work``: the seconds of each segment. ``free``: when each lane is free; this leaves when it is free at the end.
        """
        started, end = list[float](), list[float]()
        begin = 0
        for lane, work_s, stop in zip(self.lanes, work[self.order].tolist(), self.stops, strict=True):
            ready = free[lane]
            for producer in self.producers[begin:stop]:
                if end[producer] > ready:  # noqa: PLR1730 - a call of max() is slower
                    ready = end[producer]
            begin = stop
            started.append(ready)
            free[lane] = ready = ready + work_s
            end.append(ready)
        return started
