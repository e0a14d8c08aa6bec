"""The attention half of a layer whose keys and values come from a latent (MLA; DeepSeek-V2, arXiv:2405.04434, 2.1).

Forward of a row block; ``*`` marks rows that sequence parallelism gathers:

    x -> norm1 -> latent -> norm of latents -> q_latent *  -> q_up  -> Q
                                            -> kv_latent * -> kv_up -> K without positions, V
                                            -> k_rope *             -> the rotary key that all heads share
    assembly: rotates the rotary parts, packs Q, K, V      | attention over all rows | projection

Heads are expanded from the latents as in training; the absorbed form of decoding has no lowering. Without a latent for
queries (``q_rank`` 0), q_up multiplies the gathered norm1.

Tensor parallelism divides heads: q_up and kv_up by columns, the projection by rows. The product ``latent`` is whole on
every rank. With sequence parallelism it multiplies the rank's token shard, and the latents are gathered, which are
narrower than norm1 (DeepSeek-V3: 2112 features, not 7168). Its weight's gradient then covers the shard, so ranks sum it
at the end of the step (``layout/parameters.py``, ``Part.TOKENS``). Megatron-LM does the same
(core/transformer/multi_latent_attention.py, linear_q_down_proj and linear_kv_down_proj "duplicated"). In backward the
gradients of the latents are summed over the ranks' heads.

Context parallelism passes the expanded keys and values, as Megatron-LM does.

With ``rebuild_qkv`` the packed Q, K and V are not kept: backward computes them again from the latents, for all tokens,
by two products and the assembly (Megatron-LM's recompute module mla_up_proj). The latents, before and after their
norms, take 4224 features a token in DeepSeek-V3, its packed Q, K and V 65536.
"""

from __future__ import annotations

from typing import NamedTuple

from memo_sim.program.attention.ulysses import Ulysses
from memo_sim.program.ir.builder import Rows, accumulates, reads, writes
from memo_sim.program.ir.kinds import Phase
from memo_sim.program.layers.attention_half import WholeAttention
from memo_sim.program.layout.token_order import row_blocks
from memo_sim.program.operators import norms
from memo_sim.program.operators import workspaces as table
from memo_sim.program.operators.operators import OperatorWriter, RowBlock


class Passes(NamedTuple):
    """How often a kernel of memo-exec reads and writes an element, in elements of the plan's dtype."""

    read: int
    written: int


NORM = {"fp32": Passes(3, 2), "bf16": Passes(8, 6), "fp16": Passes(8, 6)}
NORM_BACKWARD = {"fp32": Passes(14, 10), "bf16": Passes(25, 19), "fp16": Passes(25, 19)}
"""Passes of the norms of latents: torch operators, which widen half floats to fp32 (``memo_exec/kernels/latent.py``).
No profile has measured them, so these passes have the rate of memory-bound kernels."""
ROTATION = Passes(4, 3)
"""Passes of a rotation in place: a copy of one half, two products, two sums."""


