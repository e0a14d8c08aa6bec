"""Finds races in debug mode: reads of offloaded rows that are not back yet, and overlapping uses of the same bytes.

    poison      once an offload and every earlier reader of its rows have ended, the rows become NaN; reading NaN fails
    checksums   the host's copy equals the rows it came from, and the prefetched rows equal the host's copy
    order       after the step, the measured times of every ordered pair of instructions are compared

The checks derive the edges again and do not take them from the schedule, so they find an edge that the schedule lacks.
The compute lane does the poisoning, between two of its instructions. So no copy lane waits longer than its edges say.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from memo_exec.interpreter.lanes import Floats
from memo_exec.kernels import Call
from memo_exec.memory.binding import Bound, Schedule
from memo_sim.program.analysis.edges import derive_edges
from memo_sim.program.ir.instruction import BufferClass, Lane, Mode


class RaceFound(Exception):
    """Two instructions touched the same bytes in the wrong order."""


@dataclass(frozen=True, slots=True)
class _Offloaded:
    """Rows that an offload has copied. They may be poisoned once the instruction ``last_reader`` has ended."""

    name: str
    rows: Tensor
    checksum: int
    last_reader: int


class Probe:
    """Checks the instructions of one interpreter while it plays."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._names = schedule.program.ids()
        self._edges = derive_edges(schedule.columns)
        self._readers = _readers_before_offload(schedule)
        self._sums: dict[tuple[int, int, int], int] = {}
        self._offloaded: deque[_Offloaded] = deque()
        self._poisoning = threading.Lock()

    def begin_step(self) -> None:
        """Forget the last step."""
        self._sums.clear()
        self._offloaded.clear()

    def before(self, bound: Bound, call: Call) -> None:
        """On the compute lane: poison offloaded rows, then check that no operand to be read holds NaN.

        A prefetch may write to offloaded rows before compute plays again: a pipeline stage may prefetch one micro-batch
        while it waits for another. From then on the rows belong to the prefetch and are not poisoned.

        Raises:
            RaceFound: when an operand to be read holds NaN, or offloaded rows differ from the host's copy.
        """
        if bound.instruction.lane is Lane.H2D:
            with self._poisoning:
                kept = [each for each in self._offloaded if not _overlap(each.rows, call["target"])]
                self._offloaded = deque(kept)
        if bound.instruction.lane is not Lane.COMPUTE:
            return
        with self._poisoning:
            for _ in range(len(self._offloaded)):
                self._poison(self._offloaded.popleft(), bound.number)
        for touch in bound.touches:
            tensor = call.tensors.get(touch.role)
            if tensor is None or not touch.mode & Mode.READ or not tensor.is_floating_point():
                continue
            if bool(tensor.isnan().any()):
                name = self._names[bound.number]
                raise RaceFound(f"{name} reads NaN in {touch.role}: it was read too early, or its values were NaN")

    def _poison(self, offloaded: _Offloaded, number: int) -> None:
        """Poison the rows if their last reader comes before instruction ``number``; otherwise keep them for later."""
        if offloaded.last_reader >= number:
            self._offloaded.append(offloaded)
            return
        _synchronize(offloaded.rows)
        if checksum(offloaded.rows) != offloaded.checksum:
            raise RaceFound(f"{offloaded.name} copied rows that another instruction changed during or after the copy")
        offloaded.rows.fill_(float("nan"))
        _synchronize(offloaded.rows)

    def after(self, bound: Bound, call: Call) -> None:
        """On a copy lane: record the checksum of an offload, or compare the one of a prefetch.

        Raises:
            RaceFound: when a prefetch finds no finished offload, or copied other bytes than were offloaded.
        """
        lane = bound.instruction.lane
        if lane not in (Lane.D2H, Lane.H2D):
            return
        source, target = (next(t for t in bound.touches if t.role == role) for role in ("source", "target"))
        device, host = (source, target) if lane is Lane.D2H else (target, source)
        if self._schedule.family(device.buffer).buffer_class is not BufferClass.SKELETAL:
            return
        name, key = self._names[bound.number], (host.buffer, host.first, host.tokens)
        _synchronize(call[source.role if lane is Lane.D2H else target.role])
        found = checksum(call["target"])
        if lane is Lane.D2H:
            self._sums[key] = found
            if self._schedule.lives.death[device.buffer] == bound.number:
                return  # the device buffer dies here, so another buffer may already use its memory
            last = self._readers.get(bound.number, -1)
            with self._poisoning:
                self._offloaded.append(_Offloaded(name, call["source"], found, last))
        elif key not in self._sums:
            raise RaceFound(f"{name} prefetched rows before their offload had ended")
        elif found != self._sums[key]:
            raise RaceFound(f"{name} prefetched other bytes than were offloaded")

    def end_step(self, start_s: Floats, end_s: Floats) -> None:
        """Compare the measured times of every ordered pair.

        Raises:
            RaceFound: when a consumer started before its producer had ended.
        """
        producer, consumer = self._edges.producer, self._edges.consumer
        early = np.flatnonzero(start_s[consumer] < end_s[producer])
        if len(early):
            first = int(early[0])
            names = self._names[int(consumer[first])], self._names[int(producer[first])]
            raise RaceFound(f"{names[0]} started before {names[1]} had ended ({len(early)} such pairs)")


def checksum(tensor: Tensor) -> int:
    """Return a checksum of the tensor's bytes: 8-byte words weighted by their position, so that order matters."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    words = flat[: flat.numel() // 8 * 8].view(torch.int64)
    places = torch.arange(1, len(words) + 1, device=words.device)
    rest = flat[len(words) * 8 :]
    return int((words * places).sum()) ^ int((rest * torch.arange(1, len(rest) + 1, device=rest.device)).sum())


def _overlap(one: Tensor, two: Tensor) -> bool:
    """Return whether two contiguous tensors share bytes."""
    return one.data_ptr() < two.data_ptr() + two.nbytes and two.data_ptr() < one.data_ptr() + one.nbytes


def _synchronize(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _readers_before_offload(schedule: Schedule) -> dict[int, int]:
    """Return, for every offload, the last compute instruction before it that touches its rows (-1 if none)."""
    found: dict[int, int] = {}
    touched: dict[int, list[tuple[int, int, int]]] = {}
    for bound in sorted((b for bounds in schedule.lanes.values() for b in bounds), key=lambda b: b.number):
        for touch in bound.touches:
            first, end = touch.first, touch.first + touch.tokens
            if bound.instruction.lane is Lane.COMPUTE:
                touched.setdefault(touch.buffer, []).append((bound.number, first, end))
            elif bound.instruction.lane is Lane.D2H and touch.role == "source":
                earlier = [n for n, low, high in touched.pop(touch.buffer, []) if low < end and first < high]
                found[bound.number] = max(earlier, default=-1)
    return found
