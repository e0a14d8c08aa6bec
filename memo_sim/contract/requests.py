"""The memory requests of one step in one memory space, one entry per buffer (``memo.requests/1``).

Time is counted in instants: whole numbers in program order (instructions of a program, lines of a log). A buffer lives
in [lower, upper). Within one instant, buffers are freed first; then new ones are allocated in the order listed.
"""

from __future__ import annotations

import msgspec

from memo_sim.contract.units import Bytes, Positive, Tokens

ARENA_ALIGNMENT_BYTES = 512
"""Alignment of a program's buffers: PyTorch rounds device blocks to it, and it satisfies every kernel."""


class Phase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the step, the instants [lower, upper): a layer's forward, a layer's backward, the classifier.

    Phases of the same ``kind`` make the same requests, because they are instances of one template.
    """

    name: str
    kind: str
    lower: Tokens
    upper: Tokens


class Requests(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.requests/1"
):
    """Columns with one entry per buffer.

    ``classes`` (transient, skeletal, state, ...) may be empty when the source does not know them.
    """

    name: str = ""
    program_sha256: str = ""
    """Hash of the program that makes these requests; empty when they come from elsewhere."""
    ids: list[str]
    lower: list[Tokens]
    upper: list[Tokens]
    size_bytes: list[Bytes]
    classes: list[str] = []
    phases: list[Phase] = []
    alignment_bytes: Positive = 1
    """Every offset is a multiple of it."""

    def __post_init__(self) -> None:
        """Refuse columns of different lengths, empty lives, and names used twice."""
        counts = {len(self.ids), len(self.lower), len(self.upper), len(self.size_bytes)}
        if self.classes:
            counts.add(len(self.classes))
        if len(counts) > 1:
            raise ValueError("ids, lower, upper, size_bytes and classes differ in length")
        for name, lower, upper in zip(self.ids, self.lower, self.upper, strict=True):
            if lower >= upper:
                raise ValueError(f"{name} has an empty life: [{lower}, {upper})")
        if len(set(self.ids)) < len(self.ids):
            raise ValueError("an id is used twice")