class LatentAttentionHalf(WholeAttention):
    """Attention of all of a rank's tokens, with heads expanded from latents."""

    def __init__(self, writer: OperatorWriter, ulysses: Ulysses) -> None:
        super().__init__(writer, ulysses)
        assert writer.shape.latent is not None
        self.latent = writer.shape.latent
        self.rebuilt = writer.decisions.rebuild_qkv

    @property
    def _kv_width(self) -> int:
        """Features of the product that makes keys without positions, and values."""
        return self.shape.heads * (self.latent.nope_dim + self.latent.value_dim)

    @property
    def _query_passes(self) -> Passes:
        """Elements of a token that the assembly reads and writes of the queries, whose rotary parts it rotates."""
        rotated = self.shape.heads * self.latent.rope_dim
        return Passes(ROTATION.read * rotated, ROTATION.written * rotated)

    def recompute(self, rows: RowBlock, *, whole: bool) -> None:
        """Write norm and products of ``rows``; where backward expands the heads of all rows, only the latents."""
        if self.rebuilt and not whole:
            self._compress(rows)
            return
        super().recompute(rows, whole=whole)

    def _before_attention(self, rows: RowBlock) -> None:
        self._compress(rows)
        self._expand(rows)

    def _compress(self, rows: RowBlock) -> None:
        """Write norm1, the product that makes the latents, and their norms, of this rank's token shard."""
        writer, latent = self.writer, self.latent
        norms.norm(writer, "norm1", "x", rows, rows)
        x, made = (writer.shard_rows(slot, rows) for slot in ("norm1", "latent"))
        writer.linear("latent", x, made, latent.width, self.shape.hidden, bias=False)
        normed, passes = latent.q_rank + latent.kv_rank, NORM[writer.dtype]
        ranks = {"q": latent.q_rank, "kv": latent.kv_rank}
        latents = {name: writer.shard_rows(f"{name}_latent", rows) for name, rank in ranks.items() if rank}
        written = {name: writer.made(kept, ranks[name]) for name, kept in latents.items()}
        writer.memory_bound(
            "latent.norm",
            "latent.norm",
            made.tokens,
            passes.read * normed + latent.rope_dim,
            passes.written * normed + latent.rope_dim,
            scratch=table.latent_norm_workspace_bytes(made.tokens, normed, writer.dtype),
            x=reads(made),
            q_weight=writer.param("q_latent_norm.weight"),
            kv_weight=writer.param("kv_latent_norm.weight"),
            q=writes(written["q"]) if latent.q_rank else None,
            kv=writes(written["kv"]),
            rope=writes(writer.shard_rows(self._rotary_key(), rows)),
            stats=writes(writer.shard_rows("latent_stats", rows)),
        )
        for name, kept in latents.items():
            writer.quantise(written[name], kept)

    def _rotary_key(self) -> str:
        """Return the slot of the shared rotary key before its rotation; kept where backward expands heads again."""
        if self.rebuilt:
            return "k_rope"
        return self.writer.own(f"{self.builder.phase}.k_rope", self.shape.shard_tokens, self.latent.rope_dim)

    def _queries_from(self) -> str:
        return "q_latent" if self.latent.q_rank else "norm1"

    def _expand(self, rows: RowBlock) -> None:
        """Write the products that make the heads, their assembly, and the all-to-all to the ranks of their heads."""
        writer, shape, latent, phase = self.writer, self.shape, self.latent, self.builder.phase
        packed = Rows(writer.own(self.ulysses.sequence_sharded("qkv"), shape.tokens, shape.qkv_width), *rows)
        writer.own("qkv", shape.attention.tokens, shape.attention.qkv_width)
        source = self._queries_from()
        mine = writer.shard_rows(writer.read_by_product(source), rows)
        x = writer.product_input("q_up", writer.gather(source, mine, f"{source}_full", rows[0]))
        width = latent.q_rank or shape.hidden
        writer.linear("q_up", x, packed, shape.q_width, width, bias=False, op="latent.q_up")
        mine = writer.shard_rows(writer.read_by_product("kv_latent"), rows)
        kv = writer.gather("kv_latent", mine, "kv_latent_full", rows[0])
        made = Rows(writer.own(f"{phase}.kv_up", shape.tokens, self._kv_width), *rows)
        writer.linear("kv_up", kv, made, self._kv_width, latent.kv_rank, bias=False)
        key = self._rotary_key()
        rope = writer.gather("k_rope", writer.shard_rows(key, rows), "k_rope_full", rows[0])
        writer.memory_bound(
            "latent.assemble",
            "latent.assemble",
            made.tokens,
            self._kv_width + latent.rope_dim + self._query_passes.read,
            shape.cache_width + self._query_passes.written,
            scratch=table.latent_rotary_workspace_bytes(made.tokens, shape.heads, latent.rope_dim, writer.dtype),
            kv=reads(made),
            rope=reads(rope),
            qkv=accumulates(packed),
        )
        self.ulysses.to_heads("qkv", packed, writer.suffix)

    def _rebuild(self) -> None:
        """Write the heads of all rows again, in the row blocks of forward, so that they are equal bit for bit."""
        if not self.rebuilt:
            return
        writer, builder = self.writer, self.builder
        phase, builder.phase = builder.phase, Phase.RECOMPUTE
        whole = (0, self.shape.tokens)
        blocks = row_blocks(writer.decisions) if writer.decisions.recompute == "tokenwise" else [whole]
        for number, rows in enumerate(blocks):
            writer.suffix = f".x{number}" if len(blocks) > 1 else ".x"
            self._expand(rows)
        writer.suffix = ""
        builder.phase = phase

    def _product_backward(self, d_qkv: Rows, grad_in: str) -> None:
        writer, shape, latent, builder = self.writer, self.shape, self.latent, self.builder
        whole = (0, shape.tokens)
        d_kv = writer.own("d_kv_up", shape.tokens, self._kv_width)
        d_rope = writer.own("d_k_rope", shape.tokens, latent.rope_dim)
        writer.memory_bound(
            "latent.assemble.bwd",
            "latent.assemble.bwd",
            shape.tokens,
            shape.cache_width + self._query_passes.read,
            self._kv_width + latent.rope_dim + self._query_passes.written,
            scratch=table.latent_rotary_workspace_bytes(shape.tokens, shape.heads, latent.rope_dim, writer.dtype),
            grad=accumulates(d_qkv),
            kv=writes(builder.all(d_kv)),
            rope=writes(builder.all(d_rope)),
        )
        summed_kv = self._up_backward("kv_up", "kv_latent", builder.all(d_kv), self._kv_width, latent.kv_rank)
        summed_rope = writer.scatter("d_k_rope", builder.all(d_rope))
        source = self._queries_from()
        width = latent.q_rank or shape.hidden
        queried = self._up_backward("q_up", source, d_qkv, shape.q_width, width, op="latent.q_up")
        d_latent = builder.all(writer.own("d_latent", shape.shard_tokens, latent.width))
        normed, passes = latent.q_rank + latent.kv_rank, NORM_BACKWARD[writer.dtype]
        writer.memory_bound(
            "latent.norm.bwd",
            "latent.norm.bwd",
            shape.shard_tokens,
            passes.read * normed + latent.rope_dim,
            passes.written * normed + latent.rope_dim,
            scratch=table.latent_norm_backward_workspace_bytes(shape.shard_tokens, normed),
            q=reads(queried) if latent.q_rank else None,
            kv=reads(summed_kv),
            rope=reads(summed_rope),
            x=reads(builder.all("latent")),
            stats=reads(builder.all("latent_stats")),
            q_weight=writer.param("q_latent_norm.weight"),
            kv_weight=writer.param("kv_latent_norm.weight"),
            out=writes(d_latent),
            grad_q_weight=writer.grad("q_latent_norm.weight"),
            grad_kv_weight=writer.grad("kv_latent_norm.weight"),
        )
        writer.wgrad("latent", d_latent, builder.all("norm1"), latent.width, shape.hidden)
        if latent.q_rank:
            grad = builder.all(writer.own("d_norm1", shape.shard_tokens, shape.hidden))
            writer.dgrad("latent", d_latent, grad, shape.hidden, latent.width)
        else:  # the queries' product reads norm1 as well, so its gradient is there already
            grad = queried
            writer.dgrad("latent", d_latent, grad, shape.hidden, latent.width, op="linear.dgrad.add")
        norms.norm_backward(
            writer, "norm1", grad=grad, norm_input="x", residual_grad="d_resid", out=grad_in, rows=whole, at=whole
        )

    def _up_backward(self, name: str, source: str, grad: Rows, n: int, k: int, *, op: str = "linear") -> Rows:
        """Write the gradients of an up-projection's weight and input; return the input's, summed over heads."""
        writer, builder = self.writer, self.builder
        mine = writer.shard_rows(source, (0, self.shape.tokens))
        held = f"{Phase.RECOMPUTE}.{source}_full"
        if self.rebuilt and self.shape.gathered:
            x, shard = builder.all(held), None
        else:
            x = writer.gather_again(source, mine, f"{source}_full", 0)
            shard = mine if x != mine else None
        d_source = f"d_{source}"
        partial = builder.all(writer.own(d_source, self.shape.tokens, k))
        writer.dgrad(name, grad, partial, k, n, op=f"{op}.dgrad")
        summed = writer.scatter(d_source, partial)
        writer.wgrad(name, grad, x, n, k, shard=shard, op=f"{op}.wgrad")
        return summed
