"""Lower bounds of the bytes of activations in an offload window, from sizes of buffers; nothing is lowered.

Subsequences are played forward from the first to the last, and backward from the last to the first. A subsequence
leaves the device in the pass that is a window after its forward, and comes back in the pass before its backward
(``window_schedule``). So the ends of the passes show what is on the device and what is on the host. Subsequences of
equal work get shorter, so the fullest instant may be an early one:

    window 1, at the end of    F0    F1    F2    F3      B3    B2    B1    B0
    on the device              0     1     2     3       2     1     0     -
    on the host                -     0     0 1   0 1 2   0 1   0     -     -
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memo_sim.contract.plan import Decisions
from memo_sim.memory.pinned_allocator import pinned_bytes
from memo_sim.program.attention import subsequence as prefix_attention
from memo_sim.program.ir.instruction import Family
from memo_sim.program.ir.kinds import FamilyKind
from memo_sim.program.layers.activations import Activations
from memo_sim.program.layout.shape import Shape, shape_of
from memo_sim.program.layout.stage import stages_of
from memo_sim.program.layout.stage_layers import LayersOfKind
from memo_sim.program.layout.subsequence import Subsequence, subsequences_of

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Bytes:
    """Bytes of one layer's activations, by subsequence."""

    whole: Ints
    """On the device after forward, with the KV cache in the first subsequence."""
    aside: Ints
    """On the device while the swapped rows are on the host."""
    host: Ints
    """On the host; 0 where no row is swapped."""

    @property
    def leaves(self) -> NDArray[np.bool_]:
        """Whether any row of a subsequence leaves the device."""
        return self.host > 0


class WindowBytes:
    """The bytes of activations of one plan with an offload window, on each of its stages."""

    def __init__(self, decisions: Decisions) -> None:
        """``decisions`` have an offload window.

        Raises:
            Infeasible: when the layout does not divide the model or the sequence.
        """
        self._decisions = decisions
        self._stages = stages_of(decisions)
        self._kinds = [Counter(decisions.model.layer_kinds[layer] for layer in stage.layers) for stage in self._stages]
        self._layer = self._bytes_of_layers()
        layout = decisions.layout
        chunks, several = self._stages[0].chunks > 1, decisions.micro_batches > 1
        self._known = not (layout.multiplexed or chunks or (layout.schedule == "gpipe" and several))
        """Whether the order of passes is 1F1B's until the first backward."""
        self._host: dict[tuple[tuple[int, int], ...], int] = {}
        """Results by the stage's numbers of layers."""

    def device_bytes(self, stage: int) -> int:
        """Return a lower bound of a stage's activations and KV caches at the fullest end of a pass.

        Counted are the ends before the first backward. The rows that this backward reads are on the device again at the
        last of them. The sums of the gradients of keys and values are not counted.
        """
        if not self._known:
            return 0
        layout, times = self._decisions.layout, self._decisions.micro_batches
        one, parts, window = self._of_stage(stage), layout.subsequences, self._decisions.offload_window
        # Without stages, a micro-batch's backward comes before the next one's forward.
        ahead = 0 if layout.pp == 1 else layout.pp - 1 - stage
        turn = min(times * parts, parts + ahead)
        number = np.arange(turn)
        subsequence = number % parts
        change = np.zeros(turn + 1, dtype=np.int64)
        change[:turn] += one.whole[subsequence]
        back = np.where(number == parts - 1, turn - 1, turn)
        away = number + window
        gone = one.leaves[subsequence] & (away < back)
        less = (one.aside - one.whole)[subsequence[gone]]
        change[away[gone]] += less
        np.subtract.at(change, back[gone], less)
        return int(np.cumsum(change[:turn]).max())

    def host_bytes(self, stage: int) -> int:
        """Return a lower bound of the host memory of one rank of a stage at the fullest end of a pass.

        Of several micro-batches, only the forwards of the first one are counted.
        """
        if not self._known:
            return 0
        key = tuple(self._kinds[stage].items())
        if key not in self._host:
            one, parts = self._of_stage(stage), self._decisions.layout.subsequences
            forward = np.arange(parts)
            away, back = forward + self._decisions.offload_window, 2 * parts - 2 - forward
            gone = one.leaves & (away < back)
            change = np.zeros(2 * parts, dtype=np.int64)
            change[away[gone]] += one.host[gone]
            change[back[gone]] -= one.host[gone]
            ends = parts if self._decisions.micro_batches > 1 else 2 * parts
            self._host[key] = int(np.cumsum(change[:ends]).max())
        return self._host[key]

    def _of_stage(self, stage: int) -> _Bytes:
        """Return the bytes of all layers of a stage."""
        kinds = self._kinds[stage].items()

        def of(name: str) -> Ints:
            found: Ints = np.sum([count * getattr(self._layer[kind], name) for kind, count in kinds], axis=0)
            return found

        return _Bytes(of("whole"), of("aside"), of("host"))

    def _bytes_of_layers(self) -> list[_Bytes]:
        """Return the bytes of a layer of each kind. They depend on a subsequence's length, not on where it begins."""
        decisions, shape = self._decisions, shape_of(self._decisions)
        subsequences, shapes = subsequences_of(decisions, shape), decisions.model.layer_shapes
        found = []
        for number, layer in enumerate(shapes):
            kind = LayersOfKind(number if len(shapes) > 1 else None, layer, (0,))
            known: dict[tuple[int, int], tuple[int, int, int]] = {}
            for part in subsequences:
                if (part.shape.tokens, part.swapped) not in known:
                    known[part.shape.tokens, part.swapped] = self._bytes_of_part(part, kind)
            rows = [known[part.shape.tokens, part.swapped] for part in subsequences]
            whole, aside, host = np.array(rows, dtype=np.int64).T
            caches = _cache_bytes(decisions, subsequences[0].shape.of_layer(layer))
            whole[0] += caches
            aside[0] += caches
            found.append(_Bytes(whole, aside, host))
        return found

    def _bytes_of_part(self, part: Subsequence, kind: LayersOfKind) -> tuple[int, int, int]:
        stage = self._stages[0]
        made = Activations(self._decisions, part.shape.of_layer(kind.shape), 1, stage, kind, part)
        families = made.families()
        device = [f for f in families if f.space == "device"]
        whole = sum(f.bytes for f in device if f.kind is not FamilyKind.PER_LAYER)
        aside = sum(f.bytes for f in device if f.kind is FamilyKind.PER_LAYER)
        return whole, aside, self._host_block_bytes(made, [f for f in families if f.space == "host"])

    def _host_block_bytes(self, made: Activations, families: Sequence[Family]) -> int:
        """Return the host bytes of one layer; each of its statistics is a pinned block of its own (``memory_of``)."""
        if self._decisions.host_allocator != "power_of_two":
            return sum(f.bytes for f in families)
        statistics = {f"host.{t.name}" for t in made.tensors if t.statistics}
        block = sum(f.bytes for f in families if f.name not in statistics)
        return pinned_bytes(block) + sum(pinned_bytes(f.bytes) for f in families if f.name in statistics)


def _cache_bytes(decisions: Decisions, shape: Shape) -> int:
    """Return the bytes of the KV cache of a layer."""
    caches = prefix_attention.families(decisions, shape.attention, 1)
    return sum(f.bytes for f in caches if f.name == prefix_attention.KV)
