"""Chooses the implementation of a plan's row-wise operators: torch's, or a fused one that the profile has measured.

One implementation plays all of them, so the choice compares sums over micro-batches, including recompute. Fused kernels
that are faster for norms and slower for the loss are chosen when the norms weigh more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

import msgspec

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.knobs import RowwiseKernel
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.costs.rowwise import RowwiseRates
from memo_sim.planning.short_rings import SHORT, steps_repeat, with_ring
from memo_sim.program.ir.instruction import Template
from memo_sim.program.ir.kinds import BlockKind, TemplateKind
from memo_sim.program.ir.work import Rowwise
from memo_sim.program.layout.recomputed_layers import ALL
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.lower import lower, lower_passes
from memo_sim.program.operators.workspaces import FUSED_KINDS, HEAD_KINDS

FEW = 2
"""The fewest subsequences whose layers have all kinds of work that those of more subsequences have."""

MERGE = "attention.merge"
"""Row-wise work of every step of a ring."""


class RowwiseChoice:
    """Chooses for the candidates of one question; those with the same row-wise work per micro-batch are priced once.

    For a plan whose alpha is still open, the choice is the one at alpha 0, where recompute is largest.
    """

    def __init__(self, hardware: Hardware) -> None:
        self._measured = hardware.fused_rowwise_bytes_per_s
        self._rates = RowwiseRates(hardware)
        self._ignores_merges = self._measured.keys() <= {"triton"} and all(
            MERGE not in curves for curves in self._measured.values()
        )
        """Whether merges, which are all that a longer ring adds to the works, have the same price in each choice."""
        self._known: dict[Decisions, RowwiseKernel] = {}
        self._wins: dict[Model, AbstractSet[str]] = {}
        """By model: the kinds of ``_kinds_won``."""
        self._in_one_stage: dict[Decisions, RowwiseKernel | None] = {}

    def faster(self, decisions: Decisions) -> Decisions:
        """Return ``decisions`` with the implementation that takes the fewest seconds; torch wins a tie.

        Decisions that cannot be lowered come back as they are: the search says why.
        """
        if not self._measured:
            return decisions
        asked = decisions
        try:
            if self._fused_wins(decisions):
                return _with_kernel(decisions, "triton")
        except Infeasible:
            return asked
        if self._ignores_merges and steps_repeat(decisions):
            decisions = with_ring(decisions, SHORT[0])
        # Fused kernels play rows of tokens alone, whichever rank the experts' rows go to.
        alike = msgspec.structs.replace(
            decisions,
            swapped_tokens=0,
            subsequence_swapped_tokens=(),
            offload_window=0,
            layout=msgspec.structs.replace(decisions.layout, dp=1, ep=1, expert_tp=0, zero=0, zero_ranks=0),
            global_batch=decisions.micro_batch * _least_micro_batches(decisions),
            expert_capacity=0.0,
            expert_overflow="drop",
            expert_overlap=False,
        )
        if alike not in self._known:
            try:
                self._known[alike] = self._of_any_stages(alike) or self.fastest(alike)
            except Infeasible:
                return asked
        return _with_kernel(asked, self._known[alike])

    def _fused_wins(self, decisions: Decisions) -> bool:
        """Return whether fused kernels are certainly the fastest, which needs no lowering.

        They are where none is slower than torch's at any size, of all kinds that the model's plans may have, and one is
        faster in every plan: the norm before attention, of all rows of the rank, if it takes longer than a launch.

        Raises:
            Infeasible: when the layout does not divide the model or the sequence.
        """
        model, layout = decisions.model, decisions.layout
        if layout.subsequences > 1 or layout.multiplexed or layout.metp > 1 or model.latent is not None:
            return False
        if model not in self._wins:
            self._wins[model] = self._kinds_won(model)
        norm = "layer_norm" if model.family == "gpt" else "rms_norm"
        if norm not in self._wins[model]:
            return False
        moved_bytes = 2 * shape_of(decisions).shard_tokens * model.hidden * DTYPE_BYTES[decisions.dtype]
        return self._rates.is_beyond_floor(norm, "torch", moved_bytes)

    def _kinds_won(self, model: Model) -> AbstractSet[str]:
        """Return the kinds of work of which fused kernels are faster at every size; none where one may be slower."""
        kinds = {kind for kind in FUSED_KINDS if not (model.gated and kind.startswith("gelu"))}
        if self._measured.keys() != {"triton"} or not kinds <= self._measured["triton"].keys():
            return frozenset()
        return self._rates.wins(kinds | HEAD_KINDS, "triton", "torch") or frozenset()

    def _of_any_stages(self, decisions: Decisions) -> RowwiseKernel | None:
        """Return the implementation that is the fastest however layers are divided over stages; None without one.

        Stages have the works of a model in one stage. Only the number of layers whose backward finds all activations in
        a rounding buffer, and recomputes nothing, depends on the stages. So one layer of each kind is lowered, with all
        subsequences, and an implementation is returned that is the fastest for any such number.

        Raises:
            Infeasible: when the plan cannot be lowered in one stage.
        """
        layout, model = decisions.layout, decisions.model
        if layout.multiplexed or decisions.recompute_layers != ALL:
            return None
        whole = msgspec.structs.replace(layout, pp=1, pp_layers=(), schedule="1f1b", virtual_stages=1)
        alone = msgspec.structs.replace(decisions, layout=whole, global_batch=layout.dp * decisions.micro_batch)
        if alone not in self._in_one_stage:
            one_each = msgspec.structs.replace(alone, model=model.of_layers(model.layer_shapes))
            found = self._fused_at_every_size(one_each) if layout.subsequences > FEW else None
            self._in_one_stage[alone] = found or self._fastest_of(_LayerWorks(one_each), Counter(model.layer_kinds))
        return self._in_one_stage[alone]

    def _fused_at_every_size(self, decisions: Decisions) -> RowwiseKernel | None:
        """Return the fused kernels if they win at every size of each kind of work, else None.

        Then they win with any number of subsequences, and two tell which kinds of work there are. One operator must
        take longer than a launch: the longest of N subsequences has at least 1/N of the rows that one of two has, and
        an operator's bytes shrink by no more than its rows.
        """
        if self._measured.keys() != {"triton"}:
            return None
        few = msgspec.structs.replace(decisions.layout, subsequences=FEW)
        try:
            works = _LayerWorks(msgspec.structs.replace(decisions, layout=few))
        except Infeasible:
            return None
        kinds = {work.kind for work in works.every}
        if not _needed(works.every) <= self._measured["triton"].keys():
            return None
        wins = self._rates.wins(kinds, "triton", "torch") or set()
        share = 1 / decisions.layout.subsequences
        longer = (
            self._rates.is_beyond_floor(work.kind, "torch", work.moved_bytes * share)
            for work in _joined(works.forward)
            if work.kind in wins
        )
        return "triton" if any(longer) else None

    def _fastest_of(self, works: _LayerWorks, layers: Counter[int]) -> RowwiseKernel | None:
        """Return the implementation that is the fastest for any number of resident layers; ``layers``: by kind."""
        needed = _needed(works.every)
        if not needed <= _needed(works.always):
            return None
        usable: list[RowwiseKernel] = ["torch", *(k for k, curves in self._measured.items() if needed <= curves.keys())]
        for number, one in enumerate(usable):
            if all(
                self._gains(works, layers, one, other, ties=number < place)
                for place, other in enumerate(usable)
                if other != one
            ):
                return one
        return None

    def _gains(
        self, works: _LayerWorks, layers: Counter[int], one: RowwiseKernel, other: RowwiseKernel, *, ties: bool
    ) -> bool:
        """Return whether ``one`` beats ``other``, or with ``ties`` equals it, for any number of resident layers.

        That number may differ between subsequences.
        """

        def more_s(of: Counter[Rowwise]) -> float:
            return self._seconds(of, one) - self._seconds(of, other)

        most_s = more_s(works.ends)
        for part in works.forward:
            backward_s = max(more_s(works.backward[part]), more_s(works.resident[part]))
            most_s += layers[part[0]] * (more_s(works.forward[part]) + backward_s)
        return most_s < 0 or (ties and most_s == 0)

    def has_rates(self, decisions: Decisions) -> bool:
        """Return whether the profile has rates of a plan's own implementation; only fused kernels can lack them.

        Raises:
            Infeasible: when the plan cannot be lowered.
        """
        kernel = decisions.kernels.rowwise
        if kernel != "triton":
            return True
        curves = self._measured.get(kernel)
        return curves is not None and _needed(_works(decisions)) <= curves.keys()

    def fastest(self, decisions: Decisions) -> RowwiseKernel:
        """Return the implementation that takes the fewest seconds; torch wins a tie.

        Raises:
            Infeasible: when the plan cannot be lowered.
        """
        works = _works(decisions)
        seconds: dict[RowwiseKernel, float] = {"torch": self._seconds(works, "torch")}
        for kernel, curves in self._measured.items():
            if _needed(works) <= curves.keys():
                seconds[kernel] = self._seconds(works, kernel)
        return min(seconds, key=lambda kernel: seconds[kernel])

    def _seconds(self, works: Counter[Rowwise], kernel: RowwiseKernel) -> float:
        outside: set[str] = set()
        return sum(times * self._rates.seconds(work, outside, kernel) for work, times in works.items())


def _with_kernel(decisions: Decisions, kernel: RowwiseKernel) -> Decisions:
    return msgspec.structs.replace(decisions, kernels=msgspec.structs.replace(decisions.kernels, rowwise=kernel))


_Part = tuple[int, int]
"""A kind of layer and the number of a subsequence."""


class _LayerWorks:
    """The row-wise work of one micro-batch that fused kernels could play, by what the number of layers multiplies."""

    def __init__(self, decisions: Decisions) -> None:
        """``decisions`` have one layer of each kind, in one stage.

        Raises:
            Infeasible: when the plan cannot be lowered.
        """
        program = lower_passes(decisions)  # behind the passes is none of this work
        self.ends: Counter[Rowwise] = Counter()
        """Of what is not in layers."""
        self.forward: dict[_Part, Counter[Rowwise]] = {}
        self.backward: dict[_Part, Counter[Rowwise]] = {}
        self.resident: dict[_Part, Counter[Rowwise]] = {}
        """By kind of layer and subsequence; backward with what is recomputed before it, or of activations that stay."""
        of_layers = {
            TemplateKind.FORWARD: self.forward,
            TemplateKind.BACKWARD: self.backward,
            TemplateKind.BACKWARD_RESIDENT: self.resident,
        }
        uses = Counter(program.template_of.tolist())
        written = Counter[int]()
        for number, template in enumerate(program.templates):
            works = _works_of(template)
            if template.block is BlockKind.LAYER and template.kind in of_layers:
                kind = template.layer_kind or 0
                written[kind] += template.kind is TemplateKind.BACKWARD  # a subsequence's forward is before it
                subsequence = written[kind] - (template.kind is not TemplateKind.FORWARD)
                of_layers[template.kind][kind, subsequence] = works
            else:
                for work, times in works.items():
                    self.ends[work] += times * uses[number]
        self.resident = {**self.backward, **self.resident}

    @property
    def always(self) -> set[Rowwise]:
        """The works that every plan has, whatever its number of resident layers."""
        return {*self.ends, *_joined(self.forward), *(_joined(self.backward) & _joined(self.resident))}

    @property
    def every(self) -> set[Rowwise]:
        """All works."""
        return self.always | _joined(self.backward) | _joined(self.resident)


def _needed(works: Iterable[Rowwise]) -> set[str]:
    """Return the kinds of ``works`` whose fused kernels have no price unless they are measured."""
    return {work.kind for work in works} - HEAD_KINDS


def _joined(by_part: dict[_Part, Counter[Rowwise]]) -> set[Rowwise]:
    return {work for works in by_part.values() for work in works}


def _least_micro_batches(decisions: Decisions) -> int:
    """Return the fewest micro-batches that a step can have: interleaved ones go in groups of as many as stages."""
    return decisions.layout.pp if decisions.layout.schedule == "interleaved" else 1


def _works(decisions: Decisions) -> Counter[Rowwise]:
    """Return the work of the fewest micro-batches that fused kernels could play, over all stages, with its counts."""
    found: Counter[Rowwise] = Counter()
    for program in lower(decisions, micro_batches=_least_micro_batches(decisions)):
        uses = Counter(program.template_of.tolist())
        for number, times in uses.items():
            for work, each in _works_of(program.templates[number]).items():
                found[work] += times * each
    return found


def _works_of(template: Template) -> Counter[Rowwise]:
    """Return the work of one instance that fused kernels could play, with its counts."""
    works = (instruction.work for instruction in template.instructions)
    return Counter(work for work in works if isinstance(work, Rowwise) and work.kind in FUSED_KINDS | HEAD_KINDS)
