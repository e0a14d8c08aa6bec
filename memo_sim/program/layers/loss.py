"""The loss of a chunk of tokens and the gradient of its logits, in each form that frameworks have (``knobs.Loss``).

Bytes per logit of a bf16 model. ``peak``: held at once, with one chunk. ``moved``: read and written.

    form             peak  moved   passes over memory
    blocks              4      6   read twice, written once (as counted for every measured curve)
    fused               2      6   the same, and the gradient replaces the logits
    vocab-parallel      6     52   widen 6, maximum 4, subtract 8, exponential 8, sum 4, divide 8, scale 8, narrow 6
    eager-fp32         12     48   widen 6, log-softmax 16, zeros 4, its backward 16, narrow 6
    checkpointed       14    126   both times: widen 6, log-softmax 16, accuracy and entropy 28; then as eager-fp32

Sources: Megatron-LM, core/tensor_parallel/cross_entropy.py (NVIDIA/Megatron-LM@00611e6: one fp32 tensor is copy,
exponentials, softmax and gradient). PyTorch, aten/src/ATen/native/cuda/SoftMax.cu: a row of more than 48 KiB (12,000
fp32 logits) does not fit into shared memory; then log-softmax reads it for its maximum, its sum and its result, and
backward reads the gradient twice and the result once. Autograd gives each result a tensor of its own: during the
backward of log-softmax the log-probabilities, their gradient and the gradient of the fp32 logits exist, after the fp32
logits died.

checkpointed is what TRL's ``chunked_nll`` plays for a chunk inside torch.utils.checkpoint (huggingface/trl@f2cd577,
trl/trainer/sft_trainer.py, ``_chunk``): the product and the loss run forward, run forward again, and then backward.
Each time the chunk's accuracy and entropy are computed: argmax, exponentials, a product, a sum. TRL plays all chunks
forward before the first one backward, which moves the same bytes and holds one chunk as well. In checkpointed-fp32 the
product's operands are copied to fp32 first, so the logits and all gradients of the product are fp32 too: TRL before
1.13 (#6863). Torch multiplies fp32 without tensor cores unless TF32 is allowed, which it is not by default.

Several chunks share their buffers, so those live from the first chunk to the last. The gradient of narrow logits then
has the buffer of the logits, and autograd's chunks hold 14 bytes per logit of a chunk.

torch's loss parallel has no form of its own: with row-wise kernels eager or compiled, vocab-parallel is priced with its
kernels, 76 bytes per logit (``operators/framework_kernels.py``). It holds more tensors than Megatron-LM's form, which
is not counted.

A policy's objective (``objective`` grpo) has the same passes: its gradient of a token's logits is that of its
log-probability times a number, which follows from the log-probability and the rollout's numbers. So it goes with every
form, with chunks and with a divided vocabulary. It has no Triton kernel: ``fused`` and ``blocks`` are then torch's.

With tensor parallelism each rank has the logits of its part of the vocabulary. The ranks combine a few fp32 numbers a
token: the maximum first, then sums (vocab-parallel), or both at once from each rank's log-sum-exp (blocks and fused).
"""

from __future__ import annotations

from dataclasses import dataclass

from memo_sim.contract.knobs import Loss
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.ir.builder import Access, Rows, TemplateBuilder, accumulates, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Families, Family, Lane, Template
from memo_sim.program.ir.kinds import BlockKind, FamilyKind, Phase, TemplateKind
from memo_sim.program.ir.work import Collective, LibraryCall, Rowwise
from memo_sim.program.layout.shape import Shape
from memo_sim.program.operators import workspaces as table
from memo_sim.program.operators.framework_kernels import library_of

FP32_BYTES = 4
ROLLOUT, ROLLOUT_NUMBERS = "input.rollout", 3
"""The input of a policy's objective, and its fp32 numbers a token: advantage, log-probability when the token was drawn,
and that of the reference model."""
METRICS = 2
"""fp32 numbers of a chunk: correct tokens, and the sum of entropies."""
STATISTICS = 3
"""fp32 numbers of a token that ranks combine: maximum, sum of exponentials and the target's logit."""
AUTOGRAD: tuple[Loss, ...] = ("eager-fp32", "checkpointed", "checkpointed-fp32")
"""Forms that torch's operators and their autograd compute, in fp32."""
SOFTMAX_READS, SOFTMAX_BACKWARD_READS = 3, 3
"""How often torch's log-softmax reads a logit in forward, and its backward a gradient or a result."""
METRICS_READS, METRICS_WRITES = 5, 2
"""How often accuracy and entropy read and write an fp32 logit: argmax reads it; the exponentials, their product with
the log-probabilities, and its sum read four and write two."""


