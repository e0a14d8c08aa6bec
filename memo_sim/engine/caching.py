"""Device memory of a plan that PyTorch's caching allocator serves: its requests replayed, not a placement.

The program frees in program order; as an eager framework plays it, it asks for more and gets some back later
(``memory/eager.py``). A step's cost is that of the last of three replayed steps, when the cache is warm; a
reorganisation stops the device, so its seconds are added to the kernel at which it happens:

      compute  | norm | qkv |##### reorganisation #####  attention | ...
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memo_sim.contract.hardware import Hardware
from memo_sim.engine.playback import Floats
from memo_sim.memory.beginning import Beginning, without_states
from memo_sim.memory.replay import DeviceStop, Replay, RunAhead, allocation_costs, replay
from memo_sim.program.analysis.columns import Columns, Ints
from memo_sim.program.analysis.liveness import Liveness
from memo_sim.program.arena.requests import requests_of
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.program import Program


@dataclass(frozen=True)
class CachingMemory:
    """The replay of one rank's requests, and the instructions it belongs to."""

    replay: Replay
    lane: Ints
    """Lane of every instruction."""

    @cached_property
    def stall_s(self) -> Floats:
        """Seconds that the allocator adds to each instruction: none but kernels wait for it."""
        seconds = np.zeros(len(self.lane))
        np.add.at(seconds, self._stopped, [stop.seconds for stop in self._stops])
        return seconds

    @cached_property
    def retried_allocation(self) -> Ints:
        """How often each instruction finds the memory reorganised."""
        counts = np.zeros(len(self.lane), dtype=np.int64)
        np.add.at(counts, self._stopped, [stop.retried_allocation for stop in self._stops])
        return counts

    @property
    def _stops(self) -> list[DeviceStop]:
        """The stops of the steady step; none where memory runs out before there is one."""
        return [] if self.replay.out_of_memory else self.replay.steady.stops

    @property
    def _stopped(self) -> Ints:
        """The kernel at which each stop happens: the next one where another lane asks for the memory."""
        kernels = np.flatnonzero(self.lane == Lane.COMPUTE)
        instants = np.array([stop.instant for stop in self._stops], dtype=np.int64)
        stopped: Ints = kernels[np.minimum(np.searchsorted(kernels, instants), len(kernels) - 1)]
        return stopped


def caching_memory(
    program: Program,
    columns: Columns,
    lives: Liveness,
    hardware: Hardware,
    *,
    reserve_bytes: int,
    names: list[str] | None = None,
    ahead: RunAhead | None = None,
    beginning: Beginning | None = None,
) -> CachingMemory:
    """Return what the allocator makes of ``program`` on one device.

    ``lives`` are the buffers asked for, with their sizes; ``names`` those of buffers that are not the program's;
    ``reserve_bytes`` of the device are not the allocator's; ``beginning`` stands for the program's states.
    """
    if beginning:
        lives = without_states(program, lives)
    return CachingMemory(
        replay(
            requests_of(program, columns, lives=lives, names=names),
            capacity_bytes=int(hardware.device_memory_bytes.value),
            reserve_bytes=reserve_bytes,
            costs=allocation_costs(hardware),
            ahead=ahead,
            beginning=beginning,
        ),
        columns.lane,
    )
