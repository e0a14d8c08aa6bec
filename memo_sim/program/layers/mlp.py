"""The MLP of a layer: whole, or in row blocks that are computed one after the other (``mlp_chunk_tokens``).

Under full recompute no tensor inside the MLP outlives a row block. So the wide tensors (first product, activation and
their gradients) have room for one block only:

    forward    norm2.b0 ffn_up.b0 act.b0 ffn_down.b0 out_add.b0 | norm2.b1 ...
    backward   recompute norm2.b0 ffn_up.b0 act.b0, then backward of that block | recompute norm2.b1 ...

The second product is not recomputed, because nothing reads it. Recompute makes the same calls as forward, so its bits
are the same. Weight gradients of the MLP are summed block by block in fp32, which rounds differently from one product
over all rows.

Frameworks cut the MLP without its norm, inside a layer that is checkpointed as a whole (``mlp_rebuild``):

    layer      recompute norm2 ffn_up.b0 act.b0 ffn_down.b0 ffn_up.b1 ..., then backward of block after block. Autograd
               keeps what every block saves, so only gradients have room for one block. This is a model code's MLP in a
               loop over ``split`` (TRL's guide to long contexts).
    twice      recompute norm2 ffn_up.b0 act.b0 ffn_down.b0 ffn_up.b1 ... for the layer's output, then in backward
               ffn_up.b0 act.b0 ffn_down.b0 again, right before that block's backward: three forwards of an MLP. This is
               DeepSpeed's TiledMLP, whose forward runs without autograd (runtime/sequence_parallel/ulysses_sp.py).
"""

from __future__ import annotations

from memo_sim.contract.knobs import MlpRebuild
from memo_sim.contract.plan import Decisions
from memo_sim.program.ir.builder import Rows, reads, writes
from memo_sim.program.ir.kinds import Phase, TemplateKind
from memo_sim.program.layers.operator_recompute import GATE, keeps_gate
from memo_sim.program.layout.rowwise_blocks import is_rowwise
from memo_sim.program.layout.shape import Shape
from memo_sim.program.layout.skeletal import Skeletal
from memo_sim.program.operators import norms
from memo_sim.program.operators.operators import OperatorWriter, RowBlock

NORM, WIDE = ("norm2", "norm2_stats"), ("up", "act")
"""The MLP's skeletal tensors; no instruction outside the MLP uses them."""


def rows_at_once(tensor: Skeletal, decisions: Decisions, shape: Shape, *, backward: bool) -> int:
    """Return the rows of a skeletal tensor that exist at once: one block of the MLP's own tensors, else all.

    ``backward``: in the template of a layer's backward, which rebuilds them.
    """
    rebuild = decisions.mlp_rebuild
    in_blocks = (*NORM, *WIDE) if rebuild == "block" else () if rebuild == "layer" and backward else WIDE
    if not decisions.mlp_chunk_tokens or tensor.name not in in_blocks:
        return tensor.tokens
    return tensor.tokens * min(decisions.mlp_chunk_tokens, shape.tokens) // shape.tokens


