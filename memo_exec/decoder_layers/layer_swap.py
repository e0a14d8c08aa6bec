"""Swapping by layers: a layer's tensors go to the host while the next layer computes, and come back one layer ahead.

forward     copies of layer i run beside layer i + 1; layer i + 2 waits for them, the device holds two layers' tensors
backward    when layer i begins, layer i - 1 is prefetched; what layer i + 1 had is dropped

These are MEMO's two rounding buffers (section 4.1), with memory from torch's allocator. Each block is copied once in
each direction, so the bytes that move are those that were planned.
"""

from __future__ import annotations

import weakref
from collections import deque

import torch
from torch import Tensor

from memo_exec.offload.block import Block, Original
from memo_exec.offload.checks import check
from memo_exec.offload.host import HostMemory, HostRange
from memo_exec.offload.statistics import OffloadStatistics
from memo_exec.offload.swap import Swap
from memo_exec.offload.view import View, bytes_of
from memo_sim.program.layout.swap_schedule import ROUNDING_BUFFERS

NEVER = 2**31
"""More copies than are ever in flight: compute waits for whole layers only."""


class LayerBlocks:
    """The swapped blocks of one layer in one forward pass. Autograd keeps them alive, not this list."""

    __slots__ = ("__weakref__", "_blocks", "previous", "restored_bytes")

    def __init__(self, previous: LayerBlocks | None) -> None:
        self.previous = weakref.ref(previous) if previous is not None else None
        self._blocks: list[weakref.ref[Block]] = []
        self.restored_bytes = 0
        """Bytes copied back on the H2D lane."""

    def add(self, block: Block) -> None:
        """Add a block that the layer's forward has offloaded."""
        self._blocks.append(weakref.ref(block))

    def living(self) -> list[Block]:
        """Return the blocks that backward still needs."""
        return [block for ref in self._blocks if (block := ref()) is not None]


class LayerSwap(Swap):
    """The swapped blocks of one model."""

    def __init__(self, *, pinned: bool, streams: bool, debug: bool) -> None:
        statistics, self.host_memory = OffloadStatistics(), HostMemory(None, pinned=pinned)
        super().__init__(self.host_memory, statistics, streams=streams, forward=NEVER, backward=0, debug=debug)
        self.statistics = statistics
        self._last: LayerBlocks | None = None
        self._in_flight: deque[weakref.ref[LayerBlocks]] = deque()
        self._in_backward: weakref.ref[LayerBlocks] | None = None

    def begin(self, *, first: bool) -> LayerBlocks:
        """Begin a layer's forward; ``first``: of a pass. The copies of the layer two before must have ended."""
        if first:
            self._last = None
            self.settle()
        layer = LayerBlocks(self._last)
        self._last = layer
        self._in_flight.append(weakref.ref(layer))
        while len(self._in_flight) > ROUNDING_BUFFERS:
            self._free_sources_of(self._in_flight.popleft()())
        return layer

    def _free_sources_of(self, layer: LayerBlocks | None) -> None:
        for block in layer.living() if layer is not None else []:
            self._lanes_of(block.device).wait(block.copied, block.stream)
            block.source = None

    def add(self, layer: LayerBlocks, original: Original, storage: torch.UntypedStorage, view: View) -> Block:
        """Start to copy the bytes of a view to the host."""
        block = self.offload(original, storage, view)
        assert block is not None, "host memory has no limit"
        layer.add(block)
        return block

    def restored(self, layer: LayerBlocks, block: Block) -> Tensor:
        """Return a block's bytes on the device, for the current compute stream; prefetch the layer below."""
        self.collect()
        lanes = self._lanes_of(block.device)
        self._enter(layer)
        restored = self._fetch(layer, block)
        lanes.wait(block.fetched, block.restored_stream)
        if block.total is not None:
            check(restored, block.total)
        return restored

    def _enter(self, layer: LayerBlocks) -> None:
        """Prefetch a layer and the one below it, when its backward begins."""
        above = self._in_backward() if self._in_backward is not None else None
        if above is layer:
            return
        for block in above.living() if above is not None else []:
            self._drop(block)
        self._in_backward = weakref.ref(layer)
        self._restored.clear()
        below = layer.previous() if layer.previous is not None else None
        for each in (layer, below) if below is not None else (layer,):
            for block in each.living():
                self._fetch(each, block)

    def _fetch(self, layer: LayerBlocks, block: Block) -> Tensor:
        lanes = self._lanes_of(block.device)
        if block.restored is None or block.restored_stream != lanes.here():
            layer.restored_bytes += block.host.memory.numel()
        return self._restore(block, lanes)


class CountedSwap:
    """Counts what would be swapped, on meta tensors: nothing is copied."""

    def __init__(self) -> None:
        self._sources: list[Tensor] = []

    def begin(self, *, first: bool) -> LayerBlocks:
        """Begin a layer's forward."""
        del first
        self._sources.clear()
        return LayerBlocks(None)

    def add(self, layer: LayerBlocks, original: Original, storage: torch.UntypedStorage, view: View) -> Block:
        """Return a block of the same size and geometry, without bytes."""
        del layer
        first, end = view.reach(storage.nbytes()) if view.gapless else (0, view.own_bytes)
        source = bytes_of(storage, first, end) if view.gapless else view.gathered(storage).view(torch.uint8)
        self._sources.append(source)  # an address is not used again while the bytes live
        host = HostRange(0, torch.empty(end - first, dtype=torch.uint8, device="meta"), in_slab=False)
        return Block(original, first if view.gapless else None, source, host, deque())

    def restored(self, layer: LayerBlocks, block: Block) -> Tensor:
        """Refuse: there is no backward on meta tensors."""
        raise AssertionError("meta tensors have no backward")
