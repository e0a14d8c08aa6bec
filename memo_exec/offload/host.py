"""Host memory of an offloading context: one slab in which blocks take turns, first fit.

With a limit the slab has that size from the start and what does not fit is refused. Without one nobody knows the size
before the first pass, so its blocks lie in memory of their own while the offsets are dealt as if there were a slab;
when all have died, the slab is made with exactly the bytes that were needed, pinned once, and later passes reuse it.

      first pass   [ a ][  b  ]      offsets only; a and b lie elsewhere (pageable)
      later        [ a ][  b  ]      the same offsets, now in the slab
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from memo_exec.machine.machine import host_available_bytes
from memo_exec.memory.pinned import mapping, pin, unpin
from memo_sim.contract.errors import CannotRun
from memo_sim.program.arena.first_fit import FirstFit


@dataclass(frozen=True, slots=True)
class HostRange:
    """Bytes on the host that one block has until it gives them back."""

    offset: int
    memory: Tensor
    in_slab: bool


class HostMemory:
    """The slab and who lies where.

    Raises:
        CannotRun: when ``limit_bytes`` is more than this process may still use, or the driver refuses to pin it.
    """

    def __init__(self, limit_bytes: int | None, *, pinned: bool) -> None:
        self._limit_bytes = limit_bytes
        self._pinned = pinned
        self._holes = FirstFit()
        self._live = 0
        self._unpin: Callable[[], object] = _nothing
        self._slab: Tensor
        self._make(limit_bytes or 0)

    @property
    def bytes(self) -> int:
        """Bytes of the slab."""
        return self._slab.numel()

    @property
    def peak_bytes(self) -> int:
        """Bytes that were in use at most, holes included."""
        return self._holes.top

    def take(self, size_bytes: int) -> HostRange | None:
        """Return bytes for a block, None when the limit leaves no room."""
        offset = self._holes.take(size_bytes, self._limit_bytes)
        if offset is None:
            return None
        self._live += 1
        end = offset + size_bytes
        if end <= self.bytes:
            return HostRange(offset, self._slab[offset:end], in_slab=True)
        return HostRange(offset, torch.empty(size_bytes, dtype=torch.uint8, device="cpu"), in_slab=False)

    def give(self, given: HostRange) -> None:
        """Take bytes back; every copy to and from them has ended or is ordered before the next."""
        self._holes.give(given.offset, given.memory.numel())
        self._live -= 1

    def settle(self) -> None:
        """Make the slab as large as what was needed, when nothing lies in it."""
        if self._limit_bytes is None and not self._live and self.peak_bytes > self.bytes:
            self._unpin()
            self._slab = self._slab[:0].clone()  # the old one goes before the new one comes
            self._make(self.peak_bytes)

    def _make(self, size_bytes: int) -> None:
        _refuse_too_much(size_bytes)
        # Mapped memory starts at a page, as the driver wants it, and goes back to the system when it is dropped.
        self._slab = mapping(size_bytes)
        if self._pinned and size_bytes:
            pin(self._slab)
            # The finalizer holds the memory, so it cannot be freed while the driver still has it registered.
            self._unpin = weakref.finalize(self, _unregister, self._slab)


def _refuse_too_much(size_bytes: int) -> None:
    available = host_available_bytes() if size_bytes else 0
    if size_bytes > available:
        raise CannotRun(
            "the host has less memory than host_bytes asks for",
            got=f"{available} bytes available",
            wanted=f"{size_bytes} bytes",
            hint="lower host_bytes, or the fraction that is offloaded",
        )


def _nothing() -> None:
    return


def _unregister(memory: Tensor) -> None:
    """Give the registration back, once no copy can be on its way."""
    torch.cuda.synchronize()
    unpin(memory)
