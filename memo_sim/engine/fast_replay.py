"""Replays the requests of a plan on PyTorch's allocator: compiled where numba is installed and pays, else in Python.

Which of the two replays changes no number.
"""

from __future__ import annotations

from typing import Protocol

from memo_sim.contract.requests import Requests
from memo_sim.engine.compiled import Compiled
from memo_sim.memory.initial_states import Beginning
from memo_sim.memory.replay import AllocationCosts, Replay, RunAhead, replay

FIRST = 300_000
"""Requests that are replayed in Python before numba is imported: about three seconds, as long as compiling takes."""

LONG = 120_000
"""Requests of a single replay that is compiled from the start: Python replays them in about a second."""

ITERATIONS = 3
"""Steps that are replayed."""


class Replaying(Protocol):
    """A replay by PyTorch's allocator with its default settings."""

    def __call__(
        self,
        requests: Requests,
        limit_bytes: int,
        costs: AllocationCosts,
        *,
        ahead: RunAhead | None,
        beginning: Beginning | None,
        iterations: int,
    ) -> Replay:
        """Return how the allocator serves ``requests`` with at most ``limit_bytes``."""


def _in_python(
    requests: Requests,
    limit_bytes: int,
    costs: AllocationCosts,
    *,
    ahead: RunAhead | None,
    beginning: Beginning | None,
    iterations: int,
) -> Replay:
    return replay(
        requests, iterations=iterations, capacity_bytes=limit_bytes, costs=costs, ahead=ahead, beginning=beginning
    )


def _compiled() -> Replaying:
    from memo_sim.engine.compiled_replay import replay_compiled

    return replay_compiled


class FastReplay:
    """Replays requests, and counts them."""

    def __init__(self, first: int = FIRST, long: int = LONG) -> None:
        self._replay: Compiled[Replaying] = Compiled(_in_python, _compiled, first=first, long=long)

    @property
    def compiled(self) -> bool:
        """Whether the compiled replay is used by now."""
        return self._replay.compiled

    def __call__(
        self,
        requests: Requests,
        *,
        limit_bytes: int,
        costs: AllocationCosts,
        ahead: RunAhead | None,
        beginning: Beginning | None,
    ) -> Replay:
        """Return how the allocator serves ``requests`` with at most ``limit_bytes`` (``memory.replay.replay``)."""
        played = self._replay.of(ITERATIONS * len(requests.ids))
        return played(requests, limit_bytes, costs, ahead=ahead, beginning=beginning, iterations=ITERATIONS)


replay_fast = FastReplay()
"""The replay of this process."""
