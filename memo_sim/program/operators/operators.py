"""Operators of a layer as instructions: products, residual adds and collectives, forward and backward.

Forward, recompute, backward and the MLP's row blocks all emit these operators. An operator has a work, operands and a
workspace. It reads weights from slot ``params`` and adds their gradients to slot ``grads``; both slots hold one
parameter block. ``suffix`` ends the names of instructions and tells row blocks apart.

Others have modules of their own: ``norms.py``, ``positions.py``, ``sinks.py``, ``adapters.py``, and with ``tp_overlap``
products in chunks, ``chunks.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from memo_sim.contract.hardware import GemmPass
from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.ir.builder import Access, Rows, TemplateBuilder, accumulates, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Lane
from memo_sim.program.ir.work import Collective, Fp8Gemm, Gemm, Rotary, Rowwise
from memo_sim.program.layout.fp8 import ATTENTION_OUTPUT, PRODUCTS, narrow_elements
from memo_sim.program.layout.parameters import Block, autocast, gradient_dtype, half_gradients
from memo_sim.program.layout.shape import Shape
from memo_sim.program.operators import norms
from memo_sim.program.operators import workspaces as table
from memo_sim.program.operators.adapters import AdapterWriter
from memo_sim.program.operators.chunks import gather_chunks, own_row_blocks, scatter_chunks
from memo_sim.program.operators.fp8_operands import Fp8Operands
from memo_sim.program.operators.framework_kernels import WIDE_BYTES
from memo_sim.program.operators.library_calls import by_row_block, scales_call

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
        self.narrow = narrow_elements(decisions, block)
        """Elements at the block's beginning that are not in slot ``params``, because they are in FP8 alone."""
        self.in_chunks = decisions.layout.tp_overlap == "chunked" and shape.gathered
        """Whether products overlap with the collectives of tensor parallelism, chunk by chunk."""
        self.defers_wgrad = False
        """Whether another template computes the weight gradients (``layers/weight_gradients.py``)."""
        self.adapter = AdapterWriter(self, decisions.lora) if decisions.lora else None

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
        return reads(Rows("params", found.first - self.narrow, found.elements)) if found else None

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
        if self.fp8 is not None and self.fp8.weights.has(name):
            return reads(self.fp8.weights.of(name, for_dgrad=for_dgrad))
        return self.param(f"{name}.weight")

    def product(self, name: str, m: int, n: int, k: int, gemm_pass: GemmPass) -> Gemm:
        """Return the work of the product ``name``, in the plan's dtype or in FP8."""
        if self.fp8 is not None and self.fp8.weights.has(name):
            return Fp8Gemm(m, n, k, gemm_pass, self.dtype, PRODUCTS[self.decisions.fp8])
        return Gemm(m, n, k, gemm_pass, self.dtype)

    def made(self, rows: Rows, features: int) -> Rows:
        """Return where the input of a product is made: in its own buffer, or in one that is quantised next."""
        return rows if self.fp8 is None else self.fp8.made(rows, features)

    def quantise(self, made: Rows, rows: Rows, *, for_wgrad: bool = False) -> None:
        """Quantise an input that was made elsewhere (``made``); nothing where it was made in its own buffer.

        ``for_wgrad``: no product reads it, only the gradient of its weight.
        """
        if self.fp8 is not None and made != rows:
            self.fp8.quantise_input(made, rows, self.suffix, for_wgrad=for_wgrad)

    def read_by_product(self, slot: str) -> str:
        """Return the slot of the copy of an input that its product in forward reads."""
        return slot if self.fp8 is None else self.fp8.by_rows(slot)

    def product_input(self, name: str, x: Rows) -> Rows:
        """Return the input of the product ``name`` as it reads it: itself, or a copy in FP8 that is made here."""
        return x if self.fp8 is None or not self.fp8.weights.has(name) else self.fp8.input(x, self.suffix, name)

    def attended(self, slot: str, *, kept: bool = False) -> str:
        """Return the slot of the projection's input, or of its copy in FP8: the one by rows, or the one ``kept``."""
        if self.fp8 is None:
            return slot
        return ATTENTION_OUTPUT if kept else self.fp8.by_rows(ATTENTION_OUTPUT)

    def before_gather(self, grad: Rows, product: str) -> Rows:
        """Return the gradient of a product's result as it is gathered: in FP8 where one copy serves both products."""
        return grad if self.fp8 is None else self.fp8.before_gather(grad, self.suffix, product)

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
        if self.adapter:
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
        size = rows.tokens * builder.row_bytes(source.slot)
        scales = scales_call(self.decisions, builder.dtype(source.slot), self.shape.tp)
        calls = by_row_block(builder, "all_gather", rows, size, scales)
        work = Collective("all_gather", size, self.shape.tp, "tp", calls=calls)
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
        for block in own_row_blocks(self, at):
            mine = Rows(source.slot, source.first + self.shape.shard(block[0] - at[0]), self.shape.shard(block[1]))
            gather_chunks(self, name, mine, full, block, product, tokens)
        return Rows(f"{self.builder.phase}.{full}", *at)

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
        for rows in own_row_blocks(self, (first, x.tokens)):
            some = Rows(x.slot, x.first + rows[0] - first, rows[1])
            scatter_chunks(self, name, some, rows[0], product, tokens)
        return Rows(f"{name}_shard", self.shape.shard(first), self.shape.shard(x.tokens))

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
        calls = by_row_block(self.builder, "reduce_scatter", partial, size)
        work = Collective("reduce_scatter", size, self.shape.tp, "tp", calls=calls)
        self.builder.emit(
            f"{name}.scatter{self.suffix}",
            "reduce_scatter",
            Lane.TP,
            work,
            full=reads(partial),
            shard=writes(rows),
        )
        return rows

    def residual(
        self, name: str, x: str, y: Rows, *, out: str, rows: RowBlock, bias: str, at: RowBlock | None = None
    ) -> None:
        """Emit ``out = x + y (+ bias)`` of a row block; ``at``: its rows in ``x``, where these are others."""
        shard = self.shard_rows(out, rows)
        h = self.shape.hidden
        self.memory_bound(
            name,
            "residual_add",
            shard.tokens,
            2 * h,
            h,
            features=h,
            x=reads(self.shard_rows(x, at or rows)),
            y=reads(y),
            bias=self.param(bias),
            out=writes(shard),
        )

    def dgrad(self, name: str, grad: Rows, out: Rows, n: int, k: int, *, op: str = "linear.dgrad") -> None:
        """Emit ``out = grad @ weight``: ``n`` input features of ``k`` output features."""
        if self.fp8 is not None and self.fp8.weights.has(name):
            grad = self.fp8.gradient(grad, self.suffix, k, name)
        self.builder.emit(
            f"{name}.dgrad{self.suffix}",
            op,
            Lane.COMPUTE,
            self.product(name, out.tokens, n, k, "dgrad"),
            grad=reads(grad),
            weight=self.weight(name, for_dgrad=True),
            out=accumulates(out) if op == "linear.dgrad.add" else writes(out),
        )
        if self.adapter:
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
            if self.adapter:
                self.adapter.wgrad(name, grad, x, n, shard=shard)
            return
        kernel = self.decisions.kernels.attention
        scratch = table.wgrad_workspace_bytes(
            m, n, grad.tokens, self.dtype, kernel, into=gradient_dtype(self.decisions)
        )
        if self.fp8 is not None and self.fp8.weights.has(name):
            grad = self.fp8.gradient(grad, self.suffix, m, name, for_wgrad=True)
            x = self.fp8.input(self.fp8.transposed(x, self.suffix), self.suffix, name, for_wgrad=True)
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
        input_at: RowBlock | None = None,
    ) -> None:
        """Write the backward of ``product`` and of the norm before it, and add the gradient of the residual branch.

        ``source``: the norm's output if it is gathered already, else None.
        ``rows``: the row block in ``norm_input``, ``residual_grad`` and ``out``.
        ``at``: its rows in the norm's output and statistics and in the product's input gradient. The buffer of that
        gradient holds ``tokens`` rows; 0 for all of the rank's.
        ``input_at``: its rows in ``norm_input``, where these are not ``rows``.

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
        norms.norm_backward(
            self,
            norm,
            grad=summed,
            norm_input=norm_input,
            residual_grad=residual_grad,
            out=out,
            rows=rows,
            at=at,
            input_at=input_at,
        )
