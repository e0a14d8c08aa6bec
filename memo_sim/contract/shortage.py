"""The answer to ``memo-sim oom``: why a run is short of memory, and what each way out costs (``memo.shortage/1``)."""

from __future__ import annotations

from typing import Literal

import msgspec

from memo_sim.contract.plan import Decisions, Status
from memo_sim.contract.units import Bytes, Positive, Seconds, Tokens


class LiveTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Buffers of one name that are live at the peak of one memory, on one rank."""

    name: str
    buffer_class: str
    count: Positive
    bytes: Bytes
    """Of all ``count`` together."""


class WayOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The asked run with one or two decisions changed, evaluated."""

    knob: str
    """The knob that changes, or two with a comma between; empty where everything is left to the search."""
    options: str
    """The options to type beside the others; the degrees of a layout change in pairs."""
    leave_out: list[str] = []
    """Options of the asked run that do not go with the change."""
    plan: str
    fits: bool
    status: Status
    step_s: Seconds | None = None
    needed_bytes: Bytes
    """Of the memory that was short: a device's with the reserve, or a node's host memory."""
    shortfall_bytes: Bytes = 0
    reason: str = ""
    note: str = ""
    """What else the change means, where it changes more than time and memory."""


class Shortage(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.shortage/1"
):
    """What fills the memory of the asked run at its peak, and the changes that make it fit.

    When the question leaves knobs open, the asked run is the best plan that fits, or else the plan nearest to fitting.
    """

    model: str
    cluster: str
    seq_tokens: Tokens
    fits: bool
    status: Status
    plan: str
    """Policy and layout of the asked run."""
    decisions: Decisions
    changes: list[str] = []
    """Kernels that are not those of the plan that was given, as this machine has no rates of them."""
    candidates: Positive
    """Plans that the question leaves open; 1: every knob is pinned."""
    memory: Literal["device", "host"]
    """The memory that is short; a device's where the run fits."""
    at: str
    """The instruction at which that memory peaks; with pipeline stages, after the stage's name."""
    needed_bytes: Bytes
    """A device's peak with the reserve, or what all ranks of one node need of its host memory."""
    capacity_bytes: Bytes
    shortfall_bytes: Bytes = 0
    free_bytes: Bytes = 0
    by_class: dict[str, Bytes]
    """Live bytes at the peak, by buffer class; of the host, those of all ranks of one node."""
    allocator: dict[str, Bytes] = {}
    """What PyTorch's allocator holds when its request fails; empty where live bytes alone are too many."""
    reserve: dict[str, Bytes] = {}
    """Bytes of the device outside the plan's buffers, by item."""
    tensors: list[LiveTensor]
    """The largest tensors at the peak, of one rank."""
    step_s: Seconds | None = None
    """Of a run that fits."""
    reason: str = ""
    ways: list[WayOut] = []
    """The single changes that make the run fit, the fastest first."""
    open: WayOut | None = None
    """The best plan when the question pins nothing; null where that was asked, or is no faster than ``ways``."""
    too_little: list[WayOut] = []
    """The single changes that need less memory and still do not fit, the nearest to fitting first."""
    tried: int = 0
    """Single changes that could be evaluated."""
    pairs: list[WayOut] = []
    """Two changes that make the run fit together, the fastest first; empty where a single one is enough."""
    pairs_tried: int = 0
    """Pairs that could be evaluated."""
    not_read: list[str] = []
    """Fields of the model's file that are ignored."""