@dataclass(frozen=True)
class LossWriter:
    """Writes the loss of one chunk after another into the template of the head.

    ``chunk``: tokens of the longest chunk. ``several``: whether there is more than one.
    """

    builder: TemplateBuilder
    decisions: Decisions
    shape: Shape
    chunk: int
    several: bool

    def __post_init__(self) -> None:
        """Declare the buffers that the chunks share."""
        form, dtype = self.decisions.loss, self.decisions.dtype
        if not self.builder.has("logits"):
            self._own("logits", dtype if self._narrow else "fp32")
        if form in ("auto", "blocks"):
            self._own("d_logits", dtype)
        if form in (*AUTOGRAD, "vocab-parallel"):
            if self._narrow:
                self._own("logits.fp32", "fp32")
                if not self.several:
                    self._own("d_logits", dtype)
            if form in AUTOGRAD:
                self._own("log_probs", "fp32")
                self._own("d_logits.fp32", "fp32")
            if self.checkpointed:
                self.builder.own("loss_metrics", BufferClass.TRANSIENT, "fp32", 1, METRICS)
        if form == "vocab-parallel":
            self._own_numbers("loss_maxima", 1)
            self._own_numbers("loss_sums", STATISTICS - 1)
        elif self.shape.tp > 1:
            self._own_numbers("loss_stats", STATISTICS)
        self.builder.scratch("loss.scratch", self._scratch_bytes())

    def _own(self, name: str, dtype: str) -> None:
        self.builder.own(name, BufferClass.TRANSIENT, dtype, self.chunk, self.shape.vocab)

    def _own_numbers(self, name: str, count: int) -> None:
        self.builder.own(name, BufferClass.EXCHANGE, "fp32", self.chunk, count)

    @property
    def _narrow(self) -> bool:
        """Whether the logits have fewer bits than the loss computes with."""
        return self.decisions.dtype != "fp32" and self.decisions.loss != "checkpointed-fp32"

    @property
    def checkpointed(self) -> bool:
        """Whether a chunk runs forward twice: product, log-softmax, accuracy and entropy."""
        return self.decisions.loss in ("checkpointed", "checkpointed-fp32")

    @property
    def gradient(self) -> str:
        """Slot of the logits' gradient."""
        form = self.decisions.loss
        if form in ("auto", "blocks"):
            return "d_logits"
        if form in AUTOGRAD and not self._narrow:
            return "d_logits.fp32"
        return "d_logits" if form != "fused" and self._narrow and not self.several else "logits"

    def _scratch_bytes(self) -> int:
        decisions, shape, chunk, policy = self.decisions, self.shape, self.chunk, self.policy
        if decisions.loss in (*AUTOGRAD, "vocab-parallel"):
            return table.picked_targets_bytes(chunk, policy=policy)
        if decisions.loss == "fused":
            fused = shape.tp == 1 and not table.on_cpu(decisions.kernels.attention) and not policy
            in_place = shape.tp > 1
            return table.loss_workspace_bytes(
                chunk, shape.vocab, decisions.dtype, "triton" if fused else "torch", in_place=in_place, policy=policy
            )
        # no fused loss over a divided vocabulary, or of a policy
        rowwise = decisions.kernels.rowwise if shape.tp == 1 and not policy else "torch"
        return table.loss_workspace_bytes(chunk, shape.vocab, decisions.dtype, rowwise, policy=policy)

    @property
    def policy(self) -> bool:
        """Whether the objective is that of a policy, whose numbers every kernel that weighs tokens reads."""
        return self.decisions.objective == "grpo"

    def _rollout(self, labels: Rows) -> Access | None:
        """Return the rollout's numbers of the tokens of ``labels``."""
        return reads(Rows(ROLLOUT, labels.first, labels.tokens)) if self.policy else None

    @property
    def _one_in_a_framework(self) -> bool:
        """Whether the plan names a loss of one kernel beside a framework's kernels, whose own loss may be several."""
        return self.decisions.loss == "blocks" and library_of(self.decisions.kernels.rowwise) is not None

    @property
    def _workspace(self) -> Access | None:
        return writes(self.builder.all("loss.scratch")) if self.builder.has("loss.scratch") else None

    def write(self, suffix: str, tokens: int, labels: Rows) -> None:
        """Write the loss of ``tokens`` logits, which lie at the start of ``logits``, and their gradient.

        Not of the checkpointed forms, whose product runs between ``forward`` and ``backward``.

        ``labels``: the tokens' targets. ``suffix`` ends the instructions' names.
        """
        match self.decisions.loss:
            case "eager-fp32":
                self._autograd(suffix, tokens, labels)
            case "vocab-parallel":
                self._vocabulary_parallel(suffix, tokens, labels)
            case form:
                self._one_kernel(suffix, tokens, labels, fused=form == "fused")

    def _one_kernel(self, suffix: str, tokens: int, labels: Rows, *, fused: bool) -> None:
        builder, shape, workspace = self.builder, self.shape, self._workspace
        logits, gradient = Rows("logits", 0, tokens), Rows(self.gradient, 0, tokens)
        size = tokens * shape.vocab * DTYPE_BYTES[self.decisions.dtype]
        stats, kind = None, "cross_entropy.fused" if fused or self._one_in_a_framework else "cross_entropy"
        if shape.tp > 1:
            stats, kind = Rows("loss_stats", 0, tokens), "cross_entropy.divided"
            builder.emit(
                f"loss.stats{suffix}",
                "cross_entropy.stats",
                Lane.COMPUTE,
                Rowwise("cross_entropy.stats", tokens, size, FP32_BYTES * STATISTICS * tokens),
                logits=reads(logits),
                labels=reads(labels),
                exponentials=None if fused else writes(gradient),
                out=writes(stats),
                workspace=workspace,
            )
            self._combine(f"loss.reduce{suffix}", "loss.all_reduce", stats, STATISTICS)
        builder.emit(
            f"loss{suffix}",
            "cross_entropy.fused" if fused else "cross_entropy",
            Lane.COMPUTE,
            Rowwise(
                kind,
                tokens,
                (1 if stats else 2) * size,
                size,
                elements=tokens * shape.vocab,
                element_bytes=DTYPE_BYTES[self.decisions.dtype],
            ),
            logits=accumulates(logits) if fused else reads(logits),
            labels=reads(labels),
            rollout=self._rollout(labels),
            stats=reads(stats) if stats else None,
            grad=None if fused else writes(gradient),
            loss=accumulates(builder.all("loss")),
            workspace=workspace,
        )

    def _autograd(self, suffix: str, tokens: int, labels: Rows) -> None:
        """Write torch's operators."""
        self.forward(suffix, tokens, labels)
        self.backward(suffix, tokens, labels)

    def forward(self, suffix: str, tokens: int, labels: Rows, *, again: bool = False) -> None:
        """Write torch's log-softmax and the loss, and accuracy and entropy where the form has them.

        ``again``: inside the checkpoint's recompute, where the loss was added already.
        """
        wide, log_probs = self._widen(suffix, tokens), Rows("log_probs", 0, tokens)
        size, column = FP32_BYTES * tokens * self.shape.vocab, FP32_BYTES * tokens
        self._emit(
            f"loss.softmax{suffix}",
            "log_softmax",
            Rowwise("log_softmax", tokens, SOFTMAX_READS * size, size, **self._wide_logits(tokens)),
            logits=reads(wide),
            out=writes(log_probs),
        )
        if not again:
            self._emit(
                f"loss{suffix}",
                "nll",
                Rowwise("nll", tokens, column, FP32_BYTES),
                log_probs=reads(log_probs),
                labels=reads(labels),
                rollout=self._rollout(labels),
                loss=accumulates(self.builder.all("loss")),
                workspace=self._workspace,
            )
        if self.checkpointed:
            self._emit(
                f"loss.metrics{suffix}",
                "metrics",
                Rowwise("loss.metrics", tokens, METRICS_READS * size, METRICS_WRITES * size),
                logits=reads(wide),
                log_probs=reads(log_probs),
                labels=reads(labels),
                product=writes(Rows("d_logits.fp32", 0, tokens)),
                metrics=writes(self.builder.all("loss_metrics")),
                workspace=self._workspace,
            )

    def backward(self, suffix: str, tokens: int, labels: Rows) -> None:
        """Write their backward; the gradient of the log-probabilities takes the buffer of the fp32 logits."""
        wide = Rows("logits.fp32" if self._narrow else "logits", 0, tokens)
        log_probs, gradient = Rows("log_probs", 0, tokens), Rows("d_logits.fp32", 0, tokens)
        size, column = FP32_BYTES * tokens * self.shape.vocab, FP32_BYTES * tokens
        self._emit(
            f"loss.bwd{suffix}",
            "nll.bwd",
            Rowwise("zero", tokens, 0, size + column),
            labels=reads(labels),
            rollout=self._rollout(labels),
            log_probs=reads(log_probs) if self.policy else None,
            grad=writes(wide),
            workspace=self._workspace,
        )
        self._emit(
            f"loss.softmax.bwd{suffix}",
            "log_softmax.bwd",
            Rowwise("log_softmax.bwd", tokens, SOFTMAX_BACKWARD_READS * size, size, **self._wide_logits(tokens)),
            grad=reads(wide),
            log_probs=reads(log_probs),
            out=writes(gradient),
        )
        if self._narrow:
            self._cast(f"loss.narrow{suffix}", gradient, Rows(self.gradient, 0, tokens))

    def _wide_logits(self, tokens: int) -> dict[str, int]:
        return {"elements": tokens * self.shape.vocab, "element_bytes": FP32_BYTES}

    def _vocabulary_parallel(self, suffix: str, tokens: int, labels: Rows) -> None:
        """Write Megatron-LM's operators."""
        wide = self._widen(suffix, tokens)
        maxima, sums = Rows("loss_maxima", 0, tokens), Rows("loss_sums", 0, tokens)
        elements = tokens * self.shape.vocab
        size, column = FP32_BYTES * elements, FP32_BYTES * tokens
        self._emit(
            f"loss.max{suffix}",
            "largest",
            Rowwise("loss.max", tokens, size, column, elements=elements),
            logits=reads(wide),
            maxima=writes(maxima),
        )
        self._combine(f"loss.max.reduce{suffix}", "loss.max_reduce", maxima, 1)
        self._emit(
            f"loss.exp{suffix}",
            "exponentials",
            Rowwise("loss.exp", tokens, 3 * size + column, 2 * size + 2 * column, elements=elements),
            logits=accumulates(wide),
            labels=reads(labels),
            maxima=reads(maxima),
            sums=writes(sums),
            workspace=self._workspace,
        )
        self._combine(f"loss.reduce{suffix}", "all_reduce", sums, STATISTICS - 1)
        self._emit(
            f"loss{suffix}",
            "softmax",
            Rowwise("loss.softmax", tokens, size + 2 * column, size, elements=elements),
            logits=accumulates(wide),
            labels=reads(labels),
            rollout=self._rollout(labels),
            sums=reads(sums),
            loss=accumulates(self.builder.all("loss")),
            workspace=self._workspace,
        )
        self._emit(
            f"loss.bwd{suffix}",
            "gradient",
            Rowwise("loss.gradient", tokens, size, size, elements=elements),
            logits=accumulates(wide),
            labels=reads(labels),
            rollout=self._rollout(labels),
            sums=reads(sums) if self.policy else None,
            workspace=self._workspace,
        )
        self._cast(f"loss.narrow{suffix}", wide, Rows(self.gradient, 0, tokens))

    def _emit(self, name: str, op: str, work: Rowwise, **operands: Access | None) -> None:
        self.builder.emit(name, f"cross_entropy.{op}", Lane.COMPUTE, work, **operands)

    def _widen(self, suffix: str, tokens: int) -> Rows:
        """Return the fp32 logits: a copy, or the logits themselves when they are fp32."""
        logits = Rows("logits", 0, tokens)
        wide = Rows("logits.fp32", 0, tokens) if self._narrow else logits
        self._cast(f"loss.widen{suffix}", logits, wide)
        return wide

    def _cast(self, name: str, source: Rows, target: Rows) -> None:
        """Write a copy to another dtype; nothing where source and target are one."""
        if source == target:
            return
        read, written = (
            rows.tokens * self.shape.vocab * DTYPE_BYTES[self.builder.dtype(rows.slot)] for rows in (source, target)
        )
        work = Rowwise("copy", source.tokens, read, written)
        self.builder.emit(name, "copy", Lane.COMPUTE, work, source=reads(source), target=writes(target))

    def _combine(self, name: str, op: str, stats: Rows, numbers: int) -> None:
        """Write the all-reduce of ``numbers`` fp32 numbers a token over the tensor-parallel ranks, if several."""
        if self.shape.tp == 1:
            return
        calls = statistics_calls(stats.tokens) if op == "loss.all_reduce" else ()
        work = Collective("all_reduce", FP32_BYTES * numbers * stats.tokens, self.shape.tp, "tp", calls=calls)
        self.builder.emit(name, op, Lane.TP, work, tensor=accumulates(stats))


