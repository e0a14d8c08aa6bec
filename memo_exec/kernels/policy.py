"""The objective of GRPO and PPO from the log-probabilities of the chosen tokens, and its derivative.

For a token with log-probability l, drawn with the log-probability o, r by the reference model, advantage A:

    ratio = exp(l - o)        surrogate = min(ratio x A, clamp(ratio, 1 - low, 1 + high) x A)
    kl = exp(r - l) - (r - l) - 1          (the estimator k3 of Schulman, "Approximating KL divergence", 2020)
    loss = -surrogate + weight x kl

    d loss / d l = -(ratio x A where the first product is the smaller, else 0) + weight x (1 - exp(r - l))

A gradient of a token's logits is ``d loss / d l x (onehot - softmax)``: that of cross entropy times ``-d loss / d l``.
The sum over tokens is divided by their number in the global batch, as for cross entropy (TRL's ``loss_type`` dapo and
bnpo, verl's token-mean).
"""

from __future__ import annotations

import torch
from torch import Tensor

from memo_exec.kernels.call import Call, Scratch


class Policy:
    """The rollout's numbers of a call's tokens, with columns of scratch for ``rows`` of them at a time."""

    def __init__(self, call: Call, scratch: Scratch, rows: int) -> None:
        self._rollout = call.matrix("rollout")
        self._scalars = call.context.scalars
        self._columns = [scratch.take(rows, 1) for _ in range(4)]

    def weigh(self, rows: slice, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return losses and ``-d loss / d log-probability`` of a block of rows, each (rows, 1), in the scratch."""
        scalars = self._scalars
        advantages, drawn, reference = torch.split(self._rollout[rows], 1, dim=1)
        losses, weights, clipped, other = (column[: len(log_probs)] for column in self._columns)
        torch.sub(log_probs, drawn, out=weights).exp_()
        torch.clamp(weights, 1.0 - scalars.clip_ratio, 1.0 + scalars.clip_ratio_high, out=clipped).mul_(advantages)
        weights.mul_(advantages)
        torch.minimum(weights, clipped, out=losses).neg_()
        torch.le(weights, clipped, out=other)
        weights.mul_(other)
        if scalars.kl_weight:
            torch.sub(reference, log_probs, out=other)
            torch.exp(other, out=clipped)
            losses.add_(clipped, alpha=scalars.kl_weight).sub_(other, alpha=scalars.kl_weight).sub_(scalars.kl_weight)
            weights.add_(clipped.sub_(1.0), alpha=scalars.kl_weight)
        return losses, weights


def policy_of(call: Call, scratch: Scratch, rows: int) -> Policy | None:
    """Return the policy's objective of a call; None where the objective is the log-probabilities themselves."""
    return Policy(call, scratch, rows) if "rollout" in call.tensors else None
