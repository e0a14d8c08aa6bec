"""One transformer layer, operator by operator: forward, recompute of a row block, backward.

Forward of a row block [first, first + tokens) of the rank's tokens (products are row-wise, so blocks are independent):

    x -> norm1 -> [all-gather] -> qkv -> (qk norm, rotary) | attention over all rows | -> proj -> [reduce-scatter]
      -> resid = x + proj -> norm2 -> [all-gather] -> up -> act | -> down -> [reduce-scatter] -> next x = resid + down

Everything left of the last bar is rebuilt by recompute: QKV, projection and first FFN product, not the second, and
not attention (MEMO 4.1). Collectives in brackets exist with tensor parallelism; with Megatron's sequence parallelism
they gather and scatter token shards, without it they are all-reduces of whole tensors after proj and down (and their
mirror images in backward).
"""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.program.attention import attention
from memo_sim.program.attention import subsequence as prefix_attention
from memo_sim.program.attention.chunked import ChunkedAttention
from memo_sim.program.attention.ulysses import Ulysses
from memo_sim.program.ir.builder import Rows, TemplateBuilder
from memo_sim.program.layers import selective
from memo_sim.program.layers.mlp import Mlp
from memo_sim.program.layout.attention_chunks import attention_chunks, in_chunks
from memo_sim.program.layout.parameters import Block
from memo_sim.program.layout.shape import Shape
from memo_sim.program.operators.operators import OperatorWriter, RowBlock


class LayerWriter(OperatorWriter):
    """Writes one layer's instructions into a template whose slots are named after the skeletal tensors.

    Slots ``params``, ``grads`` are the layer's parameter and gradient blocks; ``next_x`` receives the layer's output.
    """

    def __init__(self, builder: TemplateBuilder, decisions: Decisions, shape: Shape, block: Block) -> None:
        super().__init__(builder, decisions, shape, block)
        room = attention_chunks(decisions)[0][1] if in_chunks(decisions) else 0
        self.ulysses = Ulysses(builder, shape, decisions.dtype, room=room)
        self.chunked = ChunkedAttention(self, self.ulysses) if room else None
        """Writes attention in chunks, where it is not played whole."""
        self.mlp = Mlp(self)

    def forward(self, blocks: list[RowBlock], out: str) -> None:
        """Write the whole forward; row-wise operators run once per row block."""
        if self.chunked:
            self.chunked.forward(store=False)
        else:
            for i, rows in enumerate(blocks):
                self.suffix = f".r{i}" if len(blocks) > 1 else ""
                self._before_attention(rows)
            self.suffix = ""
            attention.forward(self.builder, self.decisions, self.shape.attention)
        for i, rows in enumerate(blocks):
            self.suffix = f".r{i}" if len(blocks) > 1 else ""
            self._project(rows)
            if not self.mlp.blocked:
                self.mlp.first_product(rows)
        self.suffix = ""
        self.mlp.forward(out)

    def recompute(self, rows: RowBlock, index: int, *, whole: bool) -> None:
        """Write the rebuilding of one row block; ``whole``: the layer's forward once more, its output thrown away.

        A whole layer is what activation checkpointing replays (one block, attention and second product included). An
        MLP in row blocks is rebuilt by backward, block by block, without its second product.
        """
        self.suffix = "" if whole else f".r{index}"
        if self.chunked:
            self.chunked.forward(store=True)
        else:
            self._before_attention(rows)
            if whole:
                attention.forward(self.builder, self.decisions, self.shape.attention)
        self._project(rows)
        if not self.mlp.blocked:
            self.mlp.first_product(rows)
        self.suffix = ""
        if whole and not self.mlp.blocked:
            self.mlp.forward(self.own("rebuilt_out", self.shape.shard_tokens, self.shape.hidden))

    def _before_attention(self, rows: RowBlock) -> None:
        first, tokens = rows
        shape = self.shape
        self.norm("norm1", "x", rows, rows)
        source = self.gather("norm1", self.shard_rows("norm1", rows), "norm1_full", first)
        packed = Rows(self.own(self.ulysses.sequence_sharded("qkv"), shape.tokens, shape.qkv_width), first, tokens)
        self.linear("qkv", source, packed, shape.qkv_width, shape.hidden)
        self.positions(packed, Rows("qk_raw", first, tokens))
        self.ulysses.to_heads("qkv", packed, self.suffix)
        if shape.kv_cache_tokens:
            fresh = self.builder.phase == "fwd"
            prefix_attention.split(self.builder, self.decisions, shape, packed, self.suffix, keys=fresh)

    def _project(self, rows: RowBlock) -> None:
        """Write the projection of a row block, and before it attention's way home, where chunks have not written that.

        With sequence parallelism what a projection sums exists of one chunk at a time.
        """
        if self.chunked and self.shape.gathered:
            for c, (first, tokens) in enumerate(self.chunked.chunks):
                self.suffix = f".c{c}"
                self._projection((first, tokens), (0, tokens), self.chunked.room)
            return
        self.own("proj_out", self.shape.tokens, self.shape.hidden)
        if not self.chunked:
            self.ulysses.to_tokens("attn", Rows(self.ulysses.sequence_sharded("attn"), *rows), self.suffix)
        self._projection(rows, rows, self.shape.tokens)

    def _projection(self, rows: RowBlock, at: RowBlock, room: int) -> None:
        """Write projection and residual sum of ``rows``; what lies between has room for ``room``, and is at ``at``."""
        shape = self.shape
        product = Rows(self.own("proj_out", room, shape.hidden), *at)
        attended = Rows(self.ulysses.sequence_sharded("attn"), *rows)
        self.linear("proj", attended, product, shape.hidden, shape.q_width, bias=False)
        summed = self.scatter("proj", product, tokens=room)
        self.residual("resid_add", "x", summed, out="resid", rows=rows, bias="proj.bias")

    def backward(self, grad_out: str, grad_in: str) -> None:
        """Write the backward: reads ``grad_out`` (of the layer's output), writes ``grad_in`` (of its input)."""
        shape, builder = self.shape, self.builder
        self.mlp.backward(grad_out)
        if self.chunked:
            self.chunked.backward(grad_in)
            return
        d_proj = self.gather("proj.grad", builder.all("d_resid"), "d_proj_full", 0)
        inside, sequence_sharded = shape.attention, self.ulysses.sequence_sharded
        d_attn = builder.all(self.own(sequence_sharded("d_attn"), shape.tokens, shape.q_width))
        self.dgrad("proj", d_proj, d_attn, shape.q_width, shape.hidden)
        self.own("d_attn", inside.tokens, inside.q_width)
        self.ulysses.to_heads("d_attn", d_attn)
        self.wgrad("proj", d_proj, builder.all(sequence_sharded("attn")), shape.hidden, shape.q_width)
        self.bgrad("proj", builder.all("d_resid"), shape.hidden)
        self.own("d_qkv", inside.tokens, inside.qkv_width)
        if self.decisions.recompute == "selective":
            selective.rebuild(builder, self.decisions, inside)
        attention.backward(builder, self.decisions, inside)
        d_qkv = self.own(sequence_sharded("d_qkv"), shape.tokens, shape.qkv_width)
        self.ulysses.to_tokens("d_qkv", builder.all(d_qkv))
        self.positions_backward(builder.all(d_qkv))
        whole = (0, shape.tokens)
        self.product_and_norm_backward(
            "qkv",
            "norm1",
            grad=builder.all(d_qkv),
            source=None,
            norm_input="x",
            residual_grad="d_resid",
            out=grad_in,
            rows=whole,
            at=whole,
        )
