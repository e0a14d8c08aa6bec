"""The skeletal tensors of one transformer layer (MEMO 3.2, Figure 4): results of forward that backward needs.

For a GPT layer they sum to 16 x tokens x hidden elements: input 1, norm1 1, Q K V 3, attention output 1, residual 1,
norm2 1, first FFN product 4, activation 4. The log-sum-exp and the norms' statistics are added to that. Row i of every
tensor belongs to token i of the rank's shard. Layouts change the list:

- A subsequence keeps only its queries. Its keys and values are in the KV cache of the prefix
  (``attention/subsequence.py``).
- METP keeps 3 of the 16, or 5 with its norms (``layers/metp.py``).
- With Ulysses the tensors of attention (Q K V, output, log-sum-exp) are head-sharded, in the row blocks of the token
  shard. The projection's input, the sequence-sharded output, is one tensor more.
- Hugging Face's modules save more (``layers/huggingface.py``).
- Experts replace the last two by those of dispatched rows, each token's rows one after the other by expert, and by what
  the router decided (``layers/experts.py``). As large a part of dispatched rows is swapped as of tokens. With expert
  parallelism they are the rows that a rank received (``layers/expert_exchange.py``).
- With a latent (MLA) backward also needs the latents before and after their norms (``layers/latent_attention.py``).
- A norm behind attention or the MLP (Gemma 3) needs its input, the result of projection or second MLP product. So
  recompute repeats the second product as well, which it leaves out without such a norm.
- Attention without a flash kernel keeps scores instead of the log-sum-exp (``attention/plain.py``,
  ``attention/rsa.py``).
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from memo_sim.contract.experts import Experts
from memo_sim.contract.latent_attention import LatentAttention
from memo_sim.contract.model import Model
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.layout.parameters import POST_NORMS
from memo_sim.program.layout.shape import Shape


class Fate(StrEnum):
    """How MEMO 4.1 swaps a tensor: the layer input and attention output always whole, the others by token.

    What a router decided is swapped whole too."""

    WHOLE = "whole"
    BY_TOKEN = "by_token"


class Skeletal(Struct, frozen=True):
    """One skeletal tensor; ``tokens`` is the number of its rows on one rank."""

    name: str
    tokens: int
    features: int
    dtype: str
    fate: Fate
    statistics: bool = False
    for_recompute: bool = False
    """Whether backward reads it for recompute of rows alone; where none are recomputed, it is not swapped."""

    @property
    def bytes(self) -> int:
        """Size on one rank."""
        return self.tokens * self.features * DTYPE_BYTES[self.dtype]


def skeletal_tensors(
    model: Model, shape: Shape, dtype: str, *, scores: tuple[Skeletal, ...] = ()
) -> tuple[Skeletal, ...]:
    """Return the skeletal tensors of one layer, in the order in which forward writes them.

    ``scores``: the tensors that attention keeps instead of the log-sum-exp; empty with a flash kernel.
    """
    stats = norm_statistics(model)
    up = 2 * shape.ffn if model.gated else shape.ffn

    def sharded(name: str, features: int, fate: Fate = Fate.BY_TOKEN) -> Skeletal:
        return Skeletal(name, shape.shard_tokens, features, dtype, fate)

    def local(name: str, features: int) -> Skeletal:
        return Skeletal(name, shape.tokens, features, dtype, Fate.BY_TOKEN)

    def statistics(name: str) -> Skeletal:
        return Skeletal(name, shape.shard_tokens, stats, "fp32", Fate.BY_TOKEN, statistics=True)

    inside = shape.attention
    sequence_sharded = (local("attn_seq", shape.attention_width),) if shape.ulysses > 1 else ()
    behind = {
        which: (sharded(normed_slot(which, shape), shape.hidden), statistics(f"{which}_stats"))
        for which in (POST_NORMS if model.post_norms else ())
    }
    raw = (local("qk_raw", shape.q_width + shape.kv_width),) if model.qk_norm else ()
    name, width = ("q", inside.q_width) if shape.kv_cache_tokens else ("qkv", inside.qkv_width)
    attended = Skeletal(name, inside.tokens, width, dtype, Fate.BY_TOKEN)
    if (latent := shape.latent) is not None:
        raw = (
            sharded("latent", latent.width),
            Skeletal(
                "latent_stats", shape.shard_tokens, latent_statistics(latent), "fp32", Fate.BY_TOKEN, statistics=True
            ),
            *((sharded("q_latent", latent.q_rank),) if latent.q_rank else ()),
            sharded("kv_latent", latent.kv_rank),
            *((sharded("k_rope", latent.rope_dim),) if shape.rebuild_qkv else ()),
        )
    kept = scores or (Skeletal("lse", inside.tokens, inside.heads, "fp32", Fate.WHOLE, statistics=True),)
    return (
        sharded("x", shape.hidden, Fate.WHOLE),
        sharded("norm1", shape.hidden),
        statistics("norm1_stats"),
        *raw,
        *(() if shape.rebuild_qkv else (attended,)),
        Skeletal("attn", inside.tokens, inside.attention_width, dtype, Fate.WHOLE),
        *kept,
        *sequence_sharded,
        *behind.get("post_attn", ()),
        sharded("resid", shape.hidden),
        sharded("norm2", shape.hidden),
        statistics("norm2_stats"),
        *(_of_experts(shape.experts, shape, dtype) if shape.experts else (local("up", up), local("act", shape.ffn))),
        *behind.get("post_mlp", ()),
    )


def normed_slot(which: str, shape: Shape) -> str:
    """Return the name of what a norm behind attention or the MLP reads: the product's sum over the ranks."""
    product, partial = {"post_attn": ("proj", "proj_out"), "post_mlp": ("ffn_down", "down_out")}[which]
    return f"{product}_shard" if shape.gathered else partial


