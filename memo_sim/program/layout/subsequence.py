"""A rank's micro-batch cut into subsequences: what each of them is, and how its own buffers and templates are named.

Subsequences follow each other through every layer. Each has templates of its own, because attention of a later one
meets more keys, and buffers as long as it is; what they take in turn (rounding buffers) has room for the longest.

    N 3     | s0 .......... | s1 ...... | s2 .... |      s1: start = tokens of s0, keys before it = start

Gradients of keys and values are summed in one buffer for a run of subsequences, of an eighth of the tokens at least: it
is free once backward has left the first of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from memo_sim.contract.plan import Decisions
from memo_sim.program.layout.partition import partition, swapped_parts
from memo_sim.program.layout.shape import Shape

RUNS = 8
"""The most that a sequence is cut into where gradients of its keys are summed. Attention's backward takes earlier keys
by these runs: more would leave a device's kernels less than they need, and make programs longer."""


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
    starts, sums = (0, *accumulate(parts)), _runs(parts)
    shapes = [
        replace(
            shape, tokens=tokens, shard_tokens=shape.shard(tokens), start=start, kv_cache_tokens=shape.tokens, sums=sums
        )
        for tokens, start in zip(parts, starts, strict=False)
    ]
    room = max(shapes, key=lambda each: each.tokens)
    return tuple(
        Subsequence(number, len(parts), each, room, some)
        for number, (each, some) in enumerate(zip(shapes, swapped, strict=True))
    )


def _runs(parts: Sequence[int]) -> tuple[int, ...]:
    """Return where runs of whole subsequences end: each is as long as an eighth of all tokens, or longer."""
    ends, begun = [], 0
    for end in accumulate(parts):
        if (end - begun) * RUNS >= sum(parts) or end == sum(parts):
            ends.append(end)
            begun = end
    return tuple(ends)
