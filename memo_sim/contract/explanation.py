"""What binds a plan, what would help most, and why each rival loses (``memo.explanation/1``)."""

from __future__ import annotations

from typing import Literal

import msgspec

from memo_sim.contract.goodput import Goodput, GoodputChange
from memo_sim.contract.plan import Decisions, Status
from memo_sim.contract.units import Bytes, Seconds, Tokens

Resource = Literal[
    "compute",
    "device memory rate",
    "copies",
    "links inside a node",
    "network",
    "host memory rate",
    "kernel launches",
    "device memory",
    "host memory",
    "batch",
    "micro-batch",
]
"""What the machine gives, or the question asks for.

- compute: rates of products and attention. device memory rate: of row-wise kernels.
- copies: between device and host (PCIe). links inside a node: of collectives there (NVLink).
- host memory rate: what the copies and updates of all local devices can draw together.
- batch: sequences of a step, as more micro-batches. micro-batch: sequences that a rank plays at once, of a step with as
  many more."""


class Use(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much of the step a lane is busy, and how long the compute lane waits for it."""

    lane: str
    busy_s: Seconds
    of_step: float
    compute_waits_s: Seconds
    """Of the compute lane itself: what no other lane causes (its pipeline bubble, allocator calls, launches)."""


class Room(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How full a memory is: a device's with the reserve, a node's host memory with all its ranks."""

    memory: Literal["device", "host"]
    needed_bytes: Bytes
    """Of a device: the planned arena, or what PyTorch's allocator reserves, which grows while there is room."""
    live_bytes: Bytes
    """Live bytes at the peak, with the reserve."""
    capacity_bytes: Bytes


class Sensitivity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The question with one resource changed; ``gain`` is the change of tokens per GPU and second."""

    resource: Resource
    change: str
    decisions: Literal["fixed", "searched"]
    """Whether the plan stays, or what happens to activations is searched again on its layout."""
    status: Status
    plan: str
    step_s: Seconds | None = None
    tgs: float | None = None
    gain: float | None = None
    """Of a plan that is searched: against the best plan of the same search without the change."""
    reason: str = ""


class Rival(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan that could have been chosen instead. Its seconds are differences from the explained plan's."""

    options: str = ""
    """The decisions that differ, as options; empty for a plan of a result."""
    plan: str
    status: Status
    step_s: Seconds | None = None
    slower_s: float | None = None
    """Negative for a rival that is faster."""
    compute_s: float | None = None
    """More busy time of the compute lane."""
    waits_s: float | None = None
    """More waiting of the compute lane; with ``compute_s`` the whole of ``slower_s``."""
    waits_for: str = ""
    """What it waits for, mostly."""
    peak_device_bytes: Bytes
    peak_host_bytes_per_node: Bytes
    shortfall_bytes: Bytes = 0


class Explanation(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.explanation/1"
):
    """The explanation of one plan on one cluster."""

    name: str
    """The file, or the kind of document, that was explained."""
    model: str
    cluster: str
    seq_tokens: Tokens
    plan: str
    decisions: Decisions
    step_s: Seconds
    mfu: float | None = None
    tgs: float
    uses: list[Use]
    """The compute lane first, then the lanes that it waits for longest."""
    rooms: list[Room]
    searched_step_s: Seconds | None = None
    """Of the fastest way to treat activations on the plan's layout, which searched gains compare with."""
    searched_plan: str = ""
    sensitivities: list[Sensitivity]
    """The largest gain first."""
    rivals: list[Rival]
    """The fastest first; those that do not fit last, the nearest to fitting first."""
    rivals_are: Literal["ranked plans", "one decision changed"]
    changed: list[Rival] = []
    """Of a result: its best plan with one decision changed, in the order of ``rivals``."""
    changes_tried: int = 0
    """Single changes that could be evaluated."""
    pairs: list[Rival] = []
    """Two decisions changed: those that are faster than the plan and than every single change, the fastest first."""
    pairs_tried: int = 0
    """Pairs of changes that could be evaluated."""
    goodput: Goodput | None = None
    """Of a result whose question speaks of failures: what they leave of the plan's speed."""
    goodput_changes: list[GoodputChange] = []
    """The goodput with one of its inputs changed, the best first."""
    notes: list[str] = []
    """How the plan was simulated, where that differs from its file."""
