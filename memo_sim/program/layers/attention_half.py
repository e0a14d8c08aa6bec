"""The attention half of a layer, from the first norm to the residual, behind one interface for both forms.

``WholeAttention`` computes attention of all tokens at once; ``ChunkedAttention`` (``attention/chunked.py``) computes it
chunk by chunk. A layer writes the same calls for both.
"""

from __future__ import annotations

from typing import Protocol

from memo_sim.program.attention import attention, shared_heads
from memo_sim.program.attention import subsequence as prefix_attention
from memo_sim.program.attention.projection import project
from memo_sim.program.attention.ulysses import Ulysses
from memo_sim.program.ir.builder import Rows
from memo_sim.program.ir.kinds import Phase
from memo_sim.program.layers import selective
from memo_sim.program.operators import norms
from memo_sim.program.operators.operators import OperatorWriter, RowBlock
from memo_sim.program.operators.positions import positions, positions_backward
from memo_sim.program.operators.sinks import sink, sink_backward


class AttentionHalf(Protocol):
    """Writes a layer from its input ``x`` to the residual ``resid``, and back."""

    def forward(self, blocks: list[RowBlock]) -> None:
        """Write norm, QKV product and attention of all rows; row-wise operators run once per row block."""

    def recompute(self, rows: RowBlock, *, whole: bool) -> None:
        """Write the recompute for backward: of ``rows`` without attention, or with ``whole`` of all rows with it."""

    def project(self, rows: RowBlock) -> None:
        """Write the projection of ``rows`` and the residual sum."""

    def backward(self, grad_in: str) -> None:
        """Write the backward from ``d_resid`` to the gradient of the layer's input, ``grad_in``."""


class WholeAttention:
    """Attention of all of a rank's tokens at once."""

    def __init__(self, writer: OperatorWriter, ulysses: Ulysses) -> None:
        self.writer, self.ulysses = writer, ulysses
        self.builder, self.decisions, self.shape = writer.builder, writer.decisions, writer.shape

    def forward(self, blocks: list[RowBlock]) -> None:
        """Write norm and product of every row block, then attention of all rows."""
        for i, rows in enumerate(blocks):
            self.writer.suffix = f".r{i}" if len(blocks) > 1 else ""
            self._before_attention(rows)
        self.writer.suffix = ""
        self._attend()

    def recompute(self, rows: RowBlock, *, whole: bool) -> None:
        """Write norm and product of ``rows``; ``whole``: attention too."""
        self._before_attention(rows)
        if whole:
            self._attend()

    def _attend(self) -> None:
        """Write attention of all rows, and the sinks into its whole output."""
        attention.forward(self.builder, self.decisions, self.shape.attention)
        sink(self.writer)

    def project(self, rows: RowBlock) -> None:
        """Write the projection of ``rows``, and before it the all-to-all that brings attention's output back."""
        writer, ulysses, tokens = self.writer, self.ulysses, self.shape.tokens
        if not writer.in_chunks:
            writer.own("proj_out", tokens, self.shape.hidden)
        if not writer.builder.has(attended := ulysses.sequence_sharded("attn")):
            writer.own(attended, tokens, self.shape.q_width)  # not kept: the projection keeps it in FP8
        ulysses.to_tokens("attn", Rows(ulysses.sequence_sharded("attn"), *rows), writer.suffix)
        project(writer, ulysses, rows, rows, tokens)

    def backward(self, grad_in: str) -> None:
        """Write the backward of projection, attention, product and norm."""
        writer, shape, builder = self.writer, self.shape, self.builder
        inside, sequence_sharded = shape.attention, self.ulysses.sequence_sharded
        whole = (0, shape.tokens)

        def product(grad: Rows, into: RowBlock) -> None:
            d_attn = writer.own(sequence_sharded("d_attn"), shape.tokens, shape.attention_width)
            writer.dgrad("proj", grad, Rows(d_attn, *into), shape.attention_width, shape.hidden)

        upstream = norms.post_norm_backward(writer, "post_attn", builder.all("d_resid"))
        gathered = writer.before_gather(upstream, "proj")
        d_proj = writer.gather_and_multiply("proj.grad", gathered, "d_proj_full", whole, product)
        d_attn = builder.all(sequence_sharded("d_attn"))
        writer.own("d_attn", inside.tokens, inside.attention_width)
        self.ulysses.to_heads("d_attn", d_attn)
        if writer.trains("proj"):
            attended = builder.all(writer.attended(sequence_sharded("attn"), kept=True))
            writer.wgrad("proj", d_proj, attended, shape.hidden, shape.attention_width)
        writer.bgrad("proj", builder.all("d_resid"), shape.hidden)
        writer.own("d_qkv", inside.tokens, inside.qkv_width)
        self._rebuild()
        if self.decisions.recompute == "selective":
            selective.rebuild(builder, self.decisions, inside)
        sink_backward(writer)
        attention.backward(builder, self.decisions, inside)
        d_qkv = writer.own(sequence_sharded("d_qkv"), shape.tokens, shape.qkv_width)
        self.ulysses.to_tokens("d_qkv", builder.all(d_qkv))
        self._product_backward(builder.all(d_qkv), grad_in)

    def _rebuild(self) -> None:
        """Write again what attention's backward reads and nothing keeps; here nothing."""

    def _product_backward(self, d_qkv: Rows, grad_in: str) -> None:
        """Write the backward from the gradient of the packed Q, K, V to that of the layer's input."""
        writer, whole = self.writer, (0, self.shape.tokens)
        positions_backward(writer, d_qkv)
        grad = shared_heads.product_gradient(writer, d_qkv, self.shape.tokens)
        writer.product_and_norm_backward(
            "qkv",
            "norm1",
            grad=grad,
            source=None,
            norm_input="x",
            residual_grad="d_resid",
            out=grad_in,
            rows=whole,
            at=whole,
        )

    def _before_attention(self, rows: RowBlock) -> None:
        """Write norm, QKV product and positions of ``rows``, and the all-to-all to the ranks of their heads."""
        first, tokens = rows
        writer, shape = self.writer, self.shape
        norms.norm(writer, "norm1", "x", rows, rows)

        def product(x: Rows, into: RowBlock) -> None:
            writer.own(qkv, shape.tokens, shape.qkv_width)
            shared_heads.product(writer, x, Rows(qkv, *into), shape.tokens)

        qkv = self.ulysses.sequence_sharded("qkv")
        normed = writer.shard_rows(writer.read_by_product("norm1"), rows)
        writer.gather_and_multiply("norm1", normed, "norm1_full", rows, product)
        packed = Rows(qkv, first, tokens)
        shared_heads.exchange(writer, packed, shape.tokens)
        positions(writer, packed, Rows("qk_raw", first, tokens))
        if shape.kv_cache_tokens:
            writer.own("qkv", shape.attention.tokens, shape.attention.qkv_width)
        self.ulysses.to_heads("qkv", packed, writer.suffix)
        self._split(rows)

    def _split(self, rows: RowBlock) -> None:
        """Beside a KV cache of the prefix: copy the queries of ``rows``, and in forward their keys and values to it."""
        if self.shape.kv_cache_tokens:
            inside, degree = self.shape.attention, self.shape.ulysses
            fresh, packed = self.builder.phase is Phase.FORWARD, Rows("qkv", degree * rows[0], degree * rows[1])
            prefix_attention.split(self.builder, inside, packed, self.writer.suffix, keys=fresh)
