"""Chooses the loop of plays that only rank plans: numba's where it is installed and pays, else SimPy's.

Importing numba and reading the compiled loop from its cache takes about a third of a second; compiling it the first
time takes about two. So plays begin in SimPy. Numba is imported once they have played ``FIRST`` segments, and at once
for a play of ``LONG`` segments. Which loop plays changes no number.
"""

from __future__ import annotations

import logging

from memo_sim.engine.event_loop import Clock, Groups, UsedRates, run
from memo_sim.engine.playback import Floats
from memo_sim.engine.segments import Segments

FIRST = 800_000
"""Segments that are played in SimPy before numba is imported: two to four seconds, about what compiling takes."""

LONG = 200_000
"""Segments of a single play that is compiled from the start: SimPy plays them in about a second."""


class FastLoop:
    """A ``player.Loop`` that counts the segments it plays."""

    def __init__(self, first: int = FIRST) -> None:
        self._left = first
        self._compiled = run
        self._decided = False
        """Whether numba was tried, or another process decides."""

    @property
    def compiled(self) -> bool:
        """Whether the compiled loop plays by now."""
        return self._compiled is not run

    def beside(self, compiled: bool) -> None:
        """Follow another process: import numba if it plays compiled there, where it is in the cache; else do not."""
        if compiled and not self.compiled:
            self._import()
        self._decided = True

    def __call__(self, segments: Segments, work: Floats, rates_of: UsedRates, groups: Groups) -> Clock:
        """Play the segments."""
        self._left -= len(work)
        if not self._decided and (self._left <= 0 or len(work) >= LONG):
            self._import()
        return self._compiled(segments, work, rates_of, groups)

    def _import(self) -> None:
        self._decided = True
        try:
            from memo_sim.engine.compiled_loop import run_compiled
        except Exception as error:  # numba also fails when its cache cannot be read or written
            reason = f"{type(error).__name__}: {error}"
            logging.getLogger(__name__).debug("SimPy plays everything, because numba does not work: %s", reason)
        else:
            self._compiled = run_compiled


run_fast = FastLoop()
"""The loop of this process."""
