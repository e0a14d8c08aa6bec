"""The parts of a pipeline stage: parameter blocks, subsequences, tasks shared with other stages, optimizers."""

from __future__ import annotations

from dataclasses import dataclass

from memo_sim.contract.plan import Decisions
from memo_sim.program.data_parallel.optimizer import Optimizer
from memo_sim.program.data_parallel.sharding import Sharding
from memo_sim.program.ir.kinds import BlockKind
from memo_sim.program.layout.multiplex import cut_tasks
from memo_sim.program.layout.parameters import Block, embed_block, experts_block, head_block, layer_block
from memo_sim.program.layout.schedule import Pass, passes_of
from memo_sim.program.layout.shape import Shape
from memo_sim.program.layout.stage import Stage, stages_of
from memo_sim.program.layout.stage_layers import LayersOfKind, layers_by_kind
from memo_sim.program.layout.subsequence import subsequences_of
from memo_sim.program.pipeline.helper_stage import HelperStage
from memo_sim.program.pipeline.owner_stage import OwnerStage
from memo_sim.program.pipeline.shared_instructions import Made
from memo_sim.program.pipeline.subsequence_templates import SubsequenceTemplates


@dataclass(frozen=True)
class StageParts:
    """The parts of one stage; ``parts_of`` makes them."""

    decisions: Decisions
    shape: Shape
    stage: Stage
    micro_batches: int
    passes: list[Pass]
    """The stage's schedule, in order."""
    blocks: dict[str, Block]
    """By name."""
    kinds: tuple[LayersOfKind, ...]
    """The stage's layers by kind."""
    subsequences: list[SubsequenceTemplates]
    owners: dict[int, OwnerStage]
    """By subsequence, the stage's own tasks whose first rows helper stages compute."""
    helpers: list[HelperStage]
    """Portions of other stages' tasks that this stage computes."""
    optimizers: dict[str, Optimizer]
    """By the names of their blocks."""
    sharding: Sharding
    with_end: bool
    """Whether the program has what follows the last pass: late reductions, gradient norm, update."""

    @property
    def tied_with_another(self) -> bool:
        """Whether another stage adds to the gradient of the token embedding, which it holds too."""
        tied = self.stage.stages > 1 and self.decisions.model.tied_embeddings and self.decisions.lora is None
        return tied and BlockKind.EMBED in self.blocks


def parts_of(
    decisions: Decisions, shape: Shape, stage: Stage, micro_batches: int, made: Made, *, with_end: bool = True
) -> StageParts:
    """Return the parts of a stage; ``made``: the layer templates that stages share, as far as they are written."""
    blocks = _blocks(decisions, stage)
    tasks, subsequences, stages = cut_tasks(decisions), subsequences_of(decisions, shape), stages_of(decisions)
    mine = {x: task for (x, at), task in tasks.items() if at == stage.index}
    kinds = layers_by_kind(decisions.model, stage)
    of_layers = {each.block: (BlockKind.LAYER, each) for each in kinds}
    of_layers |= {each.experts_block: (BlockKind.EXPERTS, each) for each in kinds}
    optimizers = {}
    for name, block in blocks.items():
        if name not in of_layers:
            optimizers[name] = Optimizer(decisions, block, BlockKind(name), 1)
            continue
        kind, layers = of_layers[name]
        optimizers[name] = Optimizer(decisions, block, kind, len(layers.layers), layers.number)
    return StageParts(
        decisions=decisions,
        shape=shape,
        stage=stage,
        micro_batches=micro_batches,
        passes=passes_of(decisions.layout, stage.index, micro_batches),
        blocks=blocks,
        kinds=kinds,
        subsequences=[
            SubsequenceTemplates(
                decisions,
                each,
                stage,
                micro_batches,
                blocks=blocks,
                made=made,
                own=mine[each.number].own if each.number in mine else None,
            )
            for each in subsequences
        ],
        owners={x: OwnerStage(decisions, subsequences[x].shape, task, stage) for x, task in mine.items()},
        helpers=[
            HelperStage(
                decisions,
                subsequences[task.subsequence].shape,
                task,
                portion,
                owner=stages[task.stage],
                block=blocks[BlockKind.LAYER],
            )
            for task in tasks.values()
            for portion in task.helpers
            if portion.stage == stage.index
        ],
        optimizers=optimizers,
        sharding=Sharding(decisions, optimizers, micro_batches, stage),
        with_end=with_end,
    )


def _blocks(decisions: Decisions, stage: Stage) -> dict[str, Block]:
    """Return the parameter blocks that the stage holds, by name."""
    layout, model, adapters = decisions.layout, decisions.model, decisions.lora
    found = []
    if stage.first or (stage.last and model.tied_embeddings):
        found.append(embed_block(model, layout.tp, positions=stage.first, adapters=adapters))
    kinds = layers_by_kind(model, stage)
    for kind in kinds:
        each = layer_block(
            model,
            layout.divided,
            kind.shape,
            name=kind.block,
            ep=layout.ep,
            whole_experts=layout.whole_experts,
            adapters=adapters,
        )
        experts = experts_block(
            model, layout.expert_divided, layout.ep, kind.shape.experts, adapters, name=kind.experts_block
        )
        found += [each, *([experts] if experts else [])]
    if stage.last:
        found.append(head_block(model, layout.tp, adapters=adapters))
    return {block.name: block for block in found}
