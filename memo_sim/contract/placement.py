"""Where every buffer lies in its arena, and during which instants (``memo.placement/1``).

    address
      ^  [---- l0.input ----][-- l2.input --]
      |  [ qkv ][ scores ][ qkv ]
      +--------------------------------------> instants

A placement repeats the lives and sizes of its buffers, so it can be checked and drawn without the program or requests.
"""

from __future__ import annotations

import re

import msgspec

from memo_sim.contract.units import Bytes, Positive, Seconds, Tokens

MOST_ROWS = 10_000_000
"""Slots of a placement, repeated ones included; memo makes placements of at most a million."""


class Repeated(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows of a placement that come again ``times`` more times, each time ``instants`` later.

    They are the rows from ``first_row`` on, as many as ``index_steps`` has entries. An id ends in a number in brackets,
    which grows by the row's entry each time: ``layer.fwd/qkv[3]``, ``layer.fwd/qkv[7]``, ...
    """

    first_row: Tokens
    times: Positive
    instants: Positive
    index_steps: list[int]
    offset_bytes: list[Bytes] = []
    """The addresses of all later times, one time after another; empty where they are those of the rows."""


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
    repeated: Repeated | None = None
    """Rows that stand for the same buffers of several micro-batches (``program/arena/folded.py`` writes them out)."""

    def __post_init__(self) -> None:
        """Refuse columns of different lengths, and repeated rows that are not there or are too many."""
        counts = {len(c) for c in (self.ids, self.lower, self.upper, self.size_bytes, self.offset_bytes)}
        if self.classes:
            counts.add(len(self.classes))
        if len(counts) > 1:
            raise ValueError("ids, lower, upper, size_bytes, offset_bytes and classes differ in length")
        if (again := self.repeated) is not None:
            if not again.index_steps or again.first_row + len(again.index_steps) > len(self.ids):
                raise ValueError("rows that are repeated are not there")
            slots = again.times * len(again.index_steps)
            if len(self.ids) + slots > MOST_ROWS:
                raise ValueError(f"more than {MOST_ROWS} slots")
            if again.offset_bytes and len(again.offset_bytes) != slots:
                raise ValueError(f"{len(again.offset_bytes)} addresses of {slots} slots that are repeated")
            last = self.ids[again.first_row : again.first_row + len(again.index_steps)]
            if any(split_id(name) is None for name in last):
                raise ValueError("an id of a repeated row ends in no number in brackets")


_ID = re.compile(r"(.*)\[(0|[1-9]\d{0,9})\]", re.DOTALL | re.ASCII)


def split_id(name: str) -> tuple[str, int] | None:
    """Return the name and the number of ``name[number]``, or None for another id."""
    found = _ID.fullmatch(name)
    return (found[1], int(found[2])) if found else None
