"""Replays the requests of a plan on PyTorch's allocator: compiled where numba is installed and pays, else in Python.

Which of the two replays changes no number.
"""

from __future__ import annotations

from typing import Protocol

from memo_sim.engine.compiled import Compiled
from memo_sim.memory.initial_states import Beginning
from memo_sim.memory.replay import AllocationCosts, Replay, Requested, RunAhead, replay

SOON = 8_000
"""Requests that are replayed in Python before a replay is loaded that is compiled already: about 0.1 s."""

FIRST = 120_000
"""Requests that are replayed in Python before the replay is compiled: about a second. Compiling takes about three
seconds, but once: later commands load the replay."""

ITERATIONS = 3
"""Steps that are replayed."""


class Replaying(Protocol):
    """A replay by PyTorch's allocator with its default settings (``memory.replay.replay``)."""

    def __call__(
        self,
        requests: Requested,
        *,
        iterations: int,
        capacity_bytes: int,
        costs: AllocationCosts,
        ahead: RunAhead | None,
        beginning: Beginning | None,
    ) -> Replay:
        """Return how the allocator serves ``requests``; it has ``capacity_bytes``."""


def _compiled(*, compiles: bool) -> Replaying:
    from memo_sim.engine.compiled_replay import CompiledReplay

    return CompiledReplay(compiles=compiles)


class FastReplay:
    """Chooses the replay, and counts what is replayed."""

    def __init__(self, first: int = FIRST, soon: int = SOON) -> None:
        self._replay: Compiled[Replaying] = Compiled(replay, _compiled, soon=soon, first=first)

    @property
    def compiled(self) -> bool:
        """Whether the compiled replay is used by now."""
        return self._replay.compiled

    def of(self, requests: Requested) -> Replaying:
        """Return the replay for some requests in ``ITERATIONS`` steps."""
        return self._replay.of(ITERATIONS * len(requests.ids))


fast_replay = FastReplay()
"""The replay of this process."""
