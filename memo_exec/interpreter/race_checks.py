"""Checks a step while it is played (debug mode): values, poison, copies and order.

    values      every row that an instruction reads holds the value that the model asks for there (``verify/values.py``)
    rows        two instructions that touch the same rows, one of them to write, never play at the same time
    poison      dead rows and outputs become NaN; a read of NaN fails, and so does a kernel that writes nothing
    checksums   the host's copy equals the rows it came from, and the prefetched rows equal the host's copy
    pairs       each offload has one prefetch, and each prefetch one offload
    order       after the step, the measured times of every ordered pair of instructions are compared

An instruction reads when it starts, and its values arrive when it has ended. So a reader that does not wait for its
writer finds the value that its rows had before.

The checks derive the edges again and do not take them from the schedule, so they find an edge that the schedule lacks.
"""

from __future__ import annotations

import threading

import numpy as np
import torch

from memo_exec.interpreter.lanes import Floats
from memo_exec.interpreter.poisoning import Poisoning, RaceFound, checksum, synchronize
from memo_exec.kernels import Call
from memo_exec.memory.binding import Bound, Schedule
from memo_exec.memory.store import BufferStore
from memo_sim.contract.plan import Decisions
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.edges import derive_edges
from memo_sim.program.ir.instruction import BufferClass, Lane, Mode
from memo_sim.program.ir.kinds import Phase
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Copy
from memo_sim.program.verify.value_call import Call as CheckedCall
from memo_sim.program.verify.values import Values

__all__ = ["Probe", "RaceFound", "checksum"]


class Probe:
    """Checks the instructions of one interpreter while it plays.

    ``program`` is the lowered one, of which the checker of values knows the rules; ``schedule`` may have a rank's own
    operands (``distributed/own_program.py``), in instructions of the same numbers. What those read is left to the
    checker before the run: a rank's norm may leave out gradients that other ranks count, and does not wait for them.
    """

    def __init__(self, schedule: Schedule, store: BufferStore, decisions: Decisions, program: Program) -> None:
        self._schedule = schedule
        self._checked = program, expand(program), decisions
        lowered = [instruction.operands for _, instruction in program.walk()]
        own = [instruction.operands for _, instruction in schedule.program.walk()]
        self._rewritten = [one != two for one, two in zip(lowered, own, strict=True)]
        """Whether an instruction has a rank's own operands; its edges are then not those of the lowered program."""
        self._lock = threading.Lock()
        self._names = schedule.program.ids()
        self._edges = derive_edges(schedule.columns)
        self._sums: dict[tuple[int, int, int], int] = {}
        self._left: set[tuple[int, int, int]] = set()
        """Host rows, by buffer, first row and rows, that wait for their prefetch."""
        self._poisoning = Poisoning(schedule, store)

    def begin_step(self) -> None:
        """Forget the last step; call it before the first one too."""
        self._values = Values(*self._checked)
        self._playing: dict[int, tuple[Bound, CheckedCall]] = {}
        self._sums.clear()
        self._left.clear()
        self._poisoning.begin_step()

    def before(self, bound: Bound, call: Call) -> None:
        """Check what the instruction is about to read, and poison what it is about to write.

        Raises:
            RaceFound: when the instruction reads another value than it needs, or NaN, when another instruction that
                plays now touches its rows, or when offloaded rows differ from the host's copy.
        """
        with self._lock:
            for other, _ in self._playing.values():
                self._refuse_conflict(bound, other)
            checked = self._values.begin(bound.number)
            if checked.faults and not self._rewritten[bound.number]:
                raise RaceFound(self._wrong_values(bound, checked.faults))
            self._playing[bound.number] = bound, checked
        self._poisoning.before(bound, call)

    def _wrong_values(self, bound: Bound, faults: list[str]) -> str:
        """Return an instruction's faults, and which rows the operands are that they name."""
        named = [touch for touch in bound.touches if any(f": {touch.role} " in fault for fault in faults)]
        rows = ", ".join(f"{touch.role}: {self._poisoning.rows_of(touch)}" for touch in named)
        return "; ".join(faults) + (f" ({rows})" if rows else "")

    def _refuse_conflict(self, one: Bound, two: Bound) -> None:
        """Refuse to start an instruction while ``two`` touches rows of it, and one of them writes."""
        for mine in one.touches:
            for theirs in two.touches:
                overlap = mine.first < theirs.first + theirs.tokens and theirs.first < mine.first + mine.tokens
                if mine.buffer == theirs.buffer and overlap and (mine.mode | theirs.mode) & Mode.WRITE:
                    names = self._names[one.number], self._names[two.number]
                    rows = self._poisoning.rows_of(mine)
                    raise RaceFound(f"{names[0]} started before {names[1]} had ended; both touch {rows}")

    def after(self, bound: Bound, call: Call) -> None:
        """Check what the instruction has written.

        Raises:
            RaceFound: when it has not written an output, when a prefetch finds no finished offload, or when it copied
                other bytes than were offloaded.
        """
        if isinstance(bound.instruction.work, Copy):
            self._check_copy(bound, call)
        self._poisoning.after(bound, call)
        with self._lock:
            _, checked = self._playing.pop(bound.number)
            self._values.finish(bound.number, checked)

    def _check_copy(self, bound: Bound, call: Call) -> None:
        """Record the checksum of an offload, or compare the one of a prefetch."""
        lane = bound.instruction.lane
        source, target = (next(t for t in bound.touches if t.role == role) for role in ("source", "target"))
        device, host = (source, target) if lane is Lane.D2H else (target, source)
        classes = {self._schedule.family(touch.buffer).buffer_class for touch in (device, host)}
        if BufferClass.SKELETAL not in classes:
            return
        name, key = self._names[bound.number], (host.buffer, host.first, host.tokens)
        synchronize(call[source.role if lane is Lane.D2H else target.role].device)
        found = checksum(call["target"])
        if lane is Lane.D2H:
            self._sums[key] = found
            if bound.instruction.phase is Phase.OFFLOAD:
                self._left.add(key)
            copy = call["target"]
            rows = copy if device.part is None else copy.view(-1).view(torch.uint8)  # a region has rows of one byte
            self._poisoning.offloaded(bound, device.first, rows)
        elif key not in self._sums:
            raise RaceFound(f"{name} prefetched rows before their offload had ended")
        elif found != self._sums[key]:
            raise RaceFound(f"{name} prefetched other bytes than were offloaded")
        elif bound.instruction.phase is Phase.PREFETCH:
            if key not in self._left:
                raise RaceFound(f"{name} prefetched rows that an earlier prefetch had brought back")
            self._left.remove(key)

    def end_step(self, start_s: Floats, end_s: Floats) -> None:
        """Compare the measured times of every ordered pair.

        Raises:
            RaceFound: when a consumer started before its producer had ended, when offloaded rows never came back, or
                when terms of a gradient are missing.
        """
        producer, consumer = self._edges.producer, self._edges.consumer
        early = np.flatnonzero(start_s[consumer] < end_s[producer])
        if len(early):
            first = int(early[0])
            names = self._names[int(consumer[first])], self._names[int(producer[first])]
            raise RaceFound(f"{names[0]} started before {names[1]} had ended ({len(early)} such pairs)")
        if self._left:
            buffer, first, tokens = min(self._left)
            family = self._schedule.family(buffer).name
            raise RaceFound(
                f"rows {first} to {first + tokens} of {family} were offloaded, but never prefetched"
                f" ({len(self._left)} such offloads)"
            )
        if faults := self._values.end():
            raise RaceFound("; ".join(faults[:3]))
