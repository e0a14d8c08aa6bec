"""Operators of a layer as instructions: products, norms, residual adds and collectives, forward and backward.

Forward, recompute, backward and the MLP's row blocks all emit these operators. An operator has a work, operands and a
workspace. It reads weights from slot ``params`` and adds their gradients to slot ``grads``; both slots hold one
parameter block. ``suffix`` ends the names of instructions and tells row blocks apart.

With ``tp_overlap`` products overlap with the all-gathers before them and the reduce-scatters behind them, in one chunk
for the rows of each tensor-parallel rank. In exchange i a rank sends to the rank i places ahead and receives from the
rank i places behind, as torch's fused operators do (``torch/distributed/_symmetric_memory``). Example of rank 0 of 4;
``own`` copies its shard into the gathered rows, and ``sum`` adds up the partial sums of its rows:

    all-gather        p2p          [from 3][from 2][from 1]
    and product       compute  own [rows 0][rows 3][rows 2][rows 1]

    product and       p2p                  [to 1 ][to 2 ][to 3 ]
    reduce-scatter    compute      [rows 1][rows 2][rows 3][rows 0] sum

A rank sends as many bytes as in the collective. Products that run so:

    behind a gather    QKV and the first MLP product; gradients of the inputs of projection and second MLP product
    before a sum       projection and second MLP product; with deferred weight gradients, gradients of the inputs of QKV
                       and first MLP product

In backward QKV and the first MLP product also gather their input again and sum its gradient. Both collectives stay
whole, because they run beside the gradients of input and weight anyway (Transformer Engine's bulk overlap).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from memo_sim.contract.hardware import GemmPass
from memo_sim.contract.layer_shape import LayerShape
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.ir.builder import Access, Rows, TemplateBuilder, accumulates, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Lane
from memo_sim.program.ir.work import AdapterGemm, Collective, Exchange, Fp8Gemm, Gemm, Rotary, Rowwise
from memo_sim.program.layout.fp8 import ATTENTION_OUTPUT, PRODUCTS
from memo_sim.program.layout.parameters import Block, adapted_columns, autocast, gradient_dtype, half_gradients
from memo_sim.program.layout.shape import Shape
from memo_sim.program.layout.skeletal import normed_slot
from memo_sim.program.layout.token_order import clipped_runs, row_blocks
from memo_sim.program.operators import workspaces as table
from memo_sim.program.operators.fp8_operands import Fp8Operands
from memo_sim.program.operators.framework_kernels import WIDE_BYTES

RowBlock = tuple[int, int]
"""First token and number of tokens, in tokens of the rank (not of the sequence-parallel shard)."""


class OperatorWriter:
    """Emits operators into a template whose slots are named after the tensors."""

    def __init__(self, builder: TemplateBuilder, decisions: Decisions, shape: Shape, block: Block) -> None:
        self.builder = builder
        self.decisions = decisions
        self.model: Model = decisions.model
        self.shape = shape
        self.block = block
        self.dtype, self.rowwise = decisions.dtype, decisions.kernels.rowwise
        self.size = DTYPE_BYTES[decisions.dtype]
        self.suffix = ""
        self.fp8 = None if decisions.fp8 == "none" else Fp8Operands(builder, decisions, shape, block)
        """Copies of operands in FP8; None where products run in the plan's dtype."""
        self.in_chunks = decisions.layout.tp_overlap == "chunked" and shape.gathered
        """Whether products overlap with the collectives of tensor parallelism, chunk by chunk."""
        self.defers_wgrad = False
        """Whether another template computes the weight gradients (``layers/weight_gradients.py``)."""
        self.adapter = AdapterWriter(self)

    @property
    def activation_op(self) -> str:
        """The operator of the MLP's activation."""
        if not self.model.gated:
            return "gelu"
        return "swiglu" if self.model.activation == "silu" else "geglu"

    def own(self, name: str, tokens: int, features: int, cls: BufferClass = BufferClass.TRANSIENT) -> str:
        """Return the name of a buffer of the template; add the buffer at its first use (row blocks share it)."""
        if not self.builder.has(name):
            self.builder.own(name, cls, self.dtype, tokens, features)
        return name

    def param(self, name: str) -> Access | None:
        """Return a parameter as a read operand, or None when the model has none of that name."""
        found = self.block.find(name)
        return reads(Rows("params", found.first, found.elements)) if found else None

    def grad(self, name: str) -> Access | None:
        """Return a parameter's gradient as an accumulated operand, or None where there is no such trained parameter."""
        found = self.block.find(name)
        return accumulates(Rows("grads", found.first, found.elements)) if found and not found.frozen else None

    def trains(self, product: str) -> bool:
        """Return whether a product's input is needed for a gradient: of its weight, or of its adapter."""
        names = (f"{product}.weight", f"{product}.lora_a")
        return any(found and not found.frozen for found in map(self.block.find, names))

    def weight(self, name: str, *, for_dgrad: bool = False) -> Access | None:
        """Return the weight of the product ``name`` as a read operand: the parameter, or its copy in FP8."""
        if self.fp8 is not None and self.fp8.has(name):
            return reads(self.fp8.weight(name, for_dgrad=for_dgrad))
        return self.param(f"{name}.weight")

    def product(self, name: str, m: int, n: int, k: int, gemm_pass: GemmPass) -> Gemm:
        """Return the work of the product ``name``, in the plan's dtype or in FP8."""
        if self.fp8 is not None and self.fp8.has(name):
            return Fp8Gemm(m, n, k, gemm_pass, self.dtype, PRODUCTS[self.decisions.fp8])
        return Gemm(m, n, k, gemm_pass, self.dtype)

    def made(self, rows: Rows, features: int) -> Rows:
        """Return where the input of a product is made: in its own buffer, or in one that is quantised next."""
        return rows if self.fp8 is None else self.fp8.made(rows, features)

    def quantise(self, made: Rows, rows: Rows) -> None:
        """Quantise an input that was made elsewhere (``made``); nothing where it was made in its own buffer."""
        if self.fp8 is not None and made != rows:
            self.fp8.quantise_input(made, rows, self.suffix)

    def read_by_product(self, slot: str) -> str:
        """Return the slot of the copy of an input that its product in forward reads."""
        return slot if self.fp8 is None else self.fp8.by_rows(slot)

    def attended(self, slot: str, *, kept: bool = False) -> str:
        """Return the slot of the projection's input, or of its copy in FP8: the one by rows, or the one ``kept``."""
        if self.fp8 is None:
            return slot
        return ATTENTION_OUTPUT if kept else self.fp8.by_rows(ATTENTION_OUTPUT)

    def before_gather(self, grad: Rows) -> Rows:
        """Return a gradient as it is gathered: in FP8 where one copy of it serves both products."""
        return grad if self.fp8 is None else self.fp8.before_gather(grad, self.suffix)

    def shard_rows(self, slot: str, rows: RowBlock) -> Rows:
        """Return this rank's shard of a row block, in a tensor that sequence parallelism divides."""
        return Rows(slot, self.shape.shard(rows[0]), self.shape.shard(rows[1]))

    def memory_bound(
        self,
        name: str,
        op: str,
        rows: int,
        read: int,
        written: int,
        *,
        features: int = 0,
        scratch: int = 0,
        first: int = 0,
        theta: float = 0.0,
        **operands: Access | None,
    ) -> None:
        """Emit a memory-bound operator that reads ``read`` and writes ``written`` elements a row.

        ``features``: those of a row of the tensor that it works on; 0 where no framework has kernels of its own for the
        operator. ``scratch``: bytes of its workspace. ``first``: the row of the rank at which its buffers begin.
        ``theta``: base of rotary tables that differ from the model's.
        """
        kind = partial(Rotary, theta=theta) if theta else Rowwise
        work = kind(op, rows, rows * read * self.size, rows * written * self.size, first, rows * features, self.size)
        workspace = self.builder.scratch(f"{self.builder.phase}.{name}{self.suffix}.scratch", scratch)
        self.builder.emit(name + self.suffix, op, Lane.COMPUTE, work, **operands, workspace=workspace)

    def norm(self, which: str, source: str, rows: RowBlock, at: RowBlock) -> None:
        """Emit a norm of a row block; its output and statistics go to rows ``at`` of their buffers."""
        op = "layer_norm" if self.model.family == "gpt" else "rms_norm"
        shard = self.shard_rows(which, at)
        made = self.made(shard, self.shape.hidden)
        self.memory_bound(
            which,
            op,
            shard.tokens,
            self.shape.hidden,
            self.shape.hidden,
            features=self.shape.hidden,
            scratch=table.norm_workspace_bytes(shard.tokens, self.shape.hidden, self.dtype, self.rowwise),
            x=reads(self.shard_rows(source, rows)),
            weight=self.param(f"{which}.weight"),
            bias=self.param(f"{which}.bias"),
            out=writes(made),
            stats=writes(self.shard_rows(f"{which}_stats", at)),
        )
        self.quantise(made, shard)

    def post_norm(self, which: str, source: Rows, rows: RowBlock) -> Rows:
        """Emit the norm behind attention or the MLP; return its rows. Without one, return ``source``.

        ``source`` is a skeletal tensor (``layout/skeletal.py``), as are the norm's statistics.
        """
        if not self.model.post_norms:
            return source
        shard, hidden = self.shard_rows(f"{which}.out", rows), self.shape.hidden
        self.own(shard.slot, self.shape.shard_tokens, hidden)
        self.memory_bound(
            which,
            "rms_norm",
            shard.tokens,
            hidden,
            hidden,
            features=hidden,
            scratch=table.norm_workspace_bytes(shard.tokens, hidden, self.dtype, self.rowwise),
            x=reads(source),
            weight=self.param(f"{which}.weight"),
            out=writes(shard),
            stats=writes(self.shard_rows(f"{which}_stats", rows)),
        )
        return shard

    def post_norm_backward(self, which: str, grad: Rows) -> Rows:
        """Emit the backward of the norm behind attention or the MLP, of all rows; return its input's gradient.

        Without such a norm, return ``grad``.
        """
        if not self.model.post_norms:
            return grad
        hidden, out = self.shape.hidden, self.builder.all(self.own(f"d_{which}", grad.tokens, self.shape.hidden))
        self.memory_bound(
            f"{which}.bwd",
            "rms_norm.bwd",
            grad.tokens,
            3 * hidden,
            2 * hidden,
            features=hidden,
            scratch=table.norm_backward_workspace_bytes(grad.tokens, hidden, self.dtype, self.rowwise),
            grad=reads(grad),
            x=reads(self.builder.all(normed_slot(which, self.shape))),
            stats=reads(self.builder.all(f"{which}_stats")),
            weight=self.param(f"{which}.weight"),
            out=writes(out),
            grad_weight=self.grad(f"{which}.weight"),
        )
        return out

    def linear(self, name: str, x: Rows, out: Rows, n: int, k: int, *, bias: bool = True, op: str = "linear") -> None:
        """Emit ``out = x @ weight.T (+ bias)`` with ``n`` output features and ``k`` input features."""
        self.builder.emit(
            name + self.suffix,
            op,
            Lane.COMPUTE,
            self.product(name, out.tokens, n, k, "fprop"),
            x=reads(x),
            weight=self.weight(name),
            bias=self.param(f"{name}.bias") if bias else None,
            out=writes(out),
        )
        self.adapter.forward(name, x, out, k)

    def linear_beside_gate(  # noqa: PLR0917 - the operands of a product
        self, name: str, x: Rows, out: Rows, gate: Rows, ffn: int, k: int, *, again: bool
    ) -> None:
        """Emit the first product of a gated MLP: gate and up, each with ``ffn`` features, packed in ``out``.

        Its gate half is copied to ``gate``, or with ``again`` from there, so only the other half is computed.
        """
        self.builder.emit(
            name + self.suffix,
            "linear.from_gate" if again else "linear.to_gate",
            Lane.COMPUTE,
            Gemm(out.tokens, ffn if again else 2 * ffn, k, "fprop", self.dtype),
            x=reads(x),
            weight=self.param(f"{name}.weight"),
            bias=self.param(f"{name}.bias"),
            gate=reads(gate) if again else writes(gate),
            out=writes(out),
        )

    def gather(self, name: str, source: Rows, full: str, first: int, *, tokens: int = 0) -> Rows:
        """Gather the rows of a sequence-parallel shard into ``full``; return ``source`` without sequence parallelism.

        ``tokens``: rows of the buffer ``full``; 0 for all of the rank's.
        Each phase has its own buffer, because the rows that recompute gathers die long before backward gathers them
        again.
        """
        if not self.shape.gathered:
            return source
        full, builder = f"{self.builder.phase}.{full}", self.builder
        if not builder.has(full):
            row = (tokens or self.shape.tokens, builder.features(source.slot))
            builder.own(full, BufferClass.EXCHANGE, builder.dtype(source.slot), *row)
        rows = Rows(full, first, source.tokens * self.shape.tp)
        work = Collective("all_gather", rows.tokens * builder.row_bytes(source.slot), self.shape.tp, "tp")
        self.builder.emit(
            f"{name}.gather{self.suffix}", "all_gather", Lane.TP, work, shard=reads(source), full=writes(rows)
        )
        return rows

    def gather_and_multiply(
        self,
        name: str,
        source: Rows,
        full: str,
        at: RowBlock,
        product: Callable[[Rows, RowBlock], None],
        *,
        tokens: int = 0,
    ) -> Rows:
        """Gather ``source`` into rows ``at`` as ``gather`` does, and write its product; return the gathered rows.

        ``product`` is called with the rows to multiply and the row block of the result: once, or with ``tp_overlap``
        for the chunk of every rank, this rank's first. This rank's chunk is copied into ``full``, and sent from there.
        """
        if not self.in_chunks:
            rows = self.gather(name, source, full, at[0], tokens=tokens)
            product(rows, at)
            return rows
        for block in self._row_blocks(at):
            mine = Rows(source.slot, source.first + self.shape.shard(block[0] - at[0]), self.shape.shard(block[1]))
            self._gather_chunks(name, mine, full, block, product, tokens)
        return Rows(f"{self.builder.phase}.{full}", *at)

    def _gather_chunks(  # noqa: PLR0917 - the arguments of ``gather_and_multiply``
        self, name: str, source: Rows, full: str, at: RowBlock, product: Callable[[Rows, RowBlock], None], tokens: int
    ) -> None:
        """Write ``gather_and_multiply`` of one row block in chunks."""
        builder, suffix, tp, chunk = self.builder, self.suffix, self.shape.tp, source.tokens
        full = self.own(f"{builder.phase}.{full}", tokens or self.shape.tokens, self.shape.hidden, BufferClass.EXCHANGE)
        ranks = [(self.shape.tp_rank - step) % tp for step in range(tp)]
        parts = [Rows(full, at[0] + rank * chunk, chunk) for rank in ranks]
        size = chunk * self.shape.hidden * self.size
        builder.further = True
        operands = {"source": reads(source), "target": writes(parts[0])}
        builder.emit(f"{name}.own{suffix}", "copy", Lane.COMPUTE, Rowwise("copy", chunk, size, size), **operands)
        for step, part in enumerate(parts):
            if step + 1 < tp:
                self._send_chunk(f"{name}.gather", step + 1, parts[0], parts[step + 1])
            self.suffix, builder.further = f"{suffix}.c{step}", step > 0
            product(part, (part.first, chunk))
            self.suffix, builder.further = suffix, True
        builder.further = False

    def multiply_and_scatter(
        self,
        name: str,
        x: Rows,
        out: str,
        first: int,
        product: Callable[[Rows, Rows], None],
        *,
        tokens: int = 0,
        whole: bool = False,
    ) -> Rows:
        """Write the product of ``x``, and sum it over the tensor-parallel ranks as ``scatter`` does; return the sum.

        ``product`` is called with the rows to multiply and those of the result: once, with rows of the buffer ``out``
        from ``first`` on, or with ``tp_overlap`` for the chunk of every rank, this rank's last. ``tokens``: rows of
        ``out``; 0 for all of the rank's. ``whole``: without chunks, because the sum overlaps with what follows.

        Chunks for other ranks lie in two exchange buffers in turn.
        """
        if whole or not self.in_chunks:
            partial = Rows(self.own(out, tokens or self.shape.tokens, self.shape.hidden), first, x.tokens)
            product(x, partial)
            return self.scatter(name, partial, tokens=tokens)
        for rows in self._row_blocks((first, x.tokens)):
            some = Rows(x.slot, x.first + rows[0] - first, rows[1])
            self._scatter_chunks(name, some, rows[0], product, tokens)
        return Rows(f"{name}_shard", self.shape.shard(first), self.shape.shard(x.tokens))

    def _scatter_chunks(
        self, name: str, x: Rows, first: int, product: Callable[[Rows, Rows], None], tokens: int
    ) -> None:
        """Write ``multiply_and_scatter`` of one row block in chunks."""
        builder, suffix, tp, hidden = self.builder, self.suffix, self.shape.tp, self.shape.hidden
        chunk, room = self.shape.shard(x.tokens), self.shape.shard(tokens or self.shape.tokens)
        sent = [self.own(f"{name}.sent{i}", room, hidden, BufferClass.EXCHANGE) for i in range(min(2, tp - 1))]
        parts = self.own(f"{name}.parts", tp * room, hidden, BufferClass.EXCHANGE)
        for step in range(1, tp + 1):
            to = (self.shape.tp_rank + step) % tp
            result = Rows(sent[step % len(sent)], 0, chunk) if step < tp else Rows(parts, 0, chunk)
            self.suffix = f"{suffix}.c{step - 1}"
            product(Rows(x.slot, x.first + to * chunk, chunk), result)
            self.suffix, builder.further = suffix, True
            if step < tp:
                self._send_chunk(f"{name}.scatter", step, result, Rows(parts, step * chunk, chunk))
        summed = Rows(self.own(f"{name}_shard", room, hidden, BufferClass.EXCHANGE), self.shape.shard(first), chunk)
        size = chunk * hidden * self.size
        added, given = Rowwise("parts.sum", chunk, tp * size, size), reads(Rows(parts, 0, tp * chunk))
        builder.emit(f"{name}.sum{suffix}", "parts.sum", Lane.COMPUTE, added, parts=given, out=writes(summed))
        builder.further = False

    def _row_blocks(self, at: RowBlock) -> Iterator[RowBlock]:
        """Yield the row blocks inside ``at``, in each of which ranks have a chunk of their own; ``suffix`` names them.

        Row blocks of the MLP (``mlp_chunk_tokens``) count rows from their own beginning, and are not divided.
        """
        blocks, suffix = [at], self.suffix
        if self.decisions.recompute == "tokenwise":
            blocks = list(clipped_runs(row_blocks(self.decisions), *at))
        for number, rows in enumerate(blocks):
            self.suffix = f"{suffix}.r{number}" if len(blocks) > 1 else suffix
            yield rows
        self.suffix = suffix

    def _send_chunk(self, name: str, distance: int, send: Rows, recv: Rows) -> None:
        """Emit the exchange of a chunk: sent ``distance`` ranks ahead, received from as far behind."""
        work = Exchange(send.tokens * self.shape.hidden * self.size, self.shape.tp, "tp", distance)
        operands = {"send": reads(send), "recv": writes(recv)}
        self.builder.emit(f"{name}{distance}{self.suffix}", "send_recv", Lane.P2P, work, **operands)

    def gather_again(self, name: str, source: Rows, full: str, first: int, *, tokens: int = 0) -> Rows:
        """Gather rows that only a weight gradient reads; return ``source`` when another template computes it.

        Megatron-LM saves only its shard of a norm's output, and gathers it again beside the input's gradient. The
        weight's gradient reads the shard as well (``wgrad``). If the gather were its last reader, the input's gradient
        could take the shard's memory, and would then wait for the gather.
        """
        return source if self.defers_wgrad else self.gather(f"{name}.again", source, full, first, tokens=tokens)

    def scatter(self, name: str, partial: Rows, *, tokens: int = 0, first: int | None = None) -> Rows:
        """Sum ``partial`` over the tensor-parallel ranks.

        With sequence parallelism the sum goes to this rank's token shard (reduce-scatter), else it stays in place
        (all-reduce). ``tokens``: the tokens whose shard the target buffer holds; 0 for all of the rank's. ``first``:
        the rank's row at which ``partial`` begins, when that differs from its row in its buffer.
        """
        features = self.builder.features(partial.slot)
        size = partial.tokens * features * self.size
        if self.shape.tp == 1:
            return partial
        if not self.shape.gathered:
            work = Collective("all_reduce", size, self.shape.tp, "tp")
            self.builder.emit(f"{name}.reduce{self.suffix}", "all_reduce", Lane.TP, work, tensor=accumulates(partial))
            return partial
        room = self.shape.shard(tokens or self.shape.tokens)
        shard = self.own(f"{name}_shard", room, features, BufferClass.EXCHANGE)
        begun = partial.first if first is None else first
        rows = Rows(shard, self.shape.shard(begun), self.shape.shard(partial.tokens))
        work = Collective("reduce_scatter", size, self.shape.tp, "tp")
        self.builder.emit(
            f"{name}.scatter{self.suffix}",
            "reduce_scatter",
            Lane.TP,
            work,
            full=reads(partial),
            shard=writes(rows),
        )
        return rows

    def residual(self, name: str, x: str, y: Rows, *, out: str, rows: RowBlock, bias: str) -> None:
        """Emit ``out = x + y (+ bias)`` of a row block."""
        shard = self.shard_rows(out, rows)
        h = self.shape.hidden
        self.memory_bound(
            name,
            "residual_add",
            shard.tokens,
            2 * h,
            h,
            features=h,
            x=reads(self.shard_rows(x, rows)),
            y=reads(y),
            bias=self.param(bias),
            out=writes(shard),
        )

    def dgrad(self, name: str, grad: Rows, out: Rows, n: int, k: int, *, op: str = "linear.dgrad") -> None:
        """Emit ``out = grad @ weight``: ``n`` input features of ``k`` output features."""
        if self.fp8 is not None and self.fp8.has(name):
            grad = self.fp8.gradient(grad, self.suffix)
        self.builder.emit(
            f"{name}.dgrad{self.suffix}",
            op,
            Lane.COMPUTE,
            self.product(name, out.tokens, n, k, "dgrad"),
            grad=reads(grad),
            weight=self.weight(name, for_dgrad=True),
            out=accumulates(out) if op == "linear.dgrad.add" else writes(out),
        )
        self.adapter.dgrad(name, grad, out, n)

    def wgrad(
        self,
        name: str,
        grad: Rows,
        x: Rows,
        m: int,
        n: int,
        *,
        shard: Rows | None = None,
        op: str = "linear.wgrad",
    ) -> None:
        """Emit the weight's gradient, ``m`` output features by ``n`` input features, added to the sum.

        ``shard``: the rows from which ``x`` was gathered; reading them keeps them alive until here (``gather_again``).
        """
        if self.defers_wgrad:
            return
        if (trained := self.block.find(f"{name}.weight")) and trained.frozen:
            self.adapter.wgrad(name, grad, x, n, shard=shard)
            return
        kernel = self.decisions.kernels.attention
        scratch = table.wgrad_workspace_bytes(
            m, n, grad.tokens, self.dtype, kernel, into=gradient_dtype(self.decisions)
        )
        if self.fp8 is not None and self.fp8.has(name):
            grad = self.fp8.gradient(grad, self.suffix, for_wgrad=True)
            x = self.fp8.transposed(x, self.suffix)
        wide = autocast(self.decisions)
        apart = wide or half_gradients(self.decisions)
        product = self.builder.all(self.own(f"{name}.wgrad.product{self.suffix}", m, n)) if apart else None
        self.builder.emit(
            f"{name}.wgrad{self.suffix}",
            op,
            Lane.COMPUTE,
            self.product(name, m, n, grad.tokens, "wgrad"),
            grad=reads(grad),
            x=reads(x),
            shard=reads(shard) if shard else None,
            out=writes(product) if product else self.grad(f"{name}.weight"),
            workspace=self.builder.scratch(f"{name}.wgrad.scratch{self.suffix}", scratch),
        )
        if product:
            added = Rowwise("grad.accumulate", m, 2 * self.size * m * n, self.size * m * n)
            if wide:  # the cast to fp32, then the sum
                read, written = (self.size + 2 * WIDE_BYTES) * m * n, 2 * WIDE_BYTES * m * n
                added = Rowwise("grad.widen", m, read, written, elements=m * n, element_bytes=self.size)
            self.builder.emit(
                f"{name}.wgrad.add{self.suffix}",
                "grad.accumulate",
                Lane.COMPUTE,
                added,
                x=reads(product),
                out=self.grad(f"{name}.weight"),
            )

    def cast_weights(self) -> None:
        """Emit autocast's copies of a layer's fp32 matrices, once in every forward; nothing without autocast."""
        if not autocast(self.decisions):
            return
        elements = self.block.decayed_elements
        work = Rowwise(
            "params.autocast",
            elements,
            WIDE_BYTES * elements,
            self.size * elements,
            elements=elements,
            element_bytes=self.size,
        )
        weights = reads(Rows("params", 0, elements))
        self.builder.emit("weights.cast", "params.autocast", Lane.COMPUTE, work, weights=weights)

    def bgrad(self, name: str, grad: Rows, width: int) -> None:
        """Emit the bias's gradient, the sum of ``grad`` over its rows; nothing when the product trains no bias."""
        if self.grad(f"{name}.bias") and not self.defers_wgrad:
            self.memory_bound(
                f"{name}.bgrad",
                "bias.bwd",
                grad.tokens,
                width,
                0,
                features=width,
                scratch=table.bias_backward_workspace_bytes(grad.tokens, width, self.dtype),
                grad=reads(grad),
                out=self.grad(f"{name}.bias"),
            )

    def product_and_norm_backward(
        self,
        product: str,
        norm: str,
        *,
        grad: Rows,
        source: Rows | None,
        norm_input: str,
        residual_grad: str,
        out: str,
        rows: RowBlock,
        at: RowBlock,
        tokens: int = 0,
    ) -> None:
        """Write the backward of ``product`` and of the norm before it, and add the gradient of the residual branch.

        ``source``: the norm's output if it is gathered already, else None.
        ``rows``: the row block in ``norm_input``, ``residual_grad`` and ``out``.
        ``at``: its rows in the norm's output and statistics and in the product's input gradient. The buffer of that
        gradient holds ``tokens`` rows; 0 for all of the rank's.

        The ranks sum the input gradient while the weight gradient is computed. Where another template computes that,
        the sum overlaps with the product of the input gradient (``tp_overlap``).
        """
        width, hidden = self.builder.features(grad.slot), self.shape.hidden
        shard = None
        if source is None and self.trains(product):
            mine = self.shard_rows(norm, at)
            source = self.gather_again(norm, mine, f"{norm}_full", at[0], tokens=tokens)
            shard = mine if source != mine else None
        summed = self.multiply_and_scatter(
            f"d_{norm}",
            grad,
            f"d_{norm}",
            at[0],
            lambda some, into: self.dgrad(product, some, into, hidden, width),
            tokens=tokens,
            whole=not self.defers_wgrad,
        )
        if source is not None:
            self.wgrad(product, grad, source, width, hidden, shard=shard)
        self.bgrad(product, grad, width)
        self.norm_backward(
            norm, grad=summed, norm_input=norm_input, residual_grad=residual_grad, out=out, rows=rows, at=at
        )

    def norm_backward(
        self, norm: str, *, grad: Rows, norm_input: str, residual_grad: str, out: str, rows: RowBlock, at: RowBlock
    ) -> None:
        """Write the backward of a norm from the gradient of its output, and add that of the residual branch.

        ``rows`` and ``at`` as in ``product_and_norm_backward``.
        """
        hidden = self.shape.hidden
        op = "layer_norm.bwd" if self.model.family == "gpt" else "rms_norm.bwd"
        written = self.shard_rows(out, rows)
        self.memory_bound(
            f"{norm}.bwd",
            op,
            written.tokens,
            4 * hidden,
            2 * hidden,
            features=hidden,
            scratch=table.norm_backward_workspace_bytes(written.tokens, hidden, self.dtype, self.rowwise),
            grad=reads(grad),
            x=reads(self.shard_rows(norm_input, rows)),
            stats=reads(self.shard_rows(f"{norm}_stats", at)),
            weight=self.param(f"{norm}.weight"),
            residual_grad=reads(self.shard_rows(residual_grad, rows)),
            out=writes(written),
            grad_weight=self.grad(f"{norm}.weight"),
            grad_bias=self.grad(f"{norm}.bias"),
        )

    def positions(self, packed: Rows, raw: Rows, *, first: int = 0) -> None:
        """Write the norm and the rotary embedding of Q and K, in place in the packed Q, K, V, if the model has them.

        The input of the norm is saved to ``raw``. ``first``: the rank's row at which the buffer begins.
        """
        tokens, width = packed.tokens, self.shape.q_width + self.shape.kv_width
        if self.model.qk_norm:
            self.memory_bound(
                "qk_norm",
                "qk_norm",
                tokens,
                width,
                2 * width,
                features=width,
                scratch=table.qk_norm_workspace_bytes(tokens, *self._rotated, self.dtype),
                qkv=accumulates(packed),
                q_weight=self.param("q_norm.weight"),
                k_weight=self.param("k_norm.weight"),
                raw=writes(raw),
            )
        if not self.model.learned_positions:
            scratch = table.rotary_workspace_bytes(tokens, *self._rotated, self.dtype, self.rowwise)
            qkv = accumulates(packed)
            self.memory_bound(
                "rotary",
                "rotary",
                tokens,
                width,
                width,
                features=width,
                scratch=scratch,
                first=first,
                theta=self.shape.rope_theta,
                qkv=qkv,
            )

    def positions_backward(self, d_qkv: Rows, *, first: int = 0) -> None:
        """Write the backward of ``positions``, in place in the gradient; it reads the same rows of ``qk_raw``."""
        tokens, width, grad = d_qkv.tokens, self.shape.q_width + self.shape.kv_width, accumulates(d_qkv)
        if not self.model.learned_positions:
            scratch = table.rotary_workspace_bytes(tokens, *self._rotated, self.dtype, self.rowwise)
            self.memory_bound(
                "rotary.bwd",
                "rotary.bwd",
                tokens,
                width,
                width,
                features=width,
                scratch=scratch,
                first=first,
                theta=self.shape.rope_theta,
                grad=grad,
            )
        if self.model.qk_norm:
            self.memory_bound(
                "qk_norm.bwd",
                "qk_norm.bwd",
                tokens,
                2 * width,
                width,
                features=width,
                scratch=table.qk_norm_backward_workspace_bytes(tokens, *self._rotated, self.dtype),
                grad=grad,
                raw=reads(Rows("qk_raw", d_qkv.first, d_qkv.tokens)),
                q_weight=self.param("q_norm.weight"),
                k_weight=self.param("k_norm.weight"),
                grad_q_weight=self.grad("q_norm.weight"),
                grad_k_weight=self.grad("k_norm.weight"),
            )

    def sink(self) -> None:
        """Write the sinks into attention's whole output and log-sum-exp, in place, if the model has them.

        A sink is one more logit of a head's softmax, whose value is zero. With the log-sum-exp of the keys alone, the
        output shrinks by ``exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse - sink)``; so attention's kernel, and the
        merges of its parts, need not know of it. Its backward takes the output and the log-sum-exp with the sink, and
        needs no change: ``ds = p (do v^T - rowsum(do out))`` holds with one more logit whose value is zero.
        """
        if not self.model.sinks:
            return
        inside = self.shape.attention
        self.memory_bound(
            "attn.sink",
            "attention.sink",
            inside.tokens,
            inside.q_width + 2 * inside.heads,
            inside.q_width + 2 * inside.heads,
            scratch=table.sink_workspace_bytes(inside.tokens, inside.heads, self.model.head_dim, self.dtype),
            sinks=self.param("sinks"),
            out=accumulates(self.builder.all("attn")),
            lse=accumulates(self.builder.all("lse")),
        )

    def sink_backward(self) -> None:
        """Write the gradient of the sinks: ``-sum over rows of exp(sink - lse) (do out)``, head by head."""
        if (grad_sinks := self.grad("sinks")) is None:
            return
        inside, heads = self.shape.attention, self.shape.attention.heads
        self.memory_bound(
            "attn.sink.bwd",
            "attention.sink.bwd",
            inside.tokens,
            2 * inside.q_width + 2 * heads,
            0,
            scratch=table.sink_backward_workspace_bytes(inside.tokens, heads, self.model.head_dim, self.dtype),
            grad=reads(self.builder.all("d_attn")),
            out=reads(self.builder.all("attn")),
            lse=reads(self.builder.all("lse")),
            sinks=self.param("sinks"),
            grad_sinks=grad_sinks,
        )

    @property
    def _rotated(self) -> tuple[int, int]:
        """Number of heads of Q and K together, and features of one head."""
        return self.shape.heads + self.shape.kv_heads, self.model.head_dim


