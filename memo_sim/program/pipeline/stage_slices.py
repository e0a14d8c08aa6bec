"""Slices of a stage's order: each forward with the passes behind it, up to the next forward; those alike are one.

      1F1B, stage 2 of 4    [F0] [F1 B0] [F2 B1] [F3 B2] [B3]         interleaved: chunks c and d
      kind of the slice      0    1       1       1       2           [Fc Bd] is another kind than [Fd Bc] ...

Of each kind, one slice is placed, without transfers between stages and without what moves parameters and gradients of
replicas. What is left of a kind is the same in all of its slices, but for the buffers of other micro-batches.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from memo_sim.contract.plan import Decisions
from memo_sim.program.ir.program import Program
from memo_sim.program.layout.recomputed_layers import ALL
from memo_sim.program.layout.schedule import Kind, Pass
from memo_sim.program.layout.shape import Shape
from memo_sim.program.layout.stage import Stage
from memo_sim.program.layout.swap_schedule import ROUNDING_BUFFERS, LayerPass
from memo_sim.program.pipeline.stage_order import StageOrder
from memo_sim.program.pipeline.stage_parts import StageParts, parts_of
from memo_sim.program.pipeline.stage_program import written
from memo_sim.program.pipeline.subsequence_templates import Made


@dataclass(frozen=True)
class StageSlices:
    """One slice of each kind, one after the other, as a program; and the kinds of all slices of the step."""

    program: Program
    first_instances: list[int]
    """By kind: the number of its slice's first instance."""
    passes: list[Pass]
    """All passes of the step."""
    kinds: dict[int, int]
    """The kind of every slice, by the number of its first pass."""


def stage_slices(decisions: Decisions, shape: Shape, stage: Stage, micro_batches: int, *, made: Made) -> StageSlices:
    """Return the slices of ``stage`` with ``micro_batches`` micro-batches, without offload window and subsequences.

    ``made``: see ``stage_program``.
    """
    parts = parts_of(decisions, shape, stage, micro_batches, made)
    families, templates, slots = written(parts)
    order = StageOrder(parts, templates, slots)
    named: dict[Hashable, range] = {}
    kinds, numbers = dict[int, int](), dict[Hashable, int]()
    for numbers_of_passes in _slices(parts.passes):
        name = _name(parts, order, numbers_of_passes, rounding=bool(slots))
        named.setdefault(name, numbers_of_passes)
        kinds[numbers_of_passes.start] = numbers.setdefault(name, len(numbers))
    first_instances = order.place_apart(named.values())
    program = Program(
        stage=stage.name,
        families=tuple(families.all.values()),
        templates=tuple(templates.all),
        instances=order.instances,
        micro_batches=micro_batches,
        passes=(),
    )
    return StageSlices(program, first_instances, parts.passes, kinds)


def _slices(passes: list[Pass]) -> list[range]:
    """Return the numbers of each slice's passes; backwards that drain the pipeline are slices of their own."""
    forwards = [number for number, each in enumerate(passes) if each.kind is Kind.FORWARD]
    drained = [n for n, each in enumerate(passes) if n > forwards[-1] + 1 and each.kind is Kind.BACKWARD]
    starts = [*forwards, *drained]
    return [range(first, end) for first, end in zip(starts, [*starts[1:], len(passes)], strict=True)]


def _name(parts: StageParts, order: StageOrder, numbers: range, *, rounding: bool) -> Hashable:
    """Return what the instances of a slice depend on, but for the buffers of other micro-batches.

    ``rounding``: whether layers use rounding buffers.
    """
    stage, passes = parts.stage, [parts.passes[number] for number in numbers]
    kind_of = {layer: kind.number for kind in parts.kinds for layer in kind.layers}
    micro_batches = list(dict.fromkeys(each.micro_batch for each in passes))
    units = list(dict.fromkeys((each.micro_batch, each.chunk) for each in passes))

    def chunk(number: int) -> Hashable:
        if parts.decisions.recompute_layers != ALL:
            return number
        layers = stage.chunk(number)
        buffer = layers[0] % ROUNDING_BUFFERS if rounding else 0
        ends = stage.begins_model(layers[0]), stage.ends_model(layers[-1])
        return tuple(kind_of[layer] for layer in layers), buffer, ends

    def wanted(each: LayerPass) -> Hashable:
        unit = each.micro_batch, stage.chunk_of(each.layer)
        place = each.layer - stage.chunk(unit[1])[0]
        return units.index(unit) if unit in units else -1, place, kind_of[each.layer], each.layer % ROUNDING_BUFFERS

    return tuple(
        (
            each.kind,
            micro_batches.index(each.micro_batch),
            units.index((each.micro_batch, each.chunk)),
            chunk(each.chunk),
            tuple((swapped, *map(wanted, prefetched)) for swapped, prefetched in order.copies_of(number)),
        )
        for number, each in zip(numbers, passes, strict=True)
    )
