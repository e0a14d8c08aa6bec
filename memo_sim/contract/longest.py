"""The longest sequence that fits (``memo.longest/2``)."""

from __future__ import annotations

from typing import Literal

import msgspec

from memo_sim.contract.plan import PlanRow
from memo_sim.contract.result import MoreMemory
from memo_sim.contract.units import Positive, Seconds, Tokens

Bound = Literal[
    "device memory", "host memory", "time limit", "divisibility", "positions", "limit of tokens", "cannot be"
]


class Tried(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One length that was asked: the first plan that was found to fit, or the one nearest to fitting."""

    seq_tokens: Positive
    fits: bool
    step_s: Seconds | None = None
    bound: Bound | None = None
    """What keeps it from fitting."""
    reason: str = ""


class Longest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.longest/2"
):
    """``seq_tokens`` is the longest multiple of ``step_tokens`` that fits, 0 when none does."""

    model: str
    cluster: str
    system: str
    step_tokens: Positive
    most_step_s: Seconds | None = None
    """Longest step that was allowed."""
    seq_tokens: Tokens
    best: PlanRow | None
    """The fastest plan at ``seq_tokens``."""
    bound: Bound
    """What keeps the next multiple from fitting."""
    tried: list[Tried]
    """Every length that was asked, by length."""
    why: list[str] = []
    """What bounds the length, what the search assumed and how far that was checked, and why the plan is best."""
    more_memory: list[MoreMemory] = []
    """The longest sequence with one more GiB, where that was asked."""
