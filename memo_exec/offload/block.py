"""One stretch of a storage on its way to the host, there, and back; and what autograd holds instead of a tensor.

    source    the original bytes, held until the D2H lane has read them
    host      the copy; the block's as long as the block lives
    restored  the bytes on the device again, held until every saved view that was waiting for them has been unpacked

A block lives as long as autograd holds a view of it. What a copy still needs when it dies goes to the context's
leftovers, which are freed in order with the lanes.
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
    """What a dead block leaves: its host bytes, and device memory that a copy may still be using."""

    device: torch.device
    host: HostRange
    copied: Mark
    source: Tensor | None
    stream: object
    fetched: Mark
    restored: Tensor | None
    restored_stream: object


class Original:
    """A weak hold on the storage that a tensor was saved from."""

    __slots__ = ("_bytes", "_ref", "version")

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        # While it is held, no other storage gets the same address.
        self._ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._bytes = storage.nbytes()
        self.version = Version(tensor, holding=False)

    def storage(self) -> torch.UntypedStorage | None:
        """Return the storage when someone still holds it with its bytes in it."""
        found = torch.UntypedStorage._new_with_weak_ptr(self._ref.cdata)
        return found if found is not None and found.nbytes() == self._bytes else None


class Block:
    """Bytes of one storage, offloaded once for every view of them."""

    __slots__ = (
        "__weakref__",
        "_leftovers",
        "copied",
        "device",
        "fetched",
        "first",
        "host",
        "original",
        "restored",
        "restored_stream",
        "source",
        "stream",
        "total",
        "unused",
        "views",
        "waiting",
    )

    def __init__(
        self, original: Original, first: int, source: Tensor, host: HostRange, leftovers: deque[Leftover]
    ) -> None:
        self.device = source.device
        self.original = original
        self.first = first
        """Where the bytes start in the original storage; 0 for a packed copy."""
        self.source: Tensor | None = source
        self.host = host
        self.stream: object = None
        """The stream that compute was on when the tensor was saved."""
        self.copied: Mark = PASSED
        self.restored: Tensor | None = None
        self.restored_stream: object = None
        self.fetched: Mark = PASSED
        self.views: list[int] = []
        """Numbers of the saved views."""
        self.waiting: set[int] = set()
        """Those that this backward pass has not unpacked yet."""
        self.unused = False
        """Whether the bytes were brought back and nobody has used them."""
        self.total: Tensor | None = None
        """Checksum in debug mode."""
        self._leftovers = leftovers

    def serves(self, view: View, original: Original) -> bool:
        """Return whether a view of the same storage lies in these bytes, and they are still what it holds."""
        mine, its = self.original.version, original.version
        if not mine.unchanged or mine.number != its.number:
            return False
        if not view.gapless:
            return True
        first, end = view.first_bytes - self.first, view.end_bytes - self.first
        return first >= 0 and end <= self.host.memory.numel()

    def __del__(self) -> None:
        # Runs wherever the garbage collector does, so it takes no lock and starts no work.
        left = (self.copied, self.source, self.stream, self.fetched, self.restored, self.restored_stream)
        self._leftovers.append(Leftover(self.device, self.host, *left))


class Saved:
    """What autograd holds instead of a tensor that was offloaded."""

    __slots__ = ("__weakref__", "backward", "block", "inside", "number", "version", "view")

    def __init__(self, block: Block, number: int, version: Version, view: View, inside: View) -> None:
        self.block = block
        self.number = number
        self.backward = -1
        """The backward pass that has unpacked it, counted as in ``Swap``."""
        self.version = version
        self.view = view
        """Where the tensor lay in the original storage."""
        self.inside = inside
        """Where it lies in the block's bytes."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Kept:
    """What autograd holds instead of a tensor that stays: an alias, since the tensor itself would be a cycle."""

    version: Version


@dataclass(frozen=True, slots=True)
class Wrapped:
    """What autograd holds instead of a wrapper subclass: its parts, the tensors among them packed one by one."""

    kind: type
    context: object
    size: torch.Size
    stride: tuple[int, ...]
    inner: dict[str, object]
