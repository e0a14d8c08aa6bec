"""Debug mode: nothing that was offloaded can be read before it is back, and nothing that shares bytes can overlap.

    poison      when an offload and every earlier reader of the rows have ended, the rows become NaN; reading NaN fails
    checksums   the host's copy equals the rows it came from, and the prefetched rows equal the host's copy
    order       after the step, every pair of instructions that a range orders is compared by its measured times

Orders are derived anew, never taken from the schedule, so that a missing edge shows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from memo_exec.kernels import Call
from memo_exec.lanes import Floats, Progress
from memo_exec.schedule import Bound, Schedule, Touch
from memo_sim.program.edges import derive_edges
from memo_sim.program.instruction import BufferClass, Lane, Mode


class RaceFound(Exception):
    """Two instructions touched the same bytes in the wrong order."""


class Probe:
    """Watches one interpreter."""

    def __init__(self, schedule: Schedule) -> None:
        self._names = schedule.program.ids()
        self._edges = derive_edges(schedule.columns)
        self._skeletal = frozenset(
            buffer
            for bounds in schedule.lanes.values()
            for bound in bounds
            for touch in bound.touches
            for buffer in (touch.buffer,)
            if schedule.family(buffer).buffer_class is BufferClass.SKELETAL
        )
        self._readers = _readers_before_offload(schedule, self._skeletal)
        self._sums: dict[tuple[int, int, int], int] = {}

    def begin_step(self) -> None:
        """Forget the sums of the last step."""
        self._sums.clear()

    def before(self, bound: Bound, call: Call) -> None:
        """Refuse to read poison.

        Raises:
            RaceFound: when an operand that is read holds NaN.
        """
        if bound.instruction.lane is not Lane.COMPUTE:
            return
        for touch in bound.touches:
            tensor = call.tensors.get(touch.role)
            if tensor is None or not touch.mode & Mode.READ or not tensor.is_floating_point():
                continue
            if bool(tensor.isnan().any()):
                name = self._names[bound.number]
                raise RaceFound(f"{name} reads {touch.role} before it was written, or it was not a number")

    def after(self, bound: Bound, call: Call, progress: Progress) -> None:
        """Check a copy, and poison the rows of an offload once nobody reads them any more.

        Raises:
            RaceFound: when a copy differs from its source, or a prefetch finds no finished offload.
        """
        lane = bound.instruction.lane
        if lane not in (Lane.D2H, Lane.H2D):
            return
        source, target = (next(t for t in bound.touches if t.role == role) for role in ("source", "target"))
        device, host = (source, target) if lane is Lane.D2H else (target, source)
        if device.buffer not in self._skeletal:
            return
        if lane is Lane.H2D:
            self._check_prefetch(bound, call, host)
            return
        _synchronize(call["source"])
        if bound.number in self._readers:
            progress.wait(Lane.COMPUTE, self._readers[bound.number])
            _synchronize(call["source"])
        found = checksum(call["target"])
        if found != checksum(call["source"]):
            raise RaceFound(f"{self._names[bound.number]} copied rows that were written at the same time")
        self._sums[host.buffer, host.first, host.tokens] = found
        call["source"].fill_(float("nan"))
        _synchronize(call["source"])

    def _check_prefetch(self, bound: Bound, call: Call, host: Touch) -> None:
        name = self._names[bound.number]
        _synchronize(call["target"])
        wanted = self._sums.get((host.buffer, host.first, host.tokens))
        if wanted is None:
            raise RaceFound(f"{name} came before the offload had ended")
        if checksum(call["target"]) != wanted:
            raise RaceFound(f"{name} brought back other bytes than were offloaded")

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
    """Return a sum over the tensor's bytes as integers, in which every byte's place within 8 counts."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    words = flat[: flat.numel() // 8 * 8].view(torch.int64)
    return int(words.sum()) ^ int(flat[words.numel() * 8 :].sum(dtype=torch.int64))


def _synchronize(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _readers_before_offload(schedule: Schedule, skeletal: frozenset[int]) -> dict[int, int]:
    """Return for every offload the last compute instruction before it that touches its rows."""
    found: dict[int, int] = {}
    last: dict[int, list[tuple[int, int, int]]] = {}
    for bound in sorted((b for bounds in schedule.lanes.values() for b in bounds), key=lambda b: b.number):
        for touch in bound.touches:
            if touch.buffer not in skeletal:
                continue
            if bound.instruction.lane is Lane.COMPUTE:
                last.setdefault(touch.buffer, []).append((bound.number, touch.first, touch.first + touch.tokens))
            elif bound.instruction.lane is Lane.D2H and touch.role == "source":
                earlier = [
                    number
                    for number, first, end in last.pop(touch.buffer, [])
                    if first < touch.first + touch.tokens and touch.first < end
                ]
                if earlier:
                    found[bound.number] = max(earlier)
    return found
