"""The result of playing a program: start and end of every instruction, and the stalls that follow from them.

An instruction starts when two things have happened: the previous instruction of its lane has ended, and so has every
producer on another lane. The later of the two binds. The chain of binding instructions from the step's end to its start
is the critical path. A producer that the lane had to wait for is a stall.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from memo_sim.program.analysis.columns import NUMBER, InstructionColumns, Ints
from memo_sim.program.analysis.edges import Edges
from memo_sim.program.ir.instruction import Lane

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Waits:
    """Stalls by column: ``instruction`` was ready at ``start_s``, but waited ``seconds`` for ``waits_for``."""

    instruction: Ints
    waits_for: Ints
    start_s: Floats
    seconds: Floats


@dataclass(frozen=True)
class Playback:
    """Start and end of every instruction in program order, in seconds from the step's start."""

    columns: InstructionColumns
    edges: Edges
    start_s: Floats
    end_s: Floats
    by_simpy: bool = True
    """Whether SimPy's loop played it; what a search plays may come from another (``fast_loop.py``)."""

    @cached_property
    def span_s(self) -> float:
        """Seconds from the step's start to the last end."""
        return float(self.end_s.max(initial=0.0))

    @cached_property
    def busy_s(self) -> Floats:
        """Busy seconds of each lane."""
        seconds = self.end_s - self.start_s
        return np.bincount(self.columns.lane, weights=seconds, minlength=len(Lane)).astype(np.float64)

    @cached_property
    def previous(self) -> Ints:
        """The previous instruction on the same lane, or -1."""
        lane = self.columns.lane
        before = np.full(len(lane), -1, dtype=NUMBER)
        for each in np.flatnonzero(np.bincount(lane)):
            mine = np.flatnonzero(lane == each)
            before[mine[1:]] = mine[:-1]
        return before

    @cached_property
    def waits(self) -> Waits:
        """Every stall of a lane that had work left and waited for another lane, in program order."""
        latest = self._latest
        producer, consumer = self.edges.producer[latest], self.edges.consumer[latest]
        before = self.previous[consumer]
        ready = np.where(before >= 0, self.end_s[before], 0.0)
        stalled = self.end_s[producer] > ready
        producer, consumer, ready = producer[stalled], consumer[stalled], ready[stalled]
        return Waits(consumer, producer, ready, self.start_s[consumer] - ready)

    @property
    def _latest(self) -> Ints:
        """Every consumer's edge whose producer ends last; of several that do, the last one."""
        producer, consumer = self.edges.producer, self.edges.consumer
        begins = np.ones(len(consumer), dtype=np.bool_)
        begins[1:] = consumer[1:] != consumer[:-1]
        firsts = np.flatnonzero(begins).astype(NUMBER)
        if not len(firsts):
            return firsts
        ends_s = self.end_s[producer]
        group = np.cumsum(begins, dtype=NUMBER)
        group -= 1
        is_last = ends_s == np.maximum.reduceat(ends_s, firsts)[group]
        del ends_s, group
        latest: Ints = np.maximum.reduceat(np.where(is_last, np.arange(len(consumer), dtype=NUMBER), -1), firsts)
        return latest

    @cached_property
    def binds(self) -> Ints:
        """The instruction that each one started after: the previous on its lane, the last producer, or -1."""
        binds = self.previous.copy()
        binds[self.waits.instruction] = self.waits.waits_for
        return binds
