"""Where device buffers come from: one interface, and the caching store.

The store counts what the program asked for: bytes born and not yet dead, workspaces that a library allocates included.
A buffer that lasts the whole step is made once, before step 1; any other at its first instruction, and released after
its last.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from memo_exec.memory.binding import Schedule
from memo_exec.memory.dtypes import TORCH_DTYPES
from memo_sim.program.ir.instruction import BufferClass, Family


class BufferStore(Protocol):
    """What the interpreter needs of a store."""

    live_bytes: int
    peak_bytes: int
    log: list[tuple[int, BufferClass, int]]
    """(instruction, class, bytes born or, negative, released), in the order it happened."""
    lasting_bytes: dict[BufferClass, int]
    """Bytes by class of the buffers that last the whole step."""

    def lasts(self, buffer: int) -> bool:
        """Return whether a buffer is there all the time, at one address."""

    def view(self, buffer: int, first: int, tokens: int) -> Tensor:
        """Return the tokens of a living buffer: (tokens, features), flat where it has one feature."""

    def birth(self, buffer: int, instruction: int) -> None:
        """Make a buffer before its first instruction."""

    def death(self, buffer: int, instruction: int) -> None:
        """Release a buffer after its last instruction."""

    def begin_step(self) -> None:
        """Forget the last step's peak and log, and whatever a failed step left alive."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What a buffer is."""

    buffer_class: BufferClass
    bytes: int
    tokens: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Block:
    """Memory that buffers of one size take in turns, and the tensors it has been."""

    __slots__ = ("raw", "tensors")

    def __init__(self, size: int, device: torch.device) -> None:
        self.raw = torch.empty(size, dtype=torch.uint8, device=device)
        self.tensors: dict[tuple[torch.dtype, tuple[int, ...]], Tensor] = {}

    def tensor(self, spec: Spec) -> Tensor:
        key = (spec.dtype, spec.shape)
        if (found := self.tensors.get(key)) is None:
            found = self.tensors[key] = self.raw.view(spec.dtype).view(spec.shape)
        return found


class CachingStore:
    """``torch.empty`` at birth, release at death.

    On CUDA torch's caching allocator serves the requests. On the CPU, where the system's allocator would map and fault
    in large blocks anew each time, released blocks are kept by size and handed out again. ``poison`` fills what is not
    yet written with NaN; without ``reuse`` nothing is kept, so that every request is seen.
    """

    def __init__(self, schedule: Schedule, device: torch.device, *, poison: bool = False, reuse: bool = True) -> None:
        self.device = device
        self.poison = poison
        self.log: list[tuple[int, BufferClass, int]] = []
        """(instruction, class, bytes born or, negative, released), in the order it happened."""
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
        """Bytes by class of the buffers that last the whole step."""
        for _, spec in self._chosen(lasting):
            self.lasting_bytes[spec.buffer_class] += spec.bytes
        self.live_bytes = self.peak_bytes = sum(self.lasting_bytes.values())

    def _chosen(self, buffers: list[int]) -> list[tuple[int, Spec]]:
        return [(buffer, self._specs[buffer]) for buffer in buffers]

    def begin_step(self) -> None:
        """Forget the last step's peak and log, and whatever a failed step left alive."""
        for buffer in list(self._tensors):
            self.death(buffer, -1)
        self.live_bytes = self.peak_bytes = sum(self.lasting_bytes.values())
        self.log.clear()
        if self.poison:
            for buffer, tensor in self._lasting.items():
                if self._specs[buffer].buffer_class is BufferClass.SKELETAL:
                    tensor.fill_(float("nan"))

    def lasts(self, buffer: int) -> bool:
        """Return whether a buffer is there all the time, at one address."""
        return buffer in self._lasting

    def view(self, buffer: int, first: int, tokens: int) -> Tensor:
        """Return the tokens of a living buffer."""
        whole = self._tensors.get(buffer)
        if whole is None:
            whole = self._lasting[buffer]
        return whole if tokens == self._specs[buffer].tokens else whole[first : first + tokens]

    def birth(self, buffer: int, instruction: int) -> None:
        """Make a buffer, unless a library makes it; count it in any case."""
        spec = self._specs[buffer]
        with self._lock:
            self.log.append((instruction, spec.buffer_class, spec.bytes))
            self.live_bytes += spec.bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            if buffer in self._library:
                return
            tensor = self._tensors[buffer] = self._take(buffer, spec)
        if self.poison and tensor.is_floating_point():
            tensor.fill_(float("nan"))

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
        """Return the memory of a buffer that is born."""
        if not self._reused:
            return torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
        free = self._free[spec.bytes]
        block = self._blocks[buffer] = free.pop() if free else _Block(spec.bytes, self.device)
        return block.tensor(spec)

    def _give_back(self, buffer: int, spec: Spec) -> None:
        """Keep the block of a buffer that is dead, if it was made of one."""
        if (block := self._blocks.pop(buffer, None)) is not None:
            self._free[spec.bytes].append(block)


def _spec(family: Family) -> Spec:
    shape = (family.tokens,) if family.features == 1 else (family.tokens, family.features)
    return Spec(family.buffer_class, family.bytes, family.tokens, shape, TORCH_DTYPES[family.dtype])
