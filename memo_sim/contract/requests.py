"""What a step asks of one memory space, buffer by buffer (``memo.requests/1``).

Time is counted in instants, whole numbers in program order (instructions of a program, lines of a log): a buffer lives
in [lower, upper). At one instant memory is given back before it is handed out, and handed out in the order listed.
"""

from __future__ import annotations

import msgspec

from memo_sim.contract.units import Bytes, Positive, Tokens

ARENA_ALIGNMENT_BYTES = 512
"""Where buffers of a program start: PyTorch rounds device blocks to it, and every kernel is content with it."""


class Phase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The instants [lower, upper) of one part of the step: a layer's forward, a layer's backward, the classifier.

    Phases with one ``kind`` make the same requests (instances of one template).
    """

    name: str
    kind: str
    lower: Tokens
    upper: Tokens


class Requests(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.requests/1"
):
    """Columns with one entry a buffer.

    ``classes`` (transient, skeletal, state, ...) may be empty where the source does not know them.
    """

    name: str = ""
    program_sha256: str = ""
    """Of the program that makes these requests; empty when they come from elsewhere."""
    ids: list[str]
    lower: list[Tokens]
    upper: list[Tokens]
    size_bytes: list[Bytes]
    classes: list[str] = []
    phases: list[Phase] = []
    alignment_bytes: Positive = 1
    """Every offset is a multiple of it."""

    def __post_init__(self) -> None:
        """Refuse columns that do not match, lives that never are, and names used twice."""
        counts = {len(self.ids), len(self.lower), len(self.upper), len(self.size_bytes)}
        if self.classes:
            counts.add(len(self.classes))
        if len(counts) > 1:
            raise ValueError("ids, lower, upper, size_bytes and classes differ in length")
        for name, lower, upper in zip(self.ids, self.lower, self.upper, strict=True):
            if lower >= upper:
                raise ValueError(f"{name} lives in [{lower}, {upper}), which is never")
        if len(set(self.ids)) < len(self.ids):
            raise ValueError("an id is used twice")
