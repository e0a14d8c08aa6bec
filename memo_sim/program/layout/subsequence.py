"""Subsequences of a rank's micro-batch: the sizes of each one, and the suffix of its buffers and templates.

Subsequences pass through every layer one after the other. Each has its own templates, because attention of a later one
reads more keys, and its own buffers, as long as it is. Rounding buffers are shared and have room for the longest.

    N 3     | s0 .......... | s1 ...... | s2 .... |      s1: start = tokens of s0, keys before it = start

A run of subsequences, with at least an eighth of all tokens, shares one buffer that sums the gradients of keys and
values. The buffer is free after the backward of the run's first subsequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from msgspec.structs import replace

from memo_sim.contract.plan import Decisions
from memo_sim.program.layout.partition import partition, swapped_parts
from memo_sim.program.layout.shape import Shape

RUNS = 8
"""Upper limit of runs in a sequence. Attention's backward makes one call for each run of earlier keys. More runs would
make kernels too small to use a device well, and programs longer."""


@dataclass(frozen=True, slots=True)
class Subsequence:
    """One subsequence; without a cut the only one is the whole micro-batch, and names have no suffix."""

    number: int
    count: int
    shape: Shape
    """Sizes of this subsequence."""
    room: Shape
    """Sizes of the longest subsequence, for buffers that all of them share."""
    swapped: int
    """Tokens whose skeletal tensors are swapped."""

    @property
    def suffix(self) -> str:
        """End of the names of this subsequence's own buffers and templates."""
        return f".s{self.number}" if self.count > 1 else ""


def subsequences_of(decisions: Decisions, shape: Shape) -> tuple[Subsequence, ...]:
    """Return the subsequences in order; ``shape`` has the sizes of the whole micro-batch.

    Raises:
        Infeasible: as in ``partition`` and ``swapped_parts``.
        BadInput: as in ``swapped_parts``.
    """
    parts, swapped = partition(decisions), swapped_parts(decisions)
    if len(parts) == 1:
        return (Subsequence(0, 1, shape, shape, swapped[0]),)
    starts, sums = (0, *accumulate(parts)), run_ends(parts)
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


def run_ends(parts: Sequence[int]) -> tuple[int, ...]:
    """Return the ends of the runs of whole subsequences; a run has at least an eighth of all tokens.

    The last run may have less.
    """
    ends, begun = [], 0
    for end in accumulate(parts):
        if (end - begun) * RUNS >= sum(parts) or end == sum(parts):
            ends.append(end)
            begun = end
    return tuple(ends)
