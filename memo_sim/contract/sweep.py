"""One question of a sweep and its answer: a line of the file that ``memo-sim sweep`` writes (``memo.sweep/1``).

A file has one line a question, in the order of the answers. Where several lines have one key, the last one counts.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from memo_sim.contract.plan import PlanRow
from memo_sim.contract.summary import Summary
from memo_sim.contract.units import Seconds, Tokens

Named = str | int | float | bool | list[int]
"""A value of a question, as it was given."""
SweepStatus = Literal["fits", "does not fit", "failed"]


class Failure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a question has no answer: the message, and the exit code that ``memo-sim what-if`` would have."""

    exit_code: int
    message: str


class SweepLine(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.sweep/1"
):
    """That no plan fits is an answer; ``failed`` are questions that contradict themselves, and lost workers."""

    key: str
    """SHA-256 of all that the answer depends on: model, cluster, profile, system, knobs, version of memo."""
    question: dict[str, Named]
    """The values that were given, by the names of the options with underscores."""
    memo_version: str
    model: str
    cluster: str
    system: str
    seq_tokens: Tokens
    status: SweepStatus
    best: PlanRow | None = None
    summary: Summary | None = None
    evaluated: int = 0
    pruned: int = 0
    warnings: list[str] = []
    """Why the figures cannot be right."""
    why: list[str] = []
    """Why no plan fits; empty where one does."""
    failure: Failure | None = None
    elapsed_s: Seconds = 0.0
    """Seconds that the answer took."""
