"""The two copy lanes beside compute. Each plays its copies in the order they came; a mark says how far it is.

On CUDA a lane is a stream and a mark an event; nothing waits on the host. On the CPU a lane is a thread and a mark a
future. Without lanes the copies run where they are issued, in order with compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A point on a lane."""

    def done(self) -> bool:
        """Return whether the lane has passed it."""

    def join(self) -> None:
        """Block the calling thread until it has; raise what the copy before it raised."""

    def settle(self) -> None:
        """Block the calling thread until it has, whatever came of the copy."""


class Lanes(Protocol):
    """Compute, D2H and H2D of one device, seen from the thread that issues compute."""

    def here(self) -> object:
        """Return what identifies the stream that compute is on now."""

    def now(self) -> Mark:
        """Return a mark behind everything that compute has issued."""

    def offload(self, into: Tensor, source: Tensor, after: Sequence[Mark]) -> Mark:
        """Copy on the D2H lane, after the marks."""

    def restore(self, into: Tensor, source: Tensor, after: Sequence[Mark]) -> Mark:
        """Copy on the H2D lane, after the marks."""

    def wait(self, mark: Mark, stream: object) -> None:
        """Make what compute issues next on ``stream`` wait for ``mark``."""

    def release(self, mark: Mark, stream: object) -> None:
        """Make it safe to free device memory of ``stream`` that the copy behind ``mark`` uses."""

    def hold(self, mark: Mark) -> None:
        """Make what the D2H lane plays next wait for ``mark``."""


class HostLanes:
    """Lanes of a CPU: threads, or the calling thread itself when ``lanes`` is false."""

    def __init__(self, *, lanes: bool) -> None:
        self._d2h = _thread("offload-d2h") if lanes else None
        self._h2d = _thread("offload-h2d") if lanes else None

    def here(self) -> object:
        """Return None: compute is whichever thread calls, one at a time."""
        return None

    def now(self) -> Mark:
        """Return a mark that is passed: what the calling thread issued has run."""
        return PASSED

    def offload(self, into: Tensor, source: Tensor, after: Sequence[Mark]) -> Mark:
        """Copy on the D2H thread; until then the task holds both tensors."""
        return _submit(self._d2h, into, source, after)

    def restore(self, into: Tensor, source: Tensor, after: Sequence[Mark]) -> Mark:
        """Copy on the H2D thread; until then the task holds both tensors."""
        return _submit(self._h2d, into, source, after)

    def wait(self, mark: Mark, stream: object) -> None:
        """Block until the copy has run.

        Raises:
            Exception: whatever the copy raised.
        """
        del stream
        mark.join()

    def release(self, mark: Mark, stream: object) -> None:
        """Nothing to do: the task holds what it copies."""

    def hold(self, mark: Mark) -> None:
        """Let the D2H thread wait."""
        if self._d2h is not None and not mark.done():
            self._d2h.submit(mark.settle)


class StreamLanes:
    """Lanes of a CUDA device: streams, or the stream that compute is on when ``lanes`` is false."""

    def __init__(self, device: torch.device, *, lanes: bool) -> None:
        self._device = device
        self._d2h = torch.cuda.Stream(device) if lanes else None  # type: ignore[no-untyped-call]
        self._h2d = torch.cuda.Stream(device) if lanes else None  # type: ignore[no-untyped-call]

    def here(self) -> torch.cuda.Stream:
        """Return the current stream, asked anew each time: checkpointing and FSDP change it."""
        return torch.cuda.current_stream(self._device)

    def now(self) -> Mark:
        """Record an event on the current stream."""
        return _Event(self.here())

    def offload(self, into: Tensor, source: Tensor, after: Sequence[Mark]) -> Mark:
        """Copy on the D2H stream. The caller keeps ``source`` until the mark is passed or waited for."""
        return self._copy(self._d2h, into, source, after)

    def restore(self, into: Tensor, source: Tensor, after: Sequence[Mark]) -> Mark:
        """Copy on the H2D stream. The caller keeps ``into`` until the mark is passed or waited for."""
        return self._copy(self._h2d, into, source, after)

    def _copy(self, lane: torch.cuda.Stream | None, into: Tensor, source: Tensor, after: Sequence[Mark]) -> Mark:
        stream = lane or self.here()
        for mark in after:
            _order(stream, mark)
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)
        return _Event(stream)

    def wait(self, mark: Mark, stream: object) -> None:
        """Let a stream wait; the host goes on."""
        _order(stream if isinstance(stream, torch.cuda.Stream) else self.here(), mark)

    def release(self, mark: Mark, stream: object) -> None:
        """Let the stream that the memory goes back to wait, unless the copy has run."""
        if not mark.done():
            self.wait(mark, stream)

    def hold(self, mark: Mark) -> None:
        """Let the D2H stream wait, unless the copy has run."""
        if not mark.done():
            _order(self._d2h or self.here(), mark)


class _Passed:
    """The mark of what has already happened."""

    def done(self) -> bool:
        return True

    def join(self) -> None:
        return

    def settle(self) -> None:
        return


PASSED: Mark = _Passed()


class _Task:
    """The mark of a copy on a thread."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def join(self) -> None:
        self._future.result()

    def settle(self) -> None:
        wait([self._future])


class _Event:
    """The mark of a point on a stream."""

    __slots__ = ("event",)

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def join(self) -> None:
        self.event.synchronize()

    def settle(self) -> None:
        self.event.synchronize()


def _order(stream: torch.cuda.Stream, mark: Mark) -> None:
    if isinstance(mark, _Event):
        stream.wait_event(mark.event)


def _thread(name: str) -> ThreadPoolExecutor:
    """Return a thread with one intra-op thread; the number that the caller's operators use stays."""
    own = torch.get_num_threads()  # torch reads its default when a thread first asks, so ask before it changes
    thread = ThreadPoolExecutor(1, thread_name_prefix=name)
    thread.submit(_use_one_thread).result()
    torch.set_num_threads(own)
    return thread


def _use_one_thread() -> None:
    torch.get_num_threads()
    torch.set_num_threads(1)


def _submit(thread: ThreadPoolExecutor | None, into: Tensor, source: Tensor, after: Sequence[Mark]) -> Mark:
    if thread is None:
        _copy(into, source, after)
        return PASSED
    return _Task(thread.submit(_copy, into, source, after))


def _copy(into: Tensor, source: Tensor, after: Sequence[Mark]) -> None:
    for mark in after:
        mark.join()
    with torch.no_grad():
        into.copy_(source)
