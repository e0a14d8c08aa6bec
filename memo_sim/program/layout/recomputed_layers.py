"""Which layers of a stage full recompute is about, and whose inputs it keeps (``Decisions.recompute_layers``).

    all        every layer keeps its input and runs forward again in its backward
    every-N    the N-th, 2N-th ... layer of a stage does; the others keep everything. torchtitan counts a stage's layers
               so (``distributed/activation_checkpoint.py``, the selective option N)
    first-K    the first K layers of each chunk of a stage do; the others keep everything (Megatron-LM,
               ``core/transformer/transformer_block.py``, recompute method block: one block of layers is a chunk)
    groups-N   all layers run forward again, and only the first input of a group of N layers is kept. A group runs
               forward again as a whole before its backward, so N layers are live at once. Each chunk is divided by
               itself, and its last group may be smaller (Megatron-LM, recompute method uniform)

A group of three layers, l0 to l2; l2 runs forward again inside its own backward, as under ``all``:

    forward l0 l1 l2 (the inputs of l1 and l2 are freed) | backward: rebuild l0, rebuild l1, backward l2, l1, l0
"""

from __future__ import annotations

from dataclasses import dataclass

from memo_sim.contract.plan import Decisions
from memo_sim.program.layout.stage import Stage

ALL = "all"


@dataclass(frozen=True)
class RecomputedLayers:
    """The layers of one stage by what backward does with them; layers are local numbers."""

    kept: frozenset[int] = frozenset()
    """Layers that keep everything."""
    passed: frozenset[int] = frozenset()
    """Layers whose input is freed after their forward: all layers of a group but its first."""
    rebuilt_before: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """For the last layer of each group: the other layers of the group, which run forward again before its backward."""

    @property
    def whole(self) -> frozenset[int]:
        """Layers of groups that run forward again before the backward of their group's last layer."""
        return frozenset(layer for _, layers in self.rebuilt_before for layer in layers)

    def before(self, layer: int) -> tuple[int, ...]:
        """Return the layers that run forward again right before the backward of ``layer``, in order."""
        return dict(self.rebuilt_before).get(layer, ())


def in_groups(decisions: Decisions) -> bool:
    """Return whether an input is kept for several layers."""
    return decisions.recompute_layers.startswith("groups-")


def recomputed_layers(decisions: Decisions, stage: Stage) -> RecomputedLayers:
    """Return what backward does with each layer of a stage."""
    kind, _, number = decisions.recompute_layers.partition("-")
    if kind == ALL:
        return RecomputedLayers()
    count, layers = int(number), range(len(stage.layers))
    chunks = [stage.chunk(c) for c in range(stage.chunks)]
    if kind == "groups":
        groups = [chunk[at : at + count] for chunk in chunks for at in range(0, len(chunk), count)]
        return RecomputedLayers(
            passed=frozenset(layer for group in groups for layer in group[1:]),
            rebuilt_before=tuple((group[-1], tuple(group[:-1])) for group in groups if len(group) > 1),
        )
    again = layers[count - 1 :: count] if kind == "every" else [layer for chunk in chunks for layer in chunk[:count]]
    return RecomputedLayers(kept=frozenset(layers) - frozenset(again))
