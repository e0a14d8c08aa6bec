"""The two ends of the model: embedding, and final norm with classifier and loss.

The head runs forward and backward of one chunk of tokens before the next chunk. So only the logits of
``loss_chunk_tokens`` tokens exist at once; 0 means one chunk with all tokens. Tensor-parallel ranks divide the
vocabulary.

Under sequence parallelism the classifier's input is gathered once for all chunks. With one chunk it is gathered twice,
as in Megatron-LM's layers: for the logits, and for the weight gradient, beside the product of the input's gradient. So
it does not occupy memory during the loss.
"""

from __future__ import annotations

from memo_sim.contract.knobs import DtypeName
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.ir.builder import Access, Rows, TemplateBuilder, accumulates, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Families, Lane, Template
from memo_sim.program.ir.kinds import BlockKind, Phase, TemplateKind
from memo_sim.program.ir.work import Gemm, Rowwise
from memo_sim.program.layers.linear_loss import LinearClassifier, is_linear
from memo_sim.program.layers.loss import ROLLOUT, LossWriter
from memo_sim.program.layout.attention_chunks import attention_chunks, in_chunks
from memo_sim.program.layout.parameters import Block, gradient_dtype, without_masters
from memo_sim.program.layout.shape import Shape
from memo_sim.program.operators import workspaces as table
from memo_sim.program.operators.library_calls import RowBlocks
from memo_sim.program.operators.operators import OperatorWriter, RowBlock

WIDE_WEIGHT, WIDE_INPUT, WIDE_INPUT_GRADIENT = "classifier.fp32", "final.fp32", "d_final.fp32"
WEIGHT_GRADIENT, NARROW_WEIGHT_GRADIENT = "classifier.product", "classifier.product.narrow"
"""Buffers of a classifier under autograd: fp32 copies of its operands, and a chunk's weight gradient."""


def _param(block: Block, name: str, slot: str, *, gradient: bool = False) -> Access | None:
    found = block.find(name)
    if found is None or (gradient and found.frozen):
        return None
    rows = Rows(slot, found.first, found.elements)
    return accumulates(rows) if gradient else reads(rows)


def _own(slot: str, shape: Shape) -> Rows:
    """Return the rows of a subsequence in an input, which has the rows of the whole micro-batch."""
    return Rows(slot, shape.start, shape.tokens)


def embed_forward(
    decisions: Decisions, shape: Shape, block: Block, families: Families, *, row_blocks: RowBlocks = ()
) -> Template:
    """Return the embedding's lookup; slots: ``input.ids``, ``params.embed``, ``x`` (the first layer's input)."""
    builder = TemplateBuilder("embed.fwd", Phase.FORWARD, TemplateKind.FORWARD, BlockKind.EMBED, row_blocks=row_blocks)
    builder.bind(families["input.ids"])
    builder.bind(families["params.embed"], slot="params.embed")
    builder.bind(families["skeletal.x"], slot="x", tokens=shape.shard_tokens)
    writer = OperatorWriter(builder, decisions, shape, block)
    row_bytes = shape.hidden * DTYPE_BYTES[decisions.dtype]
    target = "x"
    if shape.tp > 1:
        target = builder.own("embedded", BufferClass.TRANSIENT, decisions.dtype, shape.tokens, shape.hidden)
    factor = 2 if block.find("positions.weight") else 1
    scaled = decisions.model.scaled_embeddings  # the rows are read and written once more
    read, written = (factor + scaled) * shape.tokens * row_bytes, (1 + scaled) * shape.tokens * row_bytes
    builder.emit(
        "lookup",
        "embed",
        Lane.COMPUTE,
        Rowwise("embed", shape.tokens, read, written),
        ids=reads(_own("input.ids", shape)),
        weight=_param(block, "tokens.weight", "params.embed"),
        positions=_param(block, "positions.weight", "params.embed") if shape.tp == 1 else None,
        out=writes(builder.all(target)),
        workspace=builder.scratch("lookup.scratch", table.divided_ids_bytes(shape.tokens)) if shape.tp > 1 else None,
    )
    if shape.tp > 1:
        summed = writer.scatter("embed", builder.all("embedded"))
        size = shape.shard_tokens * row_bytes
        # Every rank looks up a part of the vocabulary; positions are added once, to the sum.
        positions = _param(block, "positions.weight", "params.embed")
        builder.emit(
            "store",
            "positions.add" if positions else "copy",
            Lane.COMPUTE,
            Rowwise("copy", shape.shard_tokens, factor * size, size),
            source=reads(summed),
            positions=positions,
            target=writes(builder.all("x")),
        )
    return builder.build()


