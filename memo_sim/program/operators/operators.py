"""Operators of a layer as instructions: what forward, recompute, backward and the MLP's row blocks are written with.

An operator is its work, its operands and its workspace; weights come from the slot ``params``, their gradients go to
``grads``, of one parameter block. ``suffix`` tells row blocks apart: it ends the names of what they emit.
"""

from __future__ import annotations

from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.ir.builder import Access, Rows, TemplateBuilder, accumulates, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Lane
from memo_sim.program.ir.work import Collective, Gemm, Rowwise
from memo_sim.program.layout.parameters import Block, half_gradients
from memo_sim.program.layout.shape import Shape
from memo_sim.program.operators import workspaces as table

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
        self.defers_wgrad = False
        """Whether weight gradients are left to another template (``weight_gradients.py``)."""

    def own(self, name: str, tokens: int, features: int, cls: BufferClass = BufferClass.TRANSIENT) -> str:
        """Return a template-own buffer, made at its first use (row blocks share it)."""
        if not self.builder.has(name):
            self.builder.own(name, cls, self.dtype, tokens, features)
        return name

    def param(self, name: str) -> Access | None:
        """Return a parameter as an operand that is read, None where the model has none of that name."""
        found = self.block.find(name)
        return reads(Rows("params", found.first, found.elements)) if found else None

    def grad(self, name: str) -> Access | None:
        """Return a parameter's gradient as an operand that is added to, None where there is none."""
        found = self.block.find(name)
        return accumulates(Rows("grads", found.first, found.elements)) if found else None

    def shard_rows(self, slot: str, rows: RowBlock) -> Rows:
        """Return the rows of a sharded tensor that stand for a row block of the rank."""
        return Rows(slot, self.shape.shard(rows[0]), self.shape.shard(rows[1]))

    def memory_bound(
        self,
        name: str,
        op: str,
        rows: int,
        read: int,
        written: int,
        *,
        scratch: int = 0,
        first: int = 0,
        **operands: Access | None,
    ) -> None:
        """Emit a memory-bound operator that reads and writes so many elements a row, with a workspace of its own."""
        work = Rowwise(op, rows, rows * read * self.size, rows * written * self.size, first)
        workspace = self.builder.scratch(f"{self.builder.phase}.{name}{self.suffix}.scratch", scratch)
        self.builder.emit(name + self.suffix, op, Lane.COMPUTE, work, **operands, workspace=workspace)

    def norm(self, which: str, source: str, rows: RowBlock, at: RowBlock) -> None:
        """Emit a norm of a row block; its output and statistics lie at rows ``at`` of their buffers."""
        op = "layer_norm" if self.model.family == "gpt" else "rms_norm"
        shard = self.shard_rows(which, at)
        self.memory_bound(
            which,
            op,
            shard.tokens,
            self.shape.hidden,
            self.shape.hidden,
            scratch=table.norm_workspace_bytes(shard.tokens, self.shape.hidden, self.dtype, self.rowwise),
            x=reads(self.shard_rows(source, rows)),
            weight=self.param(f"{which}.weight"),
            bias=self.param(f"{which}.bias"),
            out=writes(shard),
            stats=writes(self.shard_rows(f"{which}_stats", at)),
        )

    def linear(self, name: str, x: Rows, out: Rows, n: int, k: int, *, bias: bool = True) -> None:
        """Emit ``out = x @ weight.T`` with ``n`` features of ``k``."""
        self.builder.emit(
            name + self.suffix,
            "linear",
            Lane.COMPUTE,
            Gemm(out.tokens, n, k, "fprop", self.dtype),
            x=reads(x),
            weight=self.param(f"{name}.weight"),
            bias=self.param(f"{name}.bias") if bias else None,
            out=writes(out),
        )

    def gather(self, name: str, source: Rows, full: str, first: int, *, tokens: int = 0) -> Rows:
        """Gather a sequence-parallel shard's rows into ``full``; without sequence parallelism return the source.

        ``tokens``: what ``full`` has room for, all of the rank's when 0.
        The buffer is the phase's own: what recompute gathers is dead long before backward gathers it again.
        """
        if not self.shape.gathered:
            return source
        full = f"{self.builder.phase}.{full}"
        self.own(full, tokens or self.shape.tokens, self.shape.hidden, BufferClass.EXCHANGE)
        rows = Rows(full, first, source.tokens * self.shape.tp)
        work = Collective("all_gather", rows.tokens * self.shape.hidden * self.size, self.shape.tp, "tp")
        self.builder.emit(
            f"{name}.gather{self.suffix}", "all_gather", Lane.COLLECTIVE, work, shard=reads(source), full=writes(rows)
        )
        return rows

    def gather_again(self, name: str, source: Rows, full: str, first: int, *, tokens: int = 0) -> Rows:
        """Gather what a weight gradient alone reads; nothing where those are left to another template.

        Megatron-LM saves only its shard of a norm's output, and gathers it again beside the input's gradient. The
        weight's gradient reads the shard as well (``wgrad``): were the gather its last reader, what is born in its
        place, the input's gradient, would wait for the gather.
        """
        return source if self.defers_wgrad else self.gather(f"{name}.again", source, full, first, tokens=tokens)

    def scatter(self, name: str, partial: Rows, *, tokens: int = 0, first: int | None = None) -> Rows:
        """Sum ``partial`` over the tensor-parallel ranks: into this rank's token shard, or in place as a whole.

        ``tokens``: those that the shard's buffer has room for the part of, all of the rank's when 0. ``first``: the
        rank's row that ``partial`` begins with, where its buffer has room for fewer rows than the shard's.
        """
        size = partial.tokens * self.shape.hidden * self.size
        if self.shape.tp == 1:
            return partial
        if not self.shape.gathered:
            work = Collective("all_reduce", size, self.shape.tp, "tp")
            self.builder.emit(
                f"{name}.reduce{self.suffix}", "all_reduce", Lane.COLLECTIVE, work, tensor=accumulates(partial)
            )
            return partial
        room = self.shape.shard(tokens or self.shape.tokens)
        shard = self.own(f"{name}_shard", room, self.shape.hidden, BufferClass.EXCHANGE)
        begun = partial.first if first is None else first
        rows = Rows(shard, self.shape.shard(begun), self.shape.shard(partial.tokens))
        work = Collective("reduce_scatter", size, self.shape.tp, "tp")
        self.builder.emit(
            f"{name}.scatter{self.suffix}",
            "reduce_scatter",
            Lane.COLLECTIVE,
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
            x=reads(self.shard_rows(x, rows)),
            y=reads(y),
            bias=self.param(bias),
            out=writes(shard),
        )

    def dgrad(self, name: str, grad: Rows, out: Rows, n: int, k: int) -> None:
        """Emit ``out = grad @ weight``: ``n`` input features of ``k`` output features."""
        self.builder.emit(
            f"{name}.dgrad{self.suffix}",
            "linear.dgrad",
            Lane.COMPUTE,
            Gemm(out.tokens, n, k, "dgrad", self.dtype),
            grad=reads(grad),
            weight=self.param(f"{name}.weight"),
            out=writes(out),
        )

    def wgrad(self, name: str, grad: Rows, x: Rows, m: int, n: int, *, shard: Rows | None = None) -> None:
        """Emit the weight's gradient, ``m`` output features by ``n`` input features, added to what is there.

        ``shard``: what ``x`` was gathered from, which is held until then.
        """
        if self.defers_wgrad:
            return
        kernel = self.decisions.kernels.attention
        scratch = table.wgrad_workspace_bytes(m, n, grad.tokens, self.dtype, kernel)
        apart = half_gradients(self.decisions)
        product = self.builder.all(self.own(f"{name}.wgrad.product{self.suffix}", m, n)) if apart else None
        self.builder.emit(
            f"{name}.wgrad{self.suffix}",
            "linear.wgrad",
            Lane.COMPUTE,
            Gemm(m, n, grad.tokens, "wgrad", self.dtype),
            grad=reads(grad),
            x=reads(x),
            shard=reads(shard) if shard else None,
            out=writes(product) if product else self.grad(f"{name}.weight"),
            workspace=self.builder.scratch(f"{name}.wgrad.scratch{self.suffix}", scratch),
        )
        if product:
            added = Rowwise("grad.accumulate", m, 2 * self.size * m * n, self.size * m * n)
            self.builder.emit(
                f"{name}.wgrad.add{self.suffix}",
                "grad.accumulate",
                Lane.COMPUTE,
                added,
                x=reads(product),
                out=self.grad(f"{name}.weight"),
            )

    def bgrad(self, name: str, grad: Rows, width: int) -> None:
        """Sum the output gradient over rows, where the product has a bias; of its token shard, where it has one."""
        if self.block.find(f"{name}.bias") and not self.defers_wgrad:
            self.memory_bound(
                f"{name}.bgrad",
                "bias.bwd",
                grad.tokens,
                width,
                0,
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
        """Write the backward of ``product`` and of the norm before it, plus the residual branch's gradient.

        ``source`` is the norm's output where it is gathered already; what lies inside (its statistics, the product's
        input gradient) has room for ``tokens`` (all when 0) and is at rows ``at`` there. The input gradient is summed
        over the ranks while the weight gradient is computed.
        """
        width, hidden = self.builder.features(grad.slot), self.shape.hidden
        shard = None
        if source is None:
            mine = self.shard_rows(norm, at)
            source = self.gather_again(norm, mine, f"{norm}_full", at[0])
            shard = mine if source != mine else None
        partial = Rows(self.own(f"d_{norm}", tokens or self.shape.tokens, hidden), *at)
        self.dgrad(product, grad, partial, hidden, width)
        summed = self.scatter(f"d_{norm}", partial, tokens=tokens)
        self.wgrad(product, grad, source, width, hidden, shard=shard)
        self.bgrad(product, grad, width)
        op = "layer_norm.bwd" if self.model.family == "gpt" else "rms_norm.bwd"
        written = self.shard_rows(out, rows)
        self.memory_bound(
            f"{norm}.bwd",
            op,
            written.tokens,
            4 * hidden,
            2 * hidden,
            scratch=table.norm_backward_workspace_bytes(written.tokens, hidden, self.dtype, self.rowwise),
            grad=reads(summed),
            x=reads(self.shard_rows(norm_input, rows)),
            stats=reads(self.shard_rows(f"{norm}_stats", at)),
            weight=self.param(f"{norm}.weight"),
            residual_grad=reads(self.shard_rows(residual_grad, rows)),
            out=writes(written),
            grad_weight=self.grad(f"{norm}.weight"),
            grad_bias=self.grad(f"{norm}.bias"),
        )

    def positions(self, packed: Rows, raw: Rows, *, first: int = 0) -> None:
        """Write what follows the packed product on Q and K in place: their norm (its input goes to ``raw``), rotary.

        ``first``: the rank's row that their buffer's first one is.
        """
        tokens, width = packed.tokens, self.shape.q_width + self.shape.kv_width
        if self.model.qk_norm:
            self.memory_bound(
                "qk_norm",
                "qk_norm",
                tokens,
                width,
                2 * width,
                scratch=table.qk_norm_workspace_bytes(tokens, *self._rotated, self.dtype),
                qkv=accumulates(packed),
                q_weight=self.param("q_norm.weight"),
                k_weight=self.param("k_norm.weight"),
                raw=writes(raw),
            )
        if not self.model.learned_positions:
            scratch = table.rotary_workspace_bytes(tokens, *self._rotated, self.dtype, self.rowwise)
            qkv = accumulates(packed)
            self.memory_bound("rotary", "rotary", tokens, width, width, scratch=scratch, first=first, qkv=qkv)

    def positions_backward(self, d_qkv: Rows, *, first: int = 0) -> None:
        """Write the backward of ``positions``, in place in the gradient; reads the same rows of ``qk_raw``."""
        tokens, width, grad = d_qkv.tokens, self.shape.q_width + self.shape.kv_width, accumulates(d_qkv)
        if not self.model.learned_positions:
            scratch = table.rotary_workspace_bytes(tokens, *self._rotated, self.dtype, self.rowwise)
            self.memory_bound("rotary.bwd", "rotary.bwd", tokens, width, width, scratch=scratch, first=first, grad=grad)
        if self.model.qk_norm:
            self.memory_bound(
                "qk_norm.bwd",
                "qk_norm.bwd",
                tokens,
                2 * width,
                width,
                scratch=table.qk_norm_backward_workspace_bytes(tokens, *self._rotated, self.dtype),
                grad=grad,
                raw=reads(Rows("qk_raw", d_qkv.first, d_qkv.tokens)),
                q_weight=self.param("q_norm.weight"),
                k_weight=self.param("k_norm.weight"),
                grad_q_weight=self.grad("q_norm.weight"),
                grad_k_weight=self.grad("k_norm.weight"),
            )

    @property
    def _rotated(self) -> tuple[int, int]:
        """Heads of Q and K together, and their size."""
        return self.shape.heads + self.shape.kv_heads, self.model.head_dim
