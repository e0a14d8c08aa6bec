"""Moves blocks to the host as they are saved and back before backward needs them, with every hazard ordered.

    D2H reads the source       after compute has written it (a mark at the save)
    compute reuses the source  after D2H has read it (compute waits before the source is released)
    H2D reads the host         after D2H has written it (the block's own mark)
    H2D writes the device      after compute has finished with that memory (a mark at the allocation)
    compute reads the device   after H2D has written it (compute waits at the unpack)
    D2H reuses host bytes      after H2D has read them (the D2H lane is held)

Device memory is always allocated on the current compute stream and freed to that stream.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque

import torch
from torch import Tensor

from memo_exec.offload.block import Block, Leftover, Original, Saved
from memo_exec.offload.checks import check, poison, total
from memo_exec.offload.host import HostMemory
from memo_exec.offload.lanes import HostLanes, Lanes, StreamLanes
from memo_exec.offload.statistics import OffloadStatistics
from memo_exec.offload.view import View, bytes_of


class Swap:
    """The blocks of one context. Callers hold the context's lock."""

    def __init__(
        self,
        host: HostMemory,
        statistics: OffloadStatistics,
        *,
        streams: bool,
        forward: int,
        backward: int,
        debug: bool,
    ) -> None:
        self._host = host
        self._statistics = statistics
        self._streams = streams
        self._forward = forward if streams else 0
        self._ahead = backward if streams else 0
        self._reach = backward
        self._debug = debug
        self._lanes: dict[torch.device, Lanes] = {}
        self._stash: deque[weakref.ref[Block]] = deque()
        self._saved: weakref.WeakValueDictionary[int, Saved] = weakref.WeakValueDictionary()
        self._restored: list[weakref.ref[Block]] = []
        self._leftovers: deque[Leftover] = deque()
        self._count = 0
        self._backward = 0
        """Number of the backward pass. If a view is unpacked again, a new pass has begun (over a retained graph)."""
        self._number = self._anchor = 0

    def reach(self, storage: torch.UntypedStorage, view: View) -> tuple[int, int] | None:
        """Return the range of storage bytes to copy for a view, or None if it is copied without its gaps."""
        return view.reach(storage.nbytes()) if view.gapless else None

    def size_bytes(self, storage: torch.UntypedStorage, view: View) -> int:
        """Return the bytes of a view's block, without those that only align it."""
        reach = None if view.gapless else self.reach(storage, view)
        return view.own_bytes if reach is None else reach[1] - reach[0]

    def save(self, block: Block, view: View, inside: View, original: Original) -> Saved:
        """Return the object that autograd is to hold for a view of a block."""
        self._count += 1
        block.views.append(self._count)
        saved = self._saved[self._count] = Saved(block, self._count, original.version, view, inside)
        return saved

    def offload(self, original: Original, storage: torch.UntypedStorage, view: View) -> Block | None:
        """Start to copy a new block to the host, and return it; return None if the host has no room."""
        self.collect()
        reach = self.reach(storage, view)
        source = bytes_of(storage, *reach) if reach else view.gathered(storage).view(torch.uint8)
        host = self._host.take(source.numel())
        if host is None:
            return None
        block = Block(original, reach[0] if reach else None, source, host, self._leftovers)
        lanes = self._lanes_of(source.device)
        if self._debug:
            block.total = total(source)
        block.stream = lanes.here()
        block.copied = lanes.offload(host.memory, source, [lanes.now()])
        self._stash.append(weakref.ref(block))
        self._statistics.offloaded_tensors += 1
        self._statistics.offloaded_bytes += source.numel()
        self._statistics.host_peak_bytes = self._host.peak_bytes
        self._free_sources(self._forward)
        return block

    def storage_for(self, saved: Saved) -> tuple[torch.UntypedStorage, View]:
        """Return device bytes that contain a saved view, and its geometry in them; prefetch the blocks needed next."""
        self.collect()
        self._free_sources(self._forward)
        self._track_backward(saved)
        block = saved.block
        storage, view = block.original.storage(), saved.view
        if storage is not None:
            self._statistics.reused_tensors += 1
        else:
            lanes = self._lanes_of(block.device)
            restored = self._restore(block, lanes)
            self._prefetch(saved, lanes)
            lanes.wait(block.fetched, block.restored_stream)
            if block.total is not None:
                check(restored, block.total)
            storage, view = restored.untyped_storage(), saved.inside
        block.waiting.discard(saved.number)
        block.unused = False
        self._drop_used()
        return storage, view

    def _restore(self, block: Block, lanes: Lanes) -> Tensor:
        """Return a block's bytes on the device for the current compute stream; their copy may still be in flight."""
        if block.restored is not None and block.restored_stream == lanes.here():
            return block.restored
        self._drop(block)
        restored = torch.empty(block.host.memory.numel(), dtype=torch.uint8, device=block.device)
        if self._debug:
            poison(restored)
        block.restored, block.restored_stream = restored, lanes.here()
        # An earlier copy out of these host bytes is on the same lane, so no wait is needed for it.
        block.fetched = lanes.restore(restored, block.host.memory, [block.copied, lanes.now()])
        block.waiting = {number for number in block.views if self._is_waiting(number)}
        block.unused = True
        self._restored.append(weakref.ref(block))
        self._statistics.restored_tensors += 1
        self._statistics.restored_bytes += restored.numel()
        return restored

    def _prefetch(self, saved: Saved, lanes: Lanes) -> None:
        """Prefetch the blocks that backward needs next: this node's other tensors, then those saved before them."""
        rest = range(saved.number + 1, saved.number + 1 + self._ahead)
        same_node = itertools.takewhile(self._is_waiting, rest)
        before = filter(self._is_waiting, range(self._anchor - 1, self._anchor - 1 - self._ahead, -1))
        for number in itertools.chain(same_node, before):
            block = self._saved[number].block
            if block.device == saved.block.device and block.restored is None and block.original.storage() is None:
                self._restore(block, lanes)

    def _track_backward(self, saved: Saved) -> None:
        """Update the position of backward.

        Backward visits nodes in reverse order of their saves, but unpacks the tensors of one node in order of their
        saves. The anchor is the first saved tensor of the current node.
        """
        if saved.backward == self._backward:
            self._backward += 1
        saved.backward = self._backward
        if not self._number < saved.number <= self._number + self._reach:
            self._anchor = saved.number
        self._number = saved.number

    def _is_waiting(self, number: int) -> bool:
        """Return whether a saved view is alive and not yet unpacked in this backward pass."""
        saved = self._saved.get(number)
        return saved is not None and saved.backward != self._backward

    def _drop_used(self) -> None:
        """Drop restored blocks that no view waits for any more, and blocks that backward has already passed."""
        first, last = self._anchor - self._reach, self._number + self._reach
        kept = []
        for ref in self._restored:
            block = ref()
            if block is None or block.restored is None:
                continue
            if any(first <= number <= last for number in block.waiting):
                kept.append(ref)
            else:
                self._statistics.dropped_prefetches += block.unused
                self._drop(block)
        self._restored = kept

    def _drop(self, block: Block) -> None:
        if block.restored is not None:
            self._lanes_of(block.device).release(block.fetched, block.restored_stream)
            block.restored = None

    def _free_sources(self, most: int) -> None:
        """Free the sources that D2H has read; wait for the oldest copy if more than ``most`` are in flight."""
        while self._stash:
            block = self._stash[0]()
            in_flight = block is not None and not block.copied.done()
            if in_flight and len(self._stash) <= most:
                return
            self._stash.popleft()
            if block is not None:
                self._statistics.forward_waits += in_flight and most > 0
                self._lanes_of(block.device).wait(block.copied, block.stream)
                block.source = None

    def collect(self) -> None:
        """Free the memory of dead blocks, in order with the copies that still use it."""
        while self._leftovers:
            left = self._leftovers.popleft()
            own = self._lanes_of(left.device)
            own.release(left.copied, left.stream)
            own.release(left.fetched, left.restored_stream)
            if self._debug or not left.host.in_slab:
                left.copied.settle()
                left.fetched.settle()
            for lanes in self._lanes.values():
                lanes.hold(left.copied)
                lanes.hold(left.fetched)
            if self._debug:
                poison(left.host.memory)
            self._host.give(left.host)

    def end_forward(self) -> None:
        """Free what has died when the forward pass ends."""
        self.collect()

    def settle(self) -> None:
        """Between passes, give the slab the exact size that was needed."""
        self.collect()
        self._host.settle()
        self._statistics.host_bytes = self._host.bytes

    def synchronize(self) -> None:
        """Block until every copy has run, and free every source."""
        self.collect()
        while self._stash:
            if (block := self._stash.popleft()()) is not None:
                block.copied.join()
                block.source = None

    def _lanes_of(self, device: torch.device) -> Lanes:
        if device not in self._lanes:
            on_cuda = device.type == "cuda"
            self._lanes[device] = (
                StreamLanes(device, lanes=self._streams) if on_cuda else HostLanes(lanes=self._streams)
            )
        return self._lanes[device]
