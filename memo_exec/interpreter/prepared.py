"""What the steps of one instruction have in common, prepared before the first step.

The dispatch of an instruction is Python, and small models have thousands of instructions of some microseconds. So a
step makes only what it has to: the views of buffers whose memory changes from step to step.

    before step 1   kernel, call, views of buffers with one address, which operands to guard, the lent slot, what is
                    counted when the instruction starts and ends
    in each step    views of the other buffers, entered into the call and removed again
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Size, Tensor

from memo_exec.memory.binding import Bound, LateFree, Touch
from memo_exec.memory.dtypes import TORCH_DTYPES
from memo_exec.memory.store import BufferStore
from memo_sim.program.ir.work import Copy

if TYPE_CHECKING:
    from memo_exec.kernels import Call, Kernel

Held = list[tuple[Tensor, int, Size]]
"""Operands with the address and shape that a kernel has to leave as they are."""


class Prepared:
    """One instruction, ready to be played in every step; ``call`` has the operands with one address."""

    __slots__ = (
        "_fixed",
        "_moving",
        "births",
        "born",
        "bound",
        "call",
        "copies",
        "deaths",
        "died",
        "freed_late",
        "guarded",
        "held",
        "kernel",
        "moves",
        "plain",
        "slot",
        "talks",
    )

    def __init__(
        self,
        bound: Bound,
        kernel: Kernel,
        call: Call,
        moving: Iterable[Touch],
        store: BufferStore,
        *,
        guarded: Iterable[str],
        slot: Tensor | None,
        talks: bool,
        freed_late: Sequence[LateFree],
    ) -> None:
        self.bound = bound
        self.kernel = kernel
        self.call = call
        self._fixed = call.tensors
        self._moving = tuple(moving)
        self.moves = bool(self._moving)
        """Whether some operands have another address in each step."""
        roles = {*self._fixed, *(touch.role for touch in self._moving)}
        self.guarded = tuple(role for role in guarded if role in roles)
        """Roles of the operands that the kernel must not move or resize."""
        self.held: Held | None = None
        """The guarded operands; None if some of them move."""
        if all(role in self._fixed for role in self.guarded):
            self.held = held_of(self._fixed, self.guarded)
        self.slot = slot
        """Where the arena lets the kernel's library allocate its results."""
        self.talks = talks
        """Whether the kernel waits for other ranks."""
        self.plain = slot is None and not talks
        """Whether the kernel needs no context around it."""
        self.copies = isinstance(bound.instruction.work, Copy)
        """Whether the kernel moves bytes between device and host."""
        self.born, self.died = store.counts(bound)
        """What is counted when the instruction starts, and when it has ended."""
        self.births = tuple(buffer for buffer in bound.births if store.acts(buffer))
        """Buffers that the store has to allocate."""
        self.deaths = tuple((buffer, others) for buffer, others in bound.deaths if others or store.acts(buffer))
        """Buffers that the store has to release, or that other lanes may still use."""
        self.freed_late = freed_late
        """Kept buffers that are freed before this instruction."""

    def begin(self, store: BufferStore) -> Call:
        """Return the call with the operands of this step."""
        call = self.call
        tensors = call.tensors = self._fixed.copy()
        for touch in self._moving:
            tensors[touch.role] = view_of(store, touch)
        return call

    def check(self, held: Held) -> None:
        """Check that the kernel has left operands where they were.

        Raises:
            ValueError: when it moved or resized one.
        """
        for tensor, pointer, shape in held:
            if tensor.data_ptr() != pointer or tensor.shape != shape:
                named = self.bound.instruction
                raise ValueError(f"{named.name}: the kernel of {named.op} moved or resized an operand")

    def end(self) -> None:
        """Drop the operands of this step, so that their memory is free once their buffers are dead."""
        self.call.tensors = self._fixed


def held_of(tensors: Mapping[str, Tensor], roles: Iterable[str]) -> Held:
    """Return the operands of these roles with their addresses and shapes."""
    return [((tensor := tensors[role]), tensor.data_ptr(), tensor.shape) for role in roles]


def view_of(store: BufferStore, touch: Touch) -> Tensor:
    """Return an operand on the device; the bytes of a part of a region as the part's rows."""
    found = store.view(touch.buffer, touch.first, touch.tokens)
    if touch.part is None:
        return found
    rows = found.view(TORCH_DTYPES[touch.part.dtype])
    return rows if touch.part.features == 1 else rows.view(-1, touch.part.features)
