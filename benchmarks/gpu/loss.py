"""The classifier and its loss in chunks of tokens, so that the logits of a long sequence never exist at once.

    loss = scale * sum over counted targets of (logsumexp - target's logit)

Forward also computes the gradients while a chunk's logits exist, so backward does not recompute them. Fused losses for
long sequences do the same. The rivals use this loss because memo has an equivalent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memo_exec.training.dataset import IGNORED_LABEL

WIDE_LOGIT_BYTES = 2**30
"""Most bytes of one chunk's logits in fp32."""


class ChunkedLoss(torch.autograd.Function):
    """``loss(hidden, weight, labels, scale)``: hidden is (tokens, features), weight is (vocabulary, features)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, scale: float) -> Tensor:
        """Return the loss in fp32 and save both gradients for backward."""
        tokens, vocab = len(hidden), len(weight)
        chunk = max(1, min(tokens, WIDE_LOGIT_BYTES // (4 * vocab)))
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        loss = torch.zeros((), dtype=torch.float32, device=weight.device)
        for first in range(0, tokens, chunk):
            rows = slice(first, min(tokens, first + chunk))
            counted = (labels[rows] != IGNORED_LABEL).unsqueeze(1)
            targets = labels[rows].clamp(min=0).unsqueeze(1)
            wide = (hidden[rows] @ weight.t()).float()
            logsumexp = wide.logsumexp(1, keepdim=True)
            loss += ((logsumexp - wide.gather(1, targets)) * counted).sum() * scale
            wide.sub_(logsumexp).exp_().scatter_add_(1, targets, torch.full_like(logsumexp, -1.0)).mul_(counted * scale)
            grad = wide.to(hidden.dtype)
            del wide
            torch.mm(grad, weight, out=grad_hidden[rows])
            grad_weight += grad.t() @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return the gradients of hidden and weight."""
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grads[0], grad_weight * grads[0], None, None
