"""The accuracy that was accepted, by case set and system (``memo.accuracy/1``): no later version may fall behind it."""

from __future__ import annotations

import msgspec

from memo_sim.contract.units import NonNegative


class GroupAccuracy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One system's rows of one source, those that were fitted left out."""

    cases: int
    not_evaluated: int = 0
    wrong_statuses: int = 0
    mean_abs_error: dict[str, NonNegative] = {}
    """By quantity: mean of |predicted / measured - 1|."""
    low: float | None = None
    high: float | None = None
    """Between them lie ``level`` of measured / predicted - 1, of step time or MFU; null for too few cases."""
    level: float | None = None
    quantity: str = ""
    """What ``low`` and ``high`` are of."""
    errors: dict[str, float] = {}
    """By case: predicted / measured - 1 of step time, or of MFU where that was measured alone."""


class Accuracies(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.accuracy/1"
):
    """``groups`` by ``<source>/<system>``."""

    groups: dict[str, GroupAccuracy]
