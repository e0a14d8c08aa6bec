"""What planning a step's memory gives (``memo.memory/2``): live bytes, the caching allocator's, the planned arena."""

from __future__ import annotations

import msgspec

from memo_sim.contract.units import Bytes, NonNegative, Positive, Seconds, Tokens


class OtherPlacement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What another solver gives for the same requests."""

    solver: str
    peak_bytes: Bytes
    elapsed_s: Seconds
    proven: bool
    """Nothing smaller exists: of bilevel-mip no other bi-level plan, of others no other placement."""


class MemoryReport(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.memory/2"
):
    """The figures of one placement beside those of PyTorch's caching allocator; null: not known, or not asked for."""

    input: str
    input_kind: str
    """csv, log, snapshot, requests or plan."""
    notes: list[str] = []
    """What of the input was left out or assumed, and why a figure is null."""
    buffers: Tokens
    alignment_bytes: Positive
    live_bytes: Bytes
    """The largest sum of sizes alive at once, as requested."""
    worst_instant: Tokens
    """The first instant at which so much lives."""
    worst_phase: str = ""
    live_by_class: dict[str, Bytes] = {}
    """Live bytes at the worst instant; empty where the input has no classes."""
    peak_bytes: Bytes
    """The planned arena."""
    lower_bound_bytes: Bytes
    """The largest live sum, each size rounded up to the alignment: no arena can be smaller."""
    gap: NonNegative
    """peak_bytes / lower_bound_bytes - 1."""
    optimal: bool
    """Proven: the arena is the lower bound."""
    solver: str
    elapsed_s: Seconds
    bilevel_peak_bytes: Bytes | None = None
    """The arena by the bi-level MIP, which plans every phase apart (MEMO 4.2); null where the input has no phases."""
    bilevel_proven: bool | None = None
    """Whether no other bi-level plan is smaller; null where there is none."""
    others: list[OtherPlacement] = []
    """What the solvers give that were not chosen: the portfolio, and the bi-level MIP where the input has phases."""
    capacity_bytes: Bytes | None = None
    """What the caching allocator may reserve; null: no limit."""
    reserved_caching_bytes: Bytes | None = None
    """What PyTorch's caching allocator reserves at most for the same requests; null: it runs out of memory."""
    allocation_retries: Tokens | None = None
    """How often it gives its cache back and asks again, in one steady iteration."""
