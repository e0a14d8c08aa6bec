"""Runs copies between device and host as the interpreter does: in the lanes' own threads (on CUDA, streams).

A copy runs alone, at the same time as a copy in the other direction, or at the same time as compute. The last case also
shows how much copies slow compute down.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from types import TracebackType
from typing import Literal, Self, TypeVar

import torch
from torch import Tensor

from memo_exec.interpreter.lanes import lane_threads
from memo_exec.kernels import KERNELS, Call, Context
from memo_exec.probes.operators import MOST_OPERAND_SETS, operand_sets
from memo_exec.probes.timing import Effort, Sample, back_to_back, sample_of, time_call
from memo_sim.contract.plan import Decisions
from memo_sim.program.ir.instruction import Instruction, Lane
from memo_sim.program.ir.work import Copy

T = TypeVar("T")

OPS: dict[Lane, Literal["d2h", "h2d"]] = {Lane.D2H: "d2h", Lane.H2D: "h2d"}

MOST_COPIED_BYTES = 2**27
"""Bytes of all buffers of one lane's copies, on a CPU; both lanes copy beside a layer's operators at once."""


class Lanes:
    """The compute and copy lanes of one device; each can repeat a call until it is stopped.

    ``sharing``: how many processes share this host's cores in a run; operators get as many threads as there.
    """

    def __init__(self, device: torch.device, decisions: Decisions, cache_bytes: int, *, sharing: int = 1) -> None:
        self.device = device
        self.cache_bytes = cache_bytes
        self.context = Context(decisions, device)
        self._threads = lane_threads((Lane.COMPUTE, Lane.D2H, Lane.H2D), device, sharing)
        self._streams: dict[Lane, torch.cuda.Stream] = {}
        if device.type == "cuda":
            for lane in self._threads:
                self._streams[lane] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for thread in self._threads.values():
            thread.shutdown()

    def inside(self, lane: Lane, work: Callable[[], T]) -> T:
        """Run ``work()`` in the lane's thread (and stream), with its number of intra-op threads; return the result."""
        return self.submit(lane, work).result()

    def submit(self, lane: Lane, work: Callable[[], T]) -> Future[T]:
        """Start ``work()`` in the lane's thread (and stream), and return its future."""
        return self._threads[lane].submit(self._in_lane, lane, work)

    def alone(self, lane: Lane, size_bytes: int, effort: Effort) -> Sample:
        """Return the time of one copy of ``size_bytes`` while nothing else runs."""
        copy = self.copier(lane, size_bytes)
        return self.inside(lane, lambda: time_call(copy, self.device, effort))

    def copier(self, lane: Lane, size_bytes: int) -> Callable[[int], None]:
        """Return a function that copies ``size_bytes`` in the lane's direction.

        It cycles through several buffers, which together exceed the cache unless that takes too many.
        """
        sets = min(4 * MOST_OPERAND_SETS, 2 + self.cache_bytes // size_bytes)
        sets = operand_sets(self.device, sets, 2 * size_bytes, MOST_COPIED_BYTES)
        pairs = [self._pair(lane, size_bytes) for _ in range(sets)]
        instruction = Instruction(OPS[lane], OPS[lane], lane, Copy(size_bytes, OPS[lane]), ())
        calls = [Call(instruction, self.context, pair) for pair in pairs]
        kernel = KERNELS[OPS[lane]]
        return lambda i: kernel(calls[i % sets])

    def _pair(self, lane: Lane, size_bytes: int) -> dict[str, Tensor]:
        on_device = torch.ones(size_bytes // 4, device=self.device)
        host = torch.ones(size_bytes // 4, pin_memory=self.device.type == "cuda")
        return {"source": on_device, "target": host} if lane is Lane.D2H else {"source": host, "target": on_device}

    def together(self, seconds: float, work: dict[Lane, Callable[[int], None]]) -> dict[Lane, Sample]:
        """Repeat each lane's call for ``seconds``, all lanes at once; return the time per call on each lane."""
        stop, ready = threading.Event(), threading.Barrier(len(work) + 1)
        futures: dict[Lane, Future[Sample]] = {
            lane: self._threads[lane].submit(self._in_lane, lane, lambda call=call: self._repeat(call, ready, stop))
            for lane, call in work.items()
        }
        try:
            ready.wait()
            time.sleep(seconds)
        except threading.BrokenBarrierError:
            _raise_first([future.exception() for future in futures.values()])
        finally:
            stop.set()
        return {lane: future.result() for lane, future in futures.items()}

    def _in_lane(self, lane: Lane, work: Callable[[], T]) -> T:
        stream = torch.cuda.stream(self._streams[lane]) if self._streams else nullcontext()
        with torch.inference_mode(), stream:
            return work()

    def _repeat(self, call: Callable[[int], None], ready: threading.Barrier, stop: threading.Event) -> Sample:
        """Wait until all lanes are ready, then repeat ``call`` until stopped; drop the first and the last duration."""
        try:
            call(0)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
        except BaseException:
            ready.abort()
            raise
        ready.wait()
        durations = back_to_back(call, self.device, stop.is_set)
        return sample_of(durations[1:-1] or durations)


def _raise_first(errors: list[BaseException | None]) -> None:
    """Raise the first error that is not a broken barrier, because that error is the cause."""
    for error in errors:
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
