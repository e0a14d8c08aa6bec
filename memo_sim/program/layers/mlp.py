"""The MLP of a layer: whole, or in row blocks that are computed one after the other (``mlp_chunk_tokens``).

Under full recompute no tensor inside the MLP outlives a row block. So the wide tensors (first product, activation and
their gradients) have room for one block only:

    forward    norm2.b0 ffn_up.b0 act.b0 ffn_down.b0 out_add.b0 | norm2.b1 ...
    backward   recompute norm2.b0 ffn_up.b0 act.b0, then backward of that block | recompute norm2.b1 ...

The second product is not recomputed, because nothing reads it. Recompute makes the same calls as forward, so its bits
are the same. Weight gradients of the MLP are summed block by block in fp32, which rounds differently from one product
over all rows.
"""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.program.ir.builder import Rows, reads, writes
from memo_sim.program.ir.kinds import Phase
from memo_sim.program.layers.operator_recompute import GATE, keeps_gate
from memo_sim.program.layout.shape import Shape
from memo_sim.program.layout.skeletal import Skeletal
from memo_sim.program.operators.operators import OperatorWriter, RowBlock

IN_BLOCKS = ("norm2", "norm2_stats", "up", "act")
"""The MLP's skeletal tensors; no instruction outside the MLP uses them."""


def rows_at_once(tensor: Skeletal, decisions: Decisions, shape: Shape) -> int:
    """Return the rows of a skeletal tensor that exist at once: one block of the MLP's own tensors, else all."""
    if not decisions.mlp_chunk_tokens or tensor.name not in IN_BLOCKS:
        return tensor.tokens
    return tensor.tokens * min(decisions.mlp_chunk_tokens, shape.tokens) // shape.tokens


