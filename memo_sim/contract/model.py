"""The shape of a decoder-only transformer (``memo.model/1``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain, cycle, groupby, islice
from typing import Annotated, Literal

import msgspec

from memo_sim.contract.units import MOST_EXPERTS, MOST_TOKENS, MOST_WIDTH, Layers, NonNegative, Positive, Rate, Width

Family = Literal["gpt", "llama"]
MOST_LAYER_KINDS = 64
"""Models whose every layer has a width of its own (OpenELM) have a few dozen; a search takes longer with each kind."""


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


LATENT_NORM_EPS = 1e-6
"""Added to the variance in the norms of latents, whatever the model's own is (transformers, DeepseekV3RMSNorm)."""


class LatentAttention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Attention whose keys and values come from a narrow latent (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1).

        q latent, kv latent, shared rotary key = x A        each latent has an RMSNorm of its own
        Q of each head = q latent B_q                       nope_dim features without positions, rope_dim rotary ones
        K, V of each head = kv latent B_kv                  nope_dim features of the key, value_dim of the value
        key of each head = [its own part, the shared rotary key]

    This is the expanded form, in which models are trained. The absorbed form multiplies B_kv into the queries and
    suits decoding; memo does not model it.
    """

    q_rank: Annotated[int, msgspec.Meta(ge=0, le=MOST_WIDTH)] = 0
    """Features of the queries' latent; 0: queries are one product of the layer's normed input (DeepSeek-V2-Lite)."""
    kv_rank: Width
    """Features of the latent of keys and values, without the rotary key."""
    nope_dim: Width
    """Features of a head of Q and K that have no positions."""
    rope_dim: Width
    """Features of a head of Q, and of the key that all heads share, that are rotated by their positions."""
    value_dim: Width
    """Features of a head of V, and of attention's output."""
    interleaved: bool = True
    """Whether rotary pairs are neighbours (2i, 2i + 1), as in DeepSeek's weights, or (i, i + rope_dim / 2)."""
    score_scale: Rate = 1.0
    """Factor on the scores beyond 1 / sqrt(nope_dim + rope_dim): the square of yarn's mscale_all_dim term."""

    def __post_init__(self) -> None:
        """Refuse an odd number of rotary features."""
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim ({self.rope_dim}) must be even for rotary positions")

    @property
    def head_dim(self) -> int:
        """Features of a head of Q and of K."""
        return self.nope_dim + self.rope_dim

    @property
    def width(self) -> int:
        """Features of the product that makes both latents and the rotary key."""
        return self.q_rank + self.kv_rank + self.rope_dim


class LayerShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one layer may have other than the model's other layers. Layers with equal shapes are of one layer kind."""

    ffn_hidden: Width
    """Features of the MLP's hidden row."""
    experts: Experts | None = None
    """The experts in place of the MLP; None: an MLP."""
    window: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)] = 0
    """Keys that a token attends to at most: its own and those right before it; 0: all before it."""
    rope_theta: NonNegative = 0.0
    """Base of this layer's rotary tables, which then have no scaling; 0: the model's base and scaling."""


class LayerRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``times`` layers in a row that are alike."""

    shape: LayerShape
    times: Layers = 1


class Model(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="schema", tag="memo.model/1"
):
    """The shape of a model.

    The ``gpt`` family has LayerNorm, GELU, biases and learned positions (or rotary positions, see ``max_positions``).
    The ``llama`` family has RMSNorm, rotary positions, a gated FFN (silu, or gelu_tanh) and grouped-query heads.
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
    latent: LatentAttention | None = None
    """The latent that keys and values come from, in every layer (MLA); None: Q, K and V are products of the layer's
    input."""
    experts: Experts | None = None
    """The experts that every layer has in place of an MLP, if there is no ``layer_pattern``; None: an MLP."""
    source: str = ""
    layer_pattern: tuple[LayerRun, ...] = ()
    """The layers in order, where they differ; the pattern repeats until there are ``layers`` layers.

    Empty: every layer has ``ffn_hidden``. Otherwise ``ffn_hidden`` is the widest layer's.

        3 wide, then 58 narrow       3 x wide, 58 x narrow
        alternating, 24 layers       1 x wide, 1 x narrow
    """
    window: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)] = 0
    """Keys that a token attends to at most in every layer, if there is no ``layer_pattern``; 0: all before it."""
    sinks: bool = False
    """Whether each head has one more logit in its softmax, learned and without a value (GPT-OSS)."""
    query_scalar: NonNegative = 0.0
    """Scores are divided by its square root; 0: ``head_dim`` (Gemma's query_pre_attn_scalar)."""
    proj_bias: bool = False
    """Whether the attention projection has a bias; with ``linear_bias`` it has one anyway."""
    post_norms: bool = False
    """Whether there is a norm behind attention and behind the MLP too, before the residual sums (Gemma 3)."""
    scaled_embeddings: bool = False
    """Whether embeddings are multiplied by ``sqrt(hidden)`` (Gemma)."""
    norms_from_one: bool = False
    """Whether Hugging Face stores each norm's weight minus one (Gemma). Ours is the whole factor."""

    def __post_init__(self) -> None:
        """Refuse shapes that no transformer can have."""
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if not self.learned_positions and self.rotary_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even for rotary positions")
        self._check_latent()
        scaling = self.rope_scaling
        if scaling is not None and scaling.kind == "longrope" and len(scaling.long_factors) != self.rotary_dim // 2:
            raise ValueError(f"longrope needs {self.rotary_dim // 2} long_factors, one for each frequency")
        if self.activation not in (("silu", "gelu_tanh") if self.gated else ("gelu", "gelu_tanh")):
            wanted = "silu or gelu_tanh" if self.gated else "gelu or gelu_tanh"
            raise ValueError(f"activation of the {self.family} family must be {wanted}, not {self.activation}")
        self._check_pattern()
        if self.mixture and (not self.gated or self.linear_bias):
            raise ValueError("experts belong to the llama family without biases in its products")
        if self.mixture and (self.post_norms or self.activation != "silu"):
            raise ValueError("experts are gated by silu, without norms behind attention and MLP")
        if self.post_norms and (self.family != "llama" or self.linear_bias or self.proj_bias):
            raise ValueError("norms behind attention and MLP belong to the llama family without biases before them")
        if self.bidirectional and (self.sinks or self.windowed):
            raise ValueError("windows and sinks need causal attention")

    def _check_latent(self) -> None:
        """Refuse heads that do not fit the latent, and what no model with a latent has."""
        if (latent := self.latent) is None:
            return
        if self.head_dim != latent.head_dim:
            raise ValueError(f"head_dim ({self.head_dim}) must be nope_dim + rope_dim ({latent.head_dim})")
        if self.heads != self.kv_heads:
            raise ValueError(
                f"latent attention has a key for every head: kv_heads ({self.kv_heads}) must be {self.heads}"
            )
        if not self.gated or self.qkv_bias or self.linear_bias or self.proj_bias or self.qk_norm:
            raise ValueError("latent attention belongs to the llama family without biases and norms of heads")
        if self.windowed or self.sinks or self.post_norms or self.query_scalar:
            raise ValueError("latent attention has no windows, no sinks, and no norms behind attention and MLP")

    def _check_pattern(self) -> None:
        """Refuse a pattern longer than the model or of too many kinds, and a width that is not the widest layer's."""
        if not self.layer_pattern:
            return
        if self.experts is not None:
            raise ValueError("with a layer_pattern, its shapes say which layers have experts")
        if self.window:
            raise ValueError("with a layer_pattern, its shapes say which layers have windows")
        described = sum(run.times for run in self.layer_pattern)
        if described > self.layers:
            raise ValueError(f"layer_pattern has {described} layers, but the model has only {self.layers}")
        kinds = len({run.shape for run in self.layer_pattern})
        if kinds > MOST_LAYER_KINDS:
            raise ValueError(f"layer_pattern has {kinds} kinds of layers, but at most {MOST_LAYER_KINDS} are planned")
        widest = max(run.shape.ffn_hidden for run in self.layer_pattern)
        if widest != self.ffn_hidden:
            raise ValueError(f"ffn_hidden ({self.ffn_hidden}) must be that of the widest layer ({widest})")

    def layer(self, number: int) -> LayerShape:
        """Return the shape of a layer, counted from 0."""
        return self._every_layer[number]

    @property
    def layer_shapes(self) -> tuple[LayerShape, ...]:
        """The distinct shapes of layers, in the order in which they first occur; one where all layers are alike."""
        return _distinct(self.layer_pattern, self.layers, self.ffn_hidden, self.experts, self.window)

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """For every layer, the index of its shape in ``layer_shapes``."""
        index = {shape: number for number, shape in enumerate(self.layer_shapes)}
        return tuple(index[shape] for shape in self._every_layer)

    @property
    def _every_layer(self) -> tuple[LayerShape, ...]:
        return _every_layer(self.layer_pattern, self.layers, self.ffn_hidden, self.experts, self.window)

    @property
    def mixture(self) -> Experts | None:
        """The experts of the layers that have them; None where no layer has any."""
        return next((shape.experts for shape in self.layer_shapes if shape.experts), None)

    @property
    def windowed(self) -> bool:
        """Whether any layer has a window."""
        return bool(self.window) or any(run.shape.window for run in self.layer_pattern)

    @property
    def score_scale(self) -> float:
        """The factor on attention's scores."""
        factor = self.latent.score_scale if self.latent else 1.0
        return float((self.query_scalar or self.head_dim) ** -0.5) * factor

    def of_layers(self, shapes: Sequence[LayerShape]) -> Model:
        """Return the same model with other layers, in the shortest pattern; equal layers need none."""
        period = next(n for n in range(1, len(shapes) + 1) if shapes[n:] == shapes[: len(shapes) - n])
        runs = tuple(LayerRun(shape=shape, times=len(list(run))) for shape, run in groupby(shapes[:period]))
        alike = len(runs) == 1 and not shapes[0].rope_theta
        return msgspec.structs.replace(
            self,
            layers=len(shapes),
            ffn_hidden=max(shape.ffn_hidden for shape in shapes),
            experts=shapes[0].experts if alike else None,
            window=shapes[0].window if alike else 0,
            layer_pattern=() if alike else runs,
        )

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
    def value_dim(self) -> int:
        """Features of a head of V, and of attention's output."""
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def narrow_values(self) -> int:
        """``value_dim`` where it is not ``head_dim``; else 0."""
        return self.value_dim if self.value_dim != self.head_dim else 0

    @property
    def rotary_dim(self) -> int:
        """Features of a head of Q and K that rotary positions rotate."""
        return self.latent.rope_dim if self.latent else self.head_dim

    @property
    def attention_width(self) -> int:
        """Features of attention's output: ``heads * value_dim``."""
        return self.heads * self.value_dim

    @property
    def score_width(self) -> float:
        """Mean features of Q and of the output: each pair of a query and a key takes 4 FLOPs a feature in forward."""
        return (self.q_width + self.attention_width) / 2

    @property
    def attention_params(self) -> int:
        """Weights of the matrices of a layer's attention, without biases."""
        if (latent := self.latent) is None:
            return self.hidden * (2 * self.q_width + 2 * self.kv_width)
        queries = (latent.q_rank or self.hidden) * self.q_width
        keys = latent.kv_rank * self.heads * (latent.nope_dim + latent.value_dim)
        return self.hidden * latent.width + queries + keys + self.attention_width * self.hidden

    def matrix_params_of(self, shape: LayerShape, *, active: bool = False) -> int:
        """Return the weights of the matrices of a layer of this shape, without biases and norms.

        ``active``: only those that one token is multiplied with: all of them, or the router and few of the experts.
        """
        attention = self.attention_params
        if shape.experts is not None:
            return attention + shape.experts.params(self.hidden, active=active)
        return attention + (3 if self.gated else 2) * self.hidden * shape.ffn_hidden

    def vector_params_of(self, shape: LayerShape, *, active: bool = False) -> int:
        """Return the weights of norms and biases of a layer of this shape; ``active`` as in ``matrix_params_of``."""
        norms = (4 if self.post_norms else 2) * self.hidden * self._norm_vectors
        norms += (2 * self.head_dim if self.qk_norm else 0) + (self.heads if self.sinks else 0)
        norms += self.hidden if self.proj_bias and not self.linear_bias else 0
        norms += self.latent.q_rank + self.latent.kv_rank if self.latent else 0
        qkv_bias = self.q_width + 2 * self.kv_width if self.qkv_bias else 0
        if shape.experts is not None:
            return norms + qkv_bias + shape.experts.vector_params(self.hidden, active=active)
        linear_bias = 2 * self.hidden + (2 if self.gated else 1) * shape.ffn_hidden if self.linear_bias else 0
        return norms + qkv_bias + linear_bias

    def layer_params(self, number: int) -> int:
        """Return the weights of a layer, counted from 0."""
        shape = self.layer(number)
        return self.matrix_params_of(shape) + self.vector_params_of(shape)

    @property
    def layers_matrix_params(self) -> int:
        """Weights of the matrices of all layers, without biases and norms."""
        return sum(self.matrix_params_of(shape) for shape in self._every_layer)

    @property
    def layers_active_params(self) -> int:
        """Weights of the matrices of all layers that one token is multiplied with (``matrix_params_of``)."""
        return sum(self.matrix_params_of(shape, active=True) for shape in self._every_layer)

    @property
    def total_params(self) -> int:
        """All trained weights of the model."""
        layers = sum(self.layer_params(number) for number in range(self.layers))
        embeddings = (1 if self.tied_embeddings else 2) * self.vocab * self.hidden
        positions = self.max_positions * self.hidden if self.learned_positions else 0
        return layers + embeddings + positions + self.hidden * self._norm_vectors

    @property
    def active_params(self) -> int:
        """Trained weights that one token uses: all of them, or without the experts that it does not go to."""
        unused = sum(
            self.vector_params_of(shape) - self.vector_params_of(shape, active=True) for shape in self._every_layer
        )
        return self.total_params - self.layers_matrix_params + self.layers_active_params - unused

    @property
    def _norm_vectors(self) -> int:
        """Vectors per norm: LayerNorm has a weight and a bias, RMSNorm has only a weight."""
        return 2 if self.family == "gpt" else 1

    @property
    def mfu_params(self) -> int:
        """P of MEMO 5.1: all matrix weights and the classifier, one embedding. GPT presets: 12*n*h^2 + V*h.

        Of experts only those of one token count, and the router: the weights that a token is multiplied with.
        """
        return self.layers_active_params + self.vocab * self.hidden

    def step_flops(
        self, seq_tokens: int, sequences: int = 1, *, attended: Callable[[int], float] | None = None
    ) -> float:
        """Model FLOPs of one step by MEMO 5.1: 6*s*P + 6*n*(heads*head_dim)*s^2 per sequence, with a causal mask.

        Without a mask, attention has twice as many FLOPs. With a window, each token counts the keys that it sees.
        Where values are narrower than queries and keys, their mean width stands for head_dim.
        ``attended``: the pairs of a query and a key that packed documents attend in a sequence, by window (0: none).
        """
        windows = [shape.window if shape.window < seq_tokens else 0 for shape in self._every_layer]
        pairs = attended or (lambda window: self._pairs(seq_tokens, window))
        every = sum(times * pairs(window) for window, times in Counter(windows).items())
        attention = 12.0 * self.score_width * every
        return sequences * (6.0 * seq_tokens * self.mfu_params + attention)

    def _pairs(self, tokens: int, window: int) -> float:
        """Return the pairs of a query and a key in a sequence of one document; without a window half of all."""
        if window:
            return pairs_in_window(tokens, tokens, window)
        return float(tokens) ** 2 * (1.0 if self.bidirectional else 0.5)


