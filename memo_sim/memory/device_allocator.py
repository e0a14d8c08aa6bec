"""PyTorch's CUDA caching allocator, as a model (c10/cuda/CUDACachingAllocator.cpp, DeviceCachingAllocator).

It hands out blocks of segments; a segment comes from the device (cudaMalloc) and goes back (cudaFree) only when memory
runs out. What ``malloc`` does, in this order:

    1. take back blocks whose events have passed      5. give back oversize cached segments, try again
    2. best fit among the free blocks                 6. give back every segment that is not split, try again
    3. collect old segments, when set up to           7. out of memory
    4. ask the device for a segment

Step 6 is MEMO's reorganisation: everything is waited for, cudaFree and cudaMalloc follow. A block of which any part is
in use keeps its whole segment, so the memory that step 6 finds can be less than what is free: fragmentation.

Left out: private pools of CUDA graphs and of ``MemPool``, callbacks that free memory, and the driver's own
fragmentation. A new segment lies behind all earlier ones, where the driver may reuse addresses; only ties between equal
sizes can tell. The capacity is the device's: under PyTorch's own limit (a memory fraction) a request that grows an
expandable segment is refused by the size of a whole segment, even where less would have to be mapped.
"""

from __future__ import annotations

from collections import deque
from typing import Literal, NamedTuple

from memo_sim.contract.errors import Infeasible, MemoError
from memo_sim.contract.units import format_bytes
from memo_sim.memory.device_blocks import Block, Pool
from memo_sim.memory.device_config import BLOCK_BYTES, SMALL_BYTES, SMALL_SEGMENT_BYTES, AllocatorConfig
from memo_sim.memory.device_expandable import ExpandableSegments

DEFAULT = AllocatorConfig()


class DeviceCall(NamedTuple):
    """One call to the device: a segment taken or given back, pages mapped or unmapped, all streams waited for."""

    kind: Literal["malloc", "free", "map", "unmap", "synchronize"]
    bytes: int


class OutOfDeviceMemory(Infeasible):
    """No segment could be had for a request, with everything given back that can be."""


class DeviceAllocator:
    """The allocator of one device; ``capacity_bytes`` is what segments together may take (None: no limit).

    Sizes are bytes, streams numbers. ``calls`` lists what the device was asked, in order.
    """

    def __init__(self, config: AllocatorConfig = DEFAULT, capacity_bytes: int | None = None) -> None:
        self.config = config
        self.capacity_bytes = capacity_bytes
        self.calls: list[DeviceCall] = []
        self.num_device_alloc = 0
        self.num_device_free = 0
        self.num_alloc_retries = 0
        """Times that everything cached was given back before a segment was asked for again: reorganisations."""
        self.num_ooms = 0
        self.allocated_bytes = 0
        """Bytes of blocks handed out and not yet freed, rounding included."""
        self.active_bytes = 0
        """Allocated, and freed blocks that wait for another stream."""
        self.reserved_bytes = 0
        """Bytes of all segments."""
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self._pools = {True: Pool(), False: Pool()}
        self._waiting: dict[int, deque[Block]] = {}
        self._passed: dict[int, int] = {}
        self._end = 0
        self._expandable = ExpandableSegments(self)

    def malloc(self, size_bytes: int, stream: int = 0) -> Block:
        """Hand out a block for ``size_bytes`` (at least 1; PyTorch asks for none when a tensor is empty).

        Raises:
            OutOfDeviceMemory: when the capacity does not allow it, whatever is given back.
        """
        self._take_back_passed()
        size = self.config.block_bytes(size_bytes)
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
        """Take a block back: at once, or when the streams of ``record_stream`` have passed an event of now."""
        if not block.allocated:
            raise MemoError("a block is freed that is not handed out", got=f"address {block.address}")
        block.allocated = False
        self.allocated_bytes -= block.size
        if not block.streams:
            self._take_back(block)
            return
        for stream in sorted(block.streams):
            self._waiting.setdefault(stream, deque()).append(block)
        block.events = len(block.streams)
        block.streams.clear()

    def record_stream(self, block: Block, stream: int) -> None:
        """Note that ``stream`` uses a block of another one."""
        if stream != block.stream:
            block.streams.add(stream)

    def pass_events(self, stream: int, most: int | None = None) -> None:
        """Say that ``stream`` has done all it was given up to now; the next ``malloc`` notices.

        With ``most``, only the events of the first so many blocks that wait for it have passed.
        """
        waiting = len(self._waiting.get(stream, ()))
        self._passed[stream] = waiting if most is None else min(most, waiting)

    def empty_cache(self) -> None:
        """Give back everything that is not in use, as ``torch.cuda.empty_cache`` does."""
        self._release_all()

    def pool_of(self, block: Block) -> Pool:
        """Return the pool that a block belongs to."""
        return self._pools[block.small]

    def take(self, kind: Literal["malloc", "map"], size: int) -> bool:
        """Take ``size`` bytes from the device; false when the capacity does not allow it."""
        if self.capacity_bytes is not None and self.reserved_bytes + size > self.capacity_bytes:
            return False
        self.calls.append(DeviceCall(kind, size))
        self.num_device_alloc += 1
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def give_back(self, kind: Literal["free", "unmap"], size: int) -> None:
        """Give ``size`` bytes back to the device."""
        self.calls.append(DeviceCall(kind, size))
        self.num_device_free += 1
        self.reserved_bytes -= size

    def addresses(self, size: int) -> int:
        """Return where ``size`` bytes of fresh addresses begin."""
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
        """Take the free block that serves ``size`` out of the pool, or return None."""
        pool.searches += 1
        found = pool.at_least(size, stream)
        best = next(found, None)
        if best is None:
            return None
        if best.expandable:
            best = self._expandable.best_fit(best, found)
        limit = self.config.max_split_bytes
        if limit is not None:
            if size < limit <= best.size:
                return None
            if size >= limit and best.size >= size + self.config.max_non_split_rounding_bytes:
                return None
        pool.remove(best)
        return best

    def _split(self, pool: Pool, block: Block, size: int) -> Block:
        """Return the part of ``block`` that is handed out; what is left of it, if it may be split, stays free."""
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
        """Return memory from the device for a block of ``size``, out of every list, or None when there is none."""
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
        """Give back cached segments that are never split: the smallest that is enough, or the largest ones.

        Returns whether what was given back is as much as is needed.
        """
        limit = self.config.max_split_bytes
        if limit is None:
            return False
        wanted = max(size, limit)
        fits = next(pool.at_least(wanted, stream), None)
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
        """Wait for every stream, then give back all free segments that are not split."""
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
        """Give back large segments of average age or more, until the threshold is kept or none is left."""
        if self.capacity_bytes is None:
            return
        excess = self.reserved_bytes - int(self.config.garbage_collection_threshold * self.capacity_bytes)
        pool = self._pools[False]
        while excess > 0:
            ages = {b: pool.searches - b.cached_at for b in pool.free_blocks() if not b.split and not b.expandable}
            if not ages:
                return
            # All that are old enough go, even when fewer would do, so that this is not needed again soon.
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
