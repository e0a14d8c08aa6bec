"""An allocator below torch, as a run uses it: results of libraries in the arena's slots, or a recorded step replayed.

Off by default. A run with an arena lends every library call the slot that the program declares for its results. A run
without one plays a step in which libraries take what they keep, records the next, and serves those after it from an
arena: the n-th request of a step gets the n-th slot. Whatever differs goes to the device's allocator and is counted, so
a step that changes stays right and says so.

    use_for_torch(path)              before anything is on the device
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
"""First steps, in which libraries take what they keep (cuBLAS its workspace, say): no later step asks for that."""


@dataclass(frozen=True)
class Replay:
    """How requests were served since counting began."""

    replayed: int
    """At the planned address."""
    lent: int
    """In the slot that the program declares for a library's results."""
    other_size: int
    """Of another size than the plan's."""
    beyond_plan: int
    """After the plan's last."""
    slot_taken: int
    """Whose slot an earlier one had not given back."""
    no_room: int
    """For which the lent slot had no room."""
    other_stream: int
    """Of a stream that is not served: slots are reused without waiting, in the order of one stream alone."""
    fallback_bytes: int
    unknown_frees: int

    @property
    def mismatches(self) -> int:
        """Requests that did not get their slot."""
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
    """Serves the requests of a stream from one arena."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def start(self, placement: Placement, stream: int = 0) -> None:
        """Take the arena; what ``stream`` (its handle) asks for is served from it from now on.

        Raises:
            BadInput: when the placement's buffers are not numbered requests, or lie outside its arena.
            CannotRun: when there is no memory for the arena, or an arena is still in use.
        """
        rows = dict(zip(placement.ids, zip(placement.offset_bytes, placement.size_bytes, strict=True), strict=True))
        wanted = [str(number) for number in range(len(rows))]
        if set(rows) != set(wanted):
            raise BadInput("the placement is not of recorded requests", wanted="buffers named 0, 1, 2, ...")
        column = ctypes.c_int64 * len(rows)
        offsets = column(*(rows[name][0] for name in wanted))
        sizes = column(*(rows[name][1] for name in wanted))
        status = self._library.memo_replay(offsets, sizes, len(rows), placement.arena_bytes, stream)
        if status == OUTSIDE:
            raise BadInput("a slot lies outside the arena", wanted=f"slots within {placement.arena_bytes} bytes")
        if status == IN_USE:
            raise CannotRun("the arena that is replayed now is still in use")
        if status == NO_MEMORY:
            raise CannotRun("there is no memory for the arena", wanted=f"{placement.arena_bytes} bytes")

    def begin_step(self) -> None:
        """Expect the plan's first request next."""
        self._library.memo_begin_step()

    def stop(self) -> Replay:
        """Serve nothing from the arena any more; return the report."""
        self._library.memo_stop()
        return counted(self._library)

    def address(self) -> int:
        """Return the arena's first address; 0 where there is none."""
        return int(self._library.memo_arena())


def counted(library: ctypes.CDLL) -> Replay:
    """Return how requests were served since counting began."""
    found = (ctypes.c_int64 * len(Replay.__dataclass_fields__))()
    library.memo_counts(found)
    return Replay(*found)


class BelowTorch:
    """What a run does with the allocator, step by step; ``stream`` is the handle of the compute lane's stream.

    ``lends``: there is an arena, and only its slots are lent; else a step is recorded and those after it replayed.
    """

    def __init__(self, library: ctypes.CDLL, stream: int = 0, *, lends: bool) -> None:
        self._library = library
        self._stream = stream
        self._lends = lends
        self._recorder, self._replayer = Recorder(library), Replayer(library)
        self._ended = 0
        self._library.memo_reset_counts()

    def begin_step(self) -> None:
        """Record or replay the step that comes."""
        if self._lends or self._ended < UNRECORDED_STEPS:
            return
        if self._ended == UNRECORDED_STEPS:
            self._recorder.start(self._stream)
        else:
            self._replayer.begin_step()

    def end_step(self) -> None:
        """Place what was recorded; a step that failed does not end, and is recorded anew.

        Raises:
            CannotRun: when there is no memory for the arena.
        """
        if not self._lends and self._ended == UNRECORDED_STEPS:
            self._replayer.start(place_recorded(self._recorder.stop()), self._stream)
        self._ended += 1

    @contextmanager
    def lending(self, slot: torch.Tensor) -> Iterator[None]:
        """Serve the stream from ``slot`` meanwhile: its bytes, rounded up to the arena's alignment."""
        size = -(-slot.nbytes // ARENA_ALIGNMENT_BYTES) * ARENA_ALIGNMENT_BYTES
        self._library.memo_lend(slot.data_ptr(), size, self._stream)
        try:
            yield
        finally:
            self._library.memo_lend(None, 0, None)

    def report(self) -> Replay:
        """Return how requests were served so far."""
        return counted(self._library)

    def close(self) -> None:
        """Serve nothing any more."""
        self._replayer.stop()


def check_device() -> None:
    """Refuse a machine whose memory torch does not let others hand out.

    Raises:
        CannotRun: without CUDA.
    """
    if not torch.cuda.is_available():
        raise CannotRun(
            "the replaying allocator serves CUDA devices",
            got="this machine's CPU, whose memory torch does not let others hand out",
            wanted="a CUDA device",
            hint="leave --replay-allocator out: the planned arena needs none",
        )


def use_for_torch(path: Path) -> None:
    """Make torch ask this allocator for all device memory; not yet run on a GPU.

    Raises:
        CannotRun: when this process has used the device already: torch keeps its allocator then.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise CannotRun("torch has used the device already, and keeps its allocator")
    allocator = torch.cuda.memory.CUDAPluggableAllocator(str(path), "memo_torch_malloc", "memo_free")
    torch.cuda.memory.change_current_allocator(allocator)
