"""The classifier's product inside the loss, a tile of the vocabulary at a time (``knobs.Loss``: linear, linear-triton).

The logits of all tokens and all columns never exist. ``tile`` is a range of the vocabulary, ``stats`` three fp32
numbers a token, ``T`` the tokens of a chunk, ``V`` the vocabulary of a rank and ``H`` the hidden size:

    statistics       stats = log-sum-exp of x W^T, and the target's logit                        2 T V H FLOPs
    (loss.reduce     over tensor-parallel ranks: maximum, sum of exponentials, target's logit)
    loss             loss += scale x sum of (log-sum-exp - target's logit); stats: log-sum-exp, weight of the token
    for each tile    d_logits = weight x (exp(x W_tile^T - log-sum-exp) - onehot)                2 T tile H
                     d_x += d_logits W_tile                                                      2 T tile H
                     dW_tile += d_logits^T x                                                     2 T tile H

So backward computes the product again: 8 T V H FLOPs, where a loss with whole logits has 6. In return a chunk needs
2 x tile + 4 H bytes a token in bf16 (the tile's gradient, and d_x, which is summed in fp32), where row blocks with
whole logits need 4 V. So chunks may be longer, and the weight's gradient in fp32 is read and written fewer times.

Tiles have at most ``workspaces.LOSS_COLUMNS`` columns. With ``linear``, torch multiplies into the tile's buffer and
reads it, in statistics too. With ``linear-triton`` a kernel keeps the logits of statistics in registers, and writes
only their gradient. Sums over columns are in fp32 and in a fixed order, so results do not change from run to run.

Sources of the method: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (arXiv 2411.09009), whose
backward sums both gradients in one kernel with locks; verl's linear cross-entropy (verl/utils/kernel), which splits
backward over the vocabulary and calls products of the library, as here.
"""

from __future__ import annotations

from dataclasses import dataclass

from memo_sim.contract.hardware import LinearLossKernel, LinearLossPart
from memo_sim.contract.knobs import LINEAR_LOSSES
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.ir.builder import Access, Rows, TemplateBuilder, accumulates, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Lane
from memo_sim.program.ir.kinds import Phase
from memo_sim.program.ir.work import Collective, LinearLoss, Rowwise, TileGemm
from memo_sim.program.layers.loss import FP32_BYTES, ROLLOUT, STATISTICS, statistics_calls
from memo_sim.program.layout.parameters import gradient_dtype
from memo_sim.program.layout.shape import Shape
from memo_sim.program.operators import workspaces as table

WIDE_GRADIENT = "d_final.fp32"
"""The gradient of the classifier's input, summed over tiles in fp32."""


def is_linear(decisions: Decisions) -> bool:
    """Return whether the classifier's product is a part of the loss."""
    return decisions.loss in LINEAR_LOSSES


def kernel_of(decisions: Decisions) -> LinearLossKernel:
    """Return whose kernels play such a loss."""
    return "triton" if decisions.loss == "linear-triton" else "torch"


