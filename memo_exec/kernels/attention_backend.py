"""What the attention backends share: the operands of a backward pass, and how returned results are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

Triple = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class AttentionBackward:
    """Operands of one backward pass: (batch, tokens, heads, head_dim) views, and the log-sum-exp without head_dim."""

    grad: Tensor
    """Gradient of the output."""
    qkv: Triple
    out: Tensor
    lse: Tensor
    grads: Triple
    """Where the gradients of Q, K, V go."""
    causal: bool
    deterministic: bool


def heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return views with tokens and heads exchanged: (batch, heads, tokens, ...), as torch's operators take them."""
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


def store(targets: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Copy results of torch's operators, heads first, into their targets."""
    for target, result in zip(targets, heads_first(*results), strict=True):
        target.copy_(result)
