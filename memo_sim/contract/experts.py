"""The mixture of experts of a layer."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from memo_sim.contract.units import MOST_EXPERTS, MOST_WIDTH, NonNegative, Rate, Width


class Experts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mixture of experts in place of a layer's MLP: each token goes to few of many narrow MLPs.

    A router (one product, in fp32) scores the experts of every token; softmax over all of them gives probabilities, of
    which the ``per_token`` largest choose the experts. A token's output is the sum of their outputs, each times its
    probability (Shazeer et al. 2017; Fedus et al. 2021).

    Other routers: DeepSeek-V3 has sigmoid scores, groups of experts, a selection bias, a scale and a shared expert. A
    softmax over the chosen experts' logits (GPT-OSS) is the renormalised softmax over all.
    """

    count: Annotated[int, msgspec.Meta(ge=2, le=MOST_EXPERTS)]
    """Experts of a layer."""
    per_token: Annotated[int, msgspec.Meta(ge=1, le=MOST_EXPERTS)]
    """Experts that each token goes to."""
    hidden: Width
    """Features inside one expert."""
    renormalize: bool = True
    """Whether the probabilities of a token's experts are divided by their sum (Mixtral; Qwen3 with norm_topk_prob)."""
    balance: NonNegative = 0.0
    """Coefficient of the loss that evens out the experts' loads (Switch Transformer, equation 4); 0: no such loss.

    Each layer and micro-batch of a rank has its own, from its own tokens, divided by ``per_token`` as in Megatron-LM
    (transformers has one for all layers together, and does not divide it). Only its gradient is added, not its value to
    the loss that is reported."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """What makes scores of the router's logits; sigmoid is for each expert by itself (DeepSeek-V3)."""
    scale: Rate = 1.0
    """Factor on the probabilities of the chosen experts (``routed_scaling_factor``)."""
    groups: Annotated[int, msgspec.Meta(ge=1, le=MOST_EXPERTS)] = 1
    """Groups of neighbouring experts; a group's score is the sum of its two best experts' (``n_group``)."""
    groups_per_token: Annotated[int, msgspec.Meta(ge=1, le=MOST_EXPERTS)] = 1
    """The groups with the best scores, from which a token's experts are chosen (``topk_group``)."""
    selection_bias: bool = False
    """Whether each expert has a bias on its score that counts for the choice alone, not for the probability."""
    selection_rate: NonNegative = 0.0
    """By how much the selection bias rises after a step in which the expert had fewer rows than the mean, or falls.

    DeepSeek-V3 (section 2.1.2) trained with 0.001; 0 leaves the bias as it is."""
    z_loss: NonNegative = 0.0
    """Coefficient of the mean over tokens of the squared log-sum-exp of the logits (ST-MoE, equation 5); 0: no loss.

    Only its gradient is added, as with ``balance``."""
    router_bias: bool = False
    """Whether the router's product has a bias (GPT-OSS)."""
    bias: bool = False
    """Whether both products of every expert have biases (GPT-OSS)."""
    activation: Literal["silu", "clamped"] = "silu"
    """silu: silu(gate) x up. clamped (GPT-OSS): gate x sigmoid(1.702 x gate) x (up + 1), with gate at most 7 and up
    between -7 and 7."""
    shared: Annotated[int, msgspec.Meta(ge=0, le=MOST_WIDTH)] = 0
    """Features inside the MLP that every token goes to beside its experts (DeepSeek-V3); 0: there is none."""
    shared_gate: bool = False
    """Whether that MLP's output is multiplied by a sigmoid gate, one number of each token (Qwen2-MoE)."""

    def __post_init__(self) -> None:
        """Refuse more experts of a token than there are, groups that do not divide, and losses without softmax."""
        if self.per_token > self.count:
            raise ValueError(f"per_token ({self.per_token}) is more than the {self.count} experts")
        if self.count % self.groups or (self.groups > 1 and self.count < 2 * self.groups):
            raise ValueError(f"{self.groups} groups do not divide {self.count} experts into groups of two or more")
        if self.groups_per_token > self.groups:
            raise ValueError(f"groups_per_token ({self.groups_per_token}) is more than the {self.groups} groups")
        if self.per_token > self.groups_per_token * self.count // self.groups:
            most = f"{self.groups_per_token} of {self.groups} groups"
            raise ValueError(f"per_token ({self.per_token}) is more than the experts of {most}")
        if self.selection_rate and not self.selection_bias:
            raise ValueError("selection_rate needs a selection_bias")
        if self.shared_gate and not self.shared:
            raise ValueError("shared_gate needs a shared expert")
        if self.scores == "sigmoid" and (self.balance or self.z_loss):
            raise ValueError("balance and z_loss need softmax scores; sigmoid scores have a selection_bias for balance")

    @property
    def of_softmax_alone(self) -> bool:
        """Whether there is nothing beside a softmax router and experts gated by silu, as in Mixtral and Qwen3-MoE."""
        own = {name: getattr(self, name) for name in ("count", "per_token", "hidden", "renormalize", "balance")}
        return self == Experts(**own)

    def params(self, hidden: int, *, active: bool = False) -> int:
        """Return the weights of the matrices of a layer's router, experts and shared expert.

        ``active``: with only the experts of one token.
        """
        wide = (self.per_token if active else self.count) * self.hidden + self.shared
        return (self.count + self.shared_gate) * hidden + 3 * hidden * wide

    def vector_params(self, hidden: int, *, active: bool = False) -> int:
        """Return the trained biases of a layer's router and experts; the selection bias is not trained by gradient."""
        each = 2 * self.hidden + hidden if self.bias else 0
        return (self.per_token if active else self.count) * each + (self.count if self.router_bias else 0)
