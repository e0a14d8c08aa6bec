"""Replays a placement of recorded requests below torch: the n-th request of a step gets the n-th slot.

Off by default; the arena of views needs none of this. It is for tensors that torch's own operators make. A request that
differs from the recorded one goes to the device's allocator and is counted, so a step that changes stays right and
says so.

    use_for_torch(path)              before anything is on the device
    recorder.start(); step(); place(recorder.stop())
    replayer.start(placement); replayer.begin_step(); step(); replayer.report()
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from memo_exec.memory.recorder import library
from memo_sim.contract.errors import BadInput, CannotRun
from memo_sim.contract.placement import Placement

NO_MEMORY, IN_USE = 1, 2


@dataclass(frozen=True)
class Replay:
    """How the requests since ``start`` were served."""

    replayed: int
    other_size: int
    """Of another size than the plan's."""
    beyond_plan: int
    """After the plan's last."""
    slot_taken: int
    """Whose slot an earlier one had not given back."""
    other_stream: int
    """Of a second stream: slots are reused without waiting, in the order of one stream alone."""
    fallback_bytes: int
    unknown_frees: int

    @property
    def mismatches(self) -> int:
        """Requests that did not get their slot."""
        return self.other_size + self.beyond_plan + self.slot_taken + self.other_stream

    def line(self) -> str:
        """Return the report as text."""
        total = self.replayed + self.mismatches
        return (
            f"{self.replayed} of {total} requests at planned addresses; "
            f"fell back: {self.other_size} of another size, {self.beyond_plan} beyond the plan, "
            f"{self.slot_taken} whose slot was taken, {self.other_stream} of another stream "
            f"({self.fallback_bytes} bytes)"
        )


class Replayer:
    """Serves requests from one arena."""

    def __init__(self, path: Path) -> None:
        self._library = library(path)

    def start(self, placement: Placement) -> None:
        """Take the arena; requests are served from it from now on.

        Raises:
            BadInput: when the placement's buffers are not numbered requests.
            CannotRun: when there is no memory for the arena, or an arena is still in use.
        """
        rows = dict(zip(placement.ids, zip(placement.offset_bytes, placement.size_bytes, strict=True), strict=True))
        wanted = [str(number) for number in range(len(rows))]
        if set(rows) != set(wanted):
            raise BadInput("the placement is not of recorded requests", wanted="buffers named 0, 1, 2, ...")
        column = ctypes.c_int64 * len(rows)
        offsets = column(*(rows[name][0] for name in wanted))
        sizes = column(*(rows[name][1] for name in wanted))
        status = self._library.memo_replay(offsets, sizes, len(rows), placement.arena_bytes)
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
        return self.report()

    def report(self) -> Replay:
        """Return how requests were served since ``start``."""
        found = (ctypes.c_int64 * len(Replay.__dataclass_fields__))()
        self._library.memo_counts(found)
        return Replay(*found)

    def address(self) -> int:
        """Return the arena's first address."""
        return int(self._library.memo_arena())


def use_for_torch(path: Path) -> None:
    """Make torch ask this allocator for all device memory; not yet run on a GPU.

    Raises:
        CannotRun: when this process has used the device already: torch does not change allocators then.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise CannotRun("torch has used the device already, and keeps its allocator")
    allocator = torch.cuda.memory.CUDAPluggableAllocator(str(path), "memo_malloc", "memo_free")
    torch.cuda.memory.change_current_allocator(allocator)
