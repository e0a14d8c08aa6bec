"""One transformer layer, operator by operator: forward, recompute of a row block, backward.

Forward of a row block [first, first + tokens) of the rank's tokens (products are row-wise, so blocks are independent):

    x -> norm1 -> [all-gather] -> qkv -> (qk norm, rotary) | attention over all rows | -> proj -> [reduce-scatter]
      -> resid = x + proj -> norm2 -> [all-gather] -> up -> act | -> down -> [reduce-scatter] -> next x = resid + down

Everything left of the last bar is rebuilt by recompute: QKV, projection and first FFN product, not the second, and
not attention (MEMO 4.1). Collectives in brackets exist with tensor parallelism; with Megatron's sequence parallelism
they gather and scatter token shards, without it they are all-reduces of whole tensors after proj and down (and their
mirror images in backward).
"""

from __future__ import annotations

from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program import attention, selective
from memo_sim.program import kernel_table as table
from memo_sim.program.builder import Access, Rows, TemplateBuilder, accumulates, reads, writes
from memo_sim.program.instruction import BufferClass, Lane
from memo_sim.program.parameters import Block
from memo_sim.program.shape import Shape
from memo_sim.program.ulysses import Ulysses
from memo_sim.program.work import Collective, Gemm, Rowwise

RowBlock = tuple[int, int]
"""First token and number of tokens, in tokens of the rank (not of the sequence-parallel shard)."""


