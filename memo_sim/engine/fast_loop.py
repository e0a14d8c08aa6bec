"""Chooses the loop of plays that only rank plans: numba's where it is installed and pays, else SimPy's.

Importing numba and reading the compiled loop from its cache takes about half a second; compiling it the first time
takes about two. So plays begin in SimPy, and numba is imported once they have played ``FIRST`` segments. Which loop
plays changes no number.
"""

from __future__ import annotations

import logging

from memo_sim.engine.event_loop import Clock, Groups, UsedRates, run
from memo_sim.engine.playback import Floats
from memo_sim.engine.segments import Segments

FIRST = 200_000
"""Segments that are played in SimPy before numba is imported: one to two seconds."""


class FastLoop:
    """A ``player.Loop`` that counts the segments it plays."""

    def __init__(self, first: int = FIRST) -> None:
        self._left = first
        self._compiled = run

    @property
    def compiled(self) -> bool:
        """Whether the compiled loop plays by now."""
        return self._compiled is not run

    def beside(self, compiled: bool) -> None:
        """Follow another process: import numba if it plays compiled there, where it is in the cache; else do not."""
        self._left = 0
        if compiled and not self.compiled:
            self._import()

    def __call__(self, segments: Segments, work: Floats, rates_of: UsedRates, groups: Groups) -> Clock:
        """Play the segments."""
        before, self._left = self._left, self._left - len(work)
        if before > 0 >= self._left:
            self._import()
        return self._compiled(segments, work, rates_of, groups)

    def _import(self) -> None:
        try:
            from memo_sim.engine.compiled_loop import run_compiled
        except Exception as error:  # numba also fails when its cache cannot be read or written
            reason = f"{type(error).__name__}: {error}"
            logging.getLogger(__name__).debug("SimPy plays everything, because numba does not work: %s", reason)
        else:
            self._compiled = run_compiled


run_fast = FastLoop()
"""The loop of this process."""
