"""Cross entropy with the vocabulary split over tensor-parallel ranks, in three steps.

    stats     each rank: log-sum-exp of its logits (written twice), and the target's logit or 0
    reduce    over the ranks: the largest log-sum-exp, the sum of exponentials relative to it, the target's logit
              (``collective.loss_all_reduce``)
    loss      as in ``loss.py``, with the log-sum-exp of the whole vocabulary

The statistics have shape (3, tokens). If the vocabulary does not divide evenly, the last ranks have columns beyond it.
Those columns count as minus infinity and get no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memo_exec.kernels.call import Call, Scratch
from memo_exec.kernels.loss import IGNORED, gradient_of
from memo_exec.kernels.policy import policy_of
from memo_sim.program.operators.workspaces import LOSS_ROWS


def divided_stats(call: Call) -> None:
    """Write (log-sum-exp, log-sum-exp, target's logit or 0) for this rank's shard of the vocabulary."""
    logits, work, labels = call.matrix("logits"), call.get("exponentials"), call["labels"]
    rows, width = logits.shape
    first, columns = own_columns(call, width)
    numbers = call["out"].view(3, rows)
    # Without a buffer for the exponentials, the logits have to survive for the gradient.
    pieces = _Pieces(call.scratch(), min(rows, LOSS_ROWS), width, wide=work is None or logits.dtype != torch.float32)
    for start in range(0, rows, LOSS_ROWS):
        block = slice(start, min(rows, start + LOSS_ROWS))
        targets, absent = pieces.targets(labels[block], first, columns)
        source = pieces.source(logits[block])
        found = numbers[:, block].unsqueeze(2)
        if not columns:
            found[:2].fill_(float("-inf"))
            found[2].zero_()
            continue
        torch.gather(source, 1, targets, out=pieces.chosen[: len(source)])
        found[2].copy_(pieces.chosen[: len(source)]).masked_fill_(absent, 0.0)
        largest = pieces.largest[: len(source)]
        torch.amax(source[:, :columns], 1, keepdim=True, out=largest)
        exponentials = (source if work is None or pieces.wide is not None else work[block])[:, :columns]
        torch.sub(source[:, :columns], largest, out=exponentials).exp_()
        torch.sum(exponentials, 1, keepdim=True, out=pieces.chosen[: len(source)])
        found[0].copy_(pieces.chosen[: len(source)]).log_().add_(largest)
        found[1].copy_(found[0])


def divided_cross_entropy(call: Call) -> None:
    """``grad = scale * (softmax(logits) - onehot(labels))`` for this rank's columns; ``loss`` is of all columns.

    Without a buffer ``grad``, the gradient replaces the logits.
    """
    logits, grad, labels = call.matrix("logits"), gradient_of(call), call["labels"]
    scale = call.context.scalars.loss_scale
    rows, width = logits.shape
    first, columns = own_columns(call, width)
    numbers = call["stats"].view(3, rows)
    scratch, most = call.scratch(), min(rows, LOSS_ROWS)
    pieces = _Pieces(scratch, most, width, wide=logits.dtype != torch.float32)
    policy = policy_of(call, scratch, most)
    for start in range(0, rows, LOSS_ROWS):
        block = slice(start, min(rows, start + LOSS_ROWS))
        n = block.stop - start
        targets, absent = pieces.targets(labels[block], first, columns)
        all_sum, ignored = pieces.largest[:n], pieces.ignored(labels[block])
        torch.log(numbers[1, block].unsqueeze(1), out=all_sum).add_(numbers[0, block].unsqueeze(1))
        losses, weights = torch.sub(all_sum, numbers[2, block].unsqueeze(1), out=pieces.chosen[:n]), None
        if policy is not None:
            losses, weights = policy.weigh(block, losses.neg_())
        torch.sum(losses.masked_fill_(ignored, 0.0), 0, out=pieces.total)
        call["loss"].add_(pieces.total, alpha=scale)
        work = grad[block] if pieces.wide is None else pieces.wide[:n]
        source = logits[block] if pieces.wide is None else work.copy_(logits[block])
        torch.sub(source, all_sum, out=work).exp_()
        work[:, columns:].zero_()
        column = pieces.chosen[:n].fill_(scale)
        work.mul_((column if weights is None else column.mul_(weights)).masked_fill_(ignored, 0.0))
        # A token without a target counts as absent on every rank.
        work.scatter_add_(1, targets, column.neg_().masked_fill_(absent, 0.0))
        if pieces.wide is not None:
            grad[block].copy_(work)


def own_columns(call: Call, width: int) -> tuple[int, int]:
    """Return the first token id of this rank's vocabulary shard, and how many of its ``width`` columns are tokens."""
    first = call.context.mesh.at("tp") * width
    return first, max(0, min(width, call.context.model.vocab - first))


def place_targets(labels: Tensor, first: int, columns: int, targets: Tensor, absent: Tensor) -> None:
    """Write each token's target as a column of this rank (0 if absent), and a mask of the absent ones, both (rows, 1).

    The rank has ``columns`` token ids from ``first`` on.
    """
    torch.sub(labels.unsqueeze(1), first, out=targets)
    torch.lt(targets, 0, out=absent)
    targets.masked_fill_(absent, columns)  # out of range, like targets of later ranks
    torch.ge(targets, columns, out=absent)
    targets.masked_fill_(absent, 0)


class _Pieces:
    """The workspace of one call, in the pieces that ``workspaces.loss_workspace_bytes`` counts."""

    def __init__(self, scratch: Scratch, rows: int, vocab: int, *, wide: bool) -> None:
        self._targets = scratch.take(rows, 1, dtype=torch.int64)
        self._mask = scratch.take(rows, 1, dtype=torch.bool)
        self.largest, _, self.chosen, flags = (scratch.take(rows, 1) for _ in range(4))
        self._ignored = flags.view(torch.uint8)[:, :1].view(torch.bool)
        self.total = scratch.take(1)
        self.wide = scratch.take(rows, vocab) if wide else None

    def targets(self, labels: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
        """Return each token's target as a column of this rank (0 if absent), and a mask of the absent ones."""
        targets, absent = self._targets[: len(labels)], self._mask[: len(labels)]
        place_targets(labels, first, columns, targets, absent)
        return targets, absent

    def ignored(self, labels: Tensor) -> Tensor:
        """Return a mask of the tokens that have no target on any rank."""
        found = self._ignored[: len(labels)]
        torch.eq(labels.unsqueeze(1), IGNORED, out=found)
        return found

    def source(self, logits: Tensor) -> Tensor:
        """Return the logits in fp32: unchanged if they are fp32, else converted into the workspace."""
        return logits if self.wide is None else self.wide[: len(logits)].copy_(logits)
