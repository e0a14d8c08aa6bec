"""The program of one pipeline stage: its families, its templates, and its instances in the order of its schedule.

The first stage has the embedding, the last one the head. With tied embeddings both hold the token embedding, and they
sum its gradient between them. Every subsequence has its own buffers and templates
(``subsequence_templates.py``), whose names end in ``.s0``, ``.s1`` ...
"""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.program.ir.instruction import Family, Template
from memo_sim.program.ir.program import Program
from memo_sim.program.layout.shape import Shape
from memo_sim.program.layout.stage import Stage
from memo_sim.program.layout.swap_schedule import Key, buffer_slots
from memo_sim.program.pipeline.order_cache import Placed, cached_order, order_key
from memo_sim.program.pipeline.stage_families import StageFamilies
from memo_sim.program.pipeline.stage_order import StageOrder, layer_passes
from memo_sim.program.pipeline.stage_parts import StageParts, parts_of
from memo_sim.program.pipeline.stage_templates import StageTemplates
from memo_sim.program.pipeline.subsequence_templates import Made


def stage_program(
    decisions: Decisions, shape: Shape, stage: Stage, micro_batches: int, *, made: Made, with_end: bool = True
) -> Program:
    """Return the program of ``stage``, with ``micro_batches`` micro-batches.

    ``made``: the layer templates that stages share; those written here are added. ``with_end``: whether what follows
    the last pass is part of it.
    """
    parts = parts_of(decisions, shape, stage, micro_batches, made, with_end=with_end)
    families, templates, slots = written(parts)
    instances, first_instances = _placed(parts, families, templates, slots)
    return Program(
        stage=stage.name,
        families=tuple(families.all.values()),
        templates=tuple(templates.all),
        instances=instances,
        micro_batches=micro_batches,
        passes=tuple(zip(parts.passes, first_instances, strict=True)),
    )


def stage_templates(
    decisions: Decisions, shape: Shape, stage: Stage, micro_batches: int, *, made: Made, with_end: bool = True
) -> tuple[tuple[Family, ...], tuple[Template, ...]]:
    """Return the families and templates of ``stage_program`` alone; its instances take most of its time."""
    families, templates, _ = written(parts_of(decisions, shape, stage, micro_batches, made, with_end=with_end))
    return tuple(families.all.values()), tuple(templates.all)


def _placed(parts: StageParts, families: StageFamilies, templates: StageTemplates, slots: dict[Key, int]) -> Placed:
    """Return the order of the stage; plans with another number of swapped tokens may share it."""

    def place() -> Placed:
        order = StageOrder(parts, templates, slots)
        order.place()
        return order.instances, tuple(order.first_instances)

    return cached_order(parts, order_key(parts, families.all, templates.all, rounding=bool(slots)), place)


def written(parts: StageParts) -> tuple[StageFamilies, StageTemplates, dict[Key, int]]:
    """Return the families and templates, and the rounding buffer of each layer's activations."""
    slots = {}
    if parts.subsequences[0].activations.rounding:
        order = [each for passed in layer_passes(parts) for each in passed]
        slots = buffer_slots(order, len(parts.subsequences))
    families = StageFamilies(parts)
    return families, StageTemplates(parts, families, slots), slots
