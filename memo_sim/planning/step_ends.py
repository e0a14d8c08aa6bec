"""The end of a step, behind its last backward: gradients are reduced and parameters updated.

One layer of each kind is lowered, in one stage. What ends a step comes in an order:

    last backward | gradients are reduced, their norms taken | parameters are updated, and gathered
                    of every layer, on every stage             of every layer, on every stage

No reduction starts before the last backward of its stage has ended, unless they overlap with it. Every update reads the
norm of all gradients, so it waits for all stages. Norms and updates are kernels; reductions and gathers have lanes of
their own, on which those of all layers follow each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field

import msgspec

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.costs.pricing import Pricer
from memo_sim.planning.pricers import Pricers
from memo_sim.program.ir.instruction import COLLECTIVE_LANES, Lane, Template
from memo_sim.program.ir.kinds import BlockKind, TemplateKind
from memo_sim.program.layout.attention_chunks import in_chunks
from memo_sim.program.layout.recomputed_layers import ALL
from memo_sim.program.layout.stage import Stage
from memo_sim.program.lower import lower

KEPT = {
    "recompute": "none",
    "recompute_layers": ALL,
    "early_stop": False,
    "rounding_buffers": False,
    "swapped_tokens": 0,
    "subsequence_swapped_tokens": (),
    "offload_window": 0,
    "mlp_chunk_tokens": 0,
    "mlp_rebuild": "block",
    "attention_chunk_tokens": 0,
}
"""What a plan decides about activations, when it keeps all of them."""

OF_LAYER = frozenset(block for block in BlockKind if block.of_layer)
_COLLECTIVES = frozenset(COLLECTIVE_LANES.values())


@dataclass(frozen=True, slots=True)
class StepEnd:
    """Seconds of the end of a step for some blocks of parameters: its two parts are lower bounds."""

    zeroed_s: float
    """Kernels before the first forward, which clear gradients."""
    norm_s: float
    update_s: float
    summed_s: dict[Lane, float]
    """The sums of gradients on each lane; none where they may overlap with backward."""
    gathered_s: dict[Lane, float]
    """The gathers of updated parameters on each lane; none where they may overlap with the next step."""

    @property
    def reduced_s(self) -> float:
        """Seconds from the stage's last backward until the norm of its gradients is known."""
        return max(self.norm_s, *self.summed_s.values(), 0.0)

    @property
    def updated_s(self) -> float:
        """Seconds from the norm of all gradients until the stage has its new parameters."""
        return max(self.update_s, *self.gathered_s.values(), 0.0)

    @classmethod
    def of_all(cls, every: Sequence[StepEnd]) -> StepEnd:
        """Return the end of a step for several blocks, given that of each."""
        summed, gathered = (
            {lane: sum(each.get(lane, 0.0) for each in lanes) for lane in {lane for each in lanes for lane in each}}
            for lanes in ([end.summed_s for end in every], [end.gathered_s for end in every])
        )
        zeroed_s, norm_s, update_s = (
            sum(getattr(end, name) for end in every) for name in ("zeroed_s", "norm_s", "update_s")
        )
        return cls(zeroed_s, norm_s, update_s, summed, gathered)


NO_END = StepEnd.of_all([])
"""The end of a step that is not counted."""


@dataclass(frozen=True, slots=True)
class BlockEnds:
    """The end of a step for one layer of each kind, for the embedding, and for a head with parameters of its own."""

    layers: tuple[StepEnd, ...]
    embedding: StepEnd
    head: StepEnd
    of_stages: dict[Hashable, StepEnd] = field(default_factory=dict, repr=False, compare=False)
    """Those of stages that were asked for; many stages of many layouts are alike."""

    def of_stage(self, stage: Stage, kinds: Sequence[int]) -> StepEnd:
        """Return the end of a step for a stage, given the kinds of all layers."""
        held = len(stage.layers) if len(self.layers) == 1 else tuple(kinds[layer] for layer in stage.layers)
        key = stage.first, stage.last, held
        if key not in self.of_stages:
            first, last = [self.embedding] * stage.first, [self.head] * stage.last
            self.of_stages[key] = StepEnd.of_all([*first, *(self.layers[kinds[n]] for n in stage.layers), *last])
        return self.of_stages[key]


class StepEnds:
    """The ends of steps on one cluster; plans that differ only in their passes share a lowering."""

    def __init__(self, hardware: Hardware, cluster: Cluster) -> None:
        self._pricers = Pricers(hardware, cluster)
        self._lowered: dict[Decisions, list[Template]] = {}
        """The templates of the steps' ends."""
        self._known: dict[tuple[Decisions, Layout], BlockEnds] = {}

    def of(self, decisions: Decisions) -> BlockEnds:
        """Return the end of a step for each block of parameters.

        Raises:
            Infeasible: when the plan cannot be lowered, or the profile has not measured its work.
        """
        model, layout = decisions.model, decisions.layout
        # Attention as a whole may be more than a kernel can count; what is kept changes nothing here.
        kept = {} if in_chunks(decisions) else KEPT
        one_stage = {"pp": 1, "pp_layers": (), "schedule": "1f1b", "virtual_stages": 1, "multiplexed": False}
        alone = msgspec.structs.replace(
            decisions,
            model=model.of_layers(model.layer_shapes),
            layout=msgspec.structs.replace(layout, subsequences=1, **one_stage),
            global_batch=layout.dp * decisions.micro_batch,
            **kept,
        )
        # Where stages lie on nodes decides how fast ranks of one stage exchange.
        placed = msgspec.structs.replace(layout, schedule="1f1b", virtual_stages=1, pp_layers=())
        if (alone, placed) not in self._known:
            if alone not in self._lowered:
                (program,) = lower(alone)
                self._lowered[alone] = [template for template in program.templates if template.kind.of_step]
            pricer = self._pricers.of(decisions)
            layers = tuple(self._of(alone, OF_LAYER, kind, pricer) for kind in range(len(model.layer_shapes)))
            embedding, head = (self._of(alone, {block}, 0, pricer) for block in (BlockKind.EMBED, BlockKind.HEAD))
            self._known[alone, placed] = BlockEnds(layers, embedding, head)
        return self._known[alone, placed]

    def _of(self, alone: Decisions, blocks: Collection[BlockKind], kind: int, pricer: Pricer) -> StepEnd:
        kernels_s: dict[TemplateKind, float] = defaultdict(float)
        exchanged_s: dict[TemplateKind, dict[Lane, float]] = defaultdict(lambda: defaultdict(float))
        for template in self._lowered[alone]:
            if template.block not in blocks or (template.layer_kind or 0) != kind:
                continue
            for instruction in template.instructions:
                if instruction.lane is Lane.COMPUTE:
                    kernels_s[template.kind] += pricer.seconds(instruction.work)
                elif instruction.lane in _COLLECTIVES and alone.overlap == "none":
                    exchanged_s[template.kind][Lane(instruction.lane)] += pricer.seconds(instruction.work)
        return StepEnd(
            kernels_s[TemplateKind.ZERO],
            kernels_s[TemplateKind.NORM],
            kernels_s[TemplateKind.UPDATE],
            exchanged_s[TemplateKind.REDUCE],
            exchanged_s[TemplateKind.UPDATE],
        )
