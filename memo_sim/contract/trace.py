"""One rank's step as it was played, predicted or measured, stored by columns (``memo.trace/1``).

Row i of the span columns is the program's i-th instruction, so a predicted and a measured trace of the same program
compare row by row. ``ids`` are the instructions' ids, derived from the program.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from memo_sim.contract.units import Bytes, Degree, Seconds

MOST_SECONDS = 1e60


class Spans(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row per instruction; times are in seconds from the step's start."""

    ids: list[str]
    ops: list[str]
    lanes: list[str]
    start_s: list[float]
    end_s: list[float]

    def __post_init__(self) -> None:
        """Refuse columns of different lengths, and spans that end before they start."""
        if len({len(self.ids), len(self.ops), len(self.lanes), len(self.start_s), len(self.end_s)}) != 1:
            raise ValueError("span columns differ in length")
        for i, (start, end) in enumerate(zip(self.start_s, self.end_s, strict=True)):
            if not 0 <= start <= end <= MOST_SECONDS:
                raise ValueError(f"span {self.ids[i]} runs from {start} to {end}")


class MemoryCurve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Live bytes over time, by buffer class: ``bytes_by_class[c][i]`` holds from ``time_s[i]`` to ``time_s[i + 1]``."""

    time_s: list[Seconds]
    bytes_by_class: dict[str, list[Bytes]]

    def __post_init__(self) -> None:
        """Refuse columns of different lengths."""
        for name, column in self.bytes_by_class.items():
            if len(column) != len(self.time_s):
                raise ValueError(f"{len(column)} values of {name} for {len(self.time_s)} times")


class Wait(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A lane was idle before ``instruction`` until ``waits_for``, an instruction of another lane, had ended."""

    instruction: str
    waits_for: str
    start_s: Seconds
    seconds: Seconds


class Trace(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.trace/1"
):
    """All spans of one rank's step, its memory curves, and every wait."""

    origin: Literal["predicted", "measured"]
    program_sha256: str
    rank: int = 0
    world_size: int = 1
    step_s: Seconds
    spans: Spans
    device_memory: MemoryCurve
    host_memory: MemoryCurve
    waits: list[Wait] = []
    micro_batches_played: Degree = 1
    """Micro-batches in the spans; fewer than ``micro_batches`` when identical ones were played once and repeated."""
    micro_batches: Degree = 1

    def __post_init__(self) -> None:
        """Refuse a trace that has played more micro-batches than its step has."""
        if self.micro_batches_played > self.micro_batches:
            raise ValueError(f"micro_batches_played is more than micro_batches, {self.micro_batches}")
