"""Hyperparameters of AdamW, and the learning rate of each step.

    linear warm-up:  lr x step / warmup_steps
    then constant, or a cosine from lr down to lr x final_fraction over decay_steps and constant after that

The schedule does not depend on the number of steps of a run. So a run that is resumed or extended has the same rates.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

from memo_sim.contract.units import Fraction, NonNegative, Rate, Tokens

BelowOne = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class Hyperparameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW's constants, gradient clipping and the schedule of the learning rate. A checkpoint stores them."""

    learning_rate: Rate = 3e-4
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    epsilon: Rate = 1e-8
    weight_decay: NonNegative = 0.1
    """Applies to matrices and embeddings, not to norms and biases."""
    clip: NonNegative = 1.0
    """Largest global norm of the gradients; 0 means no clipping."""
    warmup_steps: Tokens = 0
    decay_steps: Tokens = 0
    final_fraction: Fraction = 0.1
    clip_ratio: BelowOne = 0.2
    """Of a policy's objective (``kernels/policy.py``): the ratio of probabilities is clipped below 1 - this."""
    clip_ratio_high: NonNegative | None = None
    """... and above 1 + this; null: as ``clip_ratio``."""
    kl_weight: NonNegative = 0.0
    """Of a policy's objective: the weight of the KL term against the reference model."""

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step; the first step has the number 1."""
        if step <= self.warmup_steps:
            return self.learning_rate * step / self.warmup_steps
        if not self.decay_steps:
            return self.learning_rate
        progress = min(1.0, (step - self.warmup_steps) / self.decay_steps)
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.learning_rate * (self.final_fraction + (1.0 - self.final_fraction) * cosine)
