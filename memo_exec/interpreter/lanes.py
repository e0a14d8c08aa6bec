"""Runs each lane in a thread, which plays its instructions in order and waits for other lanes where an edge says so.

``Progress`` holds the number of the last instruction that each lane has finished. Numbers rise along a lane, so
"instruction p of lane L has ended" is ``done[L] >= p``. A ``Timekeeper`` orders and times instructions on a device.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memo_sim.program.ir.instruction import Lane

Floats = NDArray[np.float64]


class LaneStopped(Exception):
    """Another lane has failed. The error of that lane is the one to show."""


class Progress:
    """The last instruction that each lane has finished in the current step."""

    def __init__(self, lanes: Iterable[Lane]) -> None:
        self.done = dict.fromkeys(lanes, -1)
        self.failure: BaseException | None = None
        self._conditions = {lane: threading.Condition() for lane in self.done}

    def wait(self, lane: Lane, number: int) -> None:
        """Return once ``lane`` has finished instruction ``number``.

        Raises:
            LaneStopped: when another lane has failed, so that ``lane`` never finishes it.
        """
        if self.done[lane] >= number:
            return
        condition = self._conditions[lane]
        with condition:
            condition.wait_for(lambda: self.done[lane] >= number or self.failure is not None)
        if self.done[lane] < number:
            raise LaneStopped

    def finish(self, lane: Lane, number: int, *, awaited: bool) -> None:
        """Record that ``lane`` has finished ``number``; with ``awaited``, wake the lanes that may wait for it."""
        self.done[lane] = number
        if awaited:
            condition = self._conditions[lane]
            with condition:
                condition.notify_all()

    def fail(self, error: BaseException) -> None:
        """Keep the first error and stop every lane that waits."""
        if self.failure is None and not isinstance(error, LaneStopped):
            self.failure = error
        for condition in self._conditions.values():
            with condition:
                condition.notify_all()


class Timekeeper(Protocol):
    """Starts, orders and times instructions on one kind of device."""

    def begin_step(self, instructions: int) -> None:
        """Set time zero."""

    @contextmanager
    def playing(self, lane: Lane) -> Iterator[None]:
        """Make ``lane`` current in the calling thread."""

    def order(self, lane: Lane, producer_lane: Lane, producer: int) -> None:
        """Make the next instruction of ``lane`` wait for ``producer``, which its own lane has finished or issued."""

    def release(self, tensor: Tensor, lanes: Iterable[Lane]) -> None:
        """Keep a tensor's memory from being reused until ``lanes`` have ended their issued uses of it."""

    def start(self, lane: Lane, number: int) -> None:
        """Note that ``number`` starts."""

    def end(self, lane: Lane, number: int) -> None:
        """Note that ``number`` has ended (or has been issued)."""

    def times(self) -> tuple[Floats, Floats]:
        """Return start and end of every instruction in seconds, once all have ended."""


class HostTimekeeper:
    """Times instructions on the CPU. They run in the calling thread, so a finished instruction has also ended."""

    def __init__(self) -> None:
        self._zero = 0.0
        self._starts: list[float] = []
        self._ends: list[float] = []

    def begin_step(self, instructions: int) -> None:
        """Set time zero."""
        self._starts = [0.0] * instructions
        self._ends = [0.0] * instructions
        self._zero = time.perf_counter()

    @contextmanager
    def playing(self, lane: Lane) -> Iterator[None]:
        """Nothing to make current: the thread is the lane."""
        del lane
        yield

    def order(self, lane: Lane, producer_lane: Lane, producer: int) -> None:
        """Nothing to do: the producer has ended."""

    def release(self, tensor: Tensor, lanes: Iterable[Lane]) -> None:
        """Nothing to do: every use of the tensor has ended."""

    def start(self, lane: Lane, number: int) -> None:
        """Note the time."""
        del lane
        self._starts[number] = time.perf_counter()

    def end(self, lane: Lane, number: int) -> None:
        """Note the time."""
        del lane
        self._ends[number] = time.perf_counter()

    def times(self) -> tuple[Floats, Floats]:
        """Return start and end of every instruction in seconds from time zero."""
        return np.array(self._starts) - self._zero, np.array(self._ends) - self._zero


def available_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def intra_op_threads(lane: Lane, device: torch.device, sharing: int = 1) -> int:
    """Return how many threads an operator of ``lane`` uses: all cores but one for compute, one thread otherwise.

    ``sharing`` is the number of processes on this host; each gets an equal share of the cores. On CUDA the host lane
    is the one that computes on cores.
    """
    computes = lane is Lane.COMPUTE if device.type == "cpu" else lane is Lane.HOST
    return max(1, available_cores() // sharing - 1) if computes else 1


def lane_threads(lanes: Iterable[Lane], device: torch.device, sharing: int = 1) -> dict[Lane, ThreadPoolExecutor]:
    """Return one thread per lane, with its number of intra-op threads set."""
    own = torch.get_num_threads()  # a thread reads torch's default at its first call, so read it before it changes
    threads = {}
    for lane in lanes:
        threads[lane] = ThreadPoolExecutor(1, thread_name_prefix=f"lane-{lane.label}")
        threads[lane].submit(_set_intra_op_threads, intra_op_threads(lane, device, sharing)).result()
    torch.set_num_threads(own)
    return threads


def _set_intra_op_threads(count: int) -> None:
    torch.get_num_threads()
    torch.set_num_threads(count)
