"""The verdict of an answer in numbers: whether a plan fits and by how much, how fast it is, and what is assumed.

It is a part of ``memo.result/2`` and ``memo.longest/2``. ``answers/summary.py`` computes it, ``views/summary_text.py``
shows it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from memo_sim.contract.goodput import Goodput
from memo_sim.contract.plan import Status, StepInterval
from memo_sim.contract.units import Bytes, NonNegative, Positive, Seconds, Tokens

NOT_READ = "not read"
"""Name of the assumption that lists ignored fields of the model's file."""
PeakKind = Literal["arena", "reserved", "live"]
"""What the bytes of a device's peak are.

- arena: the arena of a planned placement.
- reserved: what PyTorch's caching allocator reserves, fragmentation included.
- live: live bytes, where there is no arena and nothing that an allocator could reserve (plans that do not fit)."""


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory of one device of the fullest pipeline stage; ``needed_bytes`` is peak and reserve."""

    stage: int = 0
    stages: Positive = 1
    peak: PeakKind
    peak_bytes: Bytes
    live_bytes: Bytes
    """Most live bytes of any stage at one instant; at most the peak."""
    reserve_bytes: Bytes
    """Bytes outside the plan's own buffers: context, communicators, libraries."""
    needed_bytes: Bytes
    capacity_bytes: Bytes
    free_bytes: Bytes = 0
    """Capacity above what is needed; 0 where the device is too small."""
    allocation_retries: int = 0
    """Allocation retries in a step; with any, PyTorch's cache has filled the device."""
    allocator_wait_s: Seconds = 0.0
    """Seconds of a step that compute waits for the allocator's calls."""


class HostMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pinned memory that all ranks of one node need together, of the node's host memory."""

    needed_bytes: Bytes
    capacity_bytes: Bytes


class Assumption(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that the figures rest on, and the option that changes it; an empty option: the profile decides."""

    name: str
    value: str
    option: str = ""


class LeftOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Plans that the search did not try, and the option that includes them."""

    what: str
    option: str


class Summary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The verdict about the best plan; where nothing fits, about the plan that is nearest to fitting.

    A plan that does not fit has no seconds, rates or prices.
    """

    fits: bool
    status: Status
    devices: Positive
    """Devices that the plan occupies; rates, GPU-hours and prices count these."""
    tokens_per_step: Tokens
    step_s: Seconds | None = None
    interval: StepInterval | None = None
    no_interval: str = ""
    """Why a plan that fits has no interval."""
    mfu: float | None = None
    tokens_per_device_s: float | None = None
    device_hours_per_billion_tokens: float | None = None
    price_per_device_hour: NonNegative | None = None
    """As given with the question, in any currency; the two prices below are in the same one."""
    price_per_step: float | None = None
    price_per_billion_tokens: float | None = None
    goodput: Goodput | None = None
    """What failures leave of these rates; null unless the question says how often devices fail."""
    device_memory: DeviceMemory
    host_memory: HostMemory
    shortfall_bytes: Bytes = 0
    reason: str = ""
    """Why the plan does not fit."""
    ways_out: list[str] = []
    """Options that would help a plan that does not fit."""
    plan: str
    """The plan in words."""
    assumptions: list[Assumption] = []
    left_out: list[LeftOut] = []
