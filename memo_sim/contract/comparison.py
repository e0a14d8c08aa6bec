"""Compares the measured step of a plan with the predicted one, on the machine that ran it (``memo.comparison/1``)."""

from __future__ import annotations

import msgspec

from memo_sim.contract.plan import MovedBytes
from memo_sim.contract.units import Bytes, Seconds


class StepFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Figures of one step, predicted or measured; ``lanes`` is the busy time of each lane."""

    step_s: Seconds
    peak_device_bytes: Bytes
    moved_bytes: MovedBytes | None
    """None when only a trace is known, because a trace does not record how many bytes were copied."""
    lanes: dict[str, Seconds]
    ops: dict[str, Seconds] = {}
    """Busy time by instruction kind."""


class Ratio(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """predicted / measured; an entry whose measured value is zero is left out."""

    step_s: float
    peak_device_bytes: float
    moved_bytes: dict[str, float]
    lanes: dict[str, float]
    ops: dict[str, float] = {}


class Comparison(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.comparison/1"
):
    """The report of ``memo-exec run`` and ``compare``; ``measured`` is the median step after warm-up."""

    program_sha256: str
    machine: str
    predicted: StepFigures | None
    measured: StepFigures
    ratio: Ratio | None
    losses: list[float] = []
    grad_norms: list[float] = []
    steps_measured: int = 1
    step_s_by_rank: list[Seconds] = []
    """Seconds of the measured step on each rank; ``measured`` is the slowest rank's. Empty for one process."""
    peak_device_bytes_by_rank: list[Bytes] = []
    allocator: dict[str, int] = {}
    """Requests that the allocator below torch served, by how; filled only with ``run --replay-allocator``."""
