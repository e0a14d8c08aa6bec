"""The answer of ``memo-sim what-if``: the ranked plans and the reasons (``memo.result/2``)."""

from __future__ import annotations

from typing import Literal

import msgspec

from memo_sim.contract.plan import Decisions, PlanRow
from memo_sim.contract.summary import Summary
from memo_sim.contract.units import Bytes, Seconds, Tokens


class MoreMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The best plan with more memory of one kind, everything else unchanged."""

    space: Literal["device", "host"]
    """The memory that grows: each device's, or each node's host memory."""
    added_bytes: Bytes
    best: PlanRow | None
    saved_s: Seconds | None = None
    """Seconds by which the step becomes shorter; null when no plan fits, before or with the added memory."""
    seq_tokens: Tokens | None = None
    """The longest sequence that then fits; null unless it was asked for."""
    text: str = ""
    """The gain in a sentence."""


class Result(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.result/2"
):
    """``best`` is the first of ``plans`` that fits, or null. The search space has ``evaluated`` + ``pruned`` plans."""

    model: str
    cluster: str
    seq_tokens: int
    best: PlanRow | None
    plans: list[PlanRow]
    evaluated: int
    pruned: int
    warnings: list[str] = []
    """Why the figures cannot be right: rates of the profile, or of the best plan, above what the chip can do."""
    why: list[str] = []
    """Why the best plan is best: its bottleneck, the runner-up, what was tried and lost; one sentence each."""
    decisions: Decisions | None = None
    """All decisions of ``best``; null when no plan fits, and in files of earlier versions."""
    system: str = ""
    """The system that was asked for; empty in files of earlier versions."""
    front: list[PlanRow] = []
    """The Pareto front of step time, device memory and host memory, the fastest plan first.

    It covers the evaluated plans. When ``front_is_whole``, it covers the whole space; an open alpha then counts at its
    fastest value and at every eighth."""
    front_is_whole: bool = False
    more_memory: list[MoreMemory] = []
    """What one more GiB of memory gains; empty unless it was asked for."""
    summary: Summary | None = None
    """The verdict about the best plan, or about the plan nearest to fitting.

    Null where no plan can be evaluated, and in files of older versions."""
