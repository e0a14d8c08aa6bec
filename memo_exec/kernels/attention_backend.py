"""What the attention backends share: masks, the operands of a backward pass, and how returned results are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

Triple = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Mask:
    """The keys that each query of a call sees."""

    causal: bool
    """Whether queries see no later keys; without a window there are then as many keys as queries."""
    window: int = 0
    """How many keys a query sees at most, its own and those before it; 0: all. Only with ``causal``.

    With a window there may be more keys than queries: the queries belong to the last keys."""

    def __post_init__(self) -> None:
        """Refuse a window whose later keys are seen."""
        if self.window and not self.causal:
            raise ValueError("a window needs a causal mask")

    @property
    def sides(self) -> tuple[int, int]:
        """How many keys a query sees before and after its own, as flash-attn takes them; -1: all."""
        return (self.window - 1 if self.window else -1, 0 if self.window else -1)


@dataclass(frozen=True, slots=True)
class Packing:
    """Documents of the rows of one call, each with as many keys as queries."""

    ends: Tensor
    """Where they begin, and the end of the last one, in rows of all sequences; int32, on the device."""
    longest: int
    """Rows of the longest one."""


def packed_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return views of (batch, tokens, ...) tensors as (rows, ...), as varlen calls take them."""
    return tuple(tensor.flatten(0, 1) for tensor in tensors)


CAUSAL, WHOLE = Mask(causal=True), Mask(causal=False)


def scale_of(q: Tensor, scale: float | None) -> float:
    """Return the factor on a call's scores: ``scale``, or without one ``head_dim ** -0.5``."""
    return float(q.shape[-1] ** -0.5) if scale is None else scale


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
    mask: Mask
    deterministic: bool
    scale: float | None = None
    """Factor on the scores; None: ``head_dim ** -0.5``."""


def heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return views with tokens and heads exchanged: (batch, heads, tokens, ...), as torch's operators take them."""
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


def store(targets: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Copy results of torch's operators, heads first, into their targets."""
    for target, result in zip(targets, heads_first(*results), strict=True):
        target.copy_(result)
