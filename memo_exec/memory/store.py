"""Where device buffers come from: one interface, and the caching store.

The store counts what the program asked for: bytes born and not yet dead, workspaces that a library allocates included.
A buffer that lasts the whole step is made once, before step 1; any other at its first instruction, and released after
its last.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Protocol

import torch
from torch import Tensor

from memo_exec.memory.dtypes import TORCH_DTYPES
from memo_exec.schedule import Schedule
from memo_sim.program.instruction import BufferClass, Family


class BufferStore(Protocol):
    """What the interpreter needs of a store."""

    live_bytes: int
    peak_bytes: int

    def view(self, buffer: int, first: int, tokens: int) -> Tensor:
        """Return the tokens of a living buffer: (tokens, features), flat where it has one feature."""

    def birth(self, buffer: int, instruction: int) -> None:
        """Make a buffer before its first instruction."""

    def death(self, buffer: int, instruction: int) -> None:
        """Release a buffer after its last instruction."""

    def begin_step(self) -> None:
        """Forget the last step's peak and log, and whatever a failed step left alive."""


class CachingStore:
    """``torch.empty`` at birth, release at death.

    On CUDA torch's caching allocator serves the requests. On the CPU, where the system's allocator would map and fault
    in large blocks anew each time, released blocks are kept by size and handed out again. ``poison`` fills what is not
    yet written with NaN.
    """

    def __init__(self, schedule: Schedule, device: torch.device, *, poison: bool = False) -> None:
        self.device = device
        self.poison = poison
        self.reused = device.type == "cpu"
        self.live_bytes = 0
        self.peak_bytes = 0
        self.log: list[tuple[int, BufferClass, int]] = []
        """(instruction, class, bytes born or, negative, released), in the order it happened."""
        self._schedule = schedule
        self._lock = threading.Lock()
        self._tensors: dict[int, Tensor] = {}
        self._blocks: dict[int, Tensor] = {}
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._views: dict[tuple[int, int, int], Tensor] = {}
        self._lasting_bytes: dict[BufferClass, int] = defaultdict(int)
        self._lasting = self._make_lasting()

    def _make_lasting(self) -> frozenset[int]:
        lives = self._schedule.lives
        made = []
        for buffer, (on_device, birth) in enumerate(zip(lives.on_device.tolist(), lives.birth.tolist(), strict=True)):
            if on_device and birth < 0:
                family = self._schedule.family(buffer)
                self._tensors[buffer] = torch.zeros(
                    _shape(family), dtype=TORCH_DTYPES[family.dtype], device=self.device
                )
                self._lasting_bytes[family.buffer_class] += family.bytes
                made.append(buffer)
        self.live_bytes = self.peak_bytes = sum(self._lasting_bytes.values())
        return frozenset(made)

    @property
    def lasting_bytes(self) -> dict[BufferClass, int]:
        """Bytes by class of the buffers that last the whole step."""
        return dict(self._lasting_bytes)

    def begin_step(self) -> None:
        """Forget the last step's peak and log, and whatever a failed step left alive."""
        for buffer in [b for b in self._tensors if b not in self._lasting]:
            self.death(buffer, -1)
        self.live_bytes = self.peak_bytes = sum(self._lasting_bytes.values())
        self.log.clear()
        if self.poison:
            for buffer in self._lasting:
                if self._schedule.family(buffer).buffer_class is BufferClass.SKELETAL:
                    self._tensors[buffer].fill_(float("nan"))

    def view(self, buffer: int, first: int, tokens: int) -> Tensor:
        """Return the tokens of a living buffer."""
        if buffer not in self._lasting:
            whole = self._tensors[buffer]
            return whole if len(whole) == tokens else whole[first : first + tokens]
        key = (buffer, first, tokens)
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = self._tensors[buffer][first : first + tokens]
        return found

    def birth(self, buffer: int, instruction: int) -> None:
        """Make a buffer, unless a library makes it; count it in any case."""
        family = self._schedule.family(buffer)
        with self._lock:
            self._count(instruction, family, 1)
            if buffer in self._schedule.library:
                return
            if self.reused:
                free = self._free[family.bytes]
                block = free.pop() if free else torch.empty(family.bytes, dtype=torch.uint8, device=self.device)
                self._blocks[buffer] = block
                tensor = block.view(TORCH_DTYPES[family.dtype]).view(_shape(family))
            else:
                tensor = torch.empty(_shape(family), dtype=TORCH_DTYPES[family.dtype], device=self.device)
            self._tensors[buffer] = tensor
        if self.poison and tensor.is_floating_point():
            tensor.fill_(float("nan"))

    def death(self, buffer: int, instruction: int) -> None:
        """Release a buffer."""
        family = self._schedule.family(buffer)
        with self._lock:
            self._count(instruction, family, -1)
            self._tensors.pop(buffer, None)
            if (block := self._blocks.pop(buffer, None)) is not None:
                self._free[family.bytes].append(block)

    def _count(self, instruction: int, family: Family, sign: int) -> None:
        self.log.append((instruction, family.buffer_class, sign * family.bytes))
        self.live_bytes += sign * family.bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def _shape(family: Family) -> tuple[int, ...]:
    return (family.tokens,) if family.features == 1 else (family.tokens, family.features)
