"""The answer of ``memo-sim gpus``: how many GPUs of which kind a question needs (``memo.gpus/1``)."""

from __future__ import annotations

from typing import Literal

import msgspec

from memo_sim.contract.plan import PlanRow
from memo_sim.contract.summary import Summary
from memo_sim.contract.units import Degree, Positive, Seconds

Role = Literal["fits", "within", "cheapest"]
"""Why a number of devices is in the answer.

- fits: the smallest number on which a plan fits.
- within: the smallest number with a step of at most ``within_s``.
- cheapest: the fewest GPU-hours per token among the numbers tried."""


class Sized(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A number of devices of one kind, with its best plan and the plan's speed and price."""

    kind: str
    cluster: str
    nodes: Degree
    roles: list[Role]
    best: PlanRow
    summary: Summary


class TriedCount(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One number of devices that was tried; its step is that of the first plan that was good enough."""

    kind: str
    cluster: str
    devices: Degree
    fits: bool
    step_s: Seconds | None = None
    reason: str = ""
    """Why no plan fits."""


class Gpus(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.gpus/1"
):
    """``chosen`` is the row that answers the question, or null where nothing does.

    With prices for all kinds it is the cheapest per token; otherwise the one with the fewest devices, and of equals the
    fastest. With ``within_s`` only rows that are fast enough count.
    """

    model: str
    seq_tokens: Positive
    global_batch: Positive
    within_s: Seconds | None = None
    kinds: list[str]
    most_devices: Positive
    chosen: Sized | None
    sizes: list[Sized]
    """By kind, in the order in which they were given, and by number of devices."""
    tried: list[TriedCount]
    warnings: list[str] = []
    """What to know before any figure: rough profiles, and rates above what a chip can do."""
    why: list[str] = []
    """What was assumed and how the numbers of devices were searched; one sentence each."""
