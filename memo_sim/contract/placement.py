"""Where every buffer lies in its arena, and when (``memo.placement/1``).

    address
      ^  [---- l0.input ----][-- l2.input --]
      |  [ qkv ][ scores ][ qkv ]
      +--------------------------------------> instants

A placement repeats lives and sizes, so that it can be checked and drawn without what it was made from.
"""

from __future__ import annotations

import msgspec

from memo_sim.contract.units import Bytes, Positive, Seconds, Tokens


class Placement(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.placement/1"
):
    """Columns with one entry a slot: a buffer's name, its life [lower, upper) in instants, its size and its offset."""

    name: str = ""
    program_sha256: str = ""
    """Of the program whose buffers these are; empty for requests from elsewhere."""
    arena_bytes: Bytes
    lower_bound_bytes: Bytes
    """The largest sum of sizes alive at once, each rounded up to the alignment; equal to ``arena_bytes``: optimal."""
    alignment_bytes: Positive = 1
    solver: str = ""
    elapsed_s: Seconds = 0.0
    ids: list[str]
    lower: list[Tokens]
    upper: list[Tokens]
    size_bytes: list[Bytes]
    offset_bytes: list[Bytes]
    classes: list[str] = []

    def __post_init__(self) -> None:
        """Refuse columns that do not match."""
        counts = {len(c) for c in (self.ids, self.lower, self.upper, self.size_bytes, self.offset_bytes)}
        if self.classes:
            counts.add(len(self.classes))
        if len(counts) > 1:
            raise ValueError("ids, lower, upper, size_bytes, offset_bytes and classes differ in length")
