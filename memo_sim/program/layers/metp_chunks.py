"""METP's attention in chunks: of one part of the heads, only chunks of queries, keys and values are on the device.

METP plays the heads part by part (``metp.py``). A part's Q, K, V have 1 / p of the features, but of all the rank's
tokens, and the outputs of all parts wait for backward. Here every part runs as chunked attention does
(``attention/chunked.py``), and the ranks are the ring of each pair of chunks (``attention/chunk_ring.py``):

    part 0   weights arrive   c0: norm, Q K V, attention, projection   c1: ...       keys of earlier chunks: host
    part 1   weights arrive   c0: the same for other heads, its projection is added   c1: ...

Weights are broadcast once a part, as without chunks, and norms run once a part. Under full recompute the forward before
backward stores Q, K, V, outputs and log-sum-exps of all parts on the host. Backward fetches them, so it has no product
with W_qkv of its own. Backward of a part ends, chunk by chunk, with the gradient of the norm's output, which is a sum
over the parts; in the last part the norm's backward follows.

For each token of a rank, in units of the hidden size and with as many key/value heads as heads, chunks take from the
device:

    beside the MLP's backward    1 + 1 + 7 / p    the norm's output, the outputs of all parts, Q K V and the ring's K V
    in attention's backward      1 + 1 + 17 / p   the same, the output's gradient, d_Q d_K d_V, parts, sums on their way

What stays is of all tokens: the sums of the projections and of the gradients of the norm's output.
"""

from __future__ import annotations

from collections.abc import Callable

from memo_sim.program.attention.chunked import ChunkedAttention
from memo_sim.program.attention.ulysses import Ulysses
from memo_sim.program.ir.builder import Rows
from memo_sim.program.ir.instruction import BufferClass
from memo_sim.program.ir.kinds import TemplateKind
from memo_sim.program.layers.metp_operators import MetpWriter
from memo_sim.program.layout.shape import Shape
from memo_sim.program.layout.skeletal import norm_statistics
from memo_sim.program.operators import norms


class ChunkedPart(ChunkedAttention):
    """Writes a part of the heads in chunks: from the layer's input to the sum of projections, and back."""

    def __init__(self, layer: MetpWriter, inside: Shape, part: int, complete: Callable[[], None]) -> None:
        """``layer`` reads the part's weights. ``complete``: called when the part's weight gradients are written."""
        builder = layer.builder.under({}, f".g{part}")
        self._sums = writer = MetpWriter(builder, layer.decisions, layer.shape, layer.block)
        writer.source = layer.source
        super().__init__(writer, Ulysses(builder, layer.shape, layer.dtype), inside)
        self.part, self.complete = part, complete
        self.pairs_before, self.chunks_before = part * len(self._order()), part * len(self.chunks)
        writer.own("norm1", self.room, self.shape.hidden, BufferClass.SKELETAL)
        if not builder.has("norm1_stats"):
            statistics = norm_statistics(writer.model)
            builder.own("norm1_stats", BufferClass.SKELETAL, "fp32", self.room, statistics)
        for name in self._raw:
            self._chunk(name, 0)

    @property
    def _in_parts(self) -> bool:
        return True

    def _own_output(self) -> None:
        """Add the buffer of the sum of projections; the output itself is in chunks."""
        self.writer.own("proj_out", self.shape.tokens, self.shape.hidden)

    def _pass_on(self, c: int) -> None:
        """Add the projection of a chunk's output to the sum over the parts."""
        shape, into = self.shape, Rows("proj_out", *self.chunks[c])
        self._sums.sum_linear("proj", self._out(c), into, shape.hidden, shape.q_width, self.part)

    def _host_slot(self, name: str, c: int) -> str:
        """Return the name of a chunk's host buffer: one for each part, where backward reads what recompute stored."""
        kept = self.builder.kind is TemplateKind.BACKWARD and name in ("kv", "q", *self._raw, *self._outputs)
        return super()._host_slot(name, c) + (f".g{self.part}" if kept else "")

    def backward(self, grad_in: str) -> None:
        """Write the part's backward from the residual's gradient, ``d_resid``, to the sum of the norm's gradients.

        With the last part it goes on to the layer's input gradient, ``grad_in``.
        """
        k, c = self._order()[0]
        self._fetch_keys(k)
        self._fetch_queries(0, k, c, ("q", *self._outputs))
        self._output_gradient()
        self._pairs_backward(grad_in)

    def _output_gradient(self) -> None:
        """Write the gradient of a part's output, chunk by chunk, and its copies to the host.

        That of the first pair's queries is written where the pair reads it, so that no copy stands before the pair.
        """
        writer, shape, (_, soon) = self.writer, self.shape, self._order()[0]
        for c in (soon, *(c for c in range(len(self.chunks)) if c != soon)):
            writer.suffix = f".c{c}"
            grad = self._back("d_attn", 0, c) if c == soon else self._chunk("d_attn", c, self._gradient_slot(c))
            writer.dgrad("proj", Rows("d_resid", *self.chunks[c]), grad, shape.q_width, shape.hidden)
            self._store("d_attn", c, grad.slot)
        writer.suffix = ""

    def _beside_last_hop(self, n: int, k: int) -> None:
        """Write the projection's weight gradient of a chunk, whose output was fetched for the pair ``n``."""
        self.writer.suffix = f".c{k}"
        grad, shape = Rows("d_resid", *self.chunks[k]), self.shape
        self.writer.wgrad("proj", grad, self._out_of_pair(n, k), shape.hidden, shape.q_width)

    def _product_backward(self, k: int, grad: Rows, source: Rows | None, grad_in: str) -> None:
        """Add a chunk's share of the norm's gradient to the sum over the parts, and with the last part its backward."""
        writer, shape, rows = self.writer, self.shape, self.chunks[k]
        at = (0, rows[1])
        writer.wgrad("qkv", grad, Rows("norm1", *at), shape.qkv_width, shape.hidden)
        writer.bgrad("qkv", grad, shape.qkv_width)
        if k + 1 == len(self.chunks):
            self.complete()
        into = Rows(writer.own("d_norm1", shape.tokens, shape.hidden), *rows)
        self._sums.sum_dgrad("qkv", grad, into, shape.hidden, shape.qkv_width, self.part)
        if self.part + 1 == shape.metp:
            norms.norm_backward(
                writer,
                "norm1",
                grad=into,
                norm_input="x",
                residual_grad="d_resid",
                out=grad_in,
                rows=rows,
                at=at,
            )
