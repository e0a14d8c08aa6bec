"""The record of one played step: loss, gradient norm, times of every instruction, memory, bytes moved, waits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memo_exec.interpreter.lanes import Floats
from memo_exec.memory.binding import Schedule
from memo_exec.memory.store import BufferStore, Count
from memo_sim.contract.plan import MovedBytes
from memo_sim.contract.trace import MemoryCurve, Spans, Trace, Wait
from memo_sim.program.analysis.liveness import live_bytes
from memo_sim.program.ir.instruction import BufferClass
from memo_sim.program.ir.program import Program


@dataclass(frozen=True)
class StepRecord:
    """One played step. Entry i of ``start_s`` and ``end_s`` belongs to instruction i of the program."""

    loss: float
    grad_norm: float
    start_s: Floats
    end_s: Floats
    step_s: float
    """From the step's start to the end of its last instruction."""
    peak_host_bytes: int
    """Size of the host slab."""
    moved: MovedBytes
    schedule: Schedule
    counts: list[Count]
    """Births and releases of buffers, in order of time."""
    store: BufferStore

    # Most steps are asked for no more than their loss and seconds, so the rest is computed when it is read.

    @cached_property
    def peak_device_bytes(self) -> int:
        """Most bytes of buffers that lived at once; with an arena, the arena's size.

        It never exceeds the program's peak, which is computed in program order. It may be less, because a late lane may
        allocate a buffer only after another one has died.
        """
        return self.store.peak_bytes(self.counts)

    @cached_property
    def waits(self) -> tuple[Wait, ...]:
        """The waits of lanes for other lanes."""
        return waits_of(self.schedule, self.start_s, self.end_s)

    @cached_property
    def device_memory(self) -> MemoryCurve:
        """The device bytes by buffer class over time."""
        return device_curve(self.counts, self.store.lasting_bytes, self.start_s, self.end_s)

    @cached_property
    def host_memory(self) -> MemoryCurve:
        """The host bytes by buffer class over time."""
        return host_curve(self.schedule, self.end_s)


def lane_busy_s(program: Program, record: StepRecord) -> dict[str, float]:
    """Return the seconds each lane was busy."""
    busy: dict[str, float] = defaultdict(float)
    seconds = (record.end_s - record.start_s).tolist()
    for (_, instruction), spent in zip(program.walk(), seconds, strict=True):
        busy[instruction.lane.label] += spent
    return dict(busy)


def measured_trace(
    program: Program, record: StepRecord, *, program_sha256: str | None = None, rank: int = 0, world_size: int = 1
) -> Trace:
    """Return the step as a ``memo.trace/1`` of origin measured, with the program's instruction ids.

    ``program_sha256`` is the hash in the plan. Give it when the plan's hash covers more than this rank's program.
    """
    walked = list(program.walk())
    return Trace(
        origin="measured",
        program_sha256=program_sha256 or program.sha256,
        rank=rank,
        world_size=world_size,
        step_s=record.step_s,
        spans=Spans(
            ids=[name for name, _ in walked],
            ops=[instruction.op for _, instruction in walked],
            lanes=[instruction.lane.label for _, instruction in walked],
            start_s=record.start_s.tolist(),
            end_s=record.end_s.tolist(),
        ),
        device_memory=record.device_memory,
        host_memory=record.host_memory,
        waits=list(record.waits),
        micro_batches_played=program.micro_batches,
        micro_batches=program.micro_batches,
    )


def waits_of(schedule: Schedule, start_s: Floats, end_s: Floats) -> tuple[Wait, ...]:
    """Return the waits of lanes for other lanes.

    A wait lasts from the end of the lane's previous instruction to the end of the producer, in seconds.
    """
    edges, names = schedule.edges, schedule.program.ids()
    latest: dict[int, int] = {}
    for producer, consumer in zip(edges.producer.tolist(), edges.consumer.tolist(), strict=True):
        if consumer not in latest or end_s[producer] > end_s[latest[consumer]]:
            latest[consumer] = producer
    previous: dict[int, float] = {}
    for bounds in schedule.lanes.values():
        free = 0.0
        for bound in bounds:
            previous[bound.number] = free
            free = float(end_s[bound.number])
    found = []
    for consumer, producer in sorted(latest.items()):
        seconds = min(float(end_s[producer]), float(start_s[consumer])) - previous[consumer]
        if seconds > 0:
            found.append(
                Wait(
                    instruction=names[consumer],
                    waits_for=names[producer],
                    start_s=previous[consumer],
                    seconds=seconds,
                )
            )
    return tuple(found)


def device_curve(
    counts: Iterable[Count], lasting_bytes: dict[BufferClass, int], start_s: Floats, end_s: Floats
) -> MemoryCurve:
    """Return the device bytes by buffer class over time.

    A birth happens at the start of its instruction, a death at the end.
    """
    events = [(start_s[i] if size > 0 else end_s[i], by, size) for i, by, size in counts]
    return _curve(events, lasting_bytes)


def host_curve(schedule: Schedule, end_s: Floats) -> MemoryCurve:
    """Return the host bytes by buffer class over time, for instructions in program order."""
    curves = live_bytes(schedule.lives, device=False)
    time_s = np.maximum.accumulate(end_s) if len(end_s) else end_s
    total = np.sum(list(curves.values()), axis=0) if curves else np.zeros(0)
    keep = np.flatnonzero(np.r_[True, np.diff(total) != 0]) if len(total) else np.zeros(0, dtype=np.int64)
    times = time_s[keep].tolist()
    if times:
        times[0] = 0.0
    return MemoryCurve(time_s=times, bytes_by_class={name: curve[keep].tolist() for name, curve in curves.items()})


def _curve(events: list[tuple[float, BufferClass, int]], lasting: dict[BufferClass, int]) -> MemoryCurve:
    events.sort(key=lambda event: event[0])
    classes = sorted({by for _, by, _ in events} | set(lasting))
    now = {by: lasting.get(by, 0) for by in classes}
    time_s = [0.0]
    columns = {by.value: [now[by]] for by in classes}
    for at, by, size in events:
        now[by] += size
        if at != time_s[-1]:
            time_s.append(float(at))
            for column in columns.values():
                column.append(column[-1])
        columns[by.value][-1] = now[by]
    return MemoryCurve(time_s=time_s, bytes_by_class=columns)