def pairs_in_window(queries: int, keys: int, window: int) -> int:
    """Return the pairs of a query and a key that it sees: its own key and those before it, ``window`` at most.

    The queries belong to the last of ``keys`` keys. ``window`` times the queries, less what the first ones lack.
    """
    lacking = window - 1 - (keys - queries)
    rows = max(0, min(queries, lacking))
    return queries * window - rows * lacking + rows * (rows - 1) // 2


@lru_cache(maxsize=1024)
def _every_layer(
    pattern: tuple[LayerRun, ...], layers: int, ffn_hidden: int, experts: Experts | None, window: int
) -> tuple[LayerShape, ...]:
    """Return the shape of every layer."""
    if not pattern:
        return (LayerShape(ffn_hidden=ffn_hidden, experts=experts, window=window),) * layers
    return tuple(islice(cycle(chain.from_iterable([run.shape] * run.times for run in pattern)), layers))


@lru_cache(maxsize=1024)
def _distinct(
    pattern: tuple[LayerRun, ...], layers: int, ffn_hidden: int, experts: Experts | None, window: int
) -> tuple[LayerShape, ...]:
    """Return the distinct shapes of layers; a search asks for them hundreds of thousands of times."""
    return tuple(dict.fromkeys(_every_layer(pattern, layers, ffn_hidden, experts, window)))
