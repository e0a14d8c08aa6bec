"""Where every buffer lies in its arena, and during which instants (``memo.placement/1``).

    address
      ^  [---- l0.input ----][-- l2.input --]
      |  [ qkv ][ scores ][ qkv ]
      +--------------------------------------> instants

A placement repeats the lives and sizes of its buffers, so it can be checked and drawn without the program or requests.
"""

from __future__ import annotations

import msgspec

from memo_sim.contract.units import Bytes, Positive, Seconds, Tokens


class Placement(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.placement/1"
):
    """Columns with one entry per slot: buffer name, life [lower, upper) in instants, size and offset."""

    name: str = ""
    program_sha256: str = ""
    """Hash of the program that the buffers belong to; empty for requests from elsewhere."""
    arena_bytes: Bytes
    lower_bound_bytes: Bytes
    """The largest sum of live sizes, each rounded up to the alignment.

    The placement is optimal when ``arena_bytes`` equals it."""
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
        """Refuse columns of different lengths."""
        counts = {len(c) for c in (self.ids, self.lower, self.upper, self.size_bytes, self.offset_bytes)}
        if self.classes:
            counts.add(len(self.classes))
        if len(counts) > 1:
            raise ValueError("ids, lower, upper, size_bytes, offset_bytes and classes differ in length")
