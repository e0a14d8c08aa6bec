"""An allocator below torch that serves memory requests from planned addresses; it is off by default.

It works in one of two ways:

- A run with an arena lends each library call the slot that the program declares for its results.
- A run without an arena plays one step unrecorded, in which libraries allocate the memory that they keep. It records
  the requests of the second step and places them. In later steps, the n-th request gets the n-th slot.

torch does not tell this allocator about ``record_stream``, and slots are reused at once. So the interpreter frees a
buffer that several lanes use only when the compute lane waits for them (``binding.late_frees``).

A request that differs from the plan goes to the device's allocator and is counted. So a step that changes stays
correct, and the report shows it.

    use_for_torch(path)              before any device memory is in use
    below = BelowTorch(library(path), stream, lends=False)
    below.begin_step(); ...; below.end_step(); below.report().line()
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from memo_exec.memory.recorder import Recorder, place_recorded
from memo_sim.contract.errors import BadInput, CannotRun
from memo_sim.contract.placement import Placement
from memo_sim.contract.requests import ARENA_ALIGNMENT_BYTES

DONE, NO_MEMORY, IN_USE, OUTSIDE = range(4)

UNRECORDED_STEPS = 1
"""First steps, in which libraries allocate memory that they keep (cuBLAS its workspace, for example).

Later steps do not make these requests, so they are not recorded.
"""


@dataclass(frozen=True)
class Replay:
    """Numbers of requests by how they were served, since counting began."""

    replayed: int
    """Requests served at their planned address."""
    lent: int
    """Requests served in the slot that the program declares for a library's results."""
    other_size: int
    """Requests whose size differs from the plan."""
    beyond_plan: int
    """Requests after the last one in the plan."""
    slot_taken: int
    """Requests whose slot was still in use by an earlier request."""
    no_room: int
    """Requests that did not fit into the lent slot."""
    other_stream: int
    """Requests of another stream; slots are reused without waiting, which is safe only within one stream."""
    fallback_bytes: int
    """Bytes of all requests that the device's allocator served instead."""
    unknown_frees: int
    """Frees of pointers that this allocator did not hand out."""

    @property
    def mismatches(self) -> int:
        """Number of requests that did not get their slot."""
        return self.other_size + self.beyond_plan + self.slot_taken + self.no_room + self.other_stream

    def line(self) -> str:
        """Return the report as text."""
        served = self.replayed + self.lent
        return (
            f"allocator: {served} of {served + self.mismatches} requests at planned addresses; "
            f"fell back: {self.other_size} of another size, {self.beyond_plan} beyond the plan, "
            f"{self.slot_taken} whose slot was taken, {self.no_room} without room in it, "
            f"{self.other_stream} of another stream ({self.fallback_bytes} bytes)"
        )


class Replayer:
    """Serves the requests of one stream from one arena."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def start(self, placement: Placement, stream: int = 0) -> None:
        """Allocate the arena, and serve the requests of ``stream`` (a stream handle) from it from now on.

        Raises:
            BadInput: if the placement's buffers are not numbered requests, or lie outside its arena.
            CannotRun: if there is no memory for the arena, or if an earlier arena is still in use.
        """
        rows = dict(zip(placement.ids, zip(placement.offset_bytes, placement.size_bytes, strict=True), strict=True))
        wanted = [str(number) for number in range(len(rows))]
        if set(rows) != set(wanted):
            raise BadInput("the placement is not one of recorded requests", wanted="buffers named 0, 1, 2, ...")
        column = ctypes.c_int64 * len(rows)
        offsets = column(*(rows[name][0] for name in wanted))
        sizes = column(*(rows[name][1] for name in wanted))
        status = self._library.memo_replay(offsets, sizes, len(rows), placement.arena_bytes, stream)
        if status == OUTSIDE:
            raise BadInput("a slot lies outside the arena", wanted=f"slots within {placement.arena_bytes} bytes")
        if status == IN_USE:
            raise CannotRun("an earlier arena of the replaying allocator is still in use")
        if status == NO_MEMORY:
            raise CannotRun("there is no memory for the arena", wanted=f"{placement.arena_bytes} bytes")

    def begin_step(self) -> None:
        """Start a step: the next request is the plan's first."""
        self._library.memo_begin_step()

    def stop(self) -> Replay:
        """Stop serving requests from the arena, and return the report."""
        self._library.memo_stop()
        return counted(self._library)

    def address(self) -> int:
        """Return the arena's first address, or 0 without an arena."""
        return int(self._library.memo_arena())


def counted(library: ctypes.CDLL) -> Replay:
    """Return how requests were served since counting began."""
    found = (ctypes.c_int64 * len(Replay.__dataclass_fields__))()
    library.memo_counts(found)
    return Replay(*found)


class BelowTorch:
    """Drives the allocator step by step; ``stream`` is the handle of the compute lane's stream.

    With ``lends``, the run has an arena and only lends its slots. Otherwise one step is recorded and later ones are
    replayed.
    """

    def __init__(self, library: ctypes.CDLL, stream: int = 0, *, lends: bool) -> None:
        self._library = library
        self._stream = stream
        self._lends = lends
        self._recorder, self._replayer = Recorder(library), Replayer(library)
        self._ended = 0
        self._library.memo_reset_counts()

    def begin_step(self) -> None:
        """Start to record or to replay the next step."""
        if self._lends or self._ended < UNRECORDED_STEPS:
            return
        if self._ended == UNRECORDED_STEPS:
            self._recorder.start(self._stream)
        else:
            self._replayer.begin_step()

    def end_step(self) -> None:
        """Place the recorded requests after the recorded step.

        A failed step never calls this, so the next step is recorded instead.

        Raises:
            CannotRun: if there is no memory for the arena.
        """
        if not self._lends and self._ended == UNRECORDED_STEPS:
            self._replayer.start(place_recorded(self._recorder.stop()), self._stream)
        self._ended += 1

    @contextmanager
    def lending(self, slot: torch.Tensor) -> Iterator[None]:
        """Serve the stream's requests from ``slot`` inside the context; its size is rounded up to the alignment."""
        size = -(-slot.nbytes // ARENA_ALIGNMENT_BYTES) * ARENA_ALIGNMENT_BYTES
        self._library.memo_lend(slot.data_ptr(), size, self._stream)
        try:
            yield
        finally:
            self._library.memo_lend(None, 0, None)

    def report(self) -> Replay:
        """Return the counts so far."""
        return counted(self._library)

    def close(self) -> None:
        """Stop serving requests."""
        self._replayer.stop()


def check_device() -> None:
    """Refuse machines without CUDA, because torch has no pluggable allocator for other memory.

    Raises:
        CannotRun: if there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise CannotRun(
            "the replaying allocator serves CUDA devices only",
            got="a machine without CUDA; torch has no pluggable allocator for CPU memory",
            wanted="a CUDA device",
            hint="leave out --replay-allocator; the planned arena works without it",
        )


def use_for_torch(path: Path) -> None:
    """Make torch request all device memory from this allocator; this has not yet run on a GPU.

    Raises:
        CannotRun: if this process has already used the device, because torch then keeps its allocator.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise CannotRun("torch has already used the device, so it cannot change its allocator any more")
    allocator = torch.cuda.memory.CUDAPluggableAllocator(str(path), "memo_torch_malloc", "memo_free")
    torch.cuda.memory.change_current_allocator(allocator)
