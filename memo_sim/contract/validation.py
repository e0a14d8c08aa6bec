"""Predictions beside published measurements (``memo.validation/1``)."""

from __future__ import annotations

import msgspec

from memo_sim.contract.plan import Layout, Status


class CasePrediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was predicted for one row; quantities that do not apply are null."""

    status: Status
    reason: str = ""
    mfu: float | None = None
    tgs: float | None = None
    step_ms: float | None = None
    allocated_gib: float | None = None
    reserved_gib: float | None = None
    reorganisations: float | None = None
    """Of a micro-batch (a sequence, where it is one), where memory is not planned."""
    alpha: float | None = None
    layout: Layout | None = None
    outside_calibration: list[str] = []
    """Curves that were asked beyond the range they were measured in."""


class Expectation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the row's source measured; blank cells are null."""

    status: Status | None = None
    mfu: float | None = None
    tgs: float | None = None
    step_ms: float | None = None
    allocated_gib: float | None = None
    reserved_gib: float | None = None
    reorganisations: float | None = None


class CaseError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """predicted / expected - 1 for each quantity both sides have; ``status`` true when they agree."""

    status: bool | None = None
    mfu: float | None = None
    tgs: float | None = None
    step_ms: float | None = None
    allocated_gib: float | None = None
    reserved_gib: float | None = None
    reorganisations: float | None = None


class CaseReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of a case file; ``fitted`` when a constant of the profile was fitted on it."""

    case: str
    source: str
    system: str
    predicted: CasePrediction
    expected: Expectation
    error: CaseError
    fitted: bool


class Validation(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.validation/1"
):
    """One entry per row, in the file's order, none dropped."""

    cases: list[CaseReport]