class Mlp:
    """Writes the MLP into a layer's templates."""

    def __init__(self, writer: OperatorWriter) -> None:
        self.writer, self.shape = writer, writer.shape
        chunk = writer.decisions.mlp_chunk_tokens
        self.blocked = chunk > 0
        self.tokens = min(chunk or self.shape.tokens, self.shape.tokens)
        """Number of tokens in a buffer inside the MLP."""

    @property
    def blocks(self) -> list[RowBlock]:
        """The row blocks in order; one block with all rows if there are no chunks."""
        total = self.shape.tokens
        return [(first, min(self.tokens, total - first)) for first in range(0, total, self.tokens)]

    @property
    def width(self) -> int:
        """Number of features of the first product."""
        return 2 * self.shape.ffn if self.writer.model.gated else self.shape.ffn

    @property
    def _activation(self) -> str:
        return "swiglu" if self.writer.model.gated else "gelu"

    def _at(self, rows: RowBlock) -> RowBlock:
        """Return the rows of a row block in the buffers inside the MLP."""
        return (0, rows[1]) if self.blocked else rows

    def first_product(self, rows: RowBlock) -> Rows:
        """Write norm, first product and activation of a row block; return the norm's output, gathered."""
        writer, at = self.writer, self._at(rows)
        writer.norm("norm2", "resid", rows, at)

        def product(x: Rows, into: RowBlock) -> None:
            if keeps_gate(writer.decisions):
                self._beside_gate(x, into, again=False)
            else:
                writer.linear("ffn_up", x, Rows("up", *into), self.width, self.shape.hidden)

        shard = writer.shard_rows("norm2", at)
        source = writer.gather_and_multiply("norm2", shard, "norm2_full", at, product, tokens=self.tokens)
        self._activate(at)
        return source

    def rebuild_operators(self) -> None:
        """Write what recompute by operator repeats of the first half: norm, activation, and a gated MLP's second half.

        The tensor-parallel ranks gather the norm's output again for that half; a product that was kept needs no input.
        """
        writer, rows = self.writer, (0, self.shape.tokens)
        writer.norm("norm2", "resid", rows, rows)
        if writer.model.gated:

            def product(x: Rows, into: RowBlock) -> None:
                self._beside_gate(x, into, again=True)

            shard = writer.shard_rows("norm2", rows)
            writer.gather_and_multiply("norm2", shard, "norm2_full", rows, product, tokens=self.tokens)
        self._activate(rows)

    def _beside_gate(self, source: Rows, at: RowBlock, *, again: bool) -> None:
        """Write the first product of a gated MLP, whose gate half is kept, or with ``again`` its other half."""
        up, gate = Rows("up", *at), Rows(GATE, *at)
        self.writer.linear_beside_gate("ffn_up", source, up, gate, self.shape.ffn, self.shape.hidden, again=again)

    def _activate(self, at: RowBlock) -> None:
        self.writer.memory_bound(
            "act",
            self._activation,
            at[1],
            self.width,
            self.shape.ffn,
            features=self.shape.ffn,
            x=reads(Rows("up", *at)),
            out=writes(Rows("act", *at)),
        )

    def forward(self, out: str) -> None:
        """Write the whole MLP in row blocks; without row blocks, only the second product of all rows."""
        for i, rows in enumerate(self.blocks):
            if self.blocked:
                self.writer.suffix = f".b{i}"
                self.first_product(rows)
            self._second_product(rows, out)
        self.writer.suffix = ""

    def _second_product(self, rows: RowBlock, out: str) -> None:
        writer, shape, at = self.writer, self.shape, self._at(rows)

        def product(x: Rows, into: Rows) -> None:
            writer.linear("ffn_down", x, into, shape.hidden, shape.ffn, bias=False)

        activated = Rows("act", *at)
        summed = writer.multiply_and_scatter("ffn_down", activated, "down_out", at[0], product, tokens=self.tokens)
        writer.residual("out_add", "resid", summed, out=out, rows=rows, bias="ffn_down.bias")

    def backward(self, grad_out: str) -> None:
        """Write the backward from ``grad_out`` to ``d_resid``; a row block is recomputed right before its backward."""
        writer = self.writer
        phase = writer.builder.phase
        for i, rows in enumerate(self.blocks):
            source = None
            if self.blocked:
                writer.suffix = f".b{i}"
                writer.builder.phase = Phase.RECOMPUTE
                source = self.first_product(rows)
                writer.builder.phase = phase
            self._block_backward(rows, grad_out, source)
        writer.suffix = ""

    def _block_backward(self, rows: RowBlock, grad_out: str, source: Rows | None) -> None:
        """Write one block's backward; ``source``: the norm's output if it is already gathered."""
        writer, shape, at = self.writer, self.shape, self._at(rows)
        upstream = writer.shard_rows(grad_out, rows)

        def product(grad: Rows, into: RowBlock) -> None:
            writer.dgrad("ffn_down", grad, Rows(writer.own("d_act", self.tokens, shape.ffn), *into), *widths)

        widths = (shape.ffn, shape.hidden)
        dy = writer.gather_and_multiply("ffn_down.grad", upstream, "d_ffn_down_full", at, product, tokens=self.tokens)
        d_act = Rows("d_act", *at)
        writer.wgrad("ffn_down", dy, Rows("act", *at), shape.hidden, shape.ffn)
        writer.bgrad("ffn_down", upstream, shape.hidden)
        d_up = Rows(writer.own("d_up", self.tokens, self.width), *at)
        writer.memory_bound(
            "act.bwd",
            f"{self._activation}.bwd",
            at[1],
            shape.ffn + self.width,
            self.width,
            features=shape.ffn,
            grad=reads(d_act),
            x=reads(Rows("up", *at)),
            grad_x=writes(d_up),
        )
        writer.own("d_resid", shape.shard_tokens, shape.hidden)
        writer.product_and_norm_backward(
            "ffn_up",
            "norm2",
            grad=d_up,
            source=source,
            norm_input="resid",
            residual_grad=grad_out,
            out="d_resid",
            rows=rows,
            at=at,
            tokens=self.tokens,
        )
