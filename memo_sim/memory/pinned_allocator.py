"""PyTorch's pinned host allocator, as a model (aten/src/ATen/core/CachingHostAllocator.h).

Every request is rounded up to a power of two and served by a cached block of exactly that size, the one freed last
first; there is no splitting and no merging, and nothing is given back until ``empty_cache``:

    3.0 GiB -> a block of 4 GiB        freed, it serves 2.1 GiB to 4 GiB and nothing else

PyTorch 2.13 can be told otherwise: above ``pinned_max_cached_size_mb`` a block is neither rounded nor kept. Its
``pinned_max_round_threshold_mb`` is not modelled: free lists go by powers of two and look at no size, so that by its
source a kept block that is not rounded could serve a larger request.
"""

from __future__ import annotations

from dataclasses import dataclass

from memo_sim.contract.errors import MemoError


def pinned_bytes(size_bytes: int) -> int:
    """Return what a pinned block for ``size_bytes`` takes: the next power of two, nothing for nothing."""
    return 1 << (size_bytes - 1).bit_length() if size_bytes else 0


@dataclass(eq=False)
class PinnedBlock:
    """One registered block; ``streams`` counts the copies of other streams that have to end before it is free."""

    size: int
    requested: int
    allocated: bool = True
    streams: int = 0


class PinnedAllocator:
    """The pinned memory of one process, in bytes; what is above ``max_cached_bytes`` is neither rounded nor kept."""

    def __init__(self, max_cached_bytes: int | None = None) -> None:
        self.max_cached_bytes = max_cached_bytes
        self.num_host_alloc = 0
        """Blocks registered: cudaHostAlloc."""
        self.num_host_free = 0
        self.allocated_bytes = 0
        """Bytes of blocks handed out, rounding included."""
        self.reserved_bytes = 0
        """Bytes of all blocks."""
        self.peak_reserved_bytes = 0
        self._free: dict[int, list[PinnedBlock]] = {}
        self._waiting: list[PinnedBlock] = []

    def malloc(self, size_bytes: int) -> PinnedBlock:
        """Hand out a block for ``size_bytes`` (at least 1; an empty tensor asks for none)."""
        size = size_bytes if self._is_exact(size_bytes) else pinned_bytes(size_bytes)
        cached = self._free.get(size)
        if cached:
            block = cached.pop()
            block.allocated, block.requested = True, size_bytes
        else:
            block = PinnedBlock(size, size_bytes)
            self.num_host_alloc += 1
            self.reserved_bytes += size
            self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self.allocated_bytes += size
        return block

    def free(self, block: PinnedBlock) -> None:
        """Take a block back: at once, or when the copies of ``record_event`` have ended.

        Raises:
            MemoError: when it is not handed out.
        """
        if not block.allocated:
            raise MemoError("a pinned block is freed that is not handed out", got=f"{block.size} bytes")
        block.allocated = False
        self.allocated_bytes -= block.size
        if block.streams:
            self._waiting.append(block)
        else:
            self._take_back(block)

    def record_event(self, block: PinnedBlock) -> None:
        """Note that a copy of another stream uses the block."""
        block.streams += 1

    def pass_events(self) -> None:
        """Say that all copies given so far have ended."""
        for block in self._waiting:
            block.streams = 0
            self._take_back(block)
        self._waiting.clear()

    def empty_cache(self) -> None:
        """Unregister every free block."""
        for blocks in self._free.values():
            self.num_host_free += len(blocks)
            self.reserved_bytes -= sum(block.size for block in blocks)
        self._free.clear()

    def _is_exact(self, size: int) -> bool:
        return self.max_cached_bytes is not None and size > self.max_cached_bytes

    def _take_back(self, block: PinnedBlock) -> None:
        if self._is_exact(block.size):
            self.num_host_free += 1
            self.reserved_bytes -= block.size
        else:
            self._free.setdefault(block.size, []).append(block)
