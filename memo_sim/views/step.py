"""One rank's step as pictures and pages show it: its trace, its buffers, and the memory that it has to fit in."""

from __future__ import annotations

from dataclasses import dataclass

from memo_sim.contract.requests import Requests
from memo_sim.contract.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Step:
    """One rank's step.

    ``buffers`` are the device buffers, whose instants are the trace's rows; None where they are not known.
    ``reserve_bytes`` is the part of the capacity outside the memory curve. ``held_bytes`` is what the curve's peak
    takes in the end, as ``held_as`` says: a planned arena, or what an allocator reserves; None where not known.
    """

    name: str
    trace: Trace
    buffers: Requests | None = None
    capacity_bytes: int | None = None
    reserve_bytes: int = 0
    held_bytes: int | None = None
    held_as: str = ""
