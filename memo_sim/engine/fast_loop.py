"""Chooses the loop over segments: numba's where it is installed and pays, else Python's.

Plays that only rank plans need no SimPy. What is shown is played with SimPy's events. Which loop plays changes no
number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo_sim.engine.compiled import Compiled
from memo_sim.engine.event_loop import Clock, Groups, UsedRates, run, run_without_simpy
from memo_sim.engine.playback import Floats
from memo_sim.engine.segments import Segments

if TYPE_CHECKING:  # imported when a play is long enough
    from memo_sim.engine.compiled_loop import CompiledLoop

SOON = 20_000
"""Segments that are played in Python before a loop is loaded that is compiled already: about 0.04 s, as long as loading
takes."""

FIRST = 200_000
"""Segments that are played in Python before the loop is compiled: about half a second. Compiling takes about two
seconds, but once: later commands load the loop."""


class PythonLoop:
    """The loop in Python."""

    def __call__(self, segments: Segments, work: Floats, rates_of: UsedRates, groups: Groups) -> Clock:
        """Play the segments without SimPy."""
        return run_without_simpy(segments, work, rates_of, groups)

    def with_simpy(self, segments: Segments, work: Floats, rates_of: UsedRates, groups: Groups) -> Clock:
        """Play the segments with SimPy's events."""
        return run(segments, work, rates_of, groups)


class FastLoop:
    """A ``player.Loop`` that counts the segments it plays."""

    def __init__(self, first: int = FIRST, soon: int = SOON) -> None:
        self._loop: Compiled[PythonLoop | CompiledLoop] = Compiled(PythonLoop(), _compiled, soon=soon, first=first)

    @property
    def compiled(self) -> bool:
        """Whether the compiled loop plays by now."""
        return self._loop.compiled

    def beside(self, compiled: bool) -> None:
        """Follow another process: play compiled if it does, and compile the loop no sooner."""
        self._loop.beside(compiled)

    def __call__(self, segments: Segments, work: Floats, rates_of: UsedRates, groups: Groups) -> Clock:
        """Play the segments without SimPy."""
        return self._loop.of(len(work))(segments, work, rates_of, groups)

    def with_simpy(self, segments: Segments, work: Floats, rates_of: UsedRates, groups: Groups) -> Clock:
        """Play the segments with SimPy's events, as all is played that is shown."""
        return self._loop.of(len(work)).with_simpy(segments, work, rates_of, groups)


def _compiled(*, compiles: bool) -> CompiledLoop:
    from memo_sim.engine.compiled_loop import CompiledLoop

    return CompiledLoop(compiles=compiles)


run_fast = FastLoop()
"""The loop of this process."""
