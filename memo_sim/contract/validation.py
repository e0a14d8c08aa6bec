"""Predictions beside published measurements (``memo.validation/2``)."""

from __future__ import annotations

from typing import Literal

import msgspec

from memo_sim.contract.plan import Layout, Status

Measured = Literal["mfu", "tgs", "step_ms", "allocated_gib", "reserved_gib", "allocation_retries"]
"""What a source may have measured."""


class CasePrediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was predicted for one row; quantities that do not apply are null."""

    status: Status
    reason: str = ""
    mfu: float | None = None
    tgs: float | None = None
    step_ms: float | None = None
    allocated_gib: float | None = None
    reserved_gib: float | None = None
    allocation_retries: float | None = None
    """Of a micro-batch (a sequence, where it is one), where memory is not planned."""
    alpha: float | None = None
    layout: Layout | None = None
    outside_calibration: list[str] = []
    """Curves that were asked beyond the range they were measured in."""
    lanes: dict[str, float] = {}
    """Fraction of the step that each lane of the pace-setting rank is busy."""
    waits: dict[str, float] = {}
    """Fraction of the step that compute waits, by what it waits for; the longest few."""


class Expectation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the row's source measured; blank cells are null."""

    status: Status | None = None
    mfu: float | None = None
    tgs: float | None = None
    step_ms: float | None = None
    allocated_gib: float | None = None
    reserved_gib: float | None = None
    allocation_retries: float | None = None


class CaseError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """predicted / expected - 1 for each quantity both sides have; ``status`` true when they agree."""

    status: bool | None = None
    mfu: float | None = None
    tgs: float | None = None
    step_ms: float | None = None
    allocated_gib: float | None = None
    reserved_gib: float | None = None
    allocation_retries: float | None = None


class Interval(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the measurement is expected, by how far ``cases`` other predictions of the same kind were off.

    ``low`` and ``high`` are in the quantity's unit; ``level`` is the share of such cases that lie within.
    """

    quantity: Measured
    low: float
    high: float
    level: float
    cases: int


class CaseReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of a case file; ``fitted`` when a constant of the profile was fitted on it."""

    case: str
    source: str
    system: str
    predicted: CasePrediction
    expected: Expectation
    error: CaseError
    fitted: bool
    model: str = ""
    seq_tokens: int = 0
    interval: Interval | None = None
    """None where nothing was predicted, or too few others of its system were measured."""


class Validation(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.validation/2"
):
    """One entry per row, in the file's order, none dropped."""

    cases: list[CaseReport]
