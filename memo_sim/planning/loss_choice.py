"""Chooses the form of a plan's loss: the default's row blocks, or Triton's with the classifier's product inside.

The latter computes a product more, and moves no logits in forward. It is chosen where the profile has measured it and
the head of a micro-batch (norm, classifier, loss and their backward) takes less time with it. A loss that the question
or the system names is never replaced.
"""

from __future__ import annotations

from math import inf

import msgspec

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.hardware import Hardware
from memo_sim.contract.knobs import Loss, RowwiseKernel
from memo_sim.contract.plan import Decisions
from memo_sim.costs.pricing import Pricer
from memo_sim.planning.blocks import loss_chunk
from memo_sim.planning.question import Question
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.kinds import BlockKind, TemplateKind
from memo_sim.program.layout.compatibility import goes_together
from memo_sim.program.layout.shape import shape_of
from memo_sim.program.lower import lower

HEAD = BlockKind.HEAD, TemplateKind.FORWARD
"""The template of the head, which runs forward and backward."""
FASTER: Loss = "linear-triton"
REPLACED: tuple[Loss, ...] = ("auto", "blocks")


def has_loss(hardware: Hardware, decisions: Decisions) -> bool:
    """Return whether a profile has measured Triton's form of the loss in a plan's dtype."""
    return any(table.kernel == "triton" and table.dtype == decisions.dtype for table in hardware.linear_loss)


class LossChoice:
    """Chooses for the layouts of one question; those with equal heads are priced once.

    Subsequences keep their loss: the heads of all of them would have to be compared.
    """

    def __init__(self, question: Question) -> None:
        self._question = question
        self._known: dict[Decisions, float] = {}

    def faster(self, base: Decisions) -> Decisions:
        """Return ``base`` with the faster form of the loss; its own wins a tie, and where no other is measured."""
        named = self._question.loss != "auto" or base.loss not in REPLACED
        if named or base.layout.subsequences > 1 or not has_loss(self._question.hardware, base):
            return base
        other = msgspec.structs.replace(base, loss=FASTER)
        if not goes_together(other):
            return base
        try:
            return other if self._head_s(other) < self._head_s(base) else base
        except Infeasible:  # the plan cannot be lowered: the search says why
            return base

    def _head_s(self, decisions: Decisions) -> float:
        """Return the seconds of a micro-batch's head on one rank, with the faster row-wise kernels.

        Raises:
            Infeasible: when the plan cannot be lowered.
        """
        chunk = loss_chunk(self._question, decisions, shape_of(decisions))
        alone = _one_layer(msgspec.structs.replace(decisions, loss_chunk_tokens=chunk))
        if alone not in self._known:
            hardware, own = self._question.hardware, self._question.rowwise
            usable: list[RowwiseKernel] = [own] if own else ["torch", *hardware.fused_rowwise_bytes_per_s]
            self._known[alone] = min(self._seconds(alone, kernel) for kernel in usable)
        return self._known[alone]

    def _seconds(self, decisions: Decisions, rowwise: RowwiseKernel) -> float:
        """Return the seconds with these row-wise kernels; infinite where the profile lacks one of them."""
        kernels = msgspec.structs.replace(decisions.kernels, rowwise=rowwise)
        (program,) = lower(msgspec.structs.replace(decisions, kernels=kernels))
        head = next(t for t in program.templates if (t.block, t.kind) == HEAD)
        pricer = Pricer(self._question.hardware, self._question.cluster, decisions.layout, rowwise=rowwise)
        try:
            return sum(pricer.seconds(i.work) for i in head.instructions if i.lane is Lane.COMPUTE)
        except Infeasible:
            return inf


def _one_layer(decisions: Decisions) -> Decisions:
    """Return a plan of one layer, micro-batch and stage with the same head."""
    layout, model = decisions.layout, decisions.model
    alone = msgspec.structs.replace(
        layout,
        pp=1,
        pp_layers=(),
        schedule="1f1b",
        virtual_stages=1,
        dp=1,
        ep=1,
        expert_tp=0,
        zero=0,
        zero_ranks=0,
    )
    return msgspec.structs.replace(
        decisions,
        layout=alone,
        model=model.of_layers(model.layer_shapes[:1]),
        global_batch=decisions.micro_batch,
        expert_capacity=0.0,
        expert_overflow="drop",
        expert_overlap=False,
    )
