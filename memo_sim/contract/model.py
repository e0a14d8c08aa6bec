"""The shape of a decoder-only transformer (``memo.model/1``)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from memo_sim.contract.units import MOST_EXPERTS, MOST_TOKENS, Layers, NonNegative, Positive, Rate, Width

Family = Literal["gpt", "llama"]


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scaling of the rotary tables, as in transformers (``modeling_rope_utils.py``).

    - linear: all frequencies are divided by ``factor``.
    - llama3: low frequencies are, high ones are not, with a band between ``low_freq_factor`` and ``high_freq_factor``.
    - yarn: the same with a ramp between ``beta_fast`` and ``beta_slow`` rotations (Peng et al. 2023).
    - dynamic: the base grows with the sequence beyond ``original_max_positions`` (NTK).
    - longrope: each frequency has a divisor of its own, another one for sequences above ``original_max_positions``.
    """

    kind: Literal["llama3", "linear", "yarn", "dynamic", "longrope"]
    factor: Annotated[float, msgspec.Meta(ge=1)] = 1.0
    low_freq_factor: Rate = 1.0
    high_freq_factor: Rate = 4.0
    original_max_positions: Positive = 8192
    attention_factor: Rate = 1.0
    """Factor on cosines and sines (yarn, longrope)."""
    beta_fast: Rate = 32.0
    beta_slow: Rate = 1.0
    truncate: bool = True
    """Whether yarn's ramp ends at whole frequencies."""
    short_factors: tuple[Rate, ...] = ()
    long_factors: tuple[Rate, ...] = ()
    """Divisors by frequency (longrope)."""

    def __post_init__(self) -> None:
        """Refuse an empty band between the two frequencies, and divisors of another number of frequencies."""
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("high_freq_factor must be more than low_freq_factor")
        if len(self.short_factors) != len(self.long_factors):
            raise ValueError("short_factors and long_factors must have one entry for each frequency")


class Experts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mixture of experts in place of a layer's MLP: each token goes to few of many narrow MLPs.

    A router (one product, in fp32) scores the experts of every token; softmax over all of them gives probabilities, of
    which the ``per_token`` largest choose the experts. A token's output is the sum of their outputs, each times its
    probability (Shazeer et al. 2017; Fedus et al. 2021).
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

    Each micro-batch of a rank has its own, from its own tokens. Only its gradient is added, not its value to the loss
    that is reported."""

    def __post_init__(self) -> None:
        """Refuse tokens that go to more experts than there are."""
        if self.per_token > self.count:
            raise ValueError(f"per_token ({self.per_token}) is more than the {self.count} experts")

    def params(self, hidden: int, *, active: bool = False) -> int:
        """Return the weights of a layer's router and experts; ``active``: with only the experts of one token."""
        return self.count * hidden + (self.per_token if active else self.count) * 3 * hidden * self.hidden


