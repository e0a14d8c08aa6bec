"""Moves blocks where the host's memory is the device's: on a CPU without a slab, to try offloading without a GPU.

A copy frees nothing there while its original is in use, and until it has ended it takes memory of its own. So the
order differs from ``Swap``'s, and a step takes no more memory than one that keeps its tensors in place:

    forward     a tensor is copied when it leaves the stash of the last ``forward`` saved ones, and stays there while
                anything else holds its storage. One copy is in flight at a time; its thread alone holds the original.
                Parts of a storage that cover most of it (Q, K and V) are copied together, with what is between them.
    backward    what is in the stash is used in place, and so are the copies: they are where backward can read them.
                Their pages return to the system when the block dies.

Copies lie on pages of their own. In the C library's heap, long-lived copies between the short-lived tensors of a step
would leave holes, which are as large as the copies themselves.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque

import torch
from torch import Tensor

from memo_exec.memory.heap import return_freed
from memo_exec.memory.pinned import mapping
from memo_exec.offload.block import Block, Original
from memo_exec.offload.checks import total
from memo_exec.offload.host import HostMemory, HostRange
from memo_exec.offload.lanes import PASSED, HostLanes, Mark
from memo_exec.offload.statistics import OffloadStatistics
from memo_exec.offload.swap import Swap
from memo_exec.offload.view import View, bytes_of

MOST_FREED_BYTES = 2**25
"""Freed originals that the C library may keep in its heap, in bytes."""

NOWHERE = HostRange(0, torch.empty(0, dtype=torch.uint8), in_slab=False)
"""The host bytes of a block that is not on the host."""


def holders(address: int) -> int:
    """Return how many tensors hold the storage at an address, which Python has seen before."""
    return int(torch._C._storage_Use_Count(address)) - _BY_PYTHON


def _by_python() -> int:
    """Return how often a storage that Python has seen is counted besides its tensors."""
    tensor = torch.empty(1)
    address = tensor.untyped_storage()._cdata
    return int(torch._C._storage_Use_Count(address)) - 1


_BY_PYTHON = _by_python()


class Moved(Block):
    """A block whose copies hold what they use, so its memory is free once it has died."""

    __slots__ = ("_freed", "pages")

    def __init__(self, original: Original, first: int | None, source: Tensor, freed: deque[int]) -> None:
        super().__init__(original, first, source, NOWHERE, deque())
        self.pages: Tensor | None = None
        """The bytes on the host, from the begin of their copy."""
        self._freed = freed

    def free_but_for(self, own: Counter[int]) -> bool:
        """Return whether only this module holds the original; ``own`` counts its blocks of each storage."""
        address = self.original.address
        return holders(address) <= own[address]

    def __del__(self) -> None:
        # The garbage collector may run this on any thread; ``Moves.collect`` counts.
        if self.pages is not None:
            self._freed.append(self.size_bytes)


class Moves(Swap):
    """The blocks of one context on a CPU. Callers hold the context's lock."""

    def __init__(
        self, statistics: OffloadStatistics, *, streams: bool, forward: int, backward: int, debug: bool
    ) -> None:
        host = HostMemory(None, pinned=False)  # nothing is taken from it
        super().__init__(host, statistics, streams=streams, forward=forward, backward=backward, debug=debug)
        self._own = HostLanes(lanes=streams)
        self._in_place: deque[weakref.ref[Moved]] = deque()
        """The stash: blocks that have not been copied, the oldest first."""
        self._in_flight: Mark = PASSED
        """The last copy to the host."""
        self._host_bytes = 0
        self._freed: deque[int] = deque()
        self._freed_bytes = 0
        """Bytes that were copied since the heap's free memory went back to the system."""

    def _lanes_of(self, device: torch.device) -> HostLanes:
        del device
        return self._own

    def reach(self, storage: torch.UntypedStorage, view: View) -> tuple[int, int] | None:
        """Return the range of storage bytes to copy for a view: the whole storage if the gaps lie over most of it."""
        first, end = view.reach(storage.nbytes())
        if view.gapless:
            return first, end
        return (0, storage.nbytes()) if 2 * (end - first) > storage.nbytes() else None

    def offload(self, original: Original, storage: torch.UntypedStorage, view: View) -> Block:
        """Return a new block, and copy those to the host that leave the stash for it."""
        self.collect()
        reach = self.reach(storage, view)
        source = bytes_of(storage, *reach) if reach else view.elements(storage)
        block = Moved(original, reach[0] if reach else None, source, self._freed)
        self._in_place.append(weakref.ref(block))
        self._copy_stash(self._forward)
        return block

    def _free_sources(self, most: int) -> None:
        """Do nothing: a copy's thread frees its original, and backward uses what is in the stash in place."""

    def _copy_stash(self, most: int) -> None:
        """Copy all but the last ``most`` blocks of the stash to the host, without those that something else holds.

        Without lanes a copy does not wait for that.
        """
        if len(self._in_place) <= most:
            return
        living = [block for ref in self._in_place if (block := ref()) is not None]
        own = Counter(block.original.address for block in living)
        self._in_place.clear()
        for i, block in enumerate(living):
            if i < len(living) - most and (not self._streams or block.free_but_for(own)):
                own[block.original.address] -= 1
                self._copy_out(block)
            else:
                self._in_place.append(weakref.ref(block))

    def _copy_out(self, block: Moved) -> None:
        source = block.source
        if source is None or block.original.storage() is None:
            return  # FSDP empties a storage and fills it again; there is nothing to copy meanwhile
        if self._debug:
            block.total = total(source.contiguous().view(-1).view(torch.uint8))
        earlier, self._in_flight = self._in_flight, PASSED
        self._statistics.forward_waits += not earlier.done()
        self._own.wait(earlier, None)
        self._freed_bytes += block.size_bytes
        self._return_freed(MOST_FREED_BYTES)
        block.pages = pages = mapping(block.size_bytes)
        into = pages.view(source.dtype).view(source.shape)
        block.source = None  # the copy holds it until it has run
        block.copied = self._in_flight = self._own.offload(into, source, [])
        self._host_bytes += block.size_bytes
        self._statistics.offloaded_tensors += 1
        self._statistics.offloaded_bytes += block.size_bytes
        self._statistics.host_peak_bytes = max(self._statistics.host_peak_bytes, self._host_bytes)

    def _restore(self, block: Block, lanes: object) -> Tensor:
        """Return a block's bytes where they are; their copy may still be in flight."""
        del lanes
        assert isinstance(block, Moved)
        if block.restored is not None:
            return block.restored
        if block.pages is None:
            raise RuntimeError("the storage of a saved tensor was emptied after the save and not filled again")
        block.restored, block.fetched = block.pages, block.copied
        self._statistics.restored_tensors += 1
        self._statistics.restored_bytes += block.size_bytes
        return block.pages

    def end_forward(self) -> None:
        """Return what the forward pass has freed to the system, as backward needs the most memory of a step."""
        self.collect()
        self._return_freed(1)

    def settle(self) -> None:
        """Between passes, count what has died; what backward has freed in the heap serves the next forward pass."""
        self.collect()

    def _return_freed(self, least_bytes: int) -> None:
        """Return what is free in the heap to the system if at least so many bytes have been moved since."""
        if self._freed_bytes >= least_bytes:
            return_freed()
            self._freed_bytes = 0

    def collect(self) -> None:
        """Count the host bytes of dead blocks as free."""
        while self._freed:
            self._host_bytes -= self._freed.popleft()

    def synchronize(self) -> None:
        """Copy what nothing else holds to the host, and block until every copy there has run."""
        self.collect()
        self._copy_stash(0)
        self._own.wait(self._in_flight, None)