def embed_backward(
    decisions: Decisions, shape: Shape, block: Block, families: Families, *, row_blocks: RowBlocks = ()
) -> Template:
    """Return the template that scatters the first layer's input gradient into the embedding's gradient."""
    builder = TemplateBuilder(
        "embed.bwd", Phase.BACKWARD, TemplateKind.BACKWARD, BlockKind.EMBED, row_blocks=row_blocks
    )
    builder.bind(families["input.ids"])
    builder.bind(families["grads.embed"], slot="grads.embed")
    builder.bind(families["grad.x"], slot="grad.x")
    writer = OperatorWriter(builder, decisions, shape, block)
    grad = writer.gather("grad", builder.all("grad.x"), "grad_full", 0)
    row, size = shape.hidden, DTYPE_BYTES[decisions.dtype]
    in_fp32 = decisions.memory_policy == "eager" and not without_masters(decisions)
    summed = DTYPE_BYTES["fp32" if in_fp32 else gradient_dtype(decisions)]
    read, written = shape.tokens * row * (size + summed), shape.tokens * row * summed
    if decisions.memory_policy == "eager":
        # Autograd makes a gradient table, clears it first, and adds it to the gradients
        # (``memory/eager_framework.py``).
        elements = sum(p.elements for p in block.parameters if p.name == "tokens.weight")
        read, written = read + (size + summed) * elements, written + (size + summed) * elements
    builder.emit(
        "scatter",
        "embed.bwd",
        Lane.COMPUTE,
        Rowwise("embed.bwd", shape.tokens, read, written),
        ids=reads(_own("input.ids", shape)),
        grad=reads(grad),
        grad_weight=_param(block, "tokens.weight", "grads.embed", gradient=True),
        grad_positions=_param(block, "positions.weight", "grads.embed", gradient=True),
        workspace=builder.scratch(
            "scatter.scratch",
            table.embed_backward_workspace_bytes(shape.tokens, row, decisions.dtype, divided=shape.tp > 1),
        ),
    )
    return builder.build()


def head(
    decisions: Decisions,
    shape: Shape,
    head_block: Block,
    embed_block: Block | None,
    families: Families,
    *,
    row_blocks: RowBlocks = (),
) -> Template:
    """Return final norm, classifier, loss and their backward; input slot ``head.x``, output slot ``grad.x``.

    ``embed_block`` has the classifier's weights when embeddings are tied.
    """
    builder = TemplateBuilder("head", Phase.FORWARD, TemplateKind.FORWARD, BlockKind.HEAD, row_blocks=row_blocks)
    rollout = (ROLLOUT,) if decisions.objective == "grpo" else ()
    frozen = decisions.lora is not None
    for name in ("head.x", "input.labels", *rollout, "params.head", *["grads.head"] * (not frozen), "loss", "grad.x"):
        builder.bind(families[name], slot=name)
    tied = decisions.model.tied_embeddings
    if decisions.loss_metrics:
        builder.bind(families["logits"], slot="logits")
    if tied:
        for name in ("params.embed", *["grads.embed"] * (not frozen)):
            builder.bind(families[name], slot=name)
    classifier = _classifier(builder, decisions, shape, embed_block if tied and embed_block else head_block, tied)
    norm = _FinalNorm(builder, decisions, shape, head_block)
    norm.forward()
    writer = OperatorWriter(builder, decisions, shape, head_block)
    blocks = gathered_blocks(decisions, shape)
    room, several = blocks[0][1], len(blocks) > 1
    for b, (start, tokens) in enumerate(blocks):
        writer.suffix = f".b{b}" if several else ""
        shard = writer.shard_rows("final", (start, tokens))
        full = writer.gather("norm", shard, "final_full", 0, tokens=room)
        writer.own("d_final", room, shape.hidden)
        chunk = min(decisions.loss_chunk_tokens or tokens, tokens)
        for first in range(0, tokens, chunk):
            rows = Rows(full.slot, first, min(chunk, tokens - first))
            classifier.loss(rows, start + first)
            if not decisions.loss_chunk_tokens and not frozen and not is_linear(decisions):
                # Here the gather is the shard's last reader. Memory peaks with whole logits, so it is more important to
                # free the shard than to avoid a wait for this gather (``gather_again``).
                rows = writer.gather_again("norm", shard, "final_again", 0, tokens=room)
            classifier.backward(rows)
        grad = writer.scatter("d_final", Rows("d_final", 0, tokens), first=start)
    norm.backward(builder.all(grad.slot))
    return builder.build()


