"""Swap schedule: which layers must swap their skeletal tensors, and when copies to and from the host start.

A layer pass is one layer's forward or backward of one micro-batch and subsequence (``schedule.py`` orders the passes of
a stage). Layer l keeps its skeletal tensors in rounding buffer l % 2 (MEMO 4.1, Figure 5). A layer must be swapped when
another layer writes the same buffer before the layer's own backward. In MEMO's order these are all layers but the last
two. The code derives this from the order of layer passes and does not assume it.

    forward  l0 l1 l2 l3 | backward l3 l2 l1 l0      buffer 0: l0 l2 . . l2 . l0,  buffer 1: l1 l3 l3 . l1 .
                                                     -> l0 and l1 were overwritten, l2 and l3 were not

Subsequences pass through the same layers one after the other. With them, the buffer alternates over all layer forwards
of the stage instead of over layer numbers. Otherwise, with an odd number of layers, the last layer of one subsequence
and the first layer of the next would share a buffer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import msgspec

from memo_sim.program.layout.schedule import Kind, Pass

ROUNDING_BUFFERS = 2

Key = tuple[int, int, int]
"""Micro-batch, subsequence and layer."""


class LayerPass(msgspec.Struct, frozen=True, gc=False):
    """One layer's forward or backward of one micro-batch's subsequence; ``layer`` counts on the rank's stage."""

    micro_batch: int
    layer: int
    backward: bool
    subsequence: int = 0

    @property
    def key(self) -> Key:
        """The activations that this layer pass writes or reads."""
        return self.micro_batch, self.subsequence, self.layer


def layer_passes_of(each: Pass, layers: Sequence[int]) -> list[LayerPass]:
    """Return the layer passes of a pass through ``layers``; none for a W pass (deferred weight gradients)."""
    if each.kind is Kind.WEIGHTS:
        return []
    backward = each.kind is Kind.BACKWARD
    order = reversed(layers) if backward else layers
    return [LayerPass(each.micro_batch, layer, backward, each.subsequence) for layer in order]


def buffer_slots(layer_passes: list[LayerPass], subsequences: int = 1) -> dict[Key, int]:
    """Return the number of the rounding buffer that each layer's forward and backward use."""
    keys = [layer_pass.key for layer_pass in layer_passes if not layer_pass.backward]
    if subsequences == 1:
        return {key: key[2] % ROUNDING_BUFFERS for key in keys}
    return {key: number % ROUNDING_BUFFERS for number, key in enumerate(keys)}


@dataclass(frozen=True, slots=True)
class SwapSchedule:
    """The copies of a stage.

    ``swapped``: the activations that are copied to the host and back.
    ``prefetch_after``: the layer passes whose activations are prefetched after layer pass i.
    ``leave_after``: the forwards whose activations are copied to the host after layer pass i. Forwards that are not
    listed are copied right after they end.
    """

    swapped: frozenset[Key]
    prefetch_after: dict[int, list[LayerPass]]
    leave_after: dict[int, list[LayerPass]] = field(default_factory=dict)


def swap_schedule(layer_passes: list[LayerPass], buffers: dict[Key, int]) -> SwapSchedule:
    """Return the layer passes whose rounding buffer is overwritten, and the earliest prefetch of each."""
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
    """Return a schedule that swaps layer by layer beside other passes of the stage (SPPO 5.2).

    Activations of pass i are copied to the host during pass i + ``window``: those of its n-th layer after the n-th
    layer pass there. They are prefetched during the pass before their backward, in the order in which that backward
    needs them. Activations stay on the device if their prefetch would not come after their copy to the host, or if
    their subsequence is not among ``travelling``.

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
