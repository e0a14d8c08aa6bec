"""Rows that no later instruction reads, and the instructions that have to end before debug mode may poison them.

A value dies with the last use before the next instruction that writes the rows whole:

    compute   [fwd l0 writes A]...[bwd l0 reads A]..dead..[fwd l2 writes A]
    d2h                 [offload reads A].............

An offload also ends the life of the rows that it copies: later readers wait for a prefetch. So poison
also shows a read for which the program has no prefetch.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from memo_exec.memory.binding import Bound, Schedule
from memo_sim.program.ir.instruction import BufferClass, Lane, Mode

KEPT = frozenset({BufferClass.STATE, BufferClass.INPUT, BufferClass.WORKSPACE})
"""Classes that are not poisoned: states and inputs live on, and a workspace dies with its instruction."""


@dataclass(frozen=True, slots=True)
class DeadRows:
    """Rows [first, end) of a buffer that are dead once the instructions ``users`` have ended, and until ``next``."""

    buffer: int
    first: int
    end: int
    users: tuple[int, ...]
    """The last use on each lane, in program order."""
    next: int
    """The next instruction that touches the rows. -1: none, and the buffer lasts longer than the step."""
    offload: int
    """The offload that ended their life; -1 if none did."""


@dataclass(slots=True)
class _Segment:
    """What happened to a range of rows so far."""

    users: dict[Lane, int]
    dead: tuple[tuple[int, ...], int] | None = None
    """Users and offload, once the value is dead and the next use is not known yet."""


def dead_rows(schedule: Schedule) -> list[DeadRows]:
    """Return the dead rows of every device buffer of a schedule; neighbouring rows with one fate are one entry."""
    touched: dict[int, list[tuple[Bound, int, int, Mode, bool]]] = defaultdict(list)
    bounds = sorted((b for lane in schedule.lanes.values() for b in lane), key=lambda b: b.number)
    poisoned = [
        family.space == "device" and family.buffer_class not in KEPT and number not in schedule.library
        for number, family in ((n, schedule.family(n)) for n in range(len(schedule.lives.bytes)))
    ]
    for bound in bounds:
        for touch in bound.touches:
            if poisoned[touch.buffer]:
                leaves = (
                    bound.instruction.lane is Lane.D2H
                    and touch.role in ("source", "x")
                    and schedule.family(touch.buffer).buffer_class is BufferClass.SKELETAL
                )
                row = (bound, touch.first, touch.first + touch.tokens, touch.mode, leaves)
                touched[touch.buffer].append(row)
    return [each for buffer, rows in touched.items() for each in _of_buffer(schedule, buffer, rows)]


def _of_buffer(schedule: Schedule, buffer: int, rows: list[tuple[Bound, int, int, Mode, bool]]) -> list[DeadRows]:
    cuts = sorted({row for _, first, end, *_ in rows for row in (first, end)})
    at = {row: i for i, row in enumerate(cuts)}
    segments = [_Segment({}) for _ in cuts[:-1]]
    found: dict[tuple[tuple[int, ...], int, int], list[int]] = defaultdict(list)

    def died(i: int, users: tuple[int, ...], offload: int, following: int) -> None:
        found[users, following, offload].append(i)

    for bound, first, end, mode, leaves in rows:
        for i in range(at[first], at[end]):
            segment = segments[i]
            if segment.dead is not None:
                died(i, *segment.dead, bound.number)
                segment.dead = None
            elif mode is Mode.WRITE and segment.users:
                died(i, tuple(sorted(segment.users.values())), -1, bound.number)
            if mode is Mode.WRITE:
                segment.users = {}
            segment.users[bound.instruction.lane] = bound.number
            if leaves:
                segment.dead = (tuple(sorted(segment.users.values())), bound.number)
                segment.users = {}
    if schedule.lives.birth[buffer] < 0:
        for i, segment in enumerate(segments):
            if segment.dead is not None:
                died(i, *segment.dead, -1)
    return [
        DeadRows(buffer, cuts[low], cuts[high], users, following, offload)
        for (users, following, offload), chosen in found.items()
        for low, high in _runs(chosen)
    ]


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Return the runs of consecutive numbers as (first, end)."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs
