"""The answer to ``memo-sim longest``: the longest sequence that fits (``memo.longest/2``)."""

from __future__ import annotations

from typing import Literal

import msgspec

from memo_sim.contract.plan import PlanRow
from memo_sim.contract.result import MoreMemory
from memo_sim.contract.summary import Summary
from memo_sim.contract.units import Positive, Seconds, Tokens

Bound = Literal[
    "device memory", "host memory", "time limit", "divisibility", "positions", "limit of tokens", "cannot be"
]


NO_PLAN: Bound = "cannot be"
"""No plan of this length may be played: its rules refuse every one (``Infeasible``)."""


def bound_in_words(bound: Bound) -> str:
    """Return a limit as text that follows "limited by"."""
    return "what plans allow" if bound == NO_PLAN else bound


class Tried(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One length that the search evaluated: the first plan found to fit, or the plan nearest to fitting."""

    seq_tokens: Positive
    fits: bool
    step_s: Seconds | None = None
    bound: Bound | None = None
    """The limit that this length exceeds."""
    reason: str = ""


class Longest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.longest/2"
):
    """``seq_tokens`` is the longest multiple of ``step_tokens`` that fits, or 0 when none fits."""

    model: str
    cluster: str
    system: str
    step_tokens: Positive
    most_step_s: Seconds | None = None
    """Longest step that was allowed; null for no limit."""
    seq_tokens: Tokens
    best: PlanRow | None
    """The fastest plan at ``seq_tokens``."""
    bound: Bound
    """The limit that the next multiple of ``step_tokens`` exceeds."""
    tried: list[Tried]
    """Every length that was evaluated, in increasing order."""
    warnings: list[str] = []
    """Why the figures cannot be right: rates of the profile, or of the best plan, above what the chip can do."""
    why: list[str] = []
    """What limits the length, which assumptions the search made and how they were checked, and why the plan is best."""
    more_memory: list[MoreMemory] = []
    """The longest sequence with one more GiB of memory; empty unless it was asked for."""
    summary: Summary | None = None
    """The verdict about the best plan at ``seq_tokens``; null where no length fits, and in files of older versions."""
