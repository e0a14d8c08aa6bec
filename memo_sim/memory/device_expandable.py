"""Expandable segments (CUDACachingAllocator.cpp, Note [Expandable Segments]): one that grows, by pool and stream.

Addresses are reserved once, for more than the device has; pages get memory when they are first needed, and lose it in
a reorganisation wherever a whole page is free. A request uses free memory at the segment's end and grows by the rest:

    | block | free |- - - - unmapped - - - -|      a request larger than `free`
    | block | handed out      | free |- - - |      maps what is missing, in whole pages
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from operator import itemgetter
from typing import Literal, Protocol

from memo_sim.memory.device_blocks import Block, Pool

UNLIMITED_BYTES = 1 << 40
"""Addresses of a segment where the device's capacity is not limited."""


class Device(Protocol):
    """What growing and shrinking need of the allocator."""

    capacity_bytes: int | None

    def take(self, kind: Literal["map"], size: int) -> bool:
        """Take memory for pages; false when there is none."""

    def give_back(self, kind: Literal["unmap"], size: int) -> None:
        """Give the memory of pages back."""

    def addresses(self, size: int) -> int:
        """Return where fresh addresses begin."""


class ExpandableSegments:
    """Grows and shrinks the segments of one device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._segments: list[tuple[int, int]] = []

    def best_fit(self, best: Block, others: Iterator[Block]) -> Block:
        """Return the block that can grow least: one at a segment's end counts with all that it can grow to."""
        for other in others:
            if not best.expandable or _grown(other) >= _grown(best):
                break
            best = other
        return best

    def grow(self, pool: Pool, size: int, stream: int, page: int, *, small: bool) -> Block | None:
        """Return a block of ``size`` bytes or more, out of every list, with memory of ``page`` bytes mapped as needed.

        None when the device has too little; what was mapped until then stays, as a free block.
        """
        found = self._find(pool, size, stream, page, small=small)
        if not found.mapped and not self._map(pool, found, min(size, found.size), page):
            return None
        while found.size < size:
            following = found.after
            assert following is not None
            if not self._map(pool, following, min(size - found.size, following.size), page):
                return None
            found = following
        pool.remove(found)
        return found

    def shrink(self, pool: Pool, block: Block) -> None:
        """Give the whole pages inside the free ``block`` back."""
        start, page = self._segments[bisect_right(self._segments, block.address, key=itemgetter(0)) - 1]
        first = start + -(-(block.address - start) // page) * page
        last = start + (block.address + block.size - start) // page * page
        if first >= last:
            return
        pool.remove(block)
        if block.address < first:
            pool.add(block.cut(first - block.address))
        pages = block
        if last < block.address + block.size:
            pages = block.cut(last - block.address)
            pool.add(block)
        pages.mapped = False
        pool.join_neighbours(pages)
        pool.add_unmapped(pages)
        self._device.give_back("unmap", last - first)

    def _find(self, pool: Pool, size: int, stream: int, page: int, *, small: bool) -> Block:
        """Return the first free or unmapped block from which on ``size`` bytes of addresses are idle."""
        for block in pool.unmapped(stream):
            start = block.before if block.before is not None and block.before.idle else block
            if _idle_run(start) >= size:
                return start
        room = self._device.capacity_bytes or UNLIMITED_BYTES
        pages = -(-(room + room // 8) // page)
        base = self._device.addresses(pages * page)
        self._segments.append((base, page))
        fresh = Block(base, pages * page, stream, small=small, expandable=True)
        fresh.mapped = False
        pool.add_unmapped(fresh)
        return fresh

    def _map(self, pool: Pool, block: Block, size: int, page: int) -> bool:
        """Give the first ``size`` bytes of the unmapped ``block`` memory, in whole pages, and keep it as free."""
        size = -(-size // page) * page
        if not self._device.take("map", size):
            return False
        pool.remove_unmapped(block)
        if size < block.size:
            rest = Block(block.address + size, block.size - size, block.stream, small=block.small, expandable=True)
            rest.mapped = False
            rest.before, rest.after = block, block.after
            if rest.after is not None:
                rest.after.before = rest
            block.after = rest
            block.size = size
            pool.add_unmapped(rest)
        block.mapped = True
        pool.join_neighbours(block)
        pool.add(block)
        return True


def _grown(block: Block) -> int:
    """Return what a free block and the unmapped addresses behind it hold together."""
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _idle_run(block: Block | None) -> int:
    """Return the bytes of ``block`` and what follows it up to the first block in use."""
    total = 0
    while block is not None and block.idle:
        total += block.size
        block = block.after
    return total
