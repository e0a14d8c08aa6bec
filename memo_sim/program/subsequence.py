"""A rank's micro-batch cut into subsequences: what each of them is, and how its own buffers and templates are named.

Subsequences follow each other through every layer. Each has templates of its own, because attention of a later one
meets more keys, and buffers as long as it is; what they take in turn (rounding buffers) has room for the longest.

    N 3     | s0 .......... | s1 ...... | s2 .... |      s1: start = tokens of s0, keys before it = start
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from memo_sim.contract.plan import Decisions
from memo_sim.program.partition import partition, swapped_parts
from memo_sim.program.shape import Shape


@dataclass(frozen=True, slots=True)
class Subsequence:
    """One of them; the only one holds the whole micro-batch, and nothing is named after it."""

    number: int
    count: int
    shape: Shape
    """Sizes of this one's rows."""
    room: Shape
    """Sizes of the longest one's."""
    swapped: int
    """Tokens whose skeletal tensors are swapped."""

    @property
    def suffix(self) -> str:
        """Ends the names of what is this one's own."""
        return f".s{self.number}" if self.count > 1 else ""


def subsequences_of(decisions: Decisions, shape: Shape) -> tuple[Subsequence, ...]:
    """Return the subsequences in order; ``shape`` has the sizes of the whole micro-batch.

    Raises:
        Infeasible: as ``partition`` and ``swapped_parts``.
    """
    parts, swapped = partition(decisions), swapped_parts(decisions)
    if len(parts) == 1:
        return (Subsequence(0, 1, shape, shape, swapped[0]),)
    starts = (0, *accumulate(parts))
    shapes = [
        replace(shape, tokens=tokens, shard_tokens=shape.shard(tokens), start=start, carried=shape.tokens)
        for tokens, start in zip(parts, starts, strict=False)
    ]
    room = max(shapes, key=lambda each: each.tokens)
    return tuple(
        Subsequence(number, len(parts), each, room, some)
        for number, (each, some) in enumerate(zip(shapes, swapped, strict=True))
    )