class AdapterWriter:
    """Emits low-rank adapters beside the products of a layer (``contract/adapters.py``); nothing without them.

    Forward adds to the result of the product, and backward to the gradient of its input:

        low = scale x A^T           out += low B^T
        d_low = scale d_out B       d_x += d_low A       dB += d_out^T low       dA += d_low^T x

    ``low`` is not kept: backward, which reads ``x`` for dA anyway, multiplies it again. So a product without an adapter
    keeps no input, and one with an adapter keeps no more than its input.

    Tensor-parallel ranks add parts of sums: a rank's ``d_low`` of qkv and ffn_up, and its ``low`` of proj and ffn_down.
    What they are multiplied into is summed over the ranks anyway, as are the gradients of the whole sides (``Part``).
    """

    def __init__(self, writer: OperatorWriter) -> None:
        self.writer, self.adapters = writer, writer.decisions.lora
        self._gradients: dict[str, Rows] = {}
        """By product: where the gradient of its low-rank rows lies."""

    def forward(self, name: str, x: Rows, out: Rows, k: int) -> None:
        """Emit the adapter of a product of ``k`` input features, after the product itself."""
        if columns := self._columns(name):
            self._add(name, self._low(name, x, out, k, columns), out, columns)

    def dgrad(self, name: str, grad: Rows, out: Rows, n: int) -> None:
        """Emit the adapter's part of the gradient of the input, of ``n`` features."""
        columns = self._columns(name)
        if not columns:
            return
        low = self._own(f"d_{name}_low", out.slot, out.tokens, columns)
        self._gradients[name] = low
        width = sum(width for _, width in columns)
        operands = {"grad": reads(grad), "weight": self.writer.param(f"{name}.lora_b"), "out": writes(low)}
        self._emit(f"{name}.lora_b.dgrad", "lora.b.dgrad", (out.tokens, self._rank, width), "dgrad", columns, operands)
        operands = {"grad": reads(low), "weight": self.writer.param(f"{name}.lora_a"), "out": accumulates(out)}
        size = (out.tokens, n, self._rank * len(columns))
        self._emit(f"{name}.lora_a.dgrad", "linear.dgrad.add", size, "dgrad", (), operands, adds=True)

    def wgrad(self, name: str, grad: Rows, x: Rows, n: int, *, shard: Rows | None) -> None:
        """Emit the gradients of both sides; ``n``: features of ``x``, ``shard``: as in ``OperatorWriter.wgrad``."""
        columns, writer = self._columns(name), self.writer
        if not columns:
            return
        low, gradient = self._low(name, x, grad, n, columns), self._gradients[name]
        width, rank, into = sum(width for _, width in columns), self._rank, gradient_dtype(writer.decisions)
        kernel, every = writer.decisions.kernels.attention, writer.builder.features(grad.slot)

        def scratch(side: str, m: int, n: int) -> Access | None:
            size = table.wgrad_workspace_bytes(m, n, grad.tokens, writer.dtype, kernel, into=into)
            return writer.builder.scratch(f"{name}.{side}.wgrad.scratch{writer.suffix}", size)

        operands = {"grad": reads(grad), "x": reads(low), "out": writer.grad(f"{name}.lora_b")}
        operands["workspace"] = scratch("lora_b", every, rank * len(columns))
        size = (width, rank, grad.tokens)
        self._emit(f"{name}.lora_b.wgrad", "lora.b.wgrad", size, "wgrad", columns, operands, adds=True)
        operands = {"grad": reads(gradient), "x": reads(x), "shard": reads(shard) if shard else None}
        operands |= {"out": writer.grad(f"{name}.lora_a"), "workspace": scratch("lora_a", rank * len(columns), n)}
        size = (rank * len(columns), n, grad.tokens)
        self._emit(f"{name}.lora_a.wgrad", "linear.wgrad", size, "wgrad", (), operands, adds=True)

    @property
    def _rank(self) -> int:
        assert self.adapters is not None  # products have columns with adapters alone
        return self.adapters.rank

    def _columns(self, name: str) -> tuple[tuple[int, int], ...]:
        """Return the features of a product's result that have adapters: (first, features) of each target."""
        writer = self.writer
        if self.adapters is None or writer.block.find(f"{name}.lora_a") is None:
            return ()
        shape = writer.shape
        layer = LayerShape(ffn_hidden=shape.ffn * shape.divided)
        return adapted_columns(writer.model, layer, shape.divided, self.adapters, name)

    def _low(self, name: str, x: Rows, like: Rows, k: int, columns: tuple[tuple[int, int], ...]) -> Rows:
        """Emit the low-rank rows of ``x``, which lie where the rows of ``like`` do, and return them."""
        low = self._own(f"{self.writer.builder.phase}.{name}_low", like.slot, like.tokens, columns)
        operands = {"x": reads(x), "weight": self.writer.param(f"{name}.lora_a"), "out": writes(low)}
        size = (like.tokens, self._rank * len(columns), k)
        self._emit(f"{name}.lora_a", "lora.a", size, "fprop", (), operands)
        return low

    def _add(self, name: str, low: Rows, out: Rows, columns: tuple[tuple[int, int], ...]) -> None:
        operands = {"x": reads(low), "weight": self.writer.param(f"{name}.lora_b"), "out": accumulates(out)}
        size = (out.tokens, sum(width for _, width in columns), self._rank)
        self._emit(f"{name}.lora_b", "lora.b", size, "fprop", columns, operands, adds=True)

    def _own(self, name: str, like: str, tokens: int, columns: tuple[tuple[int, int], ...]) -> Rows:
        """Return the first ``tokens`` rows of a buffer for low-rank rows, as long as the buffer ``like``."""
        writer = self.writer
        writer.own(name, writer.builder.all(like).tokens, self._rank * len(columns))
        return Rows(name, 0, tokens)

    def _emit(  # noqa: PLR0917 - a product's parts
        self,
        name: str,
        op: str,
        size: tuple[int, int, int],
        gemm_pass: GemmPass,
        columns: tuple[tuple[int, int], ...],
        operands: dict[str, Access | None],
        *,
        adds: bool = False,
    ) -> None:
        writer = self.writer
        work = AdapterGemm(*size, gemm_pass, writer.dtype, columns, adds)
        writer.builder.emit(f"{name}{writer.suffix}", op, Lane.COMPUTE, work, **operands)
