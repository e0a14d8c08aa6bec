"""Poisons dead rows and outputs in debug mode, and finds kernels that read poison or write nothing.

    dead rows   poisoned by the compute lane once every user has ended, before the next use (``dead_rows.py``)
    outputs     poisoned before each kernel of the compute lane that writes them whole; rows that a kernel of any lane
                leaves poisoned were not written
    sums        an operand that a kernel changes in place has to change, unless what is added is zero

Only the compute lane poisons, between two of its instructions. So no copy lane waits longer than its edges say.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from dataclasses import dataclass

import torch
from torch import Tensor

from memo_exec.distributed.groups import communicates
from memo_exec.interpreter.dead_rows import DeadRows, dead_rows
from memo_exec.kernels import Call
from memo_exec.memory import poison
from memo_exec.memory.binding import Bound, Schedule, Touch
from memo_exec.memory.store import BufferStore
from memo_sim.program.ir.instruction import BufferClass, Lane, Mode

BLOCK = 2**22
"""Numbers of a checksum that are weighted at once."""

_MAY_CHANGE_NOTHING = ("grads.scale", "fp8.quantize", "params.quantize")
SCRATCH_ROLES = frozenset({"exponentials", "workspace"})
"""Operands in which a kernel may keep intermediate results, and which it may leave unwritten."""


class RaceFound(Exception):
    """An instruction touched bytes in the wrong order, read another value than it needs, or left rows unwritten."""


@dataclass(slots=True)
class _Dying:
    """Dead rows of the current step, and how many of their users have not ended."""

    rows: DeadRows
    users_left: int
    checksum: int | None = None
    """Checksum of the offload's copy; the rows must not change until they are poisoned."""


