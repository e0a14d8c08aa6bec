"""The order in which layers are visited, and what it implies for two rounding buffers.

A visit is one layer's forward or backward of one micro-batch (``schedule.py`` orders the passes they belong to). Layer
l keeps its skeletal tensors in rounding buffer l % 2 (MEMO 4.1, Figure 5); whether it has to be swapped follows from
the order: it has, when another layer writes the same buffer before the layer's own backward. In MEMO's order all layers
but the last two are; nothing here knows that.

    forward  l0 l1 l2 l3 | backward l3 l2 l1 l0      buffer 0: l0 l2 . . l2 . l0,  buffer 1: l1 l3 l3 . l1 .
                                                     -> l0 and l1 were overwritten, l2 and l3 were not

Subsequences follow each other through the same layers, so what counts with them is the number of a layer's forward
among all forwards of the stage: otherwise the last of an odd number of layers and the first would share a buffer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from memo_sim.program.layout.schedule import Kind, Pass

ROUNDING_BUFFERS = 2

Key = tuple[int, int, int]
"""Micro-batch, subsequence and layer."""


@dataclass(frozen=True, slots=True)
class LayerPass:
    """One layer's forward or backward of one micro-batch's subsequence; ``layer`` counts on the rank's stage."""

    micro_batch: int
    layer: int
    backward: bool
    subsequence: int = 0

    @property
    def key(self) -> Key:
        """Whose activations it makes or reads."""
        return self.micro_batch, self.subsequence, self.layer


def layer_passes_of(each: Pass, layers: Sequence[int]) -> list[LayerPass]:
    """Return the visits of a pass through ``layers``: none where it computes weight gradients alone."""
    if each.kind is Kind.WEIGHTS:
        return []
    backward = each.kind is Kind.BACKWARD
    order = reversed(layers) if backward else layers
    return [LayerPass(each.micro_batch, layer, backward, each.subsequence) for layer in order]


def buffer_slots(layer_passes: list[LayerPass], subsequences: int = 1) -> dict[Key, int]:
    """Return the rounding buffer of every layer's forward and backward."""
    keys = [layer_pass.key for layer_pass in layer_passes if not layer_pass.backward]
    if subsequences == 1:
        return {key: key[2] % ROUNDING_BUFFERS for key in keys}
    return {key: number % ROUNDING_BUFFERS for number, key in enumerate(keys)}


@dataclass(frozen=True, slots=True)
class SwapSchedule:
    """What to copy: whose activations are ``swapped``, and the visits to prefetch for once visit i has ended.

    ``leave_after``: the forwards whose activations leave once visit i has ended; right after their own if not said.
    """

    swapped: frozenset[Key]
    prefetch_after: dict[int, list[LayerPass]]
    leave_after: dict[int, list[LayerPass]] = field(default_factory=dict)


def swap_schedule(layer_passes: list[LayerPass], buffers: dict[Key, int]) -> SwapSchedule:
    """Return which visits find their rounding buffer overwritten, and the earliest moment each can be prefetched."""
    owner: dict[int, Key] = {}
    last_use: dict[int, int] = {}
    swapped: set[Key] = set()
    prefetch_after: dict[int, list[LayerPass]] = {}
    for i, layer_pass in enumerate(layer_passes):
        slot = buffers[layer_pass.key]
        if layer_pass.backward and owner.get(slot) != layer_pass.key:
            swapped.add(layer_pass.key)
            prefetch_after.setdefault(last_use[slot], []).append(layer_pass)
        owner[slot] = layer_pass.key
        last_use[slot] = i
    return SwapSchedule(frozenset(swapped), prefetch_after)


def window_schedule(passes: Sequence[list[LayerPass]], window: int, travelling: Collection[int]) -> SwapSchedule:
    """Return what leaves and comes back, layer by layer, beside other passes of the stage (SPPO 5.2).

    Activations of pass i leave during pass i + ``window``: its n-th layer's once the n-th visit there has ended. They
    come back during the pass before their backward, in the order in which that needs them. What would have to come back
    before it has left stays, and so do subsequences that are not ``travelling``.

        window 1    F0 F1 F2 F3 | B3 B2 B1 B0        0 leaves beside F1, 1 beside F2, 2 beside F3, 3 stays
                                                     2 comes back beside B3, 1 beside B2, 0 beside B1
    """
    played = [layer_passes for layer_passes in passes if layer_passes]
    starts = [0, *accumulate(len(layer_passes) for layer_passes in played)]
    backward = {layer_passes[0].key: number for number, layer_passes in enumerate(played) if layer_passes[0].backward}
    found = SwapSchedule(frozenset(), {})
    swapped: set[Key] = set()
    for number, layer_passes in enumerate(played):
        away, back = number + window, backward[layer_passes[-1].key] - 1 if not layer_passes[0].backward else -1
        if layer_passes[0].subsequence not in travelling or away >= back:
            continue
        for n, layer_pass in enumerate(layer_passes):
            found.leave_after.setdefault(starts[away] + n, []).append(layer_pass)
            found.prefetch_after.setdefault(starts[back] + n, []).append(layer_passes[-1 - n])
            swapped.add(layer_pass.key)
    return replace(found, swapped=frozenset(swapped))
