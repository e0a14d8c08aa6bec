"""METP: the same ranks divide a layer's tokens and its weights (Liang et al., O = f(AB)C without a whole tensor).

Tokens are divided into zigzag chunks, as in context parallelism. W_in and W_qkv are divided by columns, W_out and
W_proj by rows, so rank r has the r-th of p parts of heads and features. Norms are whole on every rank.

    MLP        Step j computes T = norm2 W_in(j), D = f(T), O += D W_out(j); weights pass round a ring of ``Exchange``
               (Algorithm 1). T and D are not kept: backward recomputes them while the weights pass round again
               (Algorithm 2). Gradient sums start at step 1, one rank after the rank that has the weights, and return to
               it after p - 1 hops. Each step adds to them last, so three products hide a hop.
    attention  For part j of the heads, rank j broadcasts W_qkv(j) and W_proj(j). Every rank computes Q, K, V of these
               heads for its tokens, K and V pass round a ring (``attention/ring.py``), and O += attn(j) W_proj(j)
               (Algorithms 3 and 5). Backward broadcasts again, recomputes Q, K, V, and reduces weight gradients to rank
               j (Algorithms 4 and 6).

Products hide the last exchanges too:

    last hop of gradient sums    product of the input's gradient in the last step
    last hop of K and V          product of W_proj's gradient
    last reduction               product of the input's gradient
    first broadcast              norm before attention

The MLP may run in row blocks: each step loops over them, so that T, D and their gradients have room for one block.
Attention may run in chunks of tokens, part by part (``metp_chunks.py``).

Memory is allocated in program order. A buffer that is born after an exchange waits for it, if another buffer dies in
that exchange.

      p2p         [W 1][W 2]  [W 3]                p2p         [kv 1][kv 2]      [kv 1][kv 2]
      compute     [step 0][step 1][step 2]..       collective  [W(0)][W(1)]  [W(2)]
                                                   compute          [part 0 .......][part 1 .......]

The weights of consecutive steps use two exchange buffers in turn. Without ``overlap_exchanges`` every exchange of
weights, keys and values runs on the compute lane, and no kernel runs beside it; the buffers are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec.structs import replace

from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.attention import attention, ring
from memo_sim.program.attention.ring import DOUBLE_BUFFER_SLOTS
from memo_sim.program.ir.builder import Rows, TemplateBuilder, accumulates, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Lane
from memo_sim.program.ir.kinds import Phase
from memo_sim.program.ir.work import Collective, Exchange, Rowwise
from memo_sim.program.layers.metp_chunks import ChunkedPart
from memo_sim.program.layers.metp_operators import MetpWriter
from memo_sim.program.layers.metp_weights import Bundle, attention_bundle, ffn_bundle
from memo_sim.program.layout.attention_chunks import in_chunks
from memo_sim.program.layout.parameters import Block
from memo_sim.program.layout.shape import Shape
from memo_sim.program.layout.skeletal import Fate, Skeletal, norm_statistics
from memo_sim.program.operators import norms
from memo_sim.program.operators import workspaces as table
from memo_sim.program.operators.operators import RowBlock
from memo_sim.program.operators.positions import positions, positions_backward

GRAD_DTYPE: Literal["fp32"] = "fp32"
"""Dtype of gradient sums."""


class MetpLayer(MetpWriter):
    """Writes one layer under METP; slots are those of ``LayerWriter``, skeletal tensors those of ``metp_tensors``."""

    def __init__(self, builder: TemplateBuilder, decisions: Decisions, shape: Shape, block: Block) -> None:
        super().__init__(builder, decisions, shape, block)
        self.ranks = shape.metp
        self.inside = replace(shape, cp=shape.metp, ring="metp")
        """Sizes of one part of the heads; its keys and values pass round the ring."""
        self.ffn, self.attn = ffn_bundle(block), attention_bundle(block)
        self.chunked = in_chunks(decisions)
        self.mlp_rows = min(decisions.mlp_chunk_tokens or shape.tokens, shape.tokens)
        """Rows of a buffer inside the MLP."""
        self.up_width = 2 * shape.ffn if self.model.gated else shape.ffn

    def forward(self, blocks: list[RowBlock], out: str) -> None:
        """Write the whole forward; only the projection runs in row blocks, because recompute repeats it."""
        self._attend(blocks, store=False)
        self._whole_norm("norm2", "resid")
        for step in range(self.ranks):
            self._pass_weights(step)
            self._at(self.ffn, step)
            for block in self._mlp_blocks():
                act = self._activated(block)
                out_rows = Rows(self._owned("down_out").slot, *block)
                self.sum_linear("ffn_down", act, out_rows, self.shape.hidden, self.shape.ffn, step)
        self._use_own_weights()
        whole = (0, self.shape.tokens)
        self.residual("out_add", "resid", self._all("down_out"), out=out, rows=whole, bias="ffn_down.bias")

    def recompute(self, rows: RowBlock, index: int, *, whole: bool) -> None:
        """Write the recompute of the residual: ``whole`` for all rows with attention, else of a row block without it.

        For a row block, the norms that are kept are recomputed too.
        """
        if whole:
            self._attend([rows], store=True)
            return
        at = f".r{index}"
        self._kept_norm("norm1", "x", rows, at)
        self._broadcast(0)
        for part in range(self.ranks):
            self._fetch(part)
            self._project(part, [rows], at)
        self._use_own_weights()
        self._add_projection(rows, at)
        self._kept_norm("norm2", "resid", rows, at)

    def backward(self, grad_out: str, grad_in: str) -> None:
        """Write the backward: reads ``grad_out`` (of the layer's output), writes ``grad_in`` (of its input)."""
        self._mlp_backward(grad_out)
        self._attention_backward(grad_in)

    def _attend(self, blocks: list[RowBlock], *, store: bool) -> None:
        """Write the attention half of the forward, up to the residual.

        ``store``: chunks of attention store what backward reads on the host.
        """
        self._broadcast(0)
        if not self.chunked:
            self._whole_norm("norm1", "x")
        for part in range(self.ranks):
            self._fetch(part)
            if self.chunked:
                self._chunks(part).attend(store=store)
                continue
            self._heads(part)
            attention.forward(self._part(part), self.decisions, self.inside)
            self._project(part, blocks, "")
        self._use_own_weights()
        self._add_projection((0, self.shape.tokens), "")

    def _heads(self, part: int) -> None:
        """Write Q, K and V of a part of the heads."""
        shape, self.suffix = self.shape, f".g{part}"
        packed = Rows(self.own("qkv", shape.tokens, shape.qkv_width), 0, shape.tokens)
        self.linear("qkv", self._all("norm1"), packed, shape.qkv_width, shape.hidden)
        if self.model.qk_norm:
            self.own("qk_raw", shape.tokens, shape.q_width + shape.kv_width)
        positions(self, packed, Rows("qk_raw", 0, shape.tokens))
        self.suffix = ""

    def _project(self, part: int, blocks: list[RowBlock], suffix: str) -> None:
        """Write the projection of one part of the heads, and add it to the sum over parts."""
        shape = self.shape
        product = self._owned("proj_out").slot
        for i, rows in enumerate(blocks):
            self.suffix = f".g{part}" + (suffix or (f".r{i}" if len(blocks) > 1 else ""))
            attended = Rows(f"attn.g{part}", *rows)
            self.sum_linear("proj", attended, Rows(product, *rows), shape.hidden, shape.q_width, part)
        self.suffix = ""

    def _add_projection(self, rows: RowBlock, suffix: str) -> None:
        self.suffix = suffix
        self.residual("resid_add", "x", Rows("proj_out", *rows), out="resid", rows=rows, bias="proj.bias")
        self.suffix = ""

    def _mlp_blocks(self) -> Iterator[RowBlock]:
        """Yield the MLP's row blocks; operators have the suffix of a block while it is written."""
        of_the_step, rows = self.suffix, self.mlp_rows
        for number, first in enumerate(range(0, self.shape.tokens, rows)):
            self.suffix = of_the_step + (f".b{number}" if rows < self.shape.tokens else "")
            yield first, min(rows, self.shape.tokens - first)
        self.suffix = of_the_step

    def _activated(self, block: RowBlock) -> Rows:
        """Write first product and activation of a row block for the current weights' features; return its rows."""
        shape, tokens = self.shape, block[1]
        up = Rows(self.own("up", self.mlp_rows, self.up_width), 0, tokens)
        act = Rows(self.own("act", self.mlp_rows, shape.ffn), 0, tokens)
        self.linear("ffn_up", Rows("norm2", *block), up, self.up_width, shape.hidden)
        op, x, out = self._activation, reads(up), writes(act)
        self.memory_bound("act", op, tokens, self.up_width, shape.ffn, features=shape.ffn, x=x, out=out)
        return act

    @property
    def _activation(self) -> str:
        return self.activation_op

    def _mlp_backward(self, grad_out: str) -> None:
        """Write the MLP's backward to ``d_resid``."""
        if not self.shape.keep_norms:
            self._whole_norm("norm2", "resid", again=True)
        for slot, width in (("d_act", self.shape.ffn), ("d_up", self.up_width)):
            self.own(slot, self.mlp_rows, width)
        self._owned("d_norm2")
        for step in range(self.ranks):
            self._pass_weights(step)
            self._at(self.ffn, step)
            for block in self._mlp_blocks():
                self._mlp_block_backward(grad_out, block, step)
        self._use_own_weights()
        self._broadcast(0)
        self.bgrad("ffn_down", self.builder.all(grad_out), self.shape.hidden)
        self._norm_backward("norm2", "resid", residual_grad=grad_out, out=self._owned("d_resid").slot)

    def _mlp_block_backward(self, grad_out: str, block: RowBlock, step: int) -> None:
        """Write the backward of the MLP's row ``block`` for the features of a step's weights, to ``d_norm2``.

        Behind the weight gradients of the step's last block, their sums go to the next rank.
        """
        shape, hidden, (first, tokens) = self.shape, self.shape.hidden, block
        upstream, normed, d_norm = (Rows(slot, *block) for slot in (grad_out, "norm2", "d_norm2"))
        act = self._activated(block)
        d_act, d_up, up = (Rows(slot, 0, tokens) for slot in ("d_act", "d_up", "up"))
        self.dgrad("ffn_down", upstream, d_act, shape.ffn, hidden)
        read, grad, x = shape.ffn + self.up_width, reads(d_act), reads(up)
        op, into = f"{self._activation}.bwd", writes(d_up)
        self.memory_bound("act.bwd", op, tokens, read, self.up_width, features=shape.ffn, grad=grad, x=x, grad_x=into)
        last_block = first + tokens == shape.tokens
        hides = last_block and step == self.ranks - 1  # the input's gradient stands behind the last hop of the sums
        if not hides:
            self.sum_dgrad("ffn_up", d_up, d_norm, hidden, self.up_width, step)
        if step == 1 and not first:
            self._clear(self.ffn, step)
        self.wgrad("ffn_down", upstream, act, hidden, shape.ffn)
        self.wgrad("ffn_up", d_up, normed, self.up_width, hidden)
        self.bgrad("ffn_up", d_up, self.up_width)
        if step and last_block:
            self._pass_sums(step)
        if hides:
            self.sum_dgrad("ffn_up", d_up, d_norm, hidden, self.up_width, step)

    def _attention_backward(self, grad_in: str) -> None:
        """Write attention's backward from ``d_resid``."""
        shape, hidden, upstream = self.shape, self.shape.hidden, self._all("d_resid")
        if self.chunked:
            self._chunked_backward(grad_in)
            return
        if not self.builder.has("norm1"):
            self._whole_norm("norm1", "x", again=True)
        self.bgrad("proj", upstream, hidden)
        d_attn, d_norm = self._owned("d_attn", shape.q_width), self._owned("d_norm1")
        d_qkv = self._owned("d_qkv", shape.qkv_width)
        for part in range(self.ranks):
            self._fetch(part)
            self._heads(part)
            self.suffix = f".g{part}"
            self.dgrad("proj", upstream, d_attn, shape.q_width, hidden)
            if not part:
                self._add_returned_sums()
            self._clear(self.attn, part)
            attention.backward(self._part(part), self.decisions, self.inside)
            self.wgrad("proj", upstream, self._all(f"attn.g{part}"), hidden, shape.q_width)
            ring.arrive(self._part(part), self.decisions, self.inside)
            positions_backward(self, d_qkv)
            self.wgrad("qkv", d_qkv, self._all("norm1"), shape.qkv_width, hidden)
            self.bgrad("qkv", d_qkv, shape.qkv_width)
            last = part == self.ranks - 1  # the next part hides all other reductions
            if last:
                self._reduce(part)
            self.sum_dgrad("qkv", d_qkv, d_norm, hidden, shape.qkv_width, part)
            if not last:
                self._reduce(part)
        self._use_own_weights()
        self._norm_backward("norm1", "x", residual_grad="d_resid", out=grad_in)

    def _chunked_backward(self, grad_in: str) -> None:
        """Write the backward of attention in chunks from ``d_resid``."""
        self.bgrad("proj", self._all("d_resid"), self.shape.hidden)
        for part in range(self.ranks):
            self._fetch(part)
            if not part:
                self._add_returned_sums()
            self._clear(self.attn, part)
            self._chunks(part).backward(grad_in)
        self._use_own_weights()

    def _chunks(self, part: int) -> ChunkedPart:
        """Return what writes a part of the heads in chunks, with the weights that operators use."""
        return ChunkedPart(self, self.inside, part, lambda: self._reduce(part))

    def _whole_norm(self, which: str, source: str, *, again: bool = False) -> None:
        """Write a norm of all rows into buffers of the template; ``again``: as recompute."""
        stats = f"{which}_stats"
        self._owned(which)
        if not self.builder.has(stats):
            count = 2 if self.model.family == "gpt" else 1
            self.builder.own(stats, BufferClass.TRANSIENT, "fp32", self.shape.tokens, count)
        phase, rows = self.builder.phase, (0, self.shape.tokens)
        self.builder.phase = Phase.RECOMPUTE if again else phase
        norms.norm(self, which, source, rows, rows)
        self.builder.phase = phase

    def _kept_norm(self, which: str, source: str, rows: RowBlock, suffix: str) -> None:
        """Write a row block of a norm that is kept."""
        if self.shape.keep_norms:
            self.suffix = suffix
            norms.norm(self, which, source, rows, rows)
            self.suffix = ""

    def _norm_backward(self, norm: str, norm_input: str, *, residual_grad: str, out: str) -> None:
        hidden, tokens = self.shape.hidden, self.shape.tokens
        self.memory_bound(
            f"{norm}.bwd",
            "layer_norm.bwd" if self.model.family == "gpt" else "rms_norm.bwd",
            tokens,
            4 * hidden,
            2 * hidden,
            features=hidden,
            scratch=table.norm_backward_workspace_bytes(tokens, hidden, self.dtype, self.rowwise),
            grad=reads(self._all(f"d_{norm}")),
            x=reads(self._all(norm_input)),
            stats=reads(self._all(f"{norm}_stats")),
            weight=self.param(f"{norm}.weight"),
            residual_grad=reads(self._all(residual_grad)),
            out=writes(self._all(out)),
            grad_weight=self.grad(f"{norm}.weight"),
            grad_bias=self.grad(f"{norm}.bias"),
        )

    def _all(self, slot: str) -> Rows:
        return self.builder.all(slot)

    def _owned(self, slot: str, features: int = 0) -> Rows:
        """Return all rows of a buffer that lives inside the template; ``features``: 0 for the hidden size."""
        return self._all(self.own(slot, self.shape.tokens, features or self.shape.hidden))

    def _part(self, part: int) -> TemplateBuilder:
        """Return the builder with the names of one part of the heads."""
        return self.builder.under({name: f"{name}.g{part}" for name in ("attn", "lse")}, f".g{part}")

    def _at(self, bundle: Bundle, step: int) -> None:
        """Make operators use the weights of a step of the ring; at step 0 these are this rank's own."""
        self.source = (bundle, step, step) if step else None
        self.suffix = f".t{step}"

    def _use_own_weights(self) -> None:
        """Make operators use this rank's own weights."""
        self.source, self.suffix = None, ""

    def _exchange(self, bundle: Bundle, *, sums: bool = False) -> None:
        dtype = GRAD_DTYPE if sums else self.dtype
        for slot_number in range(DOUBLE_BUFFER_SLOTS):
            if not self.builder.has(bundle.buffer(slot_number, sums=sums)):
                self.builder.own(bundle.buffer(slot_number, sums=sums), BufferClass.EXCHANGE, dtype, bundle.elements, 1)

    def _lane(self, lane: Lane) -> Lane:
        return lane if self.decisions.layout.overlap_exchanges else Lane.COMPUTE

    def _pass_weights(self, step: int) -> None:
        """Write the hop that sends this step's weights to the next rank and receives those of the following step."""
        self._exchange(self.ffn)
        if step + 1 == self.ranks:
            return
        source, target = self.ffn.buffer(step), self.ffn.buffer(step + 1)
        for run in self.ffn.runs():
            sent = run.exchanged(source) if step else run.own("params")
            self._hop(f"ffn.{run.name}.hop{step + 1}", sent, run.exchanged(target), self.size)

    def _pass_sums(self, step: int) -> None:
        """Write the hop of gradient sums after a step; after the last step they are at the rank of their weights."""
        source, target = (self.ffn.buffer(at, sums=True) for at in (step, step + 1))
        for run in self.ffn.runs():
            sent, taken = run.exchanged(source), run.exchanged(target)
            self._hop(f"d_ffn.{run.name}.hop{step}", sent, taken, DTYPE_BYTES[GRAD_DTYPE])

    def _hop(self, name: str, sent: Rows, taken: Rows, size: int) -> None:
        work = Exchange(size * sent.tokens, self.ranks, "metp")
        self.builder.emit(name, "send_recv", self._lane(Lane.P2P), work, send=reads(sent), recv=writes(taken))

    def _add_returned_sums(self) -> None:
        """Add the returned sums of the other ranks to this rank's gradients."""
        for run in self.ffn.runs():
            x, size = run.exchanged(self.ffn.buffer(self.ranks, sums=True)), DTYPE_BYTES[GRAD_DTYPE] * run.elements
            work = Rowwise("grad.accumulate", run.elements, 2 * size, size)
            into = accumulates(run.own("grads"))
            self.builder.emit(f"d_ffn.{run.name}.return", "grad.accumulate", Lane.COMPUTE, work, x=reads(x), out=into)

    def _fetch(self, part: int) -> None:
        """Write the broadcast of the next part's weights, and make operators use those of this part."""
        if part + 1 < self.ranks:
            self._broadcast(part + 1)
        self.source, self.suffix = (self.attn, part, part), ""

    def _broadcast(self, part: int) -> None:
        """Write the broadcast of a part's weights."""
        self._exchange(self.attn)
        for run in self.attn.runs():
            work = Collective("broadcast", self.size * run.elements, self.ranks, "metp", part)
            own, full = reads(run.own("params")), writes(run.exchanged(self.attn.buffer(part)))
            name, lane = f"attn.{run.name}.g{part}", self._lane(Lane.METP)
            self.builder.emit(name, "broadcast", lane, work, own=own, tensor=full)

    def _clear(self, bundle: Bundle, step: int) -> None:
        """Zero the gradient sums before the first step that adds to them."""
        self._exchange(bundle, sums=True)
        rows = self._all(bundle.buffer(step, sums=True))
        work = Rowwise("zero", rows.tokens, 0, DTYPE_BYTES[GRAD_DTYPE] * rows.tokens)
        self.builder.emit(f"d_{bundle.kind}.clear{step}", "zero", Lane.COMPUTE, work, target=writes(rows))

    def _reduce(self, part: int) -> None:
        """Reduce a part's gradients over the ranks, into the gradients of the rank that has its weights."""
        for run in self.attn.runs():
            size = DTYPE_BYTES[GRAD_DTYPE] * run.elements
            work = Collective("reduce", size, self.ranks, "metp", part)
            tensor = accumulates(run.exchanged(self.attn.buffer(part, sums=True)))
            name, lane = f"d_attn.{run.name}.g{part}", self._lane(Lane.METP)
            self.builder.emit(name, "reduce", lane, work, tensor=tensor, total=accumulates(run.own("grads")))


def metp_tensors(model: Model, shape: Shape, dtype: str, *, scores: tuple[Skeletal, ...] = ()) -> tuple[Skeletal, ...]:
    """Return the skeletal tensors of a METP layer: input, attention output of each group of heads, residual.

    With ``keep_norms`` the norms are kept too. Every backward computes the rest again: Q K V, the MLP's tensors (METP's
    Algorithms 2 and 6), and norms that are not kept. ``scores`` are empty, because METP needs a flash kernel.
    """
    tokens = shape.tokens

    def norm(name: str) -> tuple[Skeletal, ...]:
        if not shape.keep_norms:
            return ()
        return (
            Skeletal(name, tokens, shape.hidden, dtype, Fate.BY_TOKEN),
            Skeletal(f"{name}_stats", tokens, norm_statistics(model), "fp32", Fate.BY_TOKEN, statistics=True),
        )

    kept = [Skeletal("x", tokens, shape.hidden, dtype, Fate.WHOLE), *norm("norm1")]
    for part in range(shape.metp):
        kept.append(Skeletal(f"attn.g{part}", tokens, shape.q_width, dtype, Fate.WHOLE))
        kept.append(Skeletal(f"lse.g{part}", tokens, shape.heads, "fp32", Fate.WHOLE, statistics=True))
    return (*kept, Skeletal("resid", tokens, shape.hidden, dtype, Fate.BY_TOKEN), *norm("norm2"))
