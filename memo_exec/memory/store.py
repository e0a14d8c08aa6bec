"""Buffer stores provide device buffers: the interface, and the store that allocates and frees during a step.

A store counts the bytes of living buffers as the program declares them, including workspaces that a library allocates
itself. A buffer that lasts the whole step is allocated once, before step 1. Any other buffer is allocated at its first
instruction and released after its last.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from memo_exec.memory import poison
from memo_exec.memory.binding import Schedule
from memo_exec.memory.dtypes import TORCH_DTYPES
from memo_sim.program.ir.instruction import BufferClass, Family


class BufferStore(Protocol):
    """The interface of a store, as the interpreter uses it."""

    live_bytes: int
    peak_bytes: int
    log: list[tuple[int, BufferClass, int]]
    """(instruction, class, bytes) in order of time; bytes are positive at birth and negative at release."""
    lasting_bytes: dict[BufferClass, int]
    """Bytes of the buffers that last the whole step, by class."""

    def lasts(self, buffer: int) -> bool:
        """Return whether a buffer exists for the whole step, at one address."""

    def view(self, buffer: int, first: int, tokens: int) -> Tensor:
        """Return a range of a living buffer's tokens: (tokens, features), or flat if it has one feature."""

    def birth(self, buffer: int, instruction: int) -> None:
        """Allocate a buffer before its first instruction."""

    def death(self, buffer: int, instruction: int) -> None:
        """Release a buffer after its last instruction."""

    def begin_step(self) -> None:
        """Reset the peak, begin a new log, and release buffers that a failed step left alive."""


@dataclass(frozen=True, slots=True, eq=False)
class Spec:
    """Class, size, shape and dtype of a family's buffers; compared by identity, because every birth looks it up."""

    buffer_class: BufferClass
    bytes: int
    tokens: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Block:
    """A block of memory that buffers of one size reuse, with the views made of it so far."""

    __slots__ = ("raw", "tensors")

    def __init__(self, size: int, device: torch.device) -> None:
        self.raw = torch.empty(size, dtype=torch.uint8, device=device)
        self.tensors: dict[Spec, Tensor] = {}

    def tensor(self, spec: Spec) -> Tensor:
        if (found := self.tensors.get(spec)) is None:
            found = self.tensors[spec] = self.raw.view(spec.dtype).view(spec.shape)
        return found


class CachingStore:
    """A store that calls ``torch.empty`` at birth and releases the tensor at death.

    On CUDA, torch's caching allocator serves the requests. On the CPU, the store keeps released blocks by size and
    reuses them, because the system's allocator would map large blocks and fault their pages in each time. Without
    ``reuse`` it keeps none, so that a profiler sees every request. ``poison`` poisons each buffer at birth.
    """

    def __init__(self, schedule: Schedule, device: torch.device, *, poison: bool = False, reuse: bool = True) -> None:
        self.device = device
        self.poison = poison
        self.log: list[tuple[int, BufferClass, int]] = []
        """(instruction, class, bytes) in order of time; bytes are positive at birth and negative at release."""
        specs = [_spec(family) for family in schedule.families]
        self._specs = [specs[family] for family in schedule.columns.buffer_family.tolist()]
        self._library = schedule.library
        self._reused = reuse and device.type == "cpu"
        self._lock = threading.Lock()
        self._blocks: dict[int, _Block] = {}
        self._free: dict[int, list[_Block]] = defaultdict(list)
        lives = schedule.lives
        lasting = (lives.on_device & (lives.birth < 0)).nonzero()[0].tolist()
        self._lasting = {b: self._make_lasting(b, s) for b, s in self._chosen(lasting)}
        self._tensors: dict[int, Tensor] = {}
        self.lasting_bytes: dict[BufferClass, int] = defaultdict(int)
        """Bytes of the buffers that last the whole step, by class."""
        for _, spec in self._chosen(lasting):
            self.lasting_bytes[spec.buffer_class] += spec.bytes
        self.live_bytes = self.peak_bytes = sum(self.lasting_bytes.values())

    def _chosen(self, buffers: list[int]) -> list[tuple[int, Spec]]:
        return [(buffer, self._specs[buffer]) for buffer in buffers]

    def begin_step(self) -> None:
        """Reset the peak, begin a new log, and release buffers that a failed step left alive."""
        for buffer in list(self._tensors):
            self.death(buffer, -1)
        self.live_bytes = self.peak_bytes = sum(self.lasting_bytes.values())
        self.log = []  # the record of the last step may still need the old one
        if self.poison:
            for buffer, tensor in self._lasting.items():
                if self._specs[buffer].buffer_class is BufferClass.SKELETAL:
                    poison.fill(tensor)

    def lasts(self, buffer: int) -> bool:
        """Return whether a buffer exists for the whole step, at one address."""
        return buffer in self._lasting

    def view(self, buffer: int, first: int, tokens: int) -> Tensor:
        """Return a range of a living buffer's tokens."""
        whole = self._tensors.get(buffer)
        if whole is None:
            whole = self._lasting[buffer]
        return whole if tokens == self._specs[buffer].tokens else whole[first : first + tokens]

    def birth(self, buffer: int, instruction: int) -> None:
        """Count a buffer, and allocate it unless a library does."""
        spec = self._specs[buffer]
        with self._lock:
            self.log.append((instruction, spec.buffer_class, spec.bytes))
            self.live_bytes += spec.bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            if buffer in self._library:
                return
            tensor = self._tensors[buffer] = self._take(buffer, spec)
        if self.poison:
            poison.fill(tensor)

    def death(self, buffer: int, instruction: int) -> None:
        """Release a buffer."""
        spec = self._specs[buffer]
        with self._lock:
            self.log.append((instruction, spec.buffer_class, -spec.bytes))
            self.live_bytes -= spec.bytes
            self._tensors.pop(buffer, None)
            self._give_back(buffer, spec)

    def _make_lasting(self, buffer: int, spec: Spec) -> Tensor:
        """Return the zeroed memory of a buffer that lasts the whole step."""
        del buffer
        return torch.zeros(spec.shape, dtype=spec.dtype, device=self.device)

    def _take(self, buffer: int, spec: Spec) -> Tensor:
        """Return memory for a buffer at its birth."""
        if not self._reused:
            return torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
        free = self._free[spec.bytes]
        block = self._blocks[buffer] = free.pop() if free else _Block(spec.bytes, self.device)
        return block.tensor(spec)

    def _give_back(self, buffer: int, spec: Spec) -> None:
        """Keep the block of a dead buffer for reuse, if it has one."""
        if (block := self._blocks.pop(buffer, None)) is not None:
            self._free[spec.bytes].append(block)


def _spec(family: Family) -> Spec:
    shape = (family.tokens,) if family.features == 1 else (family.tokens, family.features)
    return Spec(family.buffer_class, family.bytes, family.tokens, shape, TORCH_DTYPES[family.dtype])