def gathered_blocks(decisions: Decisions, shape: Shape) -> list[RowBlock]:
    """Return the row blocks in which tensor-parallel ranks gather the head's input: all of it, or attention's chunks.

    A token shard has the chunks one after the other, so a gathered chunk has its tokens in order.
    """
    return attention_chunks(decisions) if shape.gathered and in_chunks(decisions) else [(0, shape.tokens)]


class _FinalNorm:
    """The norm after the last layer, forward and backward."""

    def __init__(self, builder: TemplateBuilder, decisions: Decisions, shape: Shape, block: Block) -> None:
        self.builder, self.shape, self.block = builder, shape, block
        self.kind = "layer_norm" if decisions.model.family == "gpt" else "rms_norm"
        self.size = DTYPE_BYTES[decisions.dtype]
        self.dtype, self.rowwise = decisions.dtype, decisions.kernels.rowwise

    def forward(self) -> None:
        builder, shape = self.builder, self.shape
        rows = shape.shard_tokens
        builder.own("final", BufferClass.TRANSIENT, self.dtype, rows, shape.hidden)
        builder.own("final_stats", BufferClass.TRANSIENT, "fp32", rows, 2 if self.kind == "layer_norm" else 1)
        moved = rows * shape.hidden * self.size
        builder.emit(
            "norm",
            self.kind,
            Lane.COMPUTE,
            Rowwise(self.kind, rows, moved, moved, elements=rows * shape.hidden, element_bytes=self.size),
            x=reads(builder.all("head.x")),
            weight=_param(self.block, "norm.weight", "params.head"),
            bias=_param(self.block, "norm.bias", "params.head"),
            out=writes(builder.all("final")),
            stats=writes(builder.all("final_stats")),
            workspace=builder.scratch(
                "norm.scratch", table.norm_workspace_bytes(rows, shape.hidden, self.dtype, self.rowwise)
            ),
        )

    def backward(self, grad: Rows) -> None:
        builder, shape = self.builder, self.shape
        rows = shape.shard_tokens
        scratch = table.norm_backward_workspace_bytes(rows, shape.hidden, self.dtype, self.rowwise)
        moved = rows * shape.hidden * self.size
        builder.emit(
            "norm.bwd",
            f"{self.kind}.bwd",
            Lane.COMPUTE,
            Rowwise(f"{self.kind}.bwd", rows, 3 * moved, moved, elements=rows * shape.hidden, element_bytes=self.size),
            grad=reads(grad),
            x=reads(builder.all("head.x")),
            stats=reads(builder.all("final_stats")),
            weight=_param(self.block, "norm.weight", "params.head"),
            out=writes(builder.all("grad.x")),
            grad_weight=_param(self.block, "norm.weight", "grads.head", gradient=True),
            grad_bias=_param(self.block, "norm.bias", "grads.head", gradient=True),
            workspace=builder.scratch("norm.bwd.scratch", scratch),
        )


