"""Sizes on one rank: tokens and features after the layout has divided them, and the checks that they divide."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import msgspec
from msgspec.structs import replace

from memo_sim.contract.errors import BadInput, Infeasible
from memo_sim.contract.experts import Experts
from memo_sim.contract.latent_attention import LatentAttention
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import MOST_TOKENS
from memo_sim.program.layout.attention_chunks import check_attention_chunks
from memo_sim.program.layout.compatibility import check_compatible
from memo_sim.program.layout.expert_load import BALANCED, capacity_rows
from memo_sim.program.layout.heads import Share, are_even, divided_heads, shares, sharing_ranks
from memo_sim.program.layout.partition import PRICE_AGAIN

MOST_RING = 1_024
"""Ranks of context parallelism; the largest that are published have fewer than a hundred."""
MOST_LOSS_CHUNKS = 2**16
MOST_MLP_CHUNKS = 2**10
"""Upper limit for every layer, forward and backward; more chunks make programs of millions of instructions."""
DEGREES_NAMED = 3
"""Number of dividing degrees that an error message suggests."""


class Shape(msgspec.Struct, frozen=True, gc=False):
    """Per-rank sizes of one micro-batch.

    ``tokens`` counts the rank's context-parallel, METP and Ulysses shard, over all sequences of the micro-batch.
    ``shard_tokens`` counts the sequence-parallel shard of those (equal to ``tokens`` without sequence parallelism).
    Widths are features after tensor parallelism, or of one METP rank's shard.
    """

    tokens: int
    shard_tokens: int
    hidden: int
    q_width: int
    kv_width: int
    ffn: int
    vocab: int
    heads: int
    kv_heads: int
    tp: int
    cp: int
    ulysses: int
    gathered: bool
    """Whether sequence parallelism shards tokens outside of the tensor-parallel products."""
    cp_rank: int = 0
    """Coordinate among context-parallel (or METP) ranks, which have different earlier keys (``attention/ring.py``)."""
    start: int = 0
    """Tokens of the micro-batch before this subsequence; 0 without subsequences (``subsequence.py``)."""
    kv_cache_tokens: int = 0
    """Tokens of the KV cache: those of the whole micro-batch, or 0 without subsequences."""
    sums: tuple[int, ...] = ()
    """Ends of the runs of KV cache tokens that sum their gradients in one buffer; empty for one buffer of all."""

    metp: int = 1
    keep_norms: bool = False
    """Whether METP keeps the results of both norms."""
    tp_rank: int = 0
    """Coordinate among the tensor-parallel ranks, which gather and sum chunks of different rows (``tp_overlap``)."""
    ulysses_rank: int = 0
    """Coordinate among the ranks of Ulysses, which may have different numbers of heads (``heads.py``)."""
    shared_by: int = 1
    """Tensor-parallel ranks that have copies of one key/value head."""
    experts: Experts | None = None
    """The experts in place of the MLP, if the layer has them."""
    ep: int = 1
    whole_experts: bool = False
    """Whether each tensor-parallel rank has whole experts, and dispatches the rows of its token shard."""
    expert_load: str = BALANCED
    expert_capacity: float = 0.0
    """How rows spread over experts, and what a pair of ranks can send (``layout/expert_load.py``); read with ``ep``."""
    window: int = 0
    """Keys that a token of the layer attends to at most; 0: all before it, also where no sequence is longer."""
    rope_theta: float = 0.0
    """Base of the layer's rotary tables; 0: the model's."""
    sequence: int = 0
    """Tokens of a whole sequence, on all ranks."""
    ring: Literal["cp", "metp"] = "cp"
    """The group that forms the ring of the ``cp`` ranks; "metp" inside METP's attention (``layers/metp.py``)."""
    latent: LatentAttention | None = None
    """The latent that keys and values come from (MLA)."""
    rebuild_qkv: bool = False
    """Whether backward computes the heads of Q, K and V again from the latents."""
    divided: int = 1
    """Number of ranks that divide the MLP's features."""

    def of_layer(self, layer: LayerShape) -> Shape:
        """Return the sizes in a layer of this shape."""
        return replace(
            self,
            ffn=layer.ffn_hidden // self.divided,
            experts=layer.experts,
            window=layer.window if layer.window < self.sequence else 0,
            rope_theta=layer.rope_theta,
        )

    def of_rows(self, tokens: int) -> Shape:
        """Return the sizes in a row block of so many of the rank's tokens, outside of attention."""
        return replace(self, tokens=tokens, shard_tokens=self.shard(tokens))

    @property
    def expert_width(self) -> int:
        """Features inside one expert, on one of the ranks that divide them."""
        return self.experts.hidden // (1 if self.whole_experts else self.divided) if self.experts else 0

    @property
    def shared_width(self) -> int:
        """Features inside the shared expert, on one of the ranks that divide them; 0 without one."""
        return self.experts.shared // self.divided if self.experts else 0

    @property
    def routed_tokens(self) -> int:
        """Tokens that the rank routes: all of the tensor-parallel ranks, or its own where it has whole experts."""
        return self.shard_tokens if self.whole_experts else self.tokens

    @property
    def dispatched(self) -> int:
        """Rows that go to experts: one for each token that is routed and each of its experts."""
        return self.routed_tokens * self.experts.per_token if self.experts else 0

    @property
    def pair_rows(self) -> int:
        """Rows that a rank of ``ep`` sends to each rank; fewer are filled up."""
        assert self.experts is not None
        return capacity_rows(self.experts, self.dispatched, self.expert_load, self.ep, self.expert_capacity)

    @property
    def expert_rows(self) -> int:
        """Rows of the experts' tensors: all dispatched rows, or with ``ep`` what all its ranks can send to this one."""
        return self.dispatched if self.ep == 1 or not self.experts else self.ep * self.pair_rows

    @property
    def own_experts(self) -> int:
        """Experts whose weights a rank holds."""
        return self.experts.count // self.ep if self.experts else 0

    @property
    def qkv_width(self) -> int:
        """Features of the packed Q, K, V."""
        return self.q_width + self.cache_width

    @property
    def cache_width(self) -> int:
        """Features of K and V together."""
        return self.kv_width + self.kv_heads * self.value_dim

    @property
    def attention_width(self) -> int:
        """Features of attention's output."""
        return self.heads * self.value_dim

    @property
    def product_width(self) -> int:
        """Features of the QKV product: less than ``qkv_width`` when ranks have copies of key/value heads."""
        return self.q_width + 2 * self.kv_width // self.shared_by

    @property
    def attention(self) -> Shape:
        """The sizes inside attention, where Ulysses holds all tokens of a part of the heads."""
        own, head_dim = shares(self.heads, self.kv_heads, self.ulysses)[self.ulysses_rank], self.head_dim
        return replace(
            self,
            tokens=self.tokens * self.ulysses,
            start=self.start * self.ulysses,
            kv_cache_tokens=self.kv_cache_tokens * self.ulysses,
            sums=tuple(end * self.ulysses for end in self.sums),
            q_width=own.heads * head_dim,
            kv_width=own.kv_heads * head_dim,
            heads=own.heads,
            kv_heads=own.kv_heads,
        )

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.q_width // self.heads

    @property
    def value_dim(self) -> int:
        """Features of a head of V, and of attention's output."""
        return self.latent.value_dim if self.latent else self.head_dim

    def grouped_width(self, width: int) -> int:
        """Return the features of a sequence-sharded row of ``width`` features, grouped by the rank of their heads.

        Attention's output is grouped as it is. Of Q, K and V, each rank gets its own copy of a key/value head.
        """
        if width == self.attention_width:
            return width
        return sum(self._packed(share) for share in shares(self.heads, self.kv_heads, self.ulysses))

    def fullest_width(self, width: int) -> int:
        """Return the features of the head-sharded form of such a row, on the rank with the most heads."""
        most = shares(self.heads, self.kv_heads, self.ulysses)[0]
        return most.heads * self.value_dim if width == self.attention_width else self._packed(most)

    def _packed(self, share: Share) -> int:
        """Return the features of the packed Q, K and V of the heads of one rank of Ulysses."""
        return (share.heads + share.kv_heads) * self.head_dim + share.kv_heads * self.value_dim

    def shard(self, tokens: int) -> int:
        """Return how many of ``tokens`` tokens this rank's sequence-parallel shard holds."""
        return tokens // self.tp if self.gathered else tokens


