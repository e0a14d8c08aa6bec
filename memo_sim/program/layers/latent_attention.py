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

from memo_sim.program.attention.ulysses import Ulysses
from memo_sim.program.ir.builder import Rows
from memo_sim.program.ir.kinds import Phase
from memo_sim.program.layers.attention_half import WholeAttention
from memo_sim.program.layers.latents import Block, Latents
from memo_sim.program.layout.token_order import row_blocks
from memo_sim.program.operators.operators import OperatorWriter, RowBlock


class LatentAttentionHalf(WholeAttention):
    """Attention of all of a rank's tokens, with heads expanded from latents."""

    def __init__(self, writer: OperatorWriter, ulysses: Ulysses) -> None:
        super().__init__(writer, ulysses)
        self.rebuilt = writer.decisions.rebuild_qkv
        self.latents = Latents(writer, rebuilt=self.rebuilt)

    def _block(self, rows: RowBlock) -> Block:
        """Return where rows lie: all buffers have room for all of the rank's."""
        return Block(rows, rows, rows, self.shape.tokens)

    def recompute(self, rows: RowBlock, *, whole: bool) -> None:
        """Write norm and products of ``rows``; where backward expands the heads of all rows, only the latents."""
        if self.rebuilt and not whole:
            self.latents.compress(self._block(rows))
            return
        super().recompute(rows, whole=whole)

    def _before_attention(self, rows: RowBlock) -> None:
        self.latents.compress(self._block(rows))
        self._expand(rows)

    def _expand(self, rows: RowBlock) -> None:
        """Write the heads of ``rows``, and the all-to-all to the ranks of their heads."""
        writer, shape = self.writer, self.shape
        packed = Rows(writer.own(self.ulysses.sequence_sharded("qkv"), shape.tokens, shape.qkv_width), *rows)
        writer.own("qkv", shape.attention.tokens, shape.attention.qkv_width)
        self.latents.expand(self._block(rows), packed)
        self.ulysses.to_heads("qkv", packed, writer.suffix)
        self._split(rows)

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
        self.latents.backward(self._block((0, self.shape.tokens)), d_qkv, grad_in)
