"""The skeletal tensors of one transformer layer (MEMO 3.2, Figure 4): what backward needs of forward.

For a GPT layer they sum to 16 x tokens x hidden elements: input 1, norm1 1, Q K V 3, attention output 1, residual 1,
norm2 1, first FFN product 4, activation 4; the log-sum-exp and the norms' statistics come on top. Row i of every
tensor belongs to token i of the rank's shard.

A subsequence keeps its queries alone: keys and values are carried for those behind it (``subsequence.py``).

METP keeps 3 of the 16, or 5 (``_metp_tensors``).

With Ulysses attention's own tensors (Q K V, output, log-sum-exp) hold the rank's heads of all tokens, in row blocks cut
as the shard is; the projection's input, this rank's tokens of the output, is one more. Attention without a flash kernel
keeps scores instead of the log-sum-exp (``plain.py``, ``rsa.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from memo_sim.contract.model import Model
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.layout.shape import Shape


class Fate(StrEnum):
    """How MEMO 4.1 treats a tensor: layer input and attention output are always swapped whole, the others by token."""

    WHOLE = "whole"
    BY_TOKEN = "by_token"


@dataclass(frozen=True, slots=True)
class Skeletal:
    """One skeletal tensor; ``tokens`` are its rows on one rank, divided or multiplied by what shards it."""

    name: str
    tokens: int
    features: int
    dtype: str
    fate: Fate
    statistics: bool = False

    @property
    def bytes(self) -> int:
        """Size on one rank."""
        return self.tokens * self.features * DTYPE_BYTES[self.dtype]


def skeletal_tensors(
    model: Model, shape: Shape, dtype: str, *, scores: tuple[Skeletal, ...] = ()
) -> tuple[Skeletal, ...]:
    """Return the skeletal tensors of one layer in the order forward writes them.

    ``scores``: what attention keeps in place of the log-sum-exp, nothing with a flash kernel.
    """
    if shape.metp > 1:
        return _metp_tensors(model, shape, dtype)
    stats = _statistics(model)
    up = 2 * shape.ffn if model.gated else shape.ffn

    def sharded(name: str, features: int, fate: Fate = Fate.BY_TOKEN) -> Skeletal:
        return Skeletal(name, shape.shard_tokens, features, dtype, fate)

    def local(name: str, features: int) -> Skeletal:
        return Skeletal(name, shape.tokens, features, dtype, Fate.BY_TOKEN)

    def statistics(name: str) -> Skeletal:
        return Skeletal(name, shape.shard_tokens, stats, "fp32", Fate.BY_TOKEN, statistics=True)

    inside = shape.attention
    home = (local("attn_seq", shape.q_width),) if shape.ulysses > 1 else ()
    raw = (local("qk_raw", shape.q_width + shape.kv_width),) if model.qk_norm else ()
    name, width = ("q", inside.q_width) if shape.kv_cache_tokens else ("qkv", inside.qkv_width)
    attended = Skeletal(name, inside.tokens, width, dtype, Fate.BY_TOKEN)
    kept = scores or (Skeletal("lse", inside.tokens, inside.heads, "fp32", Fate.WHOLE, statistics=True),)
    return (
        sharded("x", shape.hidden, Fate.WHOLE),
        sharded("norm1", shape.hidden),
        statistics("norm1_stats"),
        *raw,
        attended,
        Skeletal("attn", inside.tokens, inside.q_width, dtype, Fate.WHOLE),
        *kept,
        *home,
        sharded("resid", shape.hidden),
        sharded("norm2", shape.hidden),
        statistics("norm2_stats"),
        local("up", up),
        local("act", shape.ffn),
    )


def _statistics(model: Model) -> int:
    """Return what a norm keeps of a token: the scale, and with LayerNorm the mean."""
    return 2 if model.family == "gpt" else 1


def _metp_tensors(model: Model, shape: Shape, dtype: str) -> tuple[Skeletal, ...]:
    """Return what a layer under METP keeps: its input, attention's output part by part, the residual, or norms too.

    The rest is computed again in any backward: Q K V, what the MLP makes (METP's Algorithms 2 and 6), and norms that
    are not kept.
    """
    tokens = shape.tokens

    def norm(name: str) -> tuple[Skeletal, ...]:
        if not shape.keep_norms:
            return ()
        return (
            Skeletal(name, tokens, shape.hidden, dtype, Fate.BY_TOKEN),
            Skeletal(f"{name}_stats", tokens, _statistics(model), "fp32", Fate.BY_TOKEN, statistics=True),
        )

    kept = [Skeletal("x", tokens, shape.hidden, dtype, Fate.WHOLE), *norm("norm1")]
    for part in range(shape.metp):
        kept.append(Skeletal(f"attn.g{part}", tokens, shape.q_width, dtype, Fate.WHOLE))
        kept.append(Skeletal(f"lse.g{part}", tokens, shape.heads, "fp32", Fate.WHOLE, statistics=True))
    return (*kept, Skeletal("resid", tokens, shape.hidden, dtype, Fate.BY_TOKEN), *norm("norm2"))