class LayerWriter:
    """Writes one layer's instructions into a template whose slots are named after the skeletal tensors.

    Slots ``params``, ``grads`` are the layer's parameter and gradient blocks; ``next_x`` receives the layer's output.
    """

    def __init__(self, builder: TemplateBuilder, decisions: Decisions, shape: Shape, block: Block) -> None:
        self.builder = builder
        self.decisions = decisions
        self.model: Model = decisions.model
        self.shape = shape
        self.block = block
        self.dtype, self.rowwise = decisions.dtype, decisions.kernels.rowwise
        self.size = DTYPE_BYTES[decisions.dtype]
        self.ulysses = Ulysses(builder, shape, decisions.dtype)
        self.suffix = ""

    def forward(self, blocks: list[RowBlock], out: str) -> None:
        """Write the whole forward; row-wise operators run once per row block."""
        for i, rows in enumerate(blocks):
            self.suffix = f".r{i}" if len(blocks) > 1 else ""
            self._before_attention(rows)
        self.suffix = ""
        attention.forward(self.builder, self.decisions, self.shape.attention)
        for i, rows in enumerate(blocks):
            self.suffix = f".r{i}" if len(blocks) > 1 else ""
            self._after_attention(rows)
        self.suffix = ""
        self._second_product(out)

    def recompute(self, rows: RowBlock, index: int, *, whole: bool) -> None:
        """Write the rebuilding of one row block; ``whole``: the layer's forward once more, its output thrown away.

        A whole layer is what activation checkpointing replays (one block, attention and second product included).
        """
        self.suffix = "" if whole else f".r{index}"
        self._before_attention(rows)
        if whole:
            attention.forward(self.builder, self.decisions, self.shape.attention)
        self._after_attention(rows)
        self.suffix = ""
        if whole:
            self._second_product(self._own("rebuilt_out", self.shape.shard_tokens, self.shape.hidden))

    def _own(self, name: str, tokens: int, features: int, cls: BufferClass = BufferClass.TRANSIENT) -> str:
        """Return a template-own buffer, made at its first use (row blocks share it)."""
        if not self.builder.has(name):
            self.builder.own(name, cls, self.dtype, tokens, features)
        return name

    def _param(self, name: str) -> Access | None:
        found = self.block.find(name)
        return reads(Rows("params", found.first, found.elements)) if found else None

    def _grad(self, name: str) -> Access | None:
        found = self.block.find(name)
        return accumulates(Rows("grads", found.first, found.elements)) if found else None

    def _shard_rows(self, slot: str, rows: RowBlock) -> Rows:
        return Rows(slot, self.shape.shard(rows[0]), self.shape.shard(rows[1]))

    def _rowwise(
        self, name: str, op: str, rows: int, read: int, written: int, *, scratch: int = 0, **operands: Access | None
    ) -> None:
        """Emit a memory-bound operator that reads and writes so many elements a row, with a workspace of its own."""
        work = Rowwise(op, rows, rows * read * self.size, rows * written * self.size)
        workspace = self.builder.scratch(f"{self.builder.phase}.{name}{self.suffix}.scratch", scratch)
        self.builder.emit(name + self.suffix, op, Lane.COMPUTE, work, **operands, workspace=workspace)

    def _norm(self, which: str, source: str, rows: RowBlock) -> None:
        op = "layer_norm" if self.model.family == "gpt" else "rms_norm"
        shard = self._shard_rows(which, rows)
        self._rowwise(
            which,
            op,
            shard.tokens,
            self.shape.hidden,
            self.shape.hidden,
            scratch=table.norm_workspace_bytes(shard.tokens, self.shape.hidden, self.dtype, self.rowwise),
            x=reads(self._shard_rows(source, rows)),
            weight=self._param(f"{which}.weight"),
            bias=self._param(f"{which}.bias"),
            out=writes(shard),
            stats=writes(self._shard_rows(f"{which}_stats", rows)),
        )

    def _linear(self, name: str, x: Rows, out: Rows, n: int, k: int, *, bias: bool = True) -> None:
        self.builder.emit(
            name + self.suffix,
            "linear",
            Lane.COMPUTE,
            Gemm(out.tokens, n, k, "fprop", self.dtype),
            x=reads(x),
            weight=self._param(f"{name}.weight"),
            bias=self._param(f"{name}.bias") if bias else None,
            out=writes(out),
        )

    def gather(self, name: str, source: Rows, full: str, first: int) -> Rows:
        """Gather a sequence-parallel shard's rows into ``full``; without sequence parallelism return the source.

        The buffer is the phase's own: what recompute gathers is dead long before backward gathers it again.
        """
        if not self.shape.gathered:
            return source
        full = f"{self.builder.phase}.{full}"
        self._own(full, self.shape.tokens, self.shape.hidden, BufferClass.EXCHANGE)
        rows = Rows(full, first, source.tokens * self.shape.tp)
        work = Collective("all_gather", rows.tokens * self.shape.hidden * self.size, self.shape.tp, "tp")
        self.builder.emit(
            f"{name}.gather{self.suffix}", "all_gather", Lane.COLLECTIVE, work, shard=reads(source), full=writes(rows)
        )
        return rows

    def scatter(self, name: str, partial: Rows) -> Rows:
        """Sum ``partial`` over the tensor-parallel ranks: into this rank's token shard, or in place as a whole."""
        size = partial.tokens * self.shape.hidden * self.size
        if self.shape.tp == 1:
            return partial
        if not self.shape.gathered:
            work = Collective("all_reduce", size, self.shape.tp, "tp")
            self.builder.emit(
                f"{name}.reduce{self.suffix}", "all_reduce", Lane.COLLECTIVE, work, tensor=accumulates(partial)
            )
            return partial
        shard = self._own(f"{name}_shard", self.shape.shard_tokens, self.shape.hidden, BufferClass.EXCHANGE)
        rows = Rows(shard, self.shape.shard(partial.first), self.shape.shard(partial.tokens))
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

    def _before_attention(self, rows: RowBlock) -> None:
        first, tokens = rows
        shape, model = self.shape, self.model
        self._norm("norm1", "x", rows)
        source = self.gather("norm1", self._shard_rows("norm1", rows), "norm1_full", first)
        packed = Rows(self._own(self.ulysses.home("qkv"), shape.tokens, shape.qkv_width), first, tokens)
        self._linear("qkv", source, packed, shape.qkv_width, shape.hidden)
        width = shape.q_width + shape.kv_width
        if model.qk_norm:
            self._rowwise(
                "qk_norm",
                "qk_norm",
                tokens,
                width,
                2 * width,
                scratch=table.qk_norm_workspace_bytes(tokens, *self._rotated, self.dtype),
                qkv=accumulates(packed),
                q_weight=self._param("q_norm.weight"),
                k_weight=self._param("k_norm.weight"),
                raw=writes(Rows("qk_raw", first, tokens)),
            )
        if not model.learned_positions:
            scratch = table.rotary_workspace_bytes(tokens, *self._rotated, self.dtype, self.rowwise)
            self._rowwise("rotary", "rotary", tokens, width, width, scratch=scratch, qkv=accumulates(packed))
        self.ulysses.to_heads("qkv", packed, self.suffix)

    @property
    def _rotated(self) -> tuple[int, int]:
        """Heads of Q and K together, and their size."""
        return self.shape.heads + self.shape.kv_heads, self.model.head_dim

    def _after_attention(self, rows: RowBlock) -> None:
        first, tokens = rows
        shape, model = self.shape, self.model
        self._own("proj_out", shape.tokens, shape.hidden)
        product = Rows("proj_out", first, tokens)
        attended = Rows(self.ulysses.home("attn"), first, tokens)
        self.ulysses.to_tokens("attn", attended, self.suffix)
        self._linear("proj", attended, product, shape.hidden, shape.q_width, bias=False)
        self._residual("resid_add", "x", self.scatter("proj", product), out="resid", rows=rows, bias="proj.bias")
        self._norm("norm2", "resid", rows)
        source = self.gather("norm2", self._shard_rows("norm2", rows), "norm2_full", first)
        width = 2 * shape.ffn if model.gated else shape.ffn
        self._linear("ffn_up", source, Rows("up", first, tokens), width, shape.hidden)
        self._rowwise(
            "act",
            self._activation,
            tokens,
            width,
            shape.ffn,
            x=reads(Rows("up", first, tokens)),
            out=writes(Rows("act", first, tokens)),
        )

    @property
    def _activation(self) -> str:
        return "swiglu" if self.model.gated else "gelu"

    def _residual(self, name: str, x: str, y: Rows, *, out: str, rows: RowBlock, bias: str) -> None:
        shard = self._shard_rows(out, rows)
        h = self.shape.hidden
        self._rowwise(
            name,
            "residual_add",
            shard.tokens,
            2 * h,
            h,
            x=reads(self._shard_rows(x, rows)),
            y=reads(y),
            bias=self._param(bias),
            out=writes(shard),
        )

    def _second_product(self, out: str) -> None:
        shape = self.shape
        self._own("down_out", shape.tokens, shape.hidden)
        product = self.builder.all("down_out")
        self._linear("ffn_down", self.builder.all("act"), product, shape.hidden, shape.ffn, bias=False)
        whole = (0, shape.tokens)
        self._residual("out_add", "resid", self.scatter("ffn_down", product), out=out, rows=whole, bias="ffn_down.bias")

    def backward(self, grad_out: str, grad_in: str) -> None:
        """Write the backward: reads ``grad_out`` (of the layer's output), writes ``grad_in`` (of its input)."""
        shape, builder = self.shape, self.builder
        width = 2 * shape.ffn if self.model.gated else shape.ffn
        dy = self.gather("ffn_down.grad", builder.all(grad_out), "d_ffn_down_full", 0)
        self._own("d_act", shape.tokens, shape.ffn)
        self._dgrad("ffn_down", dy, builder.all("d_act"), shape.ffn, shape.hidden)
        self._wgrad("ffn_down", dy, builder.all("act"), shape.hidden, shape.ffn)
        self._bgrad("ffn_down", builder.all(grad_out), shape.hidden)
        self._own("d_up", shape.tokens, width)
        self._rowwise(
            "act.bwd",
            f"{self._activation}.bwd",
            shape.tokens,
            shape.ffn + width,
            width,
            grad=reads(builder.all("d_act")),
            x=reads(builder.all("up")),
            grad_x=writes(builder.all("d_up")),
        )
        self._own("d_resid", shape.shard_tokens, shape.hidden)
        self._product_and_norm(
            "ffn_up", "norm2", grad="d_up", width=width, norm_input="resid", residual_grad=grad_out, out="d_resid"
        )
        d_proj = self.gather("proj.grad", builder.all("d_resid"), "d_proj_full", 0)
        inside, home = shape.attention, self.ulysses.home
        d_attn = builder.all(self._own(home("d_attn"), shape.tokens, shape.q_width))
        self._dgrad("proj", d_proj, d_attn, shape.q_width, shape.hidden)
        self._own("d_attn", inside.tokens, inside.q_width)
        self.ulysses.to_heads("d_attn", d_attn)
        self._wgrad("proj", d_proj, builder.all(home("attn")), shape.hidden, shape.q_width)
        self._bgrad("proj", builder.all("d_resid"), shape.hidden)
        self._own("d_qkv", inside.tokens, inside.qkv_width)
        if self.decisions.recompute == "selective":
            selective.rebuild(builder, self.decisions, inside)
        attention.backward(builder, self.decisions, inside)
        d_qkv = self._own(home("d_qkv"), shape.tokens, shape.qkv_width)
        self.ulysses.to_tokens("d_qkv", builder.all(d_qkv))
        self._positions_backward(d_qkv)
        self._product_and_norm(
            "qkv", "norm1", grad=d_qkv, width=shape.qkv_width, norm_input="x", residual_grad="d_resid", out=grad_in
        )

    def _positions_backward(self, d_qkv: str) -> None:
        shape, builder = self.shape, self.builder
        width = shape.q_width + shape.kv_width
        if not self.model.learned_positions:
            scratch = table.rotary_workspace_bytes(shape.tokens, *self._rotated, self.dtype, self.rowwise)
            grad = accumulates(builder.all(d_qkv))
            self._rowwise("rotary.bwd", "rotary.bwd", shape.tokens, width, width, scratch=scratch, grad=grad)
        if self.model.qk_norm:
            self._rowwise(
                "qk_norm.bwd",
                "qk_norm.bwd",
                shape.tokens,
                2 * width,
                width,
                scratch=table.qk_norm_backward_workspace_bytes(shape.tokens, *self._rotated, self.dtype),
                grad=accumulates(builder.all(d_qkv)),
                raw=reads(builder.all("qk_raw")),
                q_weight=self._param("q_norm.weight"),
                k_weight=self._param("k_norm.weight"),
                grad_q_weight=self._grad("q_norm.weight"),
                grad_k_weight=self._grad("k_norm.weight"),
            )

    def _dgrad(self, name: str, grad: Rows, out: Rows, n: int, k: int) -> None:
        self.builder.emit(
            f"{name}.dgrad",
            "linear.dgrad",
            Lane.COMPUTE,
            Gemm(out.tokens, n, k, "dgrad", self.dtype),
            grad=reads(grad),
            weight=self._param(f"{name}.weight"),
            out=writes(out),
        )

    def _wgrad(self, name: str, grad: Rows, x: Rows, m: int, n: int) -> None:
        kernel = self.decisions.kernels.attention
        scratch = table.wgrad_workspace_bytes(m, n, grad.tokens, self.dtype, kernel)
        self.builder.emit(
            f"{name}.wgrad",
            "linear.wgrad",
            Lane.COMPUTE,
            Gemm(m, n, grad.tokens, "wgrad", self.dtype),
            grad=reads(grad),
            x=reads(x),
            out=self._grad(f"{name}.weight"),
            workspace=self.builder.scratch(f"{name}.wgrad.scratch", scratch),
        )

    def _bgrad(self, name: str, grad: Rows, width: int) -> None:
        """Sum the output gradient over rows, where the product has a bias; of its token shard, where it has one."""
        if self.block.find(f"{name}.bias"):
            self._rowwise(
                f"{name}.bgrad",
                "bias.bwd",
                grad.tokens,
                width,
                0,
                scratch=table.bias_backward_workspace_bytes(grad.tokens, width, self.dtype),
                grad=reads(grad),
                out=self._grad(f"{name}.bias"),
            )

    def _product_and_norm(
        self, product: str, norm: str, *, grad: str, width: int, norm_input: str, residual_grad: str, out: str
    ) -> None:
        """Backward through ``product`` and the norm before it, plus the residual branch's gradient.

        The input gradient is summed over the ranks while the weight gradient is computed, and the norm's output is
        gathered again (Megatron-LM saves only its shard) while the input gradient is.
        """
        shape, builder = self.shape, self.builder
        source = self.gather(f"{norm}.again", builder.all(norm), f"{norm}_full", 0)
        partial = self._own(f"d_{norm}", shape.tokens, shape.hidden)
        self._dgrad(product, builder.all(grad), builder.all(partial), shape.hidden, width)
        summed = self.scatter(f"d_{norm}", builder.all(partial))
        self._wgrad(product, builder.all(grad), source, width, shape.hidden)
        self._bgrad(product, builder.all(grad), width)
        op = "layer_norm.bwd" if self.model.family == "gpt" else "rms_norm.bwd"
        rows = shape.shard_tokens
        self._rowwise(
            f"{norm}.bwd",
            op,
            rows,
            4 * shape.hidden,
            2 * shape.hidden,
            scratch=table.norm_backward_workspace_bytes(rows, shape.hidden, self.dtype, self.rowwise),
            grad=reads(summed),
            x=reads(builder.all(norm_input)),
            stats=reads(builder.all(f"{norm}_stats")),
            weight=self._param(f"{norm}.weight"),
            residual_grad=reads(builder.all(residual_grad)),
            out=writes(builder.all(out)),
            grad_weight=self._grad(f"{norm}.weight"),
            grad_bias=self._grad(f"{norm}.bias"),
        )
