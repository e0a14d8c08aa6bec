"""The layers of one pipeline stage by layer kind: layers with equal shapes, which have equal templates and buffers.

Kinds are numbered through the model, in the order in which they first occur, so stages agree about the numbers. Where
all layers of a model are alike, nothing is numbered, and names have no suffix.

      model    wide narrow narrow | wide narrow narrow        suffixes .k0 (wide) and .k1 (narrow)
      stage 0  k0: layers 0       k1: layers 1 2
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.model import Model
from memo_sim.program.layout.stage import Stage


@dataclass(frozen=True)
class LayersOfKind:
    """The layers of one kind on a stage; ``layers`` are local numbers, in order."""

    number: int | None
    """The kind's number; None where all layers of the model are alike."""
    shape: LayerShape
    layers: tuple[int, ...]

    @property
    def suffix(self) -> str:
        """Suffix of the names of this kind's buffers and templates."""
        return kind_suffix(self.number)

    @property
    def block(self) -> str:
        """The name of this kind's parameter blocks."""
        return f"layer{self.suffix}"

    @property
    def experts_block(self) -> str:
        """The name of the blocks of their experts, where ranks divide these."""
        return f"experts{self.suffix}"

    @cached_property
    def place(self) -> dict[int, int]:
        """By local number of a layer: how many layers of the kind come before it on the stage."""
        return {layer: index for index, layer in enumerate(self.layers)}


def kind_suffix(number: int | None) -> str:
    """Return the suffix of names that belong to the kind ``number``; none where all layers are alike."""
    return "" if number is None else f".k{number}"


def layers_by_kind(model: Model, stage: Stage) -> tuple[LayersOfKind, ...]:
    """Return the kinds of layers that ``stage`` has, by their numbers."""
    shapes, kinds = model.layer_shapes, model.layer_kinds
    if len(shapes) == 1:
        return (LayersOfKind(None, shapes[0], tuple(range(len(stage.layers)))),)
    found = (
        LayersOfKind(number, shape, tuple(n for n, layer in enumerate(stage.layers) if kinds[layer] == number))
        for number, shape in enumerate(shapes)
    )
    return tuple(each for each in found if each.layers)