@lru_cache(maxsize=256)
def shape_of(decisions: Decisions, *, cp_rank: int | None = None, ulysses_rank: int = 0, tp_rank: int = 0) -> Shape:
    """Return the per-rank sizes of ``decisions`` on the representative context-parallel rank, or on ``cp_rank``.

    Where layers differ, the sizes are those of the widest one (``Shape.of_layer``). A search asks several times in
    succession for the same decisions, so the last ones are cached.

    ``ulysses_rank``: the rank of Ulysses; rank 0 has the most heads. ``tp_rank``: the tensor-parallel rank.

    Raises:
        Infeasible: when the layout does not divide the model or the sequence, or combines incompatible options
            (``compatibility.py``).
        BadInput: when swapped tokens end inside a row block. No search writes such a plan; only an edited file has it.
    """
    model, layout = decisions.model, decisions.layout
    check_compatible(decisions)
    check_attention_chunks(decisions)
    _check_heads(decisions)
    for each in model.layer_shapes:
        if each.experts is not None:
            _degree_divides("features of an expert", each.experts.hidden, "tp", layout.expert_divided)
            _degree_divides("experts", each.experts.count, "ep", layout.ep)
            _degree_divides("features of the shared expert", each.experts.shared, "tp", layout.tp)
            continue
        _degree_divides("ffn_hidden", each.ffn_hidden, "tp", layout.tp)
        _degree_divides("ffn_hidden", each.ffn_hidden, "metp", layout.metp)
    _check_batch(decisions)
    if model.learned_positions and decisions.seq_tokens > model.max_positions:
        raise Infeasible(
            "the sequence is longer than the model's position table",
            where="seq_tokens",
            got=decisions.seq_tokens,
            wanted=f"at most {model.max_positions}",
            hint="a shorter --seq-len, or a model file with more max_positions",
        )
    if layout.ring > MOST_RING:
        raise Infeasible(
            "the ring has too many ranks: each exchanges with every other, and the program grows with them",
            where="cp x metp",
            got=layout.ring,
            wanted=f"at most {MOST_RING}",
            hint="a smaller --cp",
        )
    chunks = 2 * layout.ring if layout.ring > 1 else 1
    _divides("seq_tokens", decisions.seq_tokens, f"2 x {layout.ring_group}", chunks)
    _divides("seq_tokens", decisions.seq_tokens, "cp chunks x ulysses", chunks * layout.ulysses)
    gathered = layout.sequence_parallel and layout.tp > 1
    tokens = decisions.local_tokens
    if gathered:
        _divides("tokens of a rank", tokens, "tp", layout.tp)
    _check_swapped(decisions, tokens)
    _check_mlp_blocks(decisions, tokens)
    _check_size(decisions, tokens)
    heads, kv_heads = divided_heads(model, layout)
    return Shape(
        tokens=tokens,
        shard_tokens=tokens // layout.tp if gathered else tokens,
        hidden=model.hidden,
        q_width=heads * model.head_dim,
        kv_width=kv_heads * model.head_dim,
        ffn=model.ffn_hidden // layout.divided,
        vocab=-(-model.vocab // layout.tp),
        heads=heads,
        kv_heads=kv_heads,
        tp=layout.tp,
        cp=layout.cp,
        ulysses=layout.ulysses,
        gathered=gathered,
        ulysses_rank=ulysses_rank,
        tp_rank=tp_rank,
        shared_by=sharing_ranks(model, layout),
        cp_rank=layout.ring - 1 if cp_rank is None else cp_rank,
        latent=model.latent,
        rebuild_qkv=decisions.rebuild_qkv,
        metp=layout.metp,
        keep_norms=decisions.keep_norms,
        divided=layout.divided,
        ep=layout.ep,
        whole_experts=layout.whole_experts,
        expert_load=decisions.expert_load,
        expert_capacity=decisions.expert_capacity,
        sequence=decisions.seq_tokens,
    )


def _check_batch(decisions: Decisions) -> None:
    """Reject a batch that does not give every replica whole micro-batches."""
    least, dp = decisions.micro_batch * decisions.layout.dp, decisions.layout.dp
    if decisions.global_batch % least == 0:
        return
    of = f" with micro-batches of {decisions.micro_batch}" if decisions.micro_batch > 1 else ""
    enough = decisions.global_batch > least
    raise Infeasible(
        f"dp {dp}{of} needs a global batch {'that is a multiple of' if enough else 'of at least'} {least}",
        where="global_batch",
        got=decisions.global_batch,
        wanted=f"a multiple of {least}",
        hint=f"--global-batch {-(-decisions.global_batch // least) * least}, or another --dp",
    )


def _check_heads(decisions: Decisions) -> None:
    """Reject degrees that do not give every rank whole heads, or copies of one key/value head."""
    model, layout = decisions.model, decisions.layout
    _degree_divides("heads", model.heads, "tp", layout.tp)
    _divides_or_copies(model, "tp", layout.tp)
    _divides("features of keys", model.kv_width, "tp", layout.tp)
    for what in ("heads", "kv_heads"):
        _degree_divides(what, getattr(model, what), "metp", layout.metp)
    heads, kv_heads = divided_heads(model, layout)
    if are_even(heads, kv_heads, layout.ulysses) or (layout.uneven_heads and layout.ulysses < kv_heads):
        return
    by, degree = "tp x ulysses", layout.tp * layout.ulysses
    if layout.uneven_heads:
        raise Infeasible(
            "Ulysses has more ranks than there are key/value heads to divide unevenly",
            where="kv_heads",
            got=f"{kv_heads} of a tensor-parallel rank with ulysses {layout.ulysses}",
            wanted=f"ulysses below {kv_heads}, or a multiple of {kv_heads} that divides {heads} heads",
            hint="a smaller --ulysses",
        )
    more = "; with --uneven-heads some ranks have one more" if layout.ulysses < kv_heads else ""
    _degree_divides("heads", model.heads, by, degree, more)
    _divides_or_copies(model, by, degree, more)


def _check_swapped(decisions: Decisions, tokens: int) -> None:
    swapped, granule = decisions.swapped_tokens, decisions.swap_granule
    several = decisions.layout.subsequences > 1  # ``partition.py`` checks the row blocks of each subsequence
    if swapped > tokens or (swapped % granule and swapped != tokens and not several):
        raise BadInput(
            "swapped_tokens does not fall on a row block",
            where="$.decisions.swapped_tokens",
            got=swapped,
            wanted=f"a multiple of {granule} up to {tokens}, or {tokens}",
            hint=PRICE_AGAIN,
        )


def _check_mlp_blocks(decisions: Decisions, tokens: int) -> None:
    chunk, granule = decisions.mlp_chunk_tokens, decisions.swap_granule
    if 0 < chunk < tokens and (chunk % granule or chunk * MOST_MLP_CHUNKS < tokens):
        raise Infeasible(
            f"the MLP's row blocks have to be multiples of {granule} tokens, {MOST_MLP_CHUNKS} of them at most",
            where="decisions.mlp_chunk_tokens",
            got=f"{chunk} of {tokens} tokens",
            wanted=f"a multiple of {granule}, at least {-(-tokens // MOST_MLP_CHUNKS)}",
            hint="another --mlp-chunk",
        )


def _check_size(decisions: Decisions, tokens: int) -> None:
    """Reject micro-batches with too many tokens or loss chunks, because the program grows with both."""
    if tokens > MOST_TOKENS:
        raise Infeasible(
            "a rank's micro-batch has too many tokens",
            where="micro_batch",
            got=f"{tokens} tokens",
            wanted=f"at most {MOST_TOKENS}",
            hint="a smaller --micro-batch, or more --cp",
        )
    chunk = decisions.loss_chunk_tokens
    if chunk and tokens > chunk * MOST_LOSS_CHUNKS:
        raise Infeasible(
            "the loss is cut into too many chunks",
            where="loss_chunk_tokens",
            got=f"{chunk} of {tokens} tokens",
            wanted=f"chunks of at least {-(-tokens // MOST_LOSS_CHUNKS)} tokens",
            hint="a larger --loss-chunk",
        )


def _degree_divides(what: str, value: int, by: str, degree: int, more: str = "") -> None:
    """Reject a degree that does not divide a size of the model; suggest the largest smaller degrees that do.

    ``more`` ends the hint.
    """
    if value % degree == 0:
        return
    fewer = [str(each) for each in range(degree - 1, 0, -1) if value % each == 0][:DEGREES_NAMED]
    _divides(what, value, by, degree, hint=f"{by} = {' or '.join(fewer)} divides {what}{more}")


def _divides_or_copies(model: Model, by: str, degree: int, more: str = "") -> None:
    """Reject a degree that neither divides the key/value heads nor is a multiple of them."""
    if degree % model.kv_heads:
        _degree_divides("kv_heads", model.kv_heads, by, degree, more)


def _divides(what: str, value: int, by: str, divisor: int, hint: str | None = None) -> None:
    if value % divisor:
        wanted = f"a multiple of {divisor}"
        raise Infeasible(f"{by} = {divisor} does not divide {what}", where=what, got=value, wanted=wanted, hint=hint)