def _of_experts(experts: Experts, shape: Shape, dtype: str) -> tuple[Skeletal, ...]:
    """Return what backward needs of experts: what the router decided, and the wide tensors of dispatched rows."""
    tokens, rows, beside_tokens = shape.routed_tokens, shape.expert_rows, shape.tokens

    def decided(name: str, kind: str, rows: int, features: int) -> Skeletal:
        return Skeletal(f"route_{name}", rows, features, kind, Fate.WHOLE)

    ends = decided("ends", "int32", experts.count, 1)
    ways: tuple[Skeletal, ...] = (
        decided("order", "int64", rows, 1),
        decided("places", "int64", tokens, experts.per_token),
        ends,
    )
    if shape.ep > 1:
        ways = (
            ends,
            decided("seats", "int64", tokens, experts.per_token),
            decided("sent", "int64", rows, 1),
            decided("arrived", "int64", rows, 1),
            decided("own_ends", "int32", shape.own_experts, 1),
            decided("gates", "fp32", rows, 1),
        )
    loss = (decided("lse", "fp32", tokens, 1),) if experts.z_loss else ()
    shared = shape.shared_width
    gate = (decided("shared_gate", "fp32", beside_tokens, 1),) if experts.shared_gate else ()
    beside = (("shared_up", 2 * shared), ("shared_act", shared)) if shared else ()
    return (
        decided("scores", "fp32", tokens, experts.count),
        *loss,
        decided("probs", "fp32", tokens, experts.per_token),
        decided("experts", "int64", tokens, experts.per_token),
        *ways,
        *gate,
        Skeletal("up", rows, 2 * shape.expert_width, dtype, Fate.BY_TOKEN),
        Skeletal("act", rows, shape.expert_width, dtype, Fate.BY_TOKEN),
        *(Skeletal(name, beside_tokens, features, dtype, Fate.BY_TOKEN) for name, features in beside),
    )


def latent_statistics(latent: LatentAttention) -> int:
    """Return how many numbers the norms of latents keep for each token: the scale of each latent."""
    return 2 if latent.q_rank else 1


def norm_statistics(model: Model) -> int:
    """Return how many numbers a norm keeps for each token: the scale, and with LayerNorm the mean."""
    return 2 if model.family == "gpt" else 1
