"""Runs lanes as CUDA streams: threads only issue instructions, and events order and time them.

Each instruction lies between two events. A lane that waits for another makes its stream wait for an event, so nothing
synchronises with the host inside a step. Only the host lane does: its thread waits for the events that it needs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from memo_exec.interpreter.lanes import Floats
from memo_sim.program.ir.instruction import Lane


class StreamTimekeeper:
    """One CUDA stream per lane. Time zero is an event that the device has passed before any lane starts."""

    def __init__(self, lanes: Iterable[Lane], device: torch.device) -> None:
        self.device = device
        self.streams = {lane: _stream(device) for lane in lanes if lane is not Lane.HOST}
        self._zero = _event()
        self._zero_s = 0.0
        self._starts: list[torch.cuda.Event | float | None] = []
        self._ends: list[torch.cuda.Event | float | None] = []
        self._events: list[torch.cuda.Event | None] = []
        """Two events of each instruction, made in its first step and recorded again in every later one."""

    def begin_step(self, instructions: int) -> None:
        """Record time zero on the device and on the host, while the device is idle."""
        self._starts = [None] * instructions
        self._ends = [None] * instructions
        self._events += [None] * (2 * instructions - len(self._events))
        torch.cuda.synchronize(self.device)  # no event of the step before is waited for any more
        for _ in range(2):  # the first record is slow
            before = time.perf_counter()
            self._zero.record(torch.cuda.current_stream(self.device))
            self._zero.synchronize()
            # The device passed the event between the two readings, so the host clock is off by at most half of that.
            self._zero_s = (before + time.perf_counter()) / 2

    @contextmanager
    def playing(self, lane: Lane) -> Iterator[None]:
        """Make the lane's stream current."""
        if lane is Lane.HOST:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self.streams[lane]):
            yield

    def order(self, lane: Lane, producer_lane: Lane, producer: int) -> None:
        """Make the lane's stream (or, for the host lane, its thread) wait for the producer's event."""
        event = self._ends[producer]
        if producer_lane is Lane.HOST or not isinstance(event, torch.cuda.Event):
            return
        if lane is Lane.HOST:
            event.synchronize()
        else:
            self.streams[lane].wait_event(event)

    def release(self, tensor: Tensor, lanes: Iterable[Lane]) -> None:
        """Make torch's allocator wait for the lanes' streams before it reuses the tensor's memory."""
        for lane in lanes:
            if lane is not Lane.HOST:
                tensor.record_stream(self.streams[lane])

    def start(self, lane: Lane, number: int) -> None:
        """Record an event, or note the time on the host lane."""
        self._starts[number] = self._now(lane, 2 * number)

    def end(self, lane: Lane, number: int) -> None:
        """Record an event, or note the time on the host lane."""
        self._ends[number] = self._now(lane, 2 * number + 1)

    def _now(self, lane: Lane, place: int) -> torch.cuda.Event | float:
        if lane is Lane.HOST:
            return time.perf_counter() - self._zero_s
        if (event := self._events[place]) is None:
            event = self._events[place] = _event()
        event.record(self.streams[lane])
        return event

    def times(self) -> tuple[Floats, Floats]:
        """Return start and end of every instruction in seconds; waits until all streams have ended."""
        torch.cuda.synchronize(self.device)
        return self._seconds(self._starts), self._seconds(self._ends)

    def _seconds(self, marks: list[torch.cuda.Event | float | None]) -> Floats:
        found = [
            self._zero.elapsed_time(mark) / 1e3 if isinstance(mark, torch.cuda.Event) else float(mark or 0.0)
            for mark in marks
        ]
        return np.array([max(0.0, seconds) for seconds in found])


def make_deterministic() -> None:
    """Make torch use only kernels that give the same bits each time, in the whole process."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
