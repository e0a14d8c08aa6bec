"""The loss as frameworks compute it with torch's operators, one operator or a few per instruction.

eager-fp32       what autograd plays for ``F.cross_entropy(logits.float(), labels)``: log-softmax, the target's
                 log-probability, and the backward of both, each into a tensor of its own
checkpointed     the same inside torch.utils.checkpoint, with accuracy and entropy (TRL's chunked_nll)
vocab-parallel   Megatron-LM's loss on this rank's part of the vocabulary: ``logits`` becomes the logits less their
                 maximum, the exponentials, the softmax and the gradient. ``maxima`` has shape (tokens), ``sums`` has
                 shape (2, tokens): the sum of exponentials, and the target's logit less the maximum. The ranks combine
                 them in between

The formulas and the meaning of ``scale`` are those of ``loss.py``. Columns beyond the vocabulary get no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memo_exec.kernels.call import Call
from memo_exec.kernels.divided_loss import own_columns, place_targets
from memo_exec.kernels.loss import IGNORED
from memo_exec.kernels.policy import policy_of

_ALL = slice(None)
"""The rows of a call: all at once."""


def log_softmax(call: Call) -> None:
    """``out = log_softmax(logits)`` over the vocabulary."""
    torch.ops.aten._log_softmax.out(call.matrix("logits"), 1, False, out=call.matrix("out"))


def nll(call: Call) -> None:
    """``loss -= scale * sum of the targets' log-probabilities``; of a policy, ``scale`` times its objective."""
    log_probs = call.matrix("log_probs")
    targets = _Targets(call, log_probs.shape[1])
    picked = torch.gather(log_probs, 1, targets.columns, out=targets.values)
    losses = picked.neg_() if targets.policy is None else targets.policy.weigh(_ALL, picked)[0]
    torch.sum(losses.masked_fill_(targets.absent, 0.0), 0, out=targets.total)
    call["loss"].add_(targets.total, alpha=call.context.scalars.loss_scale)


def metrics(call: Call) -> None:
    """``metrics`` = correct tokens of the chunk, and the sum of their entropies.

    ``product`` gets the probabilities times their logarithms.
    """
    log_probs, labels, found = call.matrix("log_probs"), call["labels"].unsqueeze(1), call["metrics"].view(-1)
    targets = _Targets(call, log_probs.shape[1])
    torch.argmax(call.matrix("logits"), 1, keepdim=True, out=targets.columns)
    torch.eq(targets.columns, labels, out=targets.absent)
    torch.sum(targets.values.copy_(targets.absent), 0, out=targets.total)
    found[:1].copy_(targets.total)
    product = torch.exp(log_probs, out=call.matrix("product")).mul_(log_probs)
    entropies = torch.sum(product, 1, keepdim=True, out=targets.values).masked_fill_(targets.uncounted(), 0.0)
    torch.neg(torch.sum(entropies, 0, out=targets.total), out=found[1:])


def nll_backward(call: Call) -> None:
    """``grad = 0``, and ``-scale`` at the targets, times their weights in a policy's objective."""
    grad = call.matrix("grad").zero_()
    targets = _Targets(call, grad.shape[1])
    counted = targets.values.fill_(-call.context.scalars.loss_scale)
    if targets.policy is not None:
        picked = torch.gather(call.matrix("log_probs"), 1, targets.columns, out=counted)
        counted = targets.policy.weigh(_ALL, picked)[1].mul_(-call.context.scalars.loss_scale)
    grad.scatter_(1, targets.columns, counted.masked_fill_(targets.absent, 0.0))


def log_softmax_backward(call: Call) -> None:
    """``out = grad - softmax * sum of grad over the vocabulary``."""
    torch.ops.aten._log_softmax_backward_data.out(
        call.matrix("grad"), call.matrix("log_probs"), 1, torch.float32, out=call.matrix("out")
    )


def largest(call: Call) -> None:
    """Write each row's largest logit of this rank's columns; minus infinity where the rank has none."""
    logits, maxima = call.matrix("logits"), call["maxima"]
    _, columns = own_columns(call, logits.shape[1])
    if columns:
        torch.amax(logits[:, :columns], 1, out=maxima)
    else:
        maxima.fill_(float("-inf"))


def exponentials(call: Call) -> None:
    """``logits = exp(logits - maximum)``; write this rank's sums and the targets' logits."""
    logits, sums = call.matrix("logits"), call["sums"].view(2, -1)
    targets = _Targets(call, logits.shape[1])
    logits.sub_(call["maxima"].unsqueeze(1))
    picked = torch.gather(logits, 1, targets.columns, out=targets.values).masked_fill_(targets.absent, 0.0)
    sums[1].copy_(picked.squeeze(1))
    logits.exp_()[:, targets.width :].zero_()
    torch.sum(logits, 1, out=sums[0])


def softmax(call: Call) -> None:
    """``logits = logits / sum`` and ``loss += scale * sum of (log(sum) - target's logit)``."""
    logits, sums = call.matrix("logits"), call["sums"].view(2, -1)
    targets = _Targets(call, logits.shape[1])
    logits.div_(sums[0].unsqueeze(1))
    losses = torch.log(sums[0].unsqueeze(1), out=targets.values).sub_(sums[1].unsqueeze(1))
    if targets.policy is not None:
        losses = targets.policy.weigh(_ALL, losses.neg_())[0]
    torch.sum(losses.masked_fill_(targets.uncounted(), 0.0), 0, out=targets.total)
    call["loss"].add_(targets.total, alpha=call.context.scalars.loss_scale)


def gradient(call: Call) -> None:
    """``logits = scale * (logits - onehot(labels))``; 0 in rows that are not counted."""
    logits = call.matrix("logits")
    targets = _Targets(call, logits.shape[1])
    logits.scatter_add_(1, targets.columns, targets.values.fill_(-1.0).masked_fill_(targets.absent, 0.0))
    scale = targets.values.fill_(call.context.scalars.loss_scale)
    if targets.policy is not None:
        sums = call["sums"].view(2, -1)
        log_probs = torch.log(sums[0].unsqueeze(1), out=scale).neg_().add_(sums[1].unsqueeze(1))
        scale = targets.policy.weigh(_ALL, log_probs)[1].mul_(call.context.scalars.loss_scale)
    logits.mul_(scale.masked_fill_(targets.uncounted(), 0.0))


class _Targets:
    """Columns of the targets among this rank's ``width`` tokens, and one number of each row, in the workspace."""

    def __init__(self, call: Call, vocab: int) -> None:
        self._labels, rows, scratch = call["labels"], len(call["labels"]), call.scratch()
        first, self.width = own_columns(call, vocab)
        self.columns, self.absent = scratch.take(rows, 1, dtype=torch.int64), scratch.take(rows, 1, dtype=torch.bool)
        self.values, self.total = scratch.take(rows, 1), scratch.take(1)
        self.policy = policy_of(call, scratch, rows)
        place_targets(self._labels, first, self.width, self.columns, self.absent)

    def uncounted(self) -> Tensor:
        """Return a mask of the rows without a target on any rank, in place of ``absent``."""
        return torch.eq(self._labels.unsqueeze(1), IGNORED, out=self.absent)
