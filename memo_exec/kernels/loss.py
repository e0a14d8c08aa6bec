"""Cross entropy and its gradient, computed in row blocks.

loss = scale x sum over counted targets of (logsumexp - target's logit). ``scale`` is 1 / number of counted targets in
the global batch, so the losses of micro-batches, chunks and ranks add up. A target with the label -100 is not counted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memo_exec.kernels.call import Call, Scratch
from memo_sim.program.operators.workspaces import LOSS_ROWS

IGNORED = -100


def cross_entropy(call: Call) -> None:
    """``grad = scale * (softmax(logits) - onehot(labels))`` and ``loss += scale * sum of losses``.

    Without a buffer ``grad``, the gradient replaces the logits.
    """
    logits, grad, labels = call.matrix("logits"), gradient_of(call), call["labels"]
    rows, vocab = logits.shape
    pieces = _Pieces(call.scratch(), min(rows, LOSS_ROWS), vocab, wide=logits.dtype != torch.float32)
    for first in range(0, rows, LOSS_ROWS):
        block = slice(first, min(rows, first + LOSS_ROWS))
        pieces.play(logits[block], labels[block], grad[block], call["loss"], call.context.scalars.loss_scale)


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

    def play(self, logits: Tensor, labels: Tensor, grad: Tensor, loss: Tensor, scale: float) -> None:
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
        torch.log(sums, out=losses).sub_(chosen).masked_fill_(ignored, 0.0)
        torch.sum(losses, 0, out=self.total)
        loss.add_(self.total, alpha=scale)
        work.mul_(sums.reciprocal_().mul_(scale).masked_fill_(ignored, 0.0))
        torch.gather(work, 1, targets, out=chosen)
        work.scatter_(1, targets, chosen.sub_(losses.fill_(scale).masked_fill_(ignored, 0.0)))
        if self.wide is not None:
            grad.copy_(work)
