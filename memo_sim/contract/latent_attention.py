"""Attention whose keys and values come from a narrow latent (MLA)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from memo_sim.contract.units import MOST_WIDTH, Rate, Width

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