class Mlp:
    """Writes the MLP into a layer's templates."""

    def __init__(self, writer: OperatorWriter) -> None:
        self.writer, self.shape = writer, writer.shape
        chunk = writer.decisions.mlp_chunk_tokens
        self.blocked = chunk > 0
        self.rebuild: MlpRebuild = writer.decisions.mlp_rebuild if self.blocked else "block"
        self.apart = self.rebuild != "block"
        """Whether the norm is computed for all rows, outside of the row blocks."""
        self.residual_in_block = is_rowwise(writer.decisions)
        """Whether the residual before the MLP exists for one row block only (``rowwise.py``)."""
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
        return self.writer.activation_op

    def _at(self, rows: RowBlock) -> RowBlock:
        """Return the rows of a row block in the buffers inside the MLP."""
        return (0, rows[1]) if self.blocked else rows

    def _residual_at(self, rows: RowBlock) -> RowBlock:
        """Return the rows of a row block in the residual before the MLP."""
        return self._at(rows) if self.residual_in_block else rows

    def _wide_at(self, rows: RowBlock) -> RowBlock:
        """Return the rows of a row block in ``up`` and ``act``, which backward holds whole under ``layer``."""
        whole = self.rebuild == "layer" and self.writer.builder.kind is not TemplateKind.FORWARD
        return rows if whole else self._at(rows)

    def first_product(self, rows: RowBlock) -> Rows:
        """Write norm, first product and activation of a row block; return the norm's output, gathered.

        The norm stands apart (``whole_norm``) where the row blocks do not have it.
        """
        writer, at = self.writer, self._wide_at(rows)

        def product(x: Rows, into: RowBlock) -> None:
            if keeps_gate(writer.decisions):
                self._beside_gate(x, into, again=False)
            else:
                writer.linear("ffn_up", x, Rows("up", *into), self.width, self.shape.hidden)

        if self.apart:
            source = Rows("norm2", *rows)
            product(source, at)
        else:
            norms.norm(writer, "norm2", "resid", self._residual_at(rows), at)
            shard = writer.shard_rows(writer.read_by_product("norm2"), at)
            source = writer.gather_and_multiply("norm2", shard, "norm2_full", at, product, tokens=self.tokens)
        self._activate(at)
        return source

    def inner(self, blocks: list[RowBlock], *, routed: bool) -> None:
        """Write what needs the norm of all row blocks: nothing, as an MLP works row by row (``experts.py``)."""

    def rebuild_operators(self) -> None:
        """Write what recompute by operator repeats of the first half: norm, activation, and a gated MLP's second half.

        The tensor-parallel ranks gather the norm's output again for that half; a product that was kept needs no input.
        """
        writer, rows = self.writer, (0, self.shape.tokens)
        norms.norm(writer, "norm2", "resid", rows, rows)
        if writer.model.gated:

            def product(x: Rows, into: RowBlock) -> None:
                self._beside_gate(x, into, again=True)

            shard = writer.shard_rows("norm2", rows)
            writer.gather_and_multiply("norm2", shard, "norm2_full", rows, product, tokens=self.tokens)
        self._activate(rows)

    def again(self) -> None:
        """Write the whole MLP once more from the kept output of its norm (``module_recompute.py``)."""
        writer, shape, rows = self.writer, self.shape, (0, self.shape.tokens)
        phase, writer.builder.phase = writer.builder.phase, Phase.RECOMPUTE
        source = writer.gather("norm2", writer.shard_rows("norm2", rows), "norm2_full", 0, tokens=self.tokens)
        writer.linear("ffn_up", source, Rows("up", *rows), self.width, shape.hidden)
        self._activate(rows)
        product = Rows(writer.own("down_out", self.tokens, shape.hidden), *rows)
        writer.linear("ffn_down", Rows("act", *rows), product, shape.hidden, shape.ffn, bias=False)
        writer.scatter("ffn_down", product, tokens=self.tokens)
        writer.builder.phase = phase

    def _beside_gate(self, source: Rows, at: RowBlock, *, again: bool) -> None:
        """Write the first product of a gated MLP, whose gate half is kept, or with ``again`` its other half."""
        up, gate = Rows("up", *at), Rows(GATE, *at)
        self.writer.linear_beside_gate("ffn_up", source, up, gate, self.shape.ffn, self.shape.hidden, again=again)

    def _activate(self, at: RowBlock) -> None:
        activated = Rows("act", *at)
        made = self.writer.made(activated, self.shape.ffn)
        self.writer.memory_bound(
            "act",
            self._activation,
            at[1],
            self.width,
            self.shape.ffn,
            features=self.shape.ffn,
            x=reads(Rows("up", *at)),
            out=writes(made),
        )
        self.writer.quantise(made, activated)

    def forward(self, out: str) -> None:
        """Write the whole MLP in row blocks; without row blocks, only the second product of all rows."""
        if self.apart:
            whole = (0, self.shape.tokens)
            norms.norm(self.writer, "norm2", "resid", whole, whole)
        for i, rows in enumerate(self.blocks):
            if self.blocked:
                self.writer.suffix = f".b{i}"
                self.first_product(rows)
            self.second_product(rows, out)
        self.writer.suffix = ""

    def second_product(self, rows: RowBlock, out: str) -> None:
        """Write the second product of a row block, and the layer's output."""
        writer, activated = self.writer, Rows(self.writer.read_by_product("act"), *self._wide_at(rows))
        first, product = self._at(rows)[0], self._down_product
        summed = writer.multiply_and_scatter("ffn_down", activated, "down_out", first, product, tokens=self.tokens)
        summed = norms.post_norm(writer, "post_mlp", summed, rows)
        residual_at = self._residual_at(rows)
        writer.residual("out_add", "resid", summed, out=out, rows=rows, bias="ffn_down.bias", at=residual_at)

    def rebuild_output(self, rows: RowBlock) -> None:
        """Write the second product and the norm behind it once more, for models with that norm."""
        if self.writer.model.post_norms:
            activated, product = Rows("act", *self._wide_at(rows)), self._down_product
            summed = self.writer.multiply_and_scatter("ffn_down", activated, "down_out", rows[0], product)
            norms.post_norm(self.writer, "post_mlp", summed, rows)

    def _down(self, rows: RowBlock) -> None:
        """Write the second product of a row block, whose result nothing reads."""
        result = Rows(self.writer.own("down_out", self.tokens, self.shape.hidden), *self._at(rows))
        self._down_product(Rows("act", *self._wide_at(rows)), result)

    def _down_product(self, x: Rows, into: Rows) -> None:
        self.writer.linear("ffn_down", x, into, self.shape.hidden, self.shape.ffn, bias=False)

    def backward(self, grad_out: str) -> None:
        """Write the backward from ``grad_out`` to ``d_resid``; a row block is recomputed right before its backward.

        Under ``mlp_rebuild`` layer all blocks are there already, under ``twice`` the second product is repeated too.
        """
        writer = self.writer
        phase = writer.builder.phase
        for i, rows in enumerate(self.blocks):
            source = None
            if self.blocked and self.rebuild != "layer":
                writer.suffix = f".b{i}.again" if self.apart else f".b{i}"
                writer.builder.phase = Phase.RECOMPUTE
                source = self.first_product(rows)
                if self.apart:
                    self._down(rows)
                writer.builder.phase = phase
            if self.blocked:
                writer.suffix = f".b{i}"
            self.block_backward(rows, grad_out, source)
        writer.suffix = ""

    def block_backward(self, rows: RowBlock, grad_out: str, source: Rows | None) -> None:
        """Write one block's backward; ``source``: the norm's output if it is already gathered."""
        writer, shape, at, wide_at = self.writer, self.shape, self._at(rows), self._wide_at(rows)
        upstream = norms.post_norm_backward(writer, "post_mlp", writer.shard_rows(grad_out, rows))

        def product(grad: Rows, into: RowBlock) -> None:
            writer.dgrad("ffn_down", grad, Rows(writer.own("d_act", self.tokens, shape.ffn), *into), *widths)

        widths = (shape.ffn, shape.hidden)
        gathered = writer.before_gather(upstream, "ffn_down")
        dy = writer.gather_and_multiply("ffn_down.grad", gathered, "d_ffn_down_full", at, product, tokens=self.tokens)
        d_act = Rows("d_act", *at)
        writer.wgrad("ffn_down", dy, Rows("act", *wide_at), shape.hidden, shape.ffn)
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
            x=reads(Rows("up", *wide_at)),
            grad_x=writes(d_up),
        )
        writer.own("d_resid", shape.shard_tokens, shape.hidden)
        writer.product_and_norm_backward(
            "ffn_up",
            "norm2",
            grad=d_up,
            source=None if writer.fp8 else source,  # what a product read is not what its weight's gradient reads
            norm_input="resid",
            residual_grad=grad_out,
            out="d_resid",
            rows=rows,
            at=rows if self.apart else at,
            tokens=shape.tokens if self.apart else self.tokens,
            input_at=self._residual_at(rows),
        )
