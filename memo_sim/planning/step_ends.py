"""The end of a step, behind its last backward: gradients are reduced and parameters updated.

One layer of each kind is lowered, in one stage. Gradients are reduced in an order in which no reduction starts before
the last backward has ended, unless they overlap with it. Kernels of the update wait for that as well, or take the place
of other kernels. So a stage takes at least its passes and the larger of both.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.costs.pricing import Pricer
from memo_sim.planning.pricers import Pricers
from memo_sim.program.ir.instruction import COLLECTIVE_LANES, Lane, Template
from memo_sim.program.ir.kinds import TemplateKind
from memo_sim.program.layout.attention_chunks import in_chunks
from memo_sim.program.layout.recomputed_layers import ALL
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

_COLLECTIVES = frozenset(COLLECTIVE_LANES.values())


@dataclass(frozen=True, slots=True)
class StepEnd:
    """Seconds of the end of a step for one layer: of the gradients' sums on each lane, and of kernels."""

    reduced_s: dict[Lane, float]
    compute_s: float


class StepEnds:
    """The ends of steps on one cluster; plans that differ only in their passes share a lowering."""

    def __init__(self, hardware: Hardware, cluster: Cluster) -> None:
        self._pricers = Pricers(hardware, cluster)
        self._lowered: dict[Decisions, list[Template]] = {}
        """The templates of the steps' ends."""
        self._known: dict[tuple[Decisions, Layout], tuple[StepEnd, ...]] = {}

    def of(self, decisions: Decisions) -> tuple[StepEnd, ...]:
        """Return the end of a step for one layer of each kind.

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
            self._known[alone, placed] = tuple(
                self._of_kind(alone, kind, pricer) for kind in range(len(model.layer_shapes))
            )
        return self._known[alone, placed]

    def _of_kind(self, alone: Decisions, kind: int, pricer: Pricer) -> StepEnd:
        reduced_s: dict[Lane, float] = {}
        compute_s = 0.0
        for template in self._lowered[alone]:
            if not _of_layer(template, kind):
                continue
            for instruction in template.instructions:
                if instruction.lane is Lane.COMPUTE:
                    compute_s += pricer.seconds(instruction.work)
                elif template.kind is TemplateKind.REDUCE and instruction.lane in _COLLECTIVES:
                    lane = Lane(instruction.lane)
                    reduced_s[lane] = reduced_s.get(lane, 0.0) + pricer.seconds(instruction.work)
        return StepEnd(reduced_s if alone.overlap == "none" else {}, compute_s)


def _of_layer(template: Template, kind: int) -> bool:
    """Return whether a template belongs to layers of a kind."""
    return template.block is not None and template.block.of_layer and (template.layer_kind or 0) == kind
