"""Models PyTorch's CUDA caching allocator (c10/cuda/CUDACachingAllocator.cpp, DeviceCachingAllocator).

The allocator hands out blocks of segments. A segment comes from the device (cudaMalloc) and is released (cudaFree) only
when memory runs out. ``malloc`` works in this order:

    1. take back blocks whose events have passed      5. release oversize cached segments, ask again
    2. best fit among the free blocks                 6. release every free segment that is not split, ask again
    3. garbage-collect old segments, if configured    7. out of memory
    4. ask the device for a segment

Step 6 is an allocation retry (``num_alloc_retries``), which MEMO calls a reorganisation: the host waits for all
streams, then cudaFree and cudaMalloc follow. A segment with any block in use cannot be released, so step 6 can release
less than what is free. This is fragmentation.

A segment is a chain of blocks, each with its neighbours; a pool holds the free blocks and finds the best fit.

Expandable segments (CUDACachingAllocator.cpp, Note [Expandable Segments]) are one growing segment per pool and stream.
It reserves more addresses than the device has memory, once. Pages get memory when they are first needed, and an
allocation retry unmaps every page that is wholly free. A request uses the free memory at the end and grows the segment
by the rest:

    | block | free |- - - - unmapped - - - -|      a request larger than `free`
    | block | handed out      | free |- - - |      maps the missing bytes, in whole pages

Not modelled: private pools of CUDA graphs and of ``MemPool``, callbacks that free memory, and the driver's own
fragmentation. A new segment lies behind all earlier ones, while the driver may reuse addresses; this matters only for
ties between equal sizes. The capacity is the device's. Under PyTorch's own limit (a memory fraction), a request that
grows an expandable segment is refused by the size of a whole segment, even where less would be mapped.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator
from operator import itemgetter
from typing import Literal, NamedTuple

from memo_sim.contract.errors import Infeasible, MemoError
from memo_sim.contract.units import format_bytes
from memo_sim.memory.device_config import BLOCK_BYTES, SMALL_BYTES, SMALL_SEGMENT_BYTES, AllocatorConfig

DEFAULT = AllocatorConfig()


class DeviceCall(NamedTuple):
    """One call to the device: a segment allocated or freed, pages mapped or unmapped, or a wait for all streams."""

    kind: Literal["malloc", "free", "map", "unmap", "synchronize"]
    bytes: int


class OutOfDeviceMemory(Infeasible):
    """A request failed even after everything that can be released was released."""


class DeviceAllocator:
    """The allocator of one device; all segments together take at most ``capacity_bytes`` (None: no limit).

    Sizes are bytes, streams are numbers. ``calls`` lists the calls to the device in order.
    """

    def __init__(self, config: AllocatorConfig = DEFAULT, capacity_bytes: int | None = None) -> None:
        self.config = config
        self.capacity_bytes = capacity_bytes
        self.calls: list[DeviceCall] = []
        self.num_device_alloc = 0
        self.num_device_free = 0
        self.num_alloc_retries = 0
        """Allocation retries: how often all cached memory was released before a segment was asked for again."""
        self.num_ooms = 0
        self.allocated_bytes = 0
        """Bytes of allocated blocks, including rounding."""
        self.active_bytes = 0
        """Bytes of allocated blocks and of freed blocks that wait for another stream."""
        self.reserved_bytes = 0
        """Bytes of all segments."""
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self._pools = {True: Pool(), False: Pool()}
        self._waiting: dict[int, deque[Block]] = {}
        self._passed: dict[int, int] = {}
        self._block_bytes: dict[int, int] = {}
        """Block sizes of the requests so far, by requested bytes: a step asks for few sizes, many times."""
        self._end = 0
        self._expandable = ExpandableSegments(self)

    def malloc(self, size_bytes: int, stream: int = 0) -> Block:
        """Return a block for ``size_bytes`` (at least 1; PyTorch requests nothing for an empty tensor).

        Raises:
            OutOfDeviceMemory: when the capacity does not suffice, even after an allocation retry.
        """
        if self._passed:
            self._take_back_passed()
        size = self._block_bytes.get(size_bytes)
        if size is None:
            size = self._block_bytes[size_bytes] = self.config.block_bytes(size_bytes)
        pool = self._pools[size <= SMALL_BYTES]
        block = self._best_fit(pool, size, stream)
        if block is None:
            if self.config.garbage_collection_threshold:
                self._collect()
            block = self._new_block(size, stream)
            if block is None and self._release_oversize(pool, size, stream):
                block = self._new_block(size, stream)
            if block is None:
                self._release_all()
                self.num_alloc_retries += 1
                block = self._new_block(size, stream)
            if block is None:
                self.num_ooms += 1
                raise self._out_of_memory(size)
        block = self._split(pool, block, size)
        block.allocated = True
        block.requested = size_bytes
        self.allocated_bytes += block.size
        self.active_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Free a block: at once, or when the streams of ``record_stream`` have passed an event recorded now."""
        if not block.allocated:
            raise MemoError("a freed block was not handed out", got=f"address {block.address}")
        block.allocated = False
        self.allocated_bytes -= block.size
        if not block.streams:
            self._take_back(block)
            return
        for stream in sorted(block.streams):
            self._waiting.setdefault(stream, deque()).append(block)
        block.events = len(block.streams)
        block.streams = None

    def record_stream(self, block: Block, stream: int) -> None:
        """Note that ``stream`` uses a block of another stream."""
        if stream != block.stream:
            block.streams = {stream} if block.streams is None else block.streams | {stream}

    def pass_events(self, stream: int, most: int | None = None) -> None:
        """Note that ``stream`` has done all its work so far; the next ``malloc`` takes the waiting blocks back.

        With ``most``, only the events of the first ``most`` blocks that wait for it have passed.
        """
        waiting = len(self._waiting.get(stream, ()))
        self._passed[stream] = waiting if most is None else min(most, waiting)

    def empty_cache(self) -> None:
        """Release everything that is not in use, as ``torch.cuda.empty_cache`` does."""
        self._release_all()

    def pool_of(self, block: Block) -> Pool:
        """Return the pool that a block belongs to."""
        return self._pools[block.small]

    def take(self, kind: Literal["malloc", "map"], size: int) -> bool:
        """Take ``size`` bytes from the device; return False when the capacity does not suffice."""
        if self.capacity_bytes is not None and self.reserved_bytes + size > self.capacity_bytes:
            return False
        self.calls.append(DeviceCall(kind, size))
        self.num_device_alloc += 1
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def give_back(self, kind: Literal["free", "unmap"], size: int) -> None:
        """Release ``size`` bytes to the device."""
        self.calls.append(DeviceCall(kind, size))
        self.num_device_free += 1
        self.reserved_bytes -= size

    def addresses(self, size: int) -> int:
        """Return the start of ``size`` bytes of new addresses."""
        start = self._end
        self._end += size
        return start

    def _take_back_passed(self) -> None:
        for stream, passed in self._passed.items():
            for _ in range(passed):
                self._event_passed(self._waiting[stream].popleft())
        self._passed.clear()

    def _event_passed(self, block: Block) -> None:
        block.events -= 1
        if not block.events:
            self._take_back(block)

    def _take_back(self, block: Block) -> None:
        self.active_bytes -= block.size
        pool = self.pool_of(block)
        pool.join_neighbours(block)
        pool.add(block)

    def _best_fit(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Remove the best free block for ``size`` from the pool and return it, or return None."""
        pool.searches += 1
        best = pool.best_fit(size, stream)
        if best is None:
            return None
        if best.expandable:
            best = self._expandable.best_fit(pool.at_least(size, stream))
        limit = self.config.max_split_bytes
        if limit is not None:
            if size < limit <= best.size:
                return None
            if size >= limit and best.size >= size + self.config.max_non_split_rounding_bytes:
                return None
        pool.remove(best)
        return best

    def _split(self, pool: Pool, block: Block, size: int) -> Block:
        """Return the part of ``block`` to hand out; the rest, if the block may be split, stays free."""
        left = block.size - size
        limit = self.config.max_split_bytes
        if block.small or self.config.expandable_segments:
            splits = left >= BLOCK_BYTES
        else:
            splits = left > SMALL_BYTES and (limit is None or size < limit)
        if not splits:
            return block
        front = block.cut(size)
        pool.add(block)
        return front

    def _new_block(self, size: int, stream: int) -> Block | None:
        """Return a new block for ``size`` with memory from the device, in no list; None if there is too little."""
        small = size <= SMALL_BYTES
        if self.config.expandable_segments:
            page = SMALL_SEGMENT_BYTES if small else self.config.large_segment_bytes
            return self._expandable.grow(self._pools[small], size, stream, page, small=small)
        segment = self.config.segment_bytes(size)
        if not self.take("malloc", segment):
            return None
        return Block(self.addresses(segment), segment, stream, small=small)

    def _release(self, pool: Pool, block: Block) -> None:
        pool.remove(block)
        self.give_back("free", block.size)

    def _release_oversize(self, pool: Pool, size: int, stream: int) -> bool:
        """Release cached segments that are never split: the smallest that suffices, or else the largest ones.

        Returns whether the released memory suffices.
        """
        limit = self.config.max_split_bytes
        if limit is None:
            return False
        wanted = max(size, limit)
        fits = pool.best_fit(wanted, stream)
        if fits is not None:
            self._release(pool, fits)
            return True
        released = 0
        for block in pool.largest_first(stream):
            if released >= wanted or block.size < limit:
                break
            released += block.size
            self._release(pool, block)
        return released >= wanted

    def _release_all(self) -> None:
        """Wait for every stream, then release all free segments that are not split."""
        self.calls.append(DeviceCall("synchronize", 0))
        for waiting in self._waiting.values():
            for block in waiting:
                self._event_passed(block)
        self._waiting.clear()
        self._passed.clear()
        for pool in (self._pools[False], self._pools[True]):
            for block in pool.free_blocks():
                if block.expandable:
                    self._expandable.shrink(pool, block)
                elif not block.split:
                    self._release(pool, block)

    def _collect(self) -> None:
        """Release large free segments of at least average age, until reserved memory is below the threshold."""
        if self.capacity_bytes is None:
            return
        excess = self.reserved_bytes - int(self.config.garbage_collection_threshold * self.capacity_bytes)
        pool = self._pools[False]
        while excess > 0:
            ages = {b: pool.searches - b.cached_at for b in pool.free_blocks() if not b.split and not b.expandable}
            if not ages:
                return
            # All old enough segments are released, even if fewer would suffice: the next collection comes later then.
            average = sum(ages.values()) / len(ages)
            for block, age in ages.items():
                if age >= average:
                    excess -= block.size
                    self._release(pool, block)

    def _out_of_memory(self, size: int) -> OutOfDeviceMemory:
        free = self.reserved_bytes - self.allocated_bytes
        return OutOfDeviceMemory(
            "the caching allocator is out of memory",
            got=f"a request of {format_bytes(size)} with {format_bytes(self.allocated_bytes)} allocated and "
            f"{format_bytes(free)} reserved but unallocated",
            wanted=f"at most {format_bytes(self.capacity_bytes or 0)} reserved",
        )


class Block:
    """``size`` bytes at ``address`` for one stream; ``before`` and ``after`` are its neighbours in the segment."""

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
        """Whether its addresses have memory; False only for the unused part of an expandable segment."""
        self.allocated = False
        self.requested = 0
        """Requested bytes, before rounding."""
        self.streams: set[int] | None = None
        """Other streams that have used it since its allocation."""
        self.events = 0
        """Events that have to pass before it is free again."""
        self.cached_at = 0
        """The pool's number of searches when it was freed; garbage collection computes its age from this."""
        self.before: Block | None = None
        self.after: Block | None = None

    @property
    def split(self) -> bool:
        """Whether it is only part of its segment."""
        return self.before is not None or self.after is not None

    @property
    def idle(self) -> bool:
        """Whether it is free: not allocated, not used by another stream, and waiting for no event."""
        return not (self.allocated or self.events or self.streams)

    def cut(self, size: int) -> Block:
        """Cut off the first ``size`` bytes as a new block before this one, and return it."""
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
        """Merge the neighbour ``other`` into this block; ``other`` must not be used afterwards."""
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
    """The free blocks of the small or of the large pool, by stream.

    They are sorted by size, then address; unmapped blocks are sorted by address.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[tuple[int, int, Block]]] = {}
        self._unmapped: dict[int, list[tuple[int, Block]]] = {}
        self.searches = 0
        """How often a free block was searched: garbage collection measures age by it."""

    def add(self, block: Block) -> None:
        """Add a free block."""
        block.cached_at = self.searches
        insort(self._free.setdefault(block.stream, []), (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        """Remove a free block that is handed out, merged or released."""
        blocks = self._free[block.stream]
        del blocks[bisect_left(blocks, (block.size, block.address))]

    def best_fit(self, size: int, stream: int) -> Block | None:
        """Return the smallest free block of ``stream`` with at least ``size`` bytes."""
        blocks = self._free.get(stream, ())
        at = bisect_left(blocks, (size,))
        return blocks[at][2] if at < len(blocks) else None

    def at_least(self, size: int, stream: int) -> Iterator[Block]:
        """Yield the free blocks of ``stream`` with at least ``size`` bytes, best fit first."""
        blocks = self._free.get(stream, [])
        for i in range(bisect_left(blocks, (size,)), len(blocks)):
            yield blocks[i][2]

    def largest_first(self, stream: int) -> list[Block]:
        """Return the free blocks of ``stream``, the largest first; of equal ones the highest address first."""
        return [block for _, _, block in reversed(self._free.get(stream, []))]

    def free_blocks(self) -> list[Block]:
        """Return every free block, by stream, size and address."""
        return [block for stream in sorted(self._free) for _, _, block in self._free[stream]]

    def add_unmapped(self, block: Block) -> None:
        """Add a block of addresses without memory."""
        insort(self._unmapped.setdefault(block.stream, []), (block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        """Remove a block of addresses without memory."""
        blocks = self._unmapped[block.stream]
        del blocks[bisect_left(blocks, (block.address,))]

    def unmapped(self, stream: int) -> list[Block]:
        """Return the unmapped blocks of ``stream``, lowest address first."""
        return [block for _, block in self._unmapped.get(stream, [])]

    def join_neighbours(self, block: Block) -> None:
        """Merge the free neighbours that are mapped (or unmapped) like ``block`` into it; ``block`` is in no list."""
        for other in (block.before, block.after):
            if other is None or other.allocated or not other.idle or other.mapped != block.mapped:
                continue
            (self.remove if other.mapped else self.remove_unmapped)(other)
            block.join(other)


UNLIMITED_BYTES = 1 << 40
"""Bytes of addresses of an expandable segment if the capacity has no limit."""


class ExpandableSegments:
    """Grows and shrinks the expandable segments of one device."""

    def __init__(self, device: DeviceAllocator) -> None:
        self._device = device
        self._segments: list[tuple[int, int]] = []

    def best_fit(self, found: Iterator[Block]) -> Block:
        """Return the best fit of ``found``; a block at a segment's end counts with all that it can grow to."""
        best = next(found)
        for other in found:
            if not best.expandable or _grown(other) >= _grown(best):
                break
            best = other
        return best

    def grow(self, pool: Pool, size: int, stream: int, page: int, *, small: bool) -> Block | None:
        """Return a block of at least ``size`` bytes, in no list; maps missing memory in pages of ``page`` bytes.

        Returns None when the device has too little memory; memory mapped so far stays as a free block.
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
        """Unmap the whole pages inside the free ``block``."""
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
        """Return the first free or unmapped block at which ``size`` bytes of idle addresses begin."""
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
        """Map the first ``size`` bytes of the unmapped ``block`` in whole pages, and add them as a free block."""
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
    """Return the bytes of a free block and of the unmapped addresses behind it."""
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _idle_run(block: Block | None) -> int:
    """Return the bytes from ``block`` up to the first block in use."""
    total = 0
    while block is not None and block.idle:
        total += block.size
        block = block.after
    return total
