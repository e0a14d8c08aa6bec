"""Chooses the implementation of a plan's row-wise operators: torch's, or a fused one that the profile has measured.

One implementation plays all of them, so the choice compares sums over micro-batches, including recompute. Fused kernels
that are faster for norms and slower for the loss are chosen when the norms weigh more.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.knobs import RowwiseKernel
from memo_sim.contract.plan import Decisions
from memo_sim.costs.rowwise import RowwiseRates
from memo_sim.program.ir.work import Rowwise
from memo_sim.program.lower import lower
from memo_sim.program.operators.workspaces import FUSED_KINDS


class RowwiseChoice:
    """Chooses for the candidates of one question; those with the same row-wise work per micro-batch are priced once.

    For a plan whose alpha is still open, the choice is the one at alpha 0, where recompute is largest.
    """

    def __init__(self, hardware: Hardware) -> None:
        self._measured = hardware.fused_rowwise_bytes_per_s
        self._rates = RowwiseRates(hardware)
        self._known: dict[Decisions, RowwiseKernel] = {}
        self._in_one_stage: dict[Decisions, RowwiseKernel | None] = {}

    def faster(self, decisions: Decisions) -> Decisions:
        """Return ``decisions`` with the implementation that takes the fewest seconds; torch wins a tie.

        Decisions that cannot be lowered come back as they are: the search says why.
        """
        if not self._measured:
            return decisions
        # Fused kernels play rows of tokens alone, whichever rank the experts' rows go to.
        alike = msgspec.structs.replace(
            decisions,
            swapped_tokens=0,
            layout=msgspec.structs.replace(decisions.layout, dp=1, ep=1, expert_tp=0, zero=0, zero_ranks=0),
            global_batch=decisions.micro_batch * _least_micro_batches(decisions),
            expert_capacity=0.0,
            expert_overflow="drop",
            expert_overlap=False,
        )
        if alike not in self._known:
            try:
                self._known[alike] = self._of_every_work(alike) or self.fastest(alike)
            except Infeasible:
                return decisions
        kernels = msgspec.structs.replace(decisions.kernels, rowwise=self._known[alike])
        return msgspec.structs.replace(decisions, kernels=kernels)

    def _of_every_work(self, decisions: Decisions) -> RowwiseKernel | None:
        """Return the implementation that is the fastest for every work, however often each occurs; None without one.

        Stages have the works of a model in one stage, in other numbers. Lowering that once is much faster than lowering
        every split into stages.

        Raises:
            Infeasible: when the plan cannot be lowered in one stage.
        """
        layout = decisions.layout
        if layout.pp == 1 or layout.subsequences > 1 or layout.schedule not in {"gpipe", "1f1b", "interleaved"}:
            return None
        whole = msgspec.structs.replace(layout, pp=1, pp_layers=(), schedule="1f1b", virtual_stages=1)
        alone = msgspec.structs.replace(decisions, layout=whole, global_batch=layout.dp * decisions.micro_batch)
        if alone not in self._in_one_stage:
            each = {self._fastest_of(work) for work in _works(alone)}
            self._in_one_stage[alone] = each.pop() if len(each) == 1 else None
        return self._in_one_stage[alone]

    def _fastest_of(self, work: Rowwise) -> RowwiseKernel:
        """Return the implementation that plays one work the fastest; torch wins a tie."""
        known: list[RowwiseKernel] = [kernel for kernel, curves in self._measured.items() if work.kind in curves]
        return min(["torch", *known], key=lambda kernel: self._seconds(Counter([work]), kernel))

    def has_rates(self, decisions: Decisions) -> bool:
        """Return whether the profile has rates of a plan's own implementation; only fused kernels can lack them.

        Raises:
            Infeasible: when the plan cannot be lowered.
        """
        kernel = decisions.kernels.rowwise
        if kernel != "triton":
            return True
        curves = self._measured.get(kernel)
        return curves is not None and all(work.kind in curves for work in _works(decisions))

    def fastest(self, decisions: Decisions) -> RowwiseKernel:
        """Return the implementation that takes the fewest seconds; torch wins a tie.

        Raises:
            Infeasible: when the plan cannot be lowered.
        """
        works = _works(decisions)
        seconds: dict[RowwiseKernel, float] = {"torch": self._seconds(works, "torch")}
        for kernel, curves in self._measured.items():
            if all(work.kind in curves for work in works):
                seconds[kernel] = self._seconds(works, kernel)
        return min(seconds, key=lambda kernel: seconds[kernel])

    def _seconds(self, works: Counter[Rowwise], kernel: RowwiseKernel) -> float:
        outside: set[str] = set()
        return sum(times * self._rates.seconds(work, outside, kernel) for work, times in works.items())


def _least_micro_batches(decisions: Decisions) -> int:
    """Return the fewest micro-batches that a step can have: interleaved ones go in groups of as many as stages."""
    return decisions.layout.pp if decisions.layout.schedule == "interleaved" else 1


def _works(decisions: Decisions) -> Counter[Rowwise]:
    """Return the work of the fewest micro-batches that fused kernels could play, over all stages, with its counts."""
    found: Counter[Rowwise] = Counter()
    for program in lower(decisions, micro_batches=_least_micro_batches(decisions)):
        uses = Counter(instance.template for instance in program.instances)
        for number, times in uses.items():
            for instruction in program.templates[number].instructions:
                if isinstance(instruction.work, Rowwise) and instruction.work.kind in FUSED_KINDS:
                    found[instruction.work] += times
    return found