@dataclass
class LinearClassifier:
    """Writes the loss and the gradients of one chunk of tokens after another into the template of the head.

    ``weight``, ``grad``: the classifier's; without ``grad`` it is frozen. ``chunk``: tokens of the longest chunk.
    """

    builder: TemplateBuilder
    decisions: Decisions
    shape: Shape
    weight: Access | None
    grad: Access | None
    chunk: int

    def __post_init__(self) -> None:
        """Declare the buffers that the chunks share."""
        builder, decisions, shape = self.builder, self.decisions, self.shape
        self.chunks = 0
        """Number of chunks written so far."""
        self.tiles = table.loss_tiles(shape.vocab)
        self.kernel = kernel_of(decisions)
        self.wide = decisions.dtype != "fp32"
        """Whether the input's gradient is summed in another dtype than its own."""
        builder.own("logits", BufferClass.TRANSIENT, decisions.dtype, self.chunk, self._tile)
        builder.own("loss_stats", BufferClass.EXCHANGE, "fp32", self.chunk, STATISTICS)
        if self.wide:
            builder.own(WIDE_GRADIENT, BufferClass.TRANSIENT, "fp32", self.chunk, shape.hidden)
        scratch = table.linear_loss_workspace_bytes(
            *(self.chunk, shape.vocab, decisions.dtype, shape.hidden),
            triton=self.kernel == "triton",
            policy=self._policy,
            on_cpu=table.on_cpu(decisions.kernels.attention),
        )
        builder.scratch("loss.scratch", scratch)

    @property
    def _tile(self) -> int:
        return self.tiles[0][1]

    @property
    def _policy(self) -> bool:
        return self.decisions.objective == "grpo"

    @property
    def _workspace(self) -> Access:
        return writes(self.builder.all("loss.scratch"))

    def _work(self, part: LinearLossPart, tokens: int, columns: int, first: int = 0) -> LinearLoss:
        hidden, dtype = self.shape.hidden, self.decisions.dtype
        return LinearLoss(part, self.kernel, tokens, columns, hidden, dtype, self._tile, first)

    def loss(self, rows: Rows, first: int) -> None:
        """Write the statistics and the loss of ``rows`` of the gathered input.

        ``first``: the rank's row that they begin with.
        """
        builder, shape, tokens, suffix = self.builder, self.shape, rows.tokens, f".c{self.chunks}"
        self.labels = Rows("input.labels", shape.start + first, tokens)
        stats = Rows("loss_stats", 0, tokens)
        builder.emit(
            f"loss.stats{suffix}",
            "linear_loss.statistics",
            Lane.COMPUTE,
            self._work("statistics", tokens, shape.vocab),
            x=reads(rows),
            weight=self.weight,
            labels=reads(self.labels),
            logits=writes(Rows("logits", 0, tokens)) if self.kernel == "torch" else None,
            out=writes(stats),
            workspace=self._workspace,
        )
        if shape.tp > 1:
            size = FP32_BYTES * STATISTICS * tokens
            combined = Collective("all_reduce", size, shape.tp, "tp", calls=statistics_calls(tokens))
            builder.emit(f"loss.reduce{suffix}", "loss.all_reduce", Lane.TP, combined, tensor=accumulates(stats))
        numbers = FP32_BYTES * STATISTICS * tokens
        builder.emit(
            f"loss{suffix}",
            "linear_loss.sum",
            Lane.COMPUTE,
            Rowwise("linear_loss.sum", tokens, numbers, numbers),
            stats=accumulates(stats),
            labels=reads(self.labels),
            rollout=reads(Rows(ROLLOUT, self.labels.first, tokens)) if self._policy else None,
            loss=accumulates(builder.all("loss")),
            workspace=self._workspace,
        )

    def backward(self, rows: Rows) -> None:
        """Write the gradients of ``rows`` of the gathered input, and their part of the weight's, tile by tile."""
        builder, tokens, suffix = self.builder, rows.tokens, f".c{self.chunks}"
        self.chunks += 1
        into = Rows("d_final", rows.first, tokens)
        summed = Rows(WIDE_GRADIENT, 0, tokens) if self.wide else into
        for number, (first, columns) in enumerate(self.tiles):
            self._tile_backward(rows, summed, (first, columns), f"{suffix}.t{number}")
        if self.wide:
            read, written = (
                tokens * self.shape.hidden * DTYPE_BYTES[dtype] for dtype in ("fp32", self.decisions.dtype)
            )
            work = Rowwise("copy", tokens, read, written)
            name = f"classifier.narrow{suffix}"
            builder.emit(name, "copy", Lane.COMPUTE, work, source=reads(summed), target=writes(into))

    def _tile_backward(self, rows: Rows, summed: Rows, tile: tuple[int, int], suffix: str) -> None:
        """Write the gradient of a tile's logits, and what it adds to the gradients of input and weight."""
        builder, decisions, tokens, (first, columns) = self.builder, self.decisions, rows.tokens, tile
        hidden, dtype = self.shape.hidden, decisions.dtype
        logits, before = Rows("logits", 0, tokens), builder.phase
        builder.phase = Phase.RECOMPUTE
        builder.emit(
            f"loss.bwd{suffix}",
            "linear_loss.gradient",
            Lane.COMPUTE,
            self._work("gradient", tokens, columns, first),
            x=reads(rows),
            weight=self.weight,
            labels=reads(self.labels),
            stats=reads(Rows("loss_stats", 0, tokens)),
            out=writes(logits),
            workspace=self._workspace,
        )
        builder.phase = before
        builder.emit(
            f"classifier.dgrad{suffix}",
            "linear_loss.dgrad.add" if first else "linear_loss.dgrad",
            Lane.COMPUTE,
            TileGemm(tokens, hidden, columns, "dgrad", dtype, first),
            grad=reads(logits),
            weight=self.weight,
            out=accumulates(summed) if first else writes(summed),
            workspace=self._workspace if self.wide and table.on_cpu(decisions.kernels.attention) else None,
        )
        if self.grad is None:  # the classifier is frozen
            return
        scratch = table.wgrad_workspace_bytes(
            *(self._tile, hidden, tokens, dtype, decisions.kernels.attention), into=gradient_dtype(decisions)
        )
        builder.emit(
            f"classifier.wgrad{suffix}",
            "linear_loss.wgrad",
            Lane.COMPUTE,
            TileGemm(columns, hidden, tokens, "wgrad", dtype, first),
            grad=reads(logits),
            x=reads(rows),
            out=self.grad,
            workspace=builder.scratch(f"wgrad.scratch{suffix}", scratch),
        )
