"""The two copy lanes, D2H and H2D, which run in parallel with compute.

A lane runs its copies in the order they are issued. A mark is a point on a lane that others can wait for. On CUDA, a
lane is a stream, a mark is an event, and the host never waits. On the CPU, a lane is a thread and a mark is a future.
Without lanes, a copy runs where it is issued, in order with compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A point on a lane."""

    def done(self) -> bool:
        """Return whether the lane has passed the mark."""

    def join(self) -> None:
        """Block the calling thread until the lane has passed the mark; raise the error of a failed copy."""

    def settle(self) -> None:
        """Block the calling thread until the lane has passed the mark; ignore the error of a failed copy."""


class Lanes(Protocol):
    """Compute, D2H and H2D of one device, as the thread that issues compute uses them.

    ``stream`` is a compute stream, as ``here`` returns it.
    """

    def here(self) -> object:
        """Return an identifier of the current compute stream."""

    def now(self) -> Mark:
        """Return a mark after everything that compute has issued so far."""

    def offload(self, into: Tensor, source: Tensor, after: Sequence[Mark]) -> Mark:
        """Copy on the D2H lane once all marks in ``after`` have passed; return the mark of the copy."""

    def restore(self, into: Tensor, source: Tensor, after: Sequence[Mark]) -> Mark:
        """Copy on the H2D lane once all marks in ``after`` have passed; return the mark of the copy."""

    def wait(self, mark: Mark, stream: object) -> None:
        """Make later compute on the stream ``stream`` wait for ``mark``."""

    def release(self, mark: Mark, stream: object) -> None:
        """Make it safe to return device memory that the copy of ``mark`` uses to the stream ``stream``."""

    def hold(self, mark: Mark) -> None:
        """Make later copies on the D2H lane wait for ``mark``."""


INLINE_BYTES = 2**20
"""A CPU copies fewer bytes than this in less time than it takes to give them to a thread and to wait for it."""


class HostLanes:
    """Lanes of a CPU: two threads, or the calling thread itself if ``lanes`` is false.

    The calling thread also makes a small copy itself if the lane is idle, so that the order of copies is kept.
    """

    def __init__(self, *, lanes: bool) -> None:
        self._d2h = _CopyThread("offload-d2h") if lanes else None
        self._h2d = _CopyThread("offload-h2d") if lanes else None

    def here(self) -> object:
        """Return None, because the calling thread is the only compute stream."""
        return None

    def now(self) -> Mark:
        """Return a passed mark, because everything that the calling thread issued has already run."""
        return PASSED

    def offload(self, into: Tensor, source: Tensor, after: Sequence[Mark]) -> Mark:
        """Copy on the D2H thread; the task holds both tensors until it has run."""
        return _submit(self._d2h, into, source, after)

    def restore(self, into: Tensor, source: Tensor, after: Sequence[Mark]) -> Mark:
        """Copy on the H2D thread; the task holds both tensors until it has run."""
        return _submit(self._h2d, into, source, after)

    def wait(self, mark: Mark, stream: object) -> None:
        """Block until the copy has run.

        Raises:
            Exception: whatever the copy raised.
        """
        del stream
        mark.join()

    def release(self, mark: Mark, stream: object) -> None:
        """Do nothing: the task itself holds the tensors that it copies."""

    def hold(self, mark: Mark) -> None:
        """Make the D2H thread wait for the mark."""
        if self._d2h is not None and not mark.done():
            self._d2h.hold(mark)


class StreamLanes:
    """Lanes of a CUDA device: two streams, or the current compute stream if ``lanes`` is false."""

    def __init__(self, device: torch.device, *, lanes: bool) -> None:
        self._device = device
        self._d2h = torch.cuda.Stream(device) if lanes else None  # type: ignore[no-untyped-call]
        self._h2d = torch.cuda.Stream(device) if lanes else None  # type: ignore[no-untyped-call]

    def here(self) -> torch.cuda.Stream:
        """Return the current stream; it is looked up each time, because checkpointing and FSDP change it."""
        return torch.cuda.current_stream(self._device)

    def now(self) -> Mark:
        """Record an event on the current stream."""
        return _Event(self.here())

    def offload(self, into: Tensor, source: Tensor, after: Sequence[Mark]) -> Mark:
        """Copy on the D2H stream; the caller keeps ``source`` until the mark has passed or compute waits for it."""
        return self._copy(self._d2h, into, source, after)

    def restore(self, into: Tensor, source: Tensor, after: Sequence[Mark]) -> Mark:
        """Copy on the H2D stream; the caller keeps ``into`` until the mark has passed or compute waits for it."""
        return self._copy(self._h2d, into, source, after)

    def _copy(self, lane: torch.cuda.Stream | None, into: Tensor, source: Tensor, after: Sequence[Mark]) -> Mark:
        stream = lane or self.here()
        for mark in after:
            _order(stream, mark)
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)
        return _Event(stream)

    def wait(self, mark: Mark, stream: object) -> None:
        """Make a stream wait for the mark; the host does not wait."""
        _order(stream if isinstance(stream, torch.cuda.Stream) else self.here(), mark)

    def release(self, mark: Mark, stream: object) -> None:
        """Make the stream that gets the memory back wait for the copy, unless it has run."""
        if not mark.done():
            self.wait(mark, stream)

    def hold(self, mark: Mark) -> None:
        """Make the D2H stream wait for the mark, unless it has passed."""
        if not mark.done():
            _order(self._d2h or self.here(), mark)


class _Passed:
    """A mark that has always passed."""

    def done(self) -> bool:
        return True

    def join(self) -> None:
        return

    def settle(self) -> None:
        return


PASSED: Mark = _Passed()


class _Task:
    """The mark of a copy on a lane thread."""

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
    """Return a worker thread that uses one intra-op thread; the caller's number of intra-op threads stays."""
    own = torch.get_num_threads()  # torch reads its default at a thread's first query, so query it before it changes
    thread = ThreadPoolExecutor(1, thread_name_prefix=name)
    thread.submit(_use_one_thread).result()
    torch.set_num_threads(own)
    return thread


def _use_one_thread() -> None:
    torch.get_num_threads()
    torch.set_num_threads(1)


class _CopyThread:
    """A lane's thread and the mark of what it was given last."""

    def __init__(self, name: str) -> None:
        self._thread = _thread(name)
        self._last: Mark = PASSED

    def run(self, copy: Callable[[], None], size_bytes: int, after: Sequence[Mark]) -> Mark:
        """Copy in this thread, or in the calling one if that is sooner; return the mark of the copy."""
        if size_bytes < INLINE_BYTES and self._last.done() and all(mark.done() for mark in after):
            copy()
            return PASSED
        self._last = _Task(self._thread.submit(copy))
        return self._last

    def hold(self, mark: Mark) -> None:
        """Make later copies wait for the mark."""
        self._last = _Task(self._thread.submit(mark.settle))


def _submit(thread: _CopyThread | None, into: Tensor, source: Tensor, after: Sequence[Mark]) -> Mark:
    if thread is None:
        _copy(into, source, after)
        return PASSED
    return thread.run(_Copy(into, source, after), source.nbytes, after)


class _Copy:
    """A copy that has let go of its tensors when it counts as done: who waits for it finds no original alive by it."""

    def __init__(self, into: Tensor, source: Tensor, after: Sequence[Mark]) -> None:
        self._given = [(into, source, after)]

    def __call__(self) -> None:
        """Copy, once."""
        _copy(*self._given.pop())


def _copy(into: Tensor, source: Tensor, after: Sequence[Mark]) -> None:
    for mark in after:
        mark.join()
    with torch.no_grad():
        into.copy_(source)