def statistics_calls(tokens: int) -> tuple[LibraryCall, ...]:
    """Return the calls that combine statistics: the largest maximum, then two sums relative to it.

    So does ``loss_all_reduce`` in ``memo_exec/kernels/collective.py``.
    """
    return ("all_reduce", FP32_BYTES * tokens), ("all_reduce", FP32_BYTES * (STATISTICS - 1) * tokens)


def kept_logits(decisions: Decisions, shape: Shape, micro_batches: int) -> list[Family]:
    """Return the buffers of the logits that metrics read when a micro-batch's backward has ended."""
    if not decisions.loss_metrics:
        return []
    size = (decisions.dtype, shape.tokens, shape.vocab, micro_batches)
    return [Family("logits", BufferClass.TRANSIENT, *size, kind=FamilyKind.HEAD_INPUT)]


def metrics(decisions: Decisions, shape: Shape, families: Families) -> Template | None:
    """Return the template of the trainer's metrics; None without them.

    Each is torch's cross entropy under autocast, without a gradient: a copy in fp32 and its log-softmax (Composer,
    trainer.py, ``_eval_train_metrics``; metrics/nlp.py, ``LanguageCrossEntropy`` and ``LanguagePerplexity``).
    """
    if not decisions.loss_metrics:
        return None
    builder = TemplateBuilder("metrics", Phase.BACKWARD, TemplateKind.METRICS, BlockKind.HEAD)
    builder.bind(families["logits"])
    builder.bind(families["input.labels"])
    tokens, vocab = shape.tokens, shape.vocab
    narrow, wide = (tokens * vocab * DTYPE_BYTES[dtype] for dtype in (decisions.dtype, "fp32"))
    logits = Rows("logits", 0, tokens)
    if decisions.dtype != "fp32":
        builder.own("metric.fp32", BufferClass.TRANSIENT, "fp32", tokens, vocab)
    builder.own("metric.log_probs", BufferClass.TRANSIENT, "fp32", tokens, vocab)
    source, log_probs = Rows("metric.fp32", 0, tokens), Rows("metric.log_probs", 0, tokens)
    for number in range(decisions.loss_metrics):
        if decisions.dtype != "fp32":
            copied = Rowwise("copy", tokens, narrow, wide)
            builder.emit(f"widen.m{number}", "copy", Lane.COMPUTE, copied, source=reads(logits), target=writes(source))
        softmax = Rowwise(
            "log_softmax",
            *(tokens, SOFTMAX_READS * wide, wide),
            elements=tokens * vocab,
            element_bytes=FP32_BYTES,
        )
        wide_logits = source if decisions.dtype != "fp32" else logits
        builder.emit(
            f"softmax.m{number}",
            "metric.log_softmax",
            Lane.COMPUTE,
            softmax,
            logits=reads(wide_logits),
            out=writes(log_probs),
        )
        picked = Rowwise("nll", tokens, FP32_BYTES * tokens, FP32_BYTES)
        builder.emit(
            f"nll.m{number}",
            "metric.nll",
            Lane.COMPUTE,
            picked,
            log_probs=reads(log_probs),
            labels=reads(Rows("input.labels", shape.start, tokens)),
            workspace=builder.scratch(f"nll.m{number}.scratch", FP32_BYTES),
        )
    return builder.build()
