"""The planned arena: a single allocation in which every device buffer is a view at its planned offset.

    address
      ^  [ params ............................ ]    alive for the whole step, zeroed once
      |  [ qkv ][ scores ][ qkv ]                   share these bytes, one after the other
      +--------------------------------------> instructions

All views are made before step 1. A step allocates nothing, so memory cannot fragment and no pointer changes. A
workspace that a library allocates itself has a slot too. The slot stays empty unless an allocator below torch lends it
to the library's call (``replaying.py``).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from memo_exec.memory.binding import Schedule
from memo_exec.memory.store import CachingStore, Count, Spec


class ArenaStore(CachingStore):
    """A buffer store whose buffers are views of the arena. ``poison`` poisons each buffer before its first write.

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
        self.slots = {buffer: self._slot(buffer) for buffer in sorted(self._library) if self._offsets[buffer] >= 0}
        """Slots of the workspaces that a library allocates itself, as byte tensors."""

    def _known(self, schedule: Schedule) -> dict[int, Tensor]:
        """Return a view of every buffer; buffers of one shape at one offset share theirs."""
        del schedule
        cut: dict[tuple[int, Spec], Tensor] = {}
        found = {}
        for buffer, spec in enumerate(self._specs):
            if self._offsets[buffer] >= 0 and buffer not in self._library:
                key = self._offsets[buffer], spec
                if key not in cut:
                    cut[key] = self._cut(buffer, spec)
                found[buffer] = cut[key]
        return found

    def _slot(self, buffer: int) -> Tensor:
        offset = self._offsets[buffer]
        return self.memory[offset : offset + self._specs[buffer].bytes]

    def _cut(self, buffer: int, spec: Spec) -> Tensor:
        return self._slot(buffer).view(spec.dtype).view(spec.shape)

    def _make_lasting(self, buffer: int, spec: Spec) -> Tensor:
        return self._cut(buffer, spec).zero_()

    def peak_bytes(self, counts: Iterable[Count]) -> int:
        """Return the arena's size, whatever lives in it."""
        del counts
        return self.arena_bytes
