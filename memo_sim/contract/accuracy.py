"""Accepted accuracy by case set and system (``memo.accuracy/1``): a later version must not predict worse."""

from __future__ import annotations

import msgspec

from memo_sim.contract.units import NonNegative


class GroupAccuracy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Accuracy over one system's rows of one source; rows that a constant was fitted on are left out."""

    cases: int
    not_evaluated: int = 0
    wrong_statuses: int = 0
    mean_abs_error: dict[str, NonNegative] = {}
    """Mean of ``|predicted / measured - 1|``, by quantity."""
    low: float | None = None
    high: float | None = None
    """``low`` and ``high`` bound the share ``level`` of the values ``measured / predicted - 1``.

    Null when there are too few cases."""
    level: float | None = None
    quantity: str = ""
    """The quantity of ``low`` and ``high``: step time or MFU."""
    errors: dict[str, float] = {}
    """``predicted / measured - 1`` by case: of step time, or of MFU when only MFU was measured."""


class Accuracies(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.accuracy/1"
):
    """Accepted accuracies; the keys of ``groups`` are ``<source>/<system>``."""

    groups: dict[str, GroupAccuracy]
