"""Blocks of the caching allocator's segments, and the pools that keep the free ones.

A segment is a chain of blocks; a pool finds, among the free blocks of one stream, the smallest that is large enough,
and of those the one at the lowest address (a sorted list a stream, searched by halves).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator


class Block:
    """``size`` bytes at ``address`` for one stream's work; ``before`` and ``after`` are neighbours in the segment."""

    __slots__ = (
        "address",
        "after",
        "allocated",
        "before",
        "cached_at",
        "events",
        "expandable",
        "mapped",
        "requested",
        "size",
        "small",
        "stream",
        "streams",
    )

    def __init__(self, address: int, size: int, stream: int, *, small: bool, expandable: bool = False) -> None:
        self.address = address
        self.size = size
        self.stream = stream
        self.small = small
        self.expandable = expandable
        self.mapped = True
        """Has memory behind its addresses; false only for the unused part of an expandable segment."""
        self.allocated = False
        self.requested = 0
        """Bytes that were asked for, before rounding."""
        self.streams: set[int] = set()
        """Other streams that used it since it was handed out."""
        self.events = 0
        """Events that have to pass before it is free again."""
        self.cached_at = 0
        """The pool's count of searches when it was put there: how old it is, for garbage collection."""
        self.before: Block | None = None
        self.after: Block | None = None

    @property
    def split(self) -> bool:
        """Whether it is only part of its segment."""
        return self.before is not None or self.after is not None

    @property
    def idle(self) -> bool:
        """Whether nobody holds it and no event is awaited."""
        return not (self.allocated or self.events or self.streams)

    def cut(self, size: int) -> Block:
        """Take the first ``size`` bytes off as a new block before this one, and return it."""
        front = Block(self.address, size, self.stream, small=self.small, expandable=self.expandable)
        front.mapped = self.mapped
        front.before, front.after = self.before, self
        if front.before is not None:
            front.before.after = front
        self.before = front
        self.address += size
        self.size -= size
        return front

    def join(self, other: Block) -> None:
        """Take in the neighbour ``other``, which is gone afterwards."""
        if other is self.before:
            self.address = other.address
            self.before = other.before
            if self.before is not None:
                self.before.after = self
        else:
            self.after = other.after
            if self.after is not None:
                self.after.before = self
        self.size += other.size


class Pool:
    """The free blocks of the small or of the large pool, by stream; ``unmapped`` ones by address."""

    def __init__(self) -> None:
        self._free: dict[int, list[tuple[int, int, Block]]] = {}
        self._unmapped: dict[int, list[tuple[int, Block]]] = {}
        self.searches = 0
        """How often a free block was looked for: the clock of garbage collection."""

    def add(self, block: Block) -> None:
        """Keep a free block."""
        block.cached_at = self.searches
        insort(self._free.setdefault(block.stream, []), (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        """Forget a free block (because it is handed out, joined to another or given back)."""
        blocks = self._free[block.stream]
        del blocks[bisect_left(blocks, (block.size, block.address))]

    def at_least(self, size: int, stream: int) -> Iterator[Block]:
        """Yield the free blocks of ``stream`` of ``size`` bytes or more, best fit first."""
        blocks = self._free.get(stream, [])
        for i in range(bisect_left(blocks, (size,)), len(blocks)):
            yield blocks[i][2]

    def largest_first(self, stream: int) -> list[Block]:
        """Return the free blocks of ``stream``, the largest and of those the highest address first."""
        return [block for _, _, block in reversed(self._free.get(stream, []))]

    def free_blocks(self) -> list[Block]:
        """Return every free block, by stream, size and address."""
        return [block for stream in sorted(self._free) for _, _, block in self._free[stream]]

    def add_unmapped(self, block: Block) -> None:
        """Keep addresses without memory."""
        insort(self._unmapped.setdefault(block.stream, []), (block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        """Forget addresses without memory."""
        blocks = self._unmapped[block.stream]
        del blocks[bisect_left(blocks, (block.address,))]

    def unmapped(self, stream: int) -> list[Block]:
        """Return the unmapped blocks of ``stream``, lowest address first."""
        return [block for _, block in self._unmapped.get(stream, [])]

    def join_neighbours(self, block: Block) -> None:
        """Let ``block`` (in no list now) take in the neighbours that are free, or unmapped, as it is."""
        for other in (block.before, block.after):
            if other is not None and other.idle and other.mapped == block.mapped:
                (self.remove if other.mapped else self.remove_unmapped)(other)
                block.join(other)
