"""Buffer stores provide device buffers: the interface, and the store that allocates and frees during a step.

A buffer that lasts the whole step is allocated once, before step 1. Any other buffer is allocated at its first
instruction and released after its last, unless its memory is known before the step. The bytes of living buffers are
counted as the program declares them, including workspaces that a library allocates itself.

Several lanes may allocate and release at once. What they change is a list or a dictionary, in one operation that no
other thread can interrupt, so no lock is needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from memo_exec.memory import poison
from memo_exec.memory.binding import Bound, Schedule, lanes_touching
from memo_exec.memory.dtypes import TORCH_DTYPES
from memo_sim.program.ir.instruction import BufferClass, Family

Count = tuple[int, BufferClass, int]
"""(instruction, class, bytes) of a buffer's birth (positive bytes) or release (negative bytes)."""


class BufferStore(Protocol):
    """The interface of a store, as the interpreter uses it."""

    lasting_bytes: dict[BufferClass, int]
    """Bytes of the buffers that last the whole step, by class."""

    def has_address(self, buffer: int) -> bool:
        """Return whether a buffer has one address in every step, known before step 1."""

    def view(self, buffer: int, first: int, tokens: int) -> Tensor:
        """Return a range of a living buffer's tokens: (tokens, features), or flat if it has one feature."""

    def acts(self, buffer: int) -> bool:
        """Return whether the store has something to do at a buffer's birth and death."""

    def birth(self, buffer: int) -> None:
        """Allocate a buffer before its first instruction."""

    def death(self, buffer: int) -> None:
        """Release a buffer after its last instruction."""

    def begin_step(self) -> None:
        """Release buffers that a failed step left alive."""

    def counts(self, bound: Bound) -> tuple[tuple[Count, ...], tuple[Count, ...]]:
        """Return what is counted when an instruction starts, and when it has ended."""

    def peak_bytes(self, counts: Iterable[Count]) -> int:
        """Return the most bytes that the store holds in a step with these counts, which are in order of time."""


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
    reuses them, because the system's allocator would map large blocks and fault their pages in each time. Where a
    single lane touches all buffers of a size, the order in which they take blocks is that of the program, so their
    blocks are chosen before step 1. Without ``reuse`` the store keeps none, so that a profiler sees every request.
    ``poison`` poisons each buffer at birth.
    """

    def __init__(self, schedule: Schedule, device: torch.device, *, poison: bool = False, reuse: bool = True) -> None:
        self.device = device
        self.poison = poison
        specs = [_spec(family) for family in schedule.families]
        self._specs = [specs[family] for family in schedule.columns.buffer_family.tolist()]
        self._library = schedule.library
        self._reused = reuse and device.type == "cpu"
        self._blocks: dict[int, _Block] = {}
        self._free: dict[int, list[_Block]] = {spec.bytes: [] for spec in specs}
        lives = schedule.lives
        lasting = (lives.on_device & (lives.birth < 0)).nonzero()[0].tolist()
        self._lasting = {b: self._make_lasting(b, s) for b, s in self._chosen(lasting)}
        self._tensors: dict[int, Tensor] = {}
        self._views = {**self._lasting, **self._known(schedule)}
        """Buffers that have one address in every step, known before step 1."""
        self.lasting_bytes: dict[BufferClass, int] = defaultdict(int)
        """Bytes of the buffers that last the whole step, by class."""
        for _, spec in self._chosen(lasting):
            self.lasting_bytes[spec.buffer_class] += spec.bytes

    def _chosen(self, buffers: list[int]) -> list[tuple[int, Spec]]:
        return [(buffer, self._specs[buffer]) for buffer in buffers]

    def _known(self, schedule: Schedule) -> dict[int, Tensor]:
        """Return the memory of buffers whose block follows from the program, because their size is of one lane."""
        if not self._reused:
            return {}
        every = [bound for bounds in schedule.lanes.values() for bound in bounds]
        touching = lanes_touching(schedule.columns).tolist()
        lanes: dict[int, int] = defaultdict(int)
        for buffer in (b for bound in every for b in bound.births if b not in self._library):
            lanes[self._specs[buffer].bytes] |= touching[buffer]
        found = {}
        for bound in every:
            for buffer in bound.births:
                spec = self._specs[buffer]
                if buffer not in self._library and lanes[spec.bytes].bit_count() == 1:
                    found[buffer] = self._take(buffer, spec)
            for buffer, _ in bound.deaths:
                if buffer in found:
                    self._give_back(buffer, self._specs[buffer])
        return found

    def begin_step(self) -> None:
        """Release buffers that a failed step left alive."""
        for buffer in list(self._tensors):
            self.death(buffer)
        if self.poison:
            for buffer, tensor in self._lasting.items():
                if self._specs[buffer].buffer_class is BufferClass.SKELETAL:
                    poison.fill(tensor)

    def has_address(self, buffer: int) -> bool:
        """Return whether a buffer has one address in every step, known before step 1."""
        return buffer in self._views

    def view(self, buffer: int, first: int, tokens: int) -> Tensor:
        """Return a range of a living buffer's tokens; of one with an address, at any time."""
        whole = self._views.get(buffer)
        if whole is None:
            whole = self._tensors[buffer]
        return whole if tokens == self._specs[buffer].tokens else whole[first : first + tokens]

    def acts(self, buffer: int) -> bool:
        """Return whether the store has something to do at a buffer's birth and death."""
        return buffer not in self._library and (self.poison or buffer not in self._views)

    def birth(self, buffer: int) -> None:
        """Allocate a buffer, unless a library does or it has an address."""
        if buffer in self._library:
            return
        tensor = self._views.get(buffer)
        if tensor is None:
            tensor = self._tensors[buffer] = self._take(buffer, self._specs[buffer])
        if self.poison:
            poison.fill(tensor)

    def death(self, buffer: int) -> None:
        """Release a buffer that ``birth`` has allocated."""
        if self._tensors.pop(buffer, None) is not None:
            self._give_back(buffer, self._specs[buffer])

    def counts(self, bound: Bound) -> tuple[tuple[Count, ...], tuple[Count, ...]]:
        """Return the buffers that are born at an instruction, and those that die there."""
        born = [(self._specs[buffer], 1) for buffer in bound.births]
        dead = [(self._specs[buffer], -1) for buffer, _ in bound.deaths]
        start, end = (
            tuple((bound.number, spec.buffer_class, sign * spec.bytes) for spec, sign in each) for each in (born, dead)
        )
        return start, end

    def peak_bytes(self, counts: Iterable[Count]) -> int:
        """Return the most bytes that live at once in a step with these counts, which are in order of time."""
        lasting = sum(self.lasting_bytes.values())
        return max(accumulate((size for _, _, size in counts), initial=lasting))

    def _make_lasting(self, buffer: int, spec: Spec) -> Tensor:
        """Return the zeroed memory of a buffer that lasts the whole step."""
        del buffer
        return torch.zeros(spec.shape, dtype=spec.dtype, device=self.device)

    def _take(self, buffer: int, spec: Spec) -> Tensor:
        """Return memory for a buffer at its birth."""
        if not self._reused:
            return torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
        try:
            block = self._free[spec.bytes].pop()
        except IndexError:
            block = _Block(spec.bytes, self.device)
        self._blocks[buffer] = block
        return block.tensor(spec)

    def _give_back(self, buffer: int, spec: Spec) -> None:
        """Keep the block of a dead buffer for reuse, if it has one."""
        if (block := self._blocks.pop(buffer, None)) is not None:
            self._free[spec.bytes].append(block)


def _spec(family: Family) -> Spec:
    shape = (family.tokens,) if family.features == 1 else (family.tokens, family.features)
    return Spec(family.buffer_class, family.bytes, family.tokens, shape, TORCH_DTYPES[family.dtype])
