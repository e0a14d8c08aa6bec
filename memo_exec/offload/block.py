"""Blocks: contiguous bytes of a storage that are offloaded together; and the objects that autograd holds for tensors.

A block refers to its bytes in up to three places:

    source    the original bytes, held until the D2H lane has read them
    host      the copy on the host, held as long as the block lives
    restored  the copy back on the device, held until every saved view that waits for it has been unpacked

A block lives as long as autograd holds a view of it. When it dies, a copy may still need its memory. So that memory
goes to the context's leftovers, and ``Swap.collect`` frees it in order with the lanes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from memo_exec.offload.host import HostRange
from memo_exec.offload.lanes import PASSED, Mark
from memo_exec.offload.version import Version
from memo_exec.offload.view import View


@dataclass(frozen=True, slots=True)
class Leftover:
    """Memory of a dead block: its host bytes, and device memory that a copy may still use."""

    device: torch.device
    host: HostRange
    copied: Mark
    source: Tensor | None
    stream: object
    fetched: Mark
    restored: Tensor | None
    restored_stream: object


class Original:
    """A weak reference to the storage of a saved tensor."""

    __slots__ = ("_bytes", "_ref", "address", "version")

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        # While this weak reference exists, no other storage gets the same address.
        self._ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._bytes = storage.nbytes()
        self.address: int = storage._cdata
        """Where torch keeps the storage; tensors of one storage have the same."""
        self.version = Version(tensor)

    def storage(self) -> torch.UntypedStorage | None:
        """Return the storage if it is still alive and still has its bytes, else None."""
        found = torch.UntypedStorage._new_with_weak_ptr(self._ref.cdata)
        return found if found is not None and found.nbytes() == self._bytes else None


class Block:
    """Bytes of one storage that are offloaded once, however many views of them autograd saves."""

    __slots__ = (
        "__weakref__",
        "_leftovers",
        "copied",
        "device",
        "fetched",
        "first",
        "host",
        "original",
        "packed",
        "restored",
        "restored_stream",
        "size_bytes",
        "source",
        "stream",
        "total",
        "unused",
        "views",
        "waiting",
    )

    def __init__(
        self,
        original: Original,
        first: int | None,
        source: Tensor,
        host: HostRange,
        leftovers: deque[Leftover],
    ) -> None:
        self.device = source.device
        self.original = original
        self.packed = first is None
        """Whether the bytes are the elements of one view without its gaps."""
        self.first = first or 0
        """Offset of the bytes in the original storage; 0 for a packed copy."""
        self.size_bytes = source.nbytes
        self.source: Tensor | None = source
        self.host = host
        self.stream: object = None
        """The compute stream at the time the tensor was saved."""
        self.copied: Mark = PASSED
        self.restored: Tensor | None = None
        self.restored_stream: object = None
        self.fetched: Mark = PASSED
        self.views: list[int] = []
        """Numbers of the saved views."""
        self.waiting: set[int] = set()
        """Numbers of the saved views that this backward pass has not unpacked yet."""
        self.unused = False
        """Whether the bytes were restored but no view has used them yet."""
        self.total: Tensor | None = None
        """Checksum of the bytes; set in debug mode only."""
        self._leftovers = leftovers

    def serves(self, view: View, original: Original) -> bool:
        """Return whether these bytes contain a view of the same storage, and the storage has not changed since."""
        mine, its = self.original.version, original.version
        if not mine.unchanged or mine.number != its.number:
            return False
        if self.packed:
            return True  # blocks of packed views are found by the view
        first, end = view.first_bytes - self.first, view.end_bytes - self.first
        return first >= 0 and end <= self.size_bytes

    def __del__(self) -> None:
        # The garbage collector may run this on any thread, so it takes no lock and starts no copy.
        left = (self.copied, self.source, self.stream, self.fetched, self.restored, self.restored_stream)
        self._leftovers.append(Leftover(self.device, self.host, *left))


class Saved:
    """The object that autograd holds instead of an offloaded tensor."""

    __slots__ = ("__weakref__", "backward", "block", "inside", "number", "version", "view")

    def __init__(self, block: Block, number: int, version: Version, view: View, inside: View) -> None:
        self.block = block
        self.number = number
        self.backward = -1
        """Number of the last backward pass that unpacked it, as ``Swap`` counts them; -1 before the first."""
        self.version = version
        self.view = view
        """Geometry of the tensor in the original storage."""
        self.inside = inside
        """Geometry of the tensor in the block's bytes."""


@dataclass(frozen=True, slots=True)
class Wrapped:
    """The object that autograd holds for a wrapper subclass: its parts, with each inner tensor packed on its own."""

    kind: type
    context: object
    size: torch.Size
    stride: tuple[int, ...]
    inner: dict[str, object]
