"""Host memory of an offloading context: one slab in which first fit places blocks.

With a limit, the slab has that size from the start, and a block that does not fit is refused.

Without a limit, the size is unknown before the first pass. In that pass, each block gets its own pageable memory, while
offsets are assigned as if there were a slab. When all blocks have died, the slab is allocated with exactly the bytes
that were needed and pinned once. Later passes use it.

      first pass   [ a ][  b  ]      offsets only; a and b are elsewhere (pageable)
      later        [ a ][  b  ]      the same offsets, now in the slab
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from memo_exec.machine.machine import host_available_bytes
from memo_exec.memory.pinned import PIECE_BYTES, mapping, pin, unpin
from memo_sim.contract.errors import CannotRun
from memo_sim.program.arena.first_fit import FirstFit


@dataclass(frozen=True, slots=True)
class HostRange:
    """Host bytes that belong to one block until it frees them."""

    offset: int
    memory: Tensor
    in_slab: bool


class HostMemory:
    """The slab and its free ranges.

    Raises:
        CannotRun: if ``limit_bytes`` exceeds the memory that is available, or if the driver refuses to pin it.
    """

    def __init__(self, limit_bytes: int | None, *, pinned: bool) -> None:
        self._limit_bytes = limit_bytes
        self._pinned = pinned
        self._grows = limit_bytes is None
        self._holes = FirstFit(PIECE_BYTES)
        self._live = 0
        self._unpin: Callable[[], object] = _nothing
        self._slab: Tensor
        self._make(limit_bytes or 0)

    @property
    def bytes(self) -> int:
        """Size of the slab in bytes."""
        return self._slab.numel()

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes in use so far, including the holes between blocks."""
        return self._holes.top

    def take(self, size_bytes: int) -> HostRange | None:
        """Return host bytes for a block, or None if the limit leaves no room."""
        offset = self._holes.take(size_bytes, self._limit_bytes)
        if offset is None:
            return None
        self._live += 1
        end = offset + size_bytes
        if end <= self.bytes:
            return HostRange(offset, self._slab[offset:end], in_slab=True)
        return HostRange(offset, torch.empty(size_bytes, dtype=torch.uint8, device="cpu"), in_slab=False)

    def give(self, given: HostRange) -> None:
        """Free a block's bytes; all copies to and from them must have ended, or be ordered before the next copy."""
        self._holes.give(given.offset, given.memory.numel())
        self._live -= 1

    def settle(self) -> None:
        """Grow the slab to the bytes that were needed, if no block is alive and it may grow."""
        if self._grows and not self._live and self.peak_bytes > self.bytes:
            self._unpin()
            self._slab = self._slab[:0].clone()  # free the old slab before allocating the new one
            self._make(self.peak_bytes)

    def _make(self, size_bytes: int) -> None:
        _refuse_too_much(size_bytes)
        # Mapped memory starts at a page boundary, as the driver requires, and returns to the system when it is freed.
        self._slab = mapping(size_bytes)
        if self._pinned and size_bytes:
            pin(self._slab)
            # The finalizer holds the memory, so it cannot be freed while the driver still has it pinned.
            self._unpin = finalizer = weakref.finalize(self, unpin, self._slab)
            finalizer.atexit = False  # the process's end unpins; waiting for the device then may never end


def _refuse_too_much(size_bytes: int) -> None:
    available = host_available_bytes() if size_bytes else 0
    if size_bytes > available:
        raise CannotRun(
            "the host has less memory available than the offloading slab needs",
            got=f"{available} bytes available",
            wanted=f"{size_bytes} bytes",
            hint="lower host_bytes or fraction",
        )


def _nothing() -> None:
    return
