"""Compares predictions with published measurements, case by case (``memo.validation/2``)."""

from __future__ import annotations

from typing import Literal

import msgspec

from memo_sim.contract.accuracy import Setting
from memo_sim.contract.plan import Layout, Status

Measured = Literal["mfu", "tgs", "step_ms", "allocated_gib", "reserved_gib", "allocation_retries"]
"""Quantities that a source may have measured."""


class CasePrediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prediction for one row; quantities that do not apply are null."""

    status: Status
    reason: str = ""
    mfu: float | None = None
    tgs: float | None = None
    step_ms: float | None = None
    allocated_gib: float | None = None
    reserved_gib: float | None = None
    allocation_retries: float | None = None
    """Allocation retries per micro-batch (per sequence when a micro-batch has one); null when memory is planned."""
    alpha: float | None = None
    layout: Layout | None = None
    outside_calibration: list[str] = []
    """Curves that were read outside the range of their measurements, by work of more than 5 % of the step."""
    lanes: dict[str, float] = {}
    """Busy fraction of the step for each lane of the slowest rank."""
    waits: dict[str, float] = {}
    """Fraction of the step that compute waits, by what it waits for; only the longest waits."""
    beyond_memory: bool = False
    """Whether the step, MFU and TGS are those with enough device memory: the row ran, and the prediction refuses it."""
    warnings: list[str] = []
    """Why the prediction cannot be right: rates of the profile, or of the plan, above what the chip can do."""
    setting: Setting | None = None
    """What decides which other rows have errors of the same kind; null for a row that was not evaluated."""


class Expectation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The values that the row's source measured; blank cells are null."""

    status: Status | None = None
    mfu: float | None = None
    tgs: float | None = None
    step_ms: float | None = None
    allocated_gib: float | None = None
    reserved_gib: float | None = None
    allocation_retries: float | None = None


class CaseError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``predicted / expected - 1`` for each quantity that both sides have; ``status`` is true when both agree."""

    status: bool | None = None
    mfu: float | None = None
    tgs: float | None = None
    step_ms: float | None = None
    allocated_gib: float | None = None
    reserved_gib: float | None = None
    allocation_retries: float | None = None


class Interval(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The range in which the measurement is expected, from the errors on ``cases`` rows of other sources.

    They have the same GPU generation and class of framework. ``low`` and ``high`` are in the quantity's unit; ``level``
    is the fraction of such cases inside the range.
    """

    quantity: Measured
    low: float
    high: float
    level: float
    cases: int
    beyond: list[str] = []
    """What none of these rows has, and widened the interval."""


class CaseReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of a case file; ``fitted`` is true when a constant of the profile was fitted on it."""

    case: str
    source: str
    system: str
    predicted: CasePrediction
    expected: Expectation
    error: CaseError
    fitted: bool
    model: str = ""
    seq_tokens: int = 0
    question: str = ""
    """What rows share that differ in their plan alone: model, cluster, length and sequences in a step."""
    interval: Interval | None = None
    """Null when nothing was predicted, or when other sources have fewer than five rows of the same class."""


class Validation(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.validation/2"
):
    """One entry per row of the case files, in their order; no row is left out."""

    cases: list[CaseReport]
