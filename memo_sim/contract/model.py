"""The shape of a decoder-only transformer (``memo.model/1``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Annotated, Literal

import msgspec

from memo_sim.contract.attended_pairs import pairs_in_window
from memo_sim.contract.experts import Experts
from memo_sim.contract.latent_attention import LatentAttention
from memo_sim.contract.layer_shape import (
    MOST_LAYER_KINDS,
    LayerRun,
    LayerShape,
    distinct_layers,
    every_layer,
    kinds_of_layers,
)
from memo_sim.contract.rope_scaling import RopeScaling
from memo_sim.contract.units import MOST_TOKENS, Layers, NonNegative, Rate, Width

Family = Literal["gpt", "llama"]


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
        return distinct_layers(self.layer_pattern, self.layers, self.ffn_hidden, self.experts, self.window)

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """For every layer, the index of its shape in ``layer_shapes``."""
        return kinds_of_layers(self.layer_pattern, self.layers, self.ffn_hidden, self.experts, self.window)

    @property
    def _every_layer(self) -> tuple[LayerShape, ...]:
        return every_layer(self.layer_pattern, self.layers, self.ffn_hidden, self.experts, self.window)

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