class Poisoning:
    """Poisons the buffers of one interpreter while it plays."""

    def __init__(self, schedule: Schedule, store: BufferStore) -> None:
        self._schedule = schedule
        self._store = store
        self._names = schedule.program.ids()
        self._dead = dead_rows(schedule)
        self._lane = [Lane(lane) for lane in schedule.columns.lane.tolist()]
        self._changed = threading.Condition()
        self._filling = -1
        """The next writer of the rows that are being poisoned; it waits until they are."""

    def begin_step(self) -> None:
        """Forget the last step; call it before the first one too."""
        dying = [_Dying(rows, len(rows.users)) for rows in self._dead]
        self._used_by: dict[int, list[_Dying]] = defaultdict(list)
        for each in dying:
            for user in each.rows.users:
                self._used_by[user].append(each)
        self._ready: deque[_Dying] = deque()
        self._begun = [False] * len(self._names)
        self._sums: dict[str, int] = {}

    def before(self, bound: Bound, call: Call) -> None:
        """Poison dead rows and outputs, if this is the compute lane; then look for poison among what is read.

        Raises:
            RaceFound: when an operand to be read holds NaN, or rows changed after their offload.
        """
        compute = bound.instruction.lane is Lane.COMPUTE
        if compute:
            self._poison_dead()
        with self._changed:
            self._changed.wait_for(lambda: self._filling != bound.number)
            self._begun[bound.number] = True
        if not compute:
            return
        for touch in bound.touches:
            tensor = call.tensors.get(touch.role)
            if tensor is None:
                continue
            if touch.mode is Mode.WRITE:
                poison.fill(tensor)
            elif tensor.is_floating_point() and bool(tensor.isnan().any()):
                name = self._names[bound.number]
                raise RaceFound(f"{name} reads NaN in {touch.role}: it was read too early, or its values were NaN")
        self._sums = {t.role: poison.fingerprint(call[t.role]) for t in self._added(bound, call)}

    def after(self, bound: Bound, call: Call) -> None:
        """Look for outputs that the instruction has not written, then poison the rows of which it was the last user.

        Raises:
            RaceFound: when a whole output is still poison, or a kernel in place has changed nothing.
        """
        name = self._names[bound.number]
        for touch in bound.touches:
            tensor = call.tensors.get(touch.role)
            if tensor is None or touch.mode is not Mode.WRITE or self._is_scratch(touch):
                continue
            if poison.is_whole(tensor):
                raise RaceFound(f"{name} has not written {touch.role}: {self.rows_of(touch)} hold poison")
        added = self._added(bound, call)
        if added and all(self._sums[t.role] == poison.fingerprint(call[t.role]) for t in added):
            read = [call.tensors.get(t.role) for t in bound.touches if t.mode is Mode.READ]
            addends = [tensor for tensor in read if tensor is not None and tensor.is_floating_point()]
            if all(bool(tensor.any()) for tensor in addends or [call[t.role] for t in added]):
                raise RaceFound(
                    f"{name} has changed nothing in {added[0].role}: {self.rows_of(added[0])} are as before"
                )
        dying_here, compute = self._used_by.get(bound.number, ()), bound.instruction.lane is Lane.COMPUTE
        if dying_here and not compute:
            synchronize(call.context.device)  # the compute lane poisons the rows, and its stream does not wait for this
        with self._changed:
            for dying in dying_here:
                dying.users_left -= 1
                if not dying.users_left:
                    self._ready.append(dying)
        if compute:
            self._poison_dead()

    def offloaded(self, bound: Bound, first: int, copy: Tensor) -> None:
        """Remember the checksums of an offload's copy, whose rows begin at ``first``. Call it before ``after``."""
        for dying in self._used_by.get(bound.number, ()):
            if dying.rows.offload == bound.number:
                dying.checksum = checksum(copy[dying.rows.first - first : dying.rows.end - first])

    def _poison_dead(self) -> None:
        """Poison the rows that are dead, one after another. No other lane but their next writer's waits for it."""
        while True:
            with self._changed:
                if not self._ready:
                    return
                dying = self._ready.popleft()
                if dying.rows.next >= 0 and self._begun[dying.rows.next]:
                    continue
                self._filling = dying.rows.next
            try:
                self._poison(dying)
            finally:
                with self._changed:
                    self._filling = -1
                    self._changed.notify_all()

    def _poison(self, dying: _Dying) -> None:
        rows = dying.rows
        tensor = self._store.view(rows.buffer, rows.first, rows.end - rows.first)
        if dying.checksum is not None and checksum(tensor) != dying.checksum:
            name = self._names[rows.offload]
            raise RaceFound(f"{name} copied rows that another instruction changed during or after the copy")
        poison.fill(tensor)
        if rows.next >= 0 and self._lane[rows.next] is not Lane.COMPUTE:
            synchronize(tensor.device)  # the next writer's stream waits for the last user, not for this

    def _added(self, bound: Bound, call: Call) -> list[Touch]:
        """Return the operands that a kernel of the compute lane changes in place, if one of them has to change.

        Single numbers may be sums of zeros (a loss without targets), and so may the rows of a vocabulary that tensor
        parallelism divides. Gradients may be scaled by 1, and what is quantised may be no larger than what was before.
        """
        instruction = bound.instruction
        if instruction.lane is not Lane.COMPUTE or communicates(instruction.work):
            return []
        if instruction.op in _MAY_CHANGE_NOTHING or (
            instruction.op == "embed.bwd" and call.context.mesh.size("tp") > 1
        ):
            return []
        found = [t for t in bound.touches if t.mode is Mode.ACCUMULATE and t.role in call.tensors]
        small = any(call[t.role].numel() == 1 or call[t.role].dtype != torch.float32 for t in found)
        return [] if small else found

    def _is_scratch(self, touch: Touch) -> bool:
        return touch.role in SCRATCH_ROLES or self._schedule.family(touch.buffer).buffer_class is BufferClass.WORKSPACE

    def rows_of(self, touch: Touch) -> str:
        """Return the rows of an operand in words."""
        family = self._schedule.family(touch.buffer)
        number = touch.buffer - self._schedule.program.family_bases[family.name]
        return f"rows {touch.first} to {touch.first + touch.tokens} of {family.name} {number}"


def checksum(tensor: Tensor) -> int:
    """Return a checksum of the tensor's bytes: 8-byte words weighted by their position, so that order matters."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    flat = flat.clone() if flat.storage_offset() % 8 else flat
    words = flat[: flat.numel() // 8 * 8].view(torch.int64)
    rest = flat[len(words) * 8 :]
    return _weighted(words) ^ _weighted(rest)


def _weighted(numbers: Tensor) -> int:
    """Return the sum of numbers times their places, modulo 2^64; in blocks, which take little memory on the device."""
    total = torch.zeros((), dtype=torch.int64, device=numbers.device)
    for first in range(0, len(numbers), BLOCK):
        block = numbers[first : first + BLOCK]
        total += (block * torch.arange(first + 1, first + 1 + len(block), device=block.device)).sum()
    return int(total)


def synchronize(device: torch.device) -> None:
    """Wait for everything that was issued to the calling lane's stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
