"""The planned arena: a single allocation in which every device buffer is a view at its planned offset.

    address
      ^  [ params ............................ ]    alive for the whole step, zeroed once
      |  [ qkv ][ scores ][ qkv ]                   share these bytes, one after the other
      +--------------------------------------> instructions

All views are made before step 1. A step allocates nothing, so memory cannot fragment and no pointer changes. Births and
deaths are counted only for the trace. A workspace that a library allocates itself has a slot too. The slot stays empty
unless an allocator below torch lends it to the library's call (``replaying.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from memo_exec.memory.binding import Schedule
from memo_exec.memory.store import CachingStore, Spec


class ArenaStore(CachingStore):
    """A buffer store whose buffers are views of the arena; it counts bytes like the caching store.

    ``peak_bytes`` is the arena's size. ``poison`` poisons each buffer before its first write.

    Raises:
        ValueError: if the schedule was made without a placement.
    """

    def __init__(self, schedule: Schedule, device: torch.device, *, poison: bool = False) -> None:
        if schedule.arena is None:
            raise ValueError("an arena needs a placement")
        self._offsets: list[int] = schedule.arena.offsets.tolist()
        self.arena_bytes = schedule.arena.bytes
        self.memory = torch.empty(self.arena_bytes, dtype=torch.uint8, device=device)
        super().__init__(schedule, device, poison=poison)
        self._views = {
            buffer: self._cut(buffer, spec)
            for buffer, spec in enumerate(self._specs)
            if self._offsets[buffer] >= 0 and buffer not in self._library
        }
        self.slots = {buffer: self._slot(buffer) for buffer in sorted(self._library) if self._offsets[buffer] >= 0}
        """Slots of the workspaces that a library allocates itself, as byte tensors."""
        self.peak_bytes = self.arena_bytes

    def _slot(self, buffer: int) -> Tensor:
        offset = self._offsets[buffer]
        return self.memory[offset : offset + self._specs[buffer].bytes]

    def _cut(self, buffer: int, spec: Spec) -> Tensor:
        return self._slot(buffer).view(spec.dtype).view(spec.shape)

    def _make_lasting(self, buffer: int, spec: Spec) -> Tensor:
        return self._cut(buffer, spec).zero_()

    def _take(self, buffer: int, spec: Spec) -> Tensor:
        del spec
        return self._views[buffer]

    def _give_back(self, buffer: int, spec: Spec) -> None:
        """Do nothing: the plan gives the slot to the next buffer."""

    def begin_step(self) -> None:
        """Begin a new log, and release buffers that a failed step left alive."""
        super().begin_step()
        self.peak_bytes = self.arena_bytes

    def lasts(self, buffer: int) -> bool:
        """Return whether a buffer keeps one address; that is true of every buffer in the arena."""
        return buffer in self._views

    def view(self, buffer: int, first: int, tokens: int) -> Tensor:
        """Return a range of a buffer's tokens; the buffer need not be alive."""
        whole = self._views[buffer]
        return whole if tokens == self._specs[buffer].tokens else whole[first : first + tokens]