class Model(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.model/1"
):
    """The shape of a model.

    The ``gpt`` family has LayerNorm, GELU, biases and learned positions (or rotary positions, see ``max_positions``).
    The ``llama`` family has RMSNorm, rotary positions, SwiGLU and grouped-query heads.
    """

    name: str
    family: Family
    layers: Layers
    hidden: Width
    heads: Width
    kv_heads: Width
    head_dim: Width
    ffn_hidden: Width
    vocab: Width
    tied_embeddings: bool
    max_positions: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)] = 0
    """Rows of the learned position table of a gpt. 0 means no table: the model then uses rotary positions.

    A learned table for 1M tokens would be larger than a 7B model."""
    norm_eps: Rate = 1e-5
    rope_theta: Rate = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    linear_bias: bool = False
    """Whether the attention projection and the FFN's products have biases."""
    qk_norm: bool = False
    """Whether RMSNorm is applied to each head of Q and K before the rotary embedding (Qwen3)."""
    bidirectional: bool = False
    """Whether a token also attends to later tokens (BERT); otherwise the mask is causal."""
    activation: Literal["gelu", "gelu_tanh", "silu"] = "gelu"
    experts: Experts | None = None
    """The experts that every layer has in place of an MLP; None: every layer has an MLP, ``ffn_hidden`` wide."""
    source: str = ""

    def __post_init__(self) -> None:
        """Refuse shapes that no transformer can have."""
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if not self.learned_positions and self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even for rotary positions")
        scaling = self.rope_scaling
        if scaling is not None and scaling.kind == "longrope" and len(scaling.long_factors) != self.head_dim // 2:
            raise ValueError(f"longrope needs {self.head_dim // 2} long_factors, one for each frequency")
        if (self.activation == "silu") != self.gated:
            wanted = "silu" if self.gated else "gelu or gelu_tanh"
            raise ValueError(f"activation of the {self.family} family must be {wanted}, not {self.activation}")
        if self.experts is not None and (not self.gated or self.linear_bias):
            raise ValueError("experts belong to the llama family without biases in its products")

    @property
    def learned_positions(self) -> bool:
        """Whether the model has a trained position table; otherwise its positions are rotary."""
        return self.family == "gpt" and self.max_positions > 0

    @property
    def gated(self) -> bool:
        """Whether the FFN has a gate (three matrices instead of two)."""
        return self.family == "llama"

    @property
    def q_width(self) -> int:
        """Features of Q: ``heads * head_dim``."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Features of K, and of V: ``kv_heads * head_dim``."""
        return self.kv_heads * self.head_dim

    @property
    def layer_matrix_params(self) -> int:
        """Weights of one layer's matrices, without biases and norms."""
        return self._layer_matrix_params(active=False)

    @property
    def layer_active_params(self) -> int:
        """Weights of one layer's matrices that one token is multiplied with: all of them, or of few experts."""
        return self._layer_matrix_params(active=True)

    def _layer_matrix_params(self, *, active: bool) -> int:
        attention = self.hidden * (2 * self.q_width + 2 * self.kv_width)
        if self.experts is not None:
            return attention + self.experts.params(self.hidden, active=active)
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn_hidden

    @property
    def layer_vector_params(self) -> int:
        """Weights of one layer's norms and biases."""
        norms = 2 * self.hidden * self._norm_vectors + (2 * self.head_dim if self.qk_norm else 0)
        qkv_bias = self.q_width + 2 * self.kv_width if self.qkv_bias else 0
        linear_bias = 2 * self.hidden + (2 if self.gated else 1) * self.ffn_hidden if self.linear_bias else 0
        return norms + qkv_bias + linear_bias

    @property
    def total_params(self) -> int:
        """All trained weights of the model."""
        layers = self.layers * (self.layer_matrix_params + self.layer_vector_params)
        embeddings = (1 if self.tied_embeddings else 2) * self.vocab * self.hidden
        positions = self.max_positions * self.hidden if self.learned_positions else 0
        return layers + embeddings + positions + self.hidden * self._norm_vectors

    @property
    def active_params(self) -> int:
        """Trained weights that one token uses: all of them, or without the experts that it does not go to."""
        return self.total_params - self.layers * (self.layer_matrix_params - self.layer_active_params)

    @property
    def _norm_vectors(self) -> int:
        """Vectors per norm: LayerNorm has a weight and a bias, RMSNorm has only a weight."""
        return 2 if self.family == "gpt" else 1

    @property
    def mfu_params(self) -> int:
        """P of MEMO 5.1: all matrix weights and the classifier, one embedding. GPT presets: 12*n*h^2 + V*h.

        Of experts only those of one token count, and the router: the weights that a token is multiplied with.
        """
        return self.layers * self.layer_active_params + self.vocab * self.hidden

    def step_flops(self, seq_tokens: int, sequences: int = 1) -> float:
        """Model FLOPs of one step by MEMO 5.1: 6*s*P + 6*n*(heads*head_dim)*s^2 per sequence, with a causal mask.

        Without a mask, attention has twice as many FLOPs.
        """
        pairs = float(seq_tokens) ** 2 * (2.0 if self.bidirectional else 1.0)
        attention = 6.0 * self.layers * self.q_width * pairs
        return sequences * (6.0 * seq_tokens * self.mfu_params + attention)