def _classifier(
    builder: TemplateBuilder, decisions: Decisions, shape: Shape, block: Block, tied: bool
) -> _Classifier | LinearClassifier:
    """Return the writer of classifier and loss in the plan's form; ``tied``: the weights are the embedding's."""
    name = "tokens.weight" if tied else "classifier.weight"
    weight = _param(block, name, "params.embed" if tied else "params.head")
    grad = _param(block, name, "grads.embed" if tied else "grads.head", gradient=True)
    most = gathered_blocks(decisions, shape)[0][1]
    chunk = min(decisions.loss_chunk_tokens or most, most)
    form = LinearClassifier if is_linear(decisions) else _Classifier
    return form(builder, decisions, shape, weight, grad, chunk)


class _Classifier:
    """Logits, loss and their gradients for one chunk of tokens at a time."""

    def __init__(  # noqa: PLR0917 - as LinearClassifier
        self,
        builder: TemplateBuilder,
        decisions: Decisions,
        shape: Shape,
        weight: Access | None,
        grad: Access | None,
        chunk: int,
    ) -> None:
        self.builder, self.decisions, self.shape = builder, decisions, shape
        self.weight, self.grad = weight, grad
        self.chunks = 0
        """Number of chunks written so far."""
        several = bool(decisions.loss_chunk_tokens) or len(gathered_blocks(decisions, shape)) > 1
        self.losses = LossWriter(builder, decisions, shape, chunk, several)
        self.wide = decisions.loss == "checkpointed-fp32" and decisions.dtype != "fp32"
        """Whether the product's operands are copied to fp32."""
        if self.losses.checkpointed:
            self._own_autograds(chunk)

    def _own_autograds(self, chunk: int) -> None:
        """Declare the tensors of autograd's product, which the chunks share."""
        own, weights = self.builder.own, self.shape.vocab * self.shape.hidden
        dtype = self.decisions.dtype
        own(WEIGHT_GRADIENT, BufferClass.TRANSIENT, "fp32" if self.wide else dtype, weights, 1)
        if self.wide:
            own(WIDE_WEIGHT, BufferClass.TRANSIENT, "fp32", weights, 1)
            own(WIDE_INPUT, BufferClass.TRANSIENT, "fp32", chunk, self.shape.hidden)
            own(WIDE_INPUT_GRADIENT, BufferClass.TRANSIENT, "fp32", chunk, self.shape.hidden)
            own(NARROW_WEIGHT_GRADIENT, BufferClass.TRANSIENT, dtype, weights, 1)

    def loss(self, rows: Rows, first: int) -> None:
        """Write the logits of ``rows`` of the gathered input, the loss and the logits' gradient.

        ``first``: the rank's row that they begin with.
        """
        losses, suffix, tokens = self.losses, f".c{self.chunks}", rows.tokens
        labels = Rows("input.labels", self.shape.start + first, tokens)
        self._product(rows, suffix)
        if not losses.checkpointed:
            losses.write(suffix, tokens, labels)
            return
        losses.forward(suffix, tokens, labels)
        self.builder.phase = Phase.RECOMPUTE
        self._product(rows, suffix)
        losses.forward(suffix, tokens, labels, again=True)
        self.builder.phase = Phase.FORWARD
        losses.backward(suffix, tokens, labels)

    def _product(self, rows: Rows, suffix: str) -> None:
        """Write the logits of ``rows`` of the input; of fp32 copies of both operands where the form has them."""
        x, weight, dtype = reads(rows), self.weight, self.decisions.dtype
        if self.wide:
            dtype = "fp32"
            x, weight = reads(Rows(WIDE_INPUT, 0, rows.tokens)), reads(self.builder.all(WIDE_WEIGHT))
            self._cast(f"classifier.widen_x{suffix}", rows, x[0])
            assert self.weight is not None  # every model has a classifier or tied embeddings
            self._cast(f"classifier.widen{suffix}", self.weight[0], weight[0])
        self.builder.emit(
            f"classifier{suffix}",
            "linear",
            Lane.COMPUTE,
            Gemm(rows.tokens, self.shape.vocab, self.shape.hidden, "fprop", dtype),
            x=x,
            weight=weight,
            out=writes(Rows("logits", 0, rows.tokens)),
        )

    def _cast(self, name: str, source: Rows, target: Rows) -> None:
        """Write a copy to another dtype."""
        read, written = (rows.tokens * self.builder.row_bytes(rows.slot) for rows in (source, target))
        work = Rowwise("copy", source.tokens, read, written)
        self.builder.emit(name, "copy", Lane.COMPUTE, work, source=reads(source), target=writes(target))

    def backward(self, rows: Rows) -> None:
        """Write the gradients of ``rows`` of the gathered input, and their part of the weight gradient."""
        if self.losses.checkpointed:
            self._autograd_backward(rows)
            return
        builder, shape, dtype = self.builder, self.shape, self.decisions.dtype
        tokens, suffix = rows.tokens, f".c{self.chunks}"
        self.chunks += 1
        gradient = Rows(self.losses.gradient, 0, tokens)
        scratch = table.wgrad_workspace_bytes(
            *(shape.vocab, shape.hidden, tokens, dtype, self.decisions.kernels.attention),
            into=gradient_dtype(self.decisions),
        )
        builder.emit(
            f"classifier.dgrad{suffix}",
            "linear.dgrad",
            Lane.COMPUTE,
            Gemm(tokens, shape.hidden, shape.vocab, "dgrad", dtype),
            grad=reads(gradient),
            weight=self.weight,
            out=writes(Rows("d_final", rows.first, tokens)),
        )
        if self.grad is None:  # the classifier is frozen
            return
        builder.emit(
            f"classifier.wgrad{suffix}",
            "linear.wgrad",
            Lane.COMPUTE,
            Gemm(shape.vocab, shape.hidden, tokens, "wgrad", dtype),
            grad=reads(gradient),
            x=reads(rows),
            out=self.grad,
            workspace=builder.scratch(f"wgrad.scratch{suffix}", scratch),
        )

    def _autograd_backward(self, rows: Rows) -> None:
        """Write autograd's gradients of the product: each in a tensor of its own, then cast and added.

        The weight's gradient is a tensor of the product's dtype, cast to that of the weight, before it is added.
        """
        builder, shape, tokens, suffix = self.builder, self.shape, rows.tokens, f".c{self.chunks}"
        self.chunks += 1
        dtype: DtypeName = "fp32" if self.wide else self.decisions.dtype
        gradient, into = reads(Rows(self.losses.gradient, 0, tokens)), Rows("d_final", rows.first, tokens)
        x = Rows(WIDE_INPUT, 0, tokens) if self.wide else rows
        product = Rows(WIDE_INPUT_GRADIENT, 0, tokens) if self.wide else into
        builder.emit(
            f"classifier.dgrad{suffix}",
            "linear.dgrad",
            Lane.COMPUTE,
            Gemm(tokens, shape.hidden, shape.vocab, "dgrad", dtype),
            grad=gradient,
            weight=reads(builder.all(WIDE_WEIGHT)) if self.wide else self.weight,
            out=writes(product),
        )
        own = builder.all(WEIGHT_GRADIENT)
        builder.emit(
            f"classifier.wgrad{suffix}",
            "linear.wgrad.product",
            Lane.COMPUTE,
            Gemm(shape.vocab, shape.hidden, tokens, "wgrad", dtype),
            grad=gradient,
            x=reads(x),
            out=writes(own),
        )
        if self.wide:
            self._cast(f"classifier.narrow_x{suffix}", product, into)
            narrow = builder.all(NARROW_WEIGHT_GRADIENT)
            self._cast(f"classifier.narrow{suffix}", own, narrow)
            own = narrow
        assert self.grad is not None  # every model has a classifier or tied embeddings
        elements, summed = own.tokens, gradient_dtype(self.decisions)
        given, moved = builder.row_bytes(own.slot), DTYPE_BYTES[summed]
        scratch = table.sum_workspace_bytes(elements, 1, self.decisions.dtype, summed, self.decisions.kernels.attention)
        builder.emit(
            f"classifier.wgrad.add{suffix}",
            "grad.accumulate",
            Lane.COMPUTE,
            Rowwise("grad.accumulate", shape.vocab, (given + moved) * elements, moved * elements),
            x=reads(own),
            out=self.grad,
            workspace=builder.scratch("wgrad.add.scratch", scratch),
        )
