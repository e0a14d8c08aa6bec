"""The order in which layers are visited, and what it implies for two rounding buffers.

A visit is one layer's forward or backward of one micro-batch (``schedule.py`` orders the passes they belong to). Layer
l keeps its skeletal tensors in rounding buffer l % 2 (MEMO 4.1, Figure 5); whether it has to be swapped follows from
the order: it has, when another layer writes the same buffer before the layer's own backward. In MEMO's order all layers
but the last two are; nothing here knows that.

    forward  l0 l1 l2 l3 | backward l3 l2 l1 l0      buffer 0: l0 l2 . . l2 . l0,  buffer 1: l1 l3 l3 . l1 .
                                                     -> l0 and l1 were overwritten, l2 and l3 were not
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memo_sim.program.schedule import Kind, Pass, one_forward_one_backward

ROUNDING_BUFFERS = 2


@dataclass(frozen=True, slots=True)
class Visit:
    """One layer's forward or backward of one micro-batch; ``layer`` counts on the rank's stage."""

    micro_batch: int
    layer: int
    backward: bool


def pass_visits(each: Pass, layers: Sequence[int]) -> list[Visit]:
    """Return the visits of a pass through ``layers``: none where it computes weight gradients alone."""
    if each.kind is Kind.WEIGHTS:
        return []
    backward = each.kind is Kind.BACKWARD
    return [Visit(each.micro_batch, layer, backward) for layer in (reversed(layers) if backward else layers)]


def step_visits(layers: int, micro_batches: int) -> list[Visit]:
    """Return the visits of a step without pipeline: each micro-batch forward, then backward."""
    passes = one_forward_one_backward(0, 1, micro_batches)
    return [visit for each in passes for visit in pass_visits(each, range(layers))]


@dataclass(frozen=True, slots=True)
class SwapSchedule:
    """What to copy: ``swapped`` (micro_batch, layer) pairs, and the visits to prefetch for once visit i has ended."""

    swapped: frozenset[tuple[int, int]]
    prefetch_after: dict[int, list[Visit]]


def swap_schedule(visits: list[Visit]) -> SwapSchedule:
    """Return which visits find their rounding buffer overwritten, and the earliest moment each can be prefetched."""
    owner: dict[int, tuple[int, int]] = {}
    last_use: dict[int, int] = {}
    swapped: set[tuple[int, int]] = set()
    prefetch_after: dict[int, list[Visit]] = {}
    for i, visit in enumerate(visits):
        slot = visit.layer % ROUNDING_BUFFERS
        key = (visit.micro_batch, visit.layer)
        if visit.backward and owner.get(slot) != key:
            swapped.add(key)
            prefetch_after.setdefault(last_use[slot], []).append(visit)
        owner[slot] = key
        last_use[slot] = i
    return SwapSchedule(frozenset(swapped), prefetch_after)
