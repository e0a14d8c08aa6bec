"""Memory of one step (``memo.memory/2``): live bytes, the caching allocator's bytes, and the planned arena."""

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
    """Figures of one placement and of PyTorch's caching allocator; null means not known or not asked for."""

    input: str
    input_kind: str
    """One of csv, log, snapshot, requests and plan."""
    notes: list[str] = []
    """Which parts of the input were left out or assumed, and why a figure is null."""
    buffers: Tokens
    alignment_bytes: Positive
    live_bytes: Bytes
    """The largest sum of requested sizes that are alive at once."""
    worst_instant: Tokens
    """The first instant with ``live_bytes`` alive."""
    worst_phase: str = ""
    live_by_class: dict[str, Bytes] = {}
    """Live bytes at the worst instant; empty where the input has no classes."""
    peak_bytes: Bytes
    """Size of the planned arena."""
    lower_bound_bytes: Bytes
    """The largest sum of live sizes, each rounded up to the alignment; no arena can be smaller."""
    gap: NonNegative
    """peak_bytes / lower_bound_bytes - 1."""
    optimal: bool
    """Whether the arena is proven optimal, because it equals the lower bound."""
    solver: str
    elapsed_s: Seconds
    bilevel_peak_bytes: Bytes | None = None
    """Arena size by the bi-level MIP, which plans every phase on its own (MEMO 4.2); null when there are no phases."""
    bilevel_proven: bool | None = None
    """Whether no other bi-level plan is smaller; null when there is none."""
    others: list[OtherPlacement] = []
    """What the solvers give that were not chosen: the portfolio, and the bi-level MIP when the input has phases."""
    capacity_bytes: Bytes | None = None
    """Most bytes that the caching allocator may reserve; null means no limit."""
    caching_replayed: bool = True
    """Whether there was time to replay the requests on PyTorch's caching allocator."""
    reserved_caching_bytes: Bytes | None = None
    """Peak bytes that PyTorch's caching allocator reserves for the same requests; null when it runs out of memory.

    Null also where it was not replayed."""
    allocation_retries: Tokens | None = None
    """Allocation retries in one steady iteration: the allocator frees its whole cache and asks the device again."""
    reserved_eager_bytes: Bytes | None = None
    """What an eager framework reserves, as an eager plan's file predicts it; null for other inputs.

    It asks for more than the program does; the figure is that of the pipeline stage where it is largest."""
