"""Cross entropy, or a policy's objective, and its gradient, computed in row blocks.

loss = scale x sum over counted targets of (logsumexp - target's logit). ``scale`` is 1 / number of counted targets in
the global batch, so the losses of micro-batches, chunks and ranks add up. A target with the label -100 is not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from memo_exec.kernels.call import Call, Scratch
from memo_exec.kernels.policy import policy_of
from memo_sim.program.operators.workspaces import LOSS_ROWS

IGNORED = -100
Weigh = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Losses and weights of rows from their log-probabilities (``policy.py``)."""


def cross_entropy(call: Call) -> None:
    """``grad = scale * (softmax(logits) - onehot(labels))`` and ``loss += scale * sum of losses``.

    Without a buffer ``grad``, the gradient replaces the logits.
    """
    logits, grad, labels = call.matrix("logits"), gradient_of(call), call["labels"]
    rows, vocab = logits.shape
    scratch, most = call.scratch(), min(rows, LOSS_ROWS)
    pieces = _Pieces(scratch, most, vocab, wide=logits.dtype != torch.float32)
    policy, scale = policy_of(call, scratch, most), call.context.scalars.loss_scale
    for first in range(0, rows, LOSS_ROWS):
        block = slice(first, min(rows, first + LOSS_ROWS))
        weigh = partial(policy.weigh, block) if policy else None
        pieces.play(logits[block], labels[block], grad[block], call["loss"], scale, weigh)


def gradient_of(call: Call) -> Tensor:
    """Return the matrix for the logits' gradient: ``grad``, or the logits themselves."""
    return call.matrix("grad" if "grad" in call.tensors else "logits")


class _Pieces:
    """The workspace of one call, split into named pieces."""

    def __init__(self, scratch: Scratch, rows: int, vocab: int, *, wide: bool) -> None:
        self.targets = scratch.take(rows, 1, dtype=torch.int64)
        self.ignored = scratch.take(rows, 1, dtype=torch.bool)
        self.largest, self.sums, self.chosen, self.losses = (scratch.take(rows, 1) for _ in range(4))
        self.total = scratch.take(1)
        self.wide = scratch.take(rows, vocab) if wide else None

    def play(  # noqa: PLR0917 - one block of each operand
        self, logits: Tensor, labels: Tensor, grad: Tensor, loss: Tensor, scale: float, weigh: Weigh | None
    ) -> None:
        n = len(logits)
        targets, ignored = self.targets[:n], self.ignored[:n]
        largest, sums, chosen, losses = self.largest[:n], self.sums[:n], self.chosen[:n], self.losses[:n]
        torch.eq(labels.unsqueeze(1), IGNORED, out=ignored)
        targets.copy_(labels.unsqueeze(1)).masked_fill_(ignored, 0)
        work = grad if self.wide is None else self.wide[:n].copy_(logits)
        source = logits if self.wide is None else work
        torch.amax(source, 1, keepdim=True, out=largest)
        torch.sub(source, largest, out=work)
        torch.gather(work, 1, targets, out=chosen)
        torch.sum(work.exp_(), 1, keepdim=True, out=sums)
        torch.log(sums, out=losses).sub_(chosen)
        weights = None
        if weigh is not None:
            weighed, weights = weigh(losses.neg_())
            losses.copy_(weighed)
        torch.sum(losses.masked_fill_(ignored, 0.0), 0, out=self.total)
        loss.add_(self.total, alpha=scale)
        # From here on, the column of losses has each row's weight in the gradient.
        torch.mul(weights, scale, out=losses) if weights is not None else losses.fill_(scale)
        work.mul_(sums.reciprocal_().mul_(losses.masked_fill_(ignored, 0.0)))
        torch.gather(work, 1, targets, out=chosen)
        work.scatter_(1, targets, chosen.sub_(losses))
        if self.wide is not None:
            grad.copy_(work)
