"""The planned arena: one allocation, and every device buffer a view at its planned offset, made before step 1.

    address
      ^  [ params ............................ ]    lives all step, zeroed once
      |  [ qkv ][ scores ][ qkv ]                   take turns; lives are the program's
      +--------------------------------------> instructions

Nothing is handed out during a step, so nothing fragments and no pointer changes; births and deaths are counted for the
trace alone. Workspaces that a library allocates itself keep their slot: empty, unless an allocator below torch lends it
to the library's call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memo_exec.memory.binding import Schedule
from memo_exec.memory.store import CachingStore, Spec


class ArenaStore(CachingStore):
    """Counts like the caching store; the memory is the arena's.

    ``peak_bytes`` is the arena's size. ``poison`` fills what is not yet written with NaN.

    Raises:
        ValueError: when the schedule was made without a placement.
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
        """Of the workspaces that a library allocates itself, as bytes."""
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
        """Nothing to do: the slot is the next buffer's by plan."""

    def begin_step(self) -> None:
        """Forget the last step's log, and whatever a failed step left alive."""
        super().begin_step()
        self.peak_bytes = self.arena_bytes

    def lasts(self, buffer: int) -> bool:
        """Return whether a buffer is always at one address: all are that are the arena's."""
        return buffer in self._views

    def view(self, buffer: int, first: int, tokens: int) -> Tensor:
        """Return the tokens of a buffer, alive or not."""
        whole = self._views[buffer]
        return whole if tokens == self._specs[buffer].tokens else whole[first : first + tokens]
