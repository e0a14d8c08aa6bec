"""Device memory of a plan that PyTorch's caching allocator serves: replays its requests instead of placing them.

The program frees buffers in program order. An eager framework asks for more, and frees some buffers later
(``memory/eager_framework.py``). Three steps are replayed; the cost of a step is that of the last one, when the cache is
warm. An allocation retry stops the device, so its seconds are added to the kernel at which it happens:

      compute  | norm | qkv |##### allocation retry #####  attention | ...
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memo_sim.contract.hardware import Hardware
from memo_sim.engine.fast_replay import ITERATIONS, fast_replay
from memo_sim.engine.playback import Floats
from memo_sim.memory.initial_states import Beginning, without_states
from memo_sim.memory.replay import DeviceStop, Replay, RunAhead, allocation_costs
from memo_sim.program.analysis.columns import Ints
from memo_sim.program.analysis.liveness import Liveness
from memo_sim.program.arena.requests import BufferNames, request_columns
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.program import Program


@dataclass(frozen=True)
class CachingMemory:
    """The replay of one rank's requests, and the lanes of the instructions that make them."""

    replay: Replay
    lane: Ints
    """Lane of every instruction."""

    @cached_property
    def stall_s(self) -> Floats:
        """Seconds that the allocator adds to each instruction; only kernels wait for it."""
        seconds = np.zeros(len(self.lane))
        np.add.at(seconds, self._stopped, [stop.seconds for stop in self._stops])
        return seconds

    @cached_property
    def retried_allocation(self) -> Ints:
        """Number of allocation retries at each instruction."""
        counts = np.zeros(len(self.lane), dtype=np.int64)
        np.add.at(counts, self._stopped, [stop.retried_allocation for stop in self._stops])
        return counts

    @property
    def _stops(self) -> list[DeviceStop]:
        """Stops of the device in the steady step; empty when memory runs out before that step."""
        return [] if self.replay.out_of_memory else self.replay.steady.stops

    @property
    def _stopped(self) -> Ints:
        """The kernel at which each stop happens; a stop caused by another lane happens at the next kernel."""
        kernels = np.flatnonzero(self.lane == Lane.COMPUTE)
        instants = np.array([stop.instant for stop in self._stops], dtype=np.int64)
        stopped: Ints = kernels[np.minimum(np.searchsorted(kernels, instants), len(kernels) - 1)]
        return stopped


def caching_memory(
    program: Program,
    lane: Ints,
    lives: Liveness,
    hardware: Hardware,
    *,
    capacity_bytes: int,
    reserve_bytes: int,
    names: BufferNames | None = None,
    ahead: RunAhead | None = None,
    beginning: Beginning | None = None,
) -> CachingMemory:
    """Return the behaviour of PyTorch's allocator for ``program`` on one device.

    ``lane``: of each instruction. ``lives``: of the requested buffers, with their sizes. ``names``: theirs, where they
    are not all the program's own. Of ``capacity_bytes``, ``reserve_bytes`` are not available to the allocator.
    ``beginning`` replaces the program's states.
    """
    if beginning:
        lives = without_states(program, lives)
    requests = request_columns(lives, names or BufferNames(program))
    return CachingMemory(
        fast_replay.of(requests)(
            requests,
            iterations=ITERATIONS,
            capacity_bytes=max(0, capacity_bytes - reserve_bytes),
            costs=allocation_costs(hardware),
            ahead=ahead,
            beginning=beginning,
        ),
        lane,
    )
