"""Identical micro-batches are played once and repeated.

Once the step is under way every micro-batch finds the lanes as the one before did, so the last but one that is played
stands for all that are not:

      played     | m0 | m1 | m2 | end           the step of five:  | m0 | m1 | m1 | m1 | m2 | end
                      |<-->| period
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memo_sim.engine.playback import Floats, Playback
from memo_sim.program.columns import Columns, Ints
from memo_sim.program.program import Program

PLAYED = 3
"""Micro-batches that show a whole period: the first starts from empty lanes, the last ends into the step's end."""


@dataclass(frozen=True)
class Repetition:
    """``times`` repetitions of the micro-batch before the last one of ``program``."""

    program: Program
    columns: Columns
    times: int

    def __post_init__(self) -> None:
        """Refuse to repeat what was not played."""
        if self.times < 0 or (self.times and self.program.micro_batches < PLAYED):
            raise ValueError(f"cannot repeat {self.times} times: {self.program.micro_batches} micro-batches are played")

    @property
    def steady(self) -> int:
        """The micro-batch that is repeated."""
        return self.program.micro_batches - 2

    def weights(self) -> Ints:
        """Return how often the step holds each instruction of the program."""
        weights = np.ones(len(self.columns.lane), dtype=np.int64)
        if self.times:
            micro_batch = np.array([i.micro_batch for i in self.program.instances], dtype=np.int64)
            weights[(micro_batch == self.steady)[self.columns.instance]] += self.times
        return weights

    def added_s(self, playback: Playback) -> float:
        """Return the seconds that the repetitions add to what was played."""
        if not self.times:
            return 0.0
        first, second = (float(playback.start_s[self._first(m)]) for m in (self.steady, self.steady + 1))
        return self.times * (second - first)

    def wait_s(self, playback: Playback) -> Floats:
        """Return the seconds of every wait of ``playback`` in the whole step.

        Where a lane has nothing to do in the repeated micro-batch, the wait across it lasts through the repetitions.
        """
        waits = playback.waits
        if not self.times:
            return waits.seconds
        before, after = playback.previous[waits.instruction], waits.instruction
        across = (before < self._first(self.steady)) & (after >= self._first(self.steady + 1))
        return waits.seconds + across * self.added_s(playback)

    def _first(self, micro_batch: int) -> int:
        """Return the micro-batch's first instruction in program order."""
        instance = next(n for n, i in enumerate(self.program.instances) if i.micro_batch == micro_batch)
        return int(np.searchsorted(self.columns.instance, instance))
