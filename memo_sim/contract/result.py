"""The answer to a what-if question (``memo.result/2``)."""

from __future__ import annotations

from typing import Literal

import msgspec

from memo_sim.contract.plan import PlanRow
from memo_sim.contract.units import Bytes, Seconds, Tokens


class MoreMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the same question answers with more memory of one kind, everything else as it was."""

    space: Literal["device", "host"]
    """Of each device, or of each node's host."""
    added_bytes: Bytes
    best: PlanRow | None
    saved_s: Seconds | None = None
    """By how much the step becomes shorter; null where nothing fits, or nothing fitted before."""
    seq_tokens: Tokens | None = None
    """The longest sequence that fits, where that was asked."""


class Result(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.result/2"
):
    """``best`` is the first of ``plans`` that fits, null when none does; the space is ``evaluated`` + ``pruned``."""

    model: str
    cluster: str
    seq_tokens: int
    best: PlanRow | None
    plans: list[PlanRow]
    evaluated: int
    pruned: int
    why: list[str] = []
    """Why the best is best: what binds, the runner-up, what was tried and lost; one sentence each."""
    front: list[PlanRow] = []
    """The Pareto front of step time, device memory and host memory, the fastest first: of what was evaluated, or of
    the whole space where ``front_is_whole``, an open alpha at its fastest and at every eighth."""
    front_is_whole: bool = False
    more_memory: list[MoreMemory] = []
    """What one more GiB buys, where that was asked."""
