"""One step as it was played, predicted or measured (``memo.trace/1``), stored by columns.

Row i of the span columns is the i-th instruction of the program in program order, so a predicted and a measured trace
of one program compare row by row; ``ids`` are the program's derived ids.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from memo_sim.contract.units import Bytes, Seconds


class Spans(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Columns over instructions; times in seconds from the step's start."""

    ids: list[str]
    ops: list[str]
    lanes: list[str]
    start_s: list[float]
    end_s: list[float]

    def __post_init__(self) -> None:
        """Refuse ragged columns and spans that end before they start."""
        if len({len(self.ids), len(self.ops), len(self.lanes), len(self.start_s), len(self.end_s)}) != 1:
            raise ValueError("span columns differ in length")
        for i, (start, end) in enumerate(zip(self.start_s, self.end_s, strict=True)):
            if not 0 <= start <= end:
                raise ValueError(f"span {self.ids[i]} runs from {start} to {end}")


class MemoryCurve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Live bytes over time, by buffer class, as steps: ``bytes_by_class[c][i]`` holds from ``time_s[i]`` on."""

    time_s: list[float]
    bytes_by_class: dict[str, list[Bytes]]


class Wait(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A lane stood still before ``instruction`` until ``waits_for`` (an instruction of another lane) had ended."""

    instruction: str
    waits_for: str
    start_s: float
    seconds: Seconds


class Trace(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.trace/1"
):
    """All spans of one rank's step, its memory, and every wait."""

    origin: Literal["predicted", "measured"]
    program_sha256: str
    rank: int = 0
    world_size: int = 1
    step_s: Seconds
    spans: Spans
    device_memory: MemoryCurve
    host_memory: MemoryCurve
    waits: list[Wait] = []
    micro_batches_played: int = 1
    """Micro-batches in the spans; fewer than the step has when identical ones were played once and repeated."""
    micro_batches: int = 1
