"""Row-wise recompute: attention is kept or swapped whole, and backward rebuilds the rest of a layer in row blocks.

Of a layer only three tensors outlive its forward: its input, attention's output and the log-sum-exp. Alpha says how
many of their rows are swapped to the host; the others stay on the device. Attention never runs forward again. Norms,
products and the MLP work row by row, so wide tensors have room for one block (``mlp_chunk_tokens``):

    forward    norm1 qkv .b0 | .b1 | attention of all rows | proj resid norm2 up act down .b0 | .b1
    backward   proj resid norm2 up act .b0 again, then MLP and projection backward of that block | .b1
               norm1 qkv .b0 | .b1 again | attention's backward of all rows
               norm1 .b0 again, then QKV and norm backward of that block | .b1

Whole in backward are the three tensors and at most four others at a time. In bytes a row of Llama 3 8B in bf16 (8 KiB
are a row of the hidden size, 12 KiB of the packed Q, K and V):

    first loop       x 8, attn 8, gradients: of the output 8, of the residual 8, of attention 8            = 40 KiB
    attention        x 8, attn 8, gradients: of the residual 8, of attention 8; qkv 12, its gradient 12    = 56 KiB
    last loop        x 8, gradients: of the residual 8, of qkv 12, of the input 8                          = 36 KiB

The first loop also needs a block of the MLP, attention the workspace of its kernel. Queries, keys and values are not
there before the gradient of attention's output is complete, and the gradient of the layer's output is dead by then.
Recompute makes the calls of forward, so its bits are the same. Weight gradients are sums over blocks in fp32, as with
the MLP in row blocks (``mlp.py``).

With attention in chunks Q, K and V and their gradients exist for chunks only (``attention/kept_chunks.py``). The
gradient of attention's output waits on the host then, so the first loop needs 32 KiB a row, and the others no more.

Products in FP8 read copies of a row block, which recompute makes again, so attention's output is kept in the plan's
dtype alone. A recipe with one scale a tensor has one for each row block (``layout/fp8.py``).

Latent attention (MLA) makes Q, K and V of latents block by block. Backward holds the latents whole, which are narrow
beside the heads, so that their product is not repeated a second time.

Under Ulysses the head-sharded output is kept, which attention's backward reads, and each block of it is exchanged
again. Blocks replace the row blocks of a rank (``layout/token_order.py``), so gathered and exchanged rows are in order.
"""

from __future__ import annotations

from memo_sim.contract.model import Model
from memo_sim.contract.plan import Decisions
from memo_sim.program.attention import attention, shared_heads
from memo_sim.program.attention.chunked import IN_CHUNKS
from memo_sim.program.attention.kept_chunks import KeptChunks
from memo_sim.program.attention.partial import split
from memo_sim.program.attention.subsequence import KV
from memo_sim.program.attention.ulysses import Ulysses
from memo_sim.program.ir.builder import Rows, TemplateBuilder
from memo_sim.program.ir.kinds import Phase
from memo_sim.program.layers.expert_blocks import ExpertBlocks
from memo_sim.program.layers.expert_ends import ALL_ENDS, ENDS, balanced
from memo_sim.program.layers.latents import Block as LatentBlock
from memo_sim.program.layers.latents import Latents
from memo_sim.program.layers.mlp import Mlp
from memo_sim.program.layout.attention_chunks import in_chunks
from memo_sim.program.layout.parameters import Block
from memo_sim.program.layout.rowwise_blocks import is_rowwise, rows_of_a_block, rowwise_blocks
from memo_sim.program.layout.shape import Shape
from memo_sim.program.layout.skeletal import Fate, Skeletal, skeletal_tensors
from memo_sim.program.operators import norms
from memo_sim.program.operators.operators import OperatorWriter, RowBlock
from memo_sim.program.operators.positions import positions, positions_backward
from memo_sim.program.operators.sinks import sink, sink_backward

KEPT = frozenset({"x", "attn", "lse", ALL_ENDS})
"""The skeletal tensors that outlive a layer's forward."""
WHOLE = KEPT | {"qkv", "q"}
"""The skeletal tensors that exist whole in a layer's forward or backward."""
FIRST_NORM = ("norm1", "norm1_stats")
RAW = "qk_raw"
"""Input of the norm of query and key heads: backward needs it after attention's, so there it is whole."""
LATENTS = ("latent", "latent_stats", "q_latent", "kv_latent")
"""Latents before and after their norms. Backward needs them after attention's too, and they are narrow."""


def is_whole(tensor: Skeletal, decisions: Decisions, *, backward: bool) -> bool:
    """Return whether a skeletal tensor exists whole, not for one row block; ``backward``: in that template."""
    chunked = in_chunks(decisions) and tensor.name in IN_CHUNKS  # chunked.py says of these how many rows there are
    return chunked or tensor.name in WHOLE or (backward and tensor.name in (RAW, *LATENTS))


def blocks_at_once(tensor: Skeletal, decisions: Decisions, shape: Shape, *, backward: bool) -> int:
    """Return of how many row blocks a tensor exists at once: of experts' ends all, where forward sums them."""
    summed = is_rowwise(decisions) and balanced(shape) and tensor.name == ENDS and not backward
    return len(rowwise_blocks(decisions, shape.tokens)) if summed else 1


def rowwise_tensors(
    model: Model, shape: Shape, dtype: str, *, scores: tuple[Skeletal, ...] = ()
) -> tuple[Skeletal, ...]:
    """Return the skeletal tensors of one layer; a loss of balance needs the rows that experts got of all tokens.

    Those of subsequences are no skeletal tensor, because all of them share one buffer (``expert_ends.py``).
    """
    tensors = skeletal_tensors(model, shape, dtype, scores=scores)
    if shape.experts is None or not balanced(shape) or shape.kv_cache_tokens:
        return tensors
    return (*tensors, Skeletal(ALL_ENDS, shape.experts.count, 1, "int32", Fate.WHOLE))


def of_a_block(decisions: Decisions, shape: Shape) -> Shape:
    """Return the sizes in the largest row block, which its buffers have room for."""
    return shape.of_rows(rows_of_a_block(decisions, shape.tokens))


class RowwiseLayer(OperatorWriter):
    """Writes one layer whose row-wise operators run block by block."""

    def __init__(self, builder: TemplateBuilder, decisions: Decisions, shape: Shape, block: Block) -> None:
        super().__init__(builder, decisions, shape, block)
        self.blocks = rowwise_blocks(decisions, shape.tokens)
        self.room = self.blocks[0][1]
        """Number of a rank's rows in a buffer for one block."""
        self.ulysses = Ulysses(builder, shape, decisions.dtype, room=self.room)
        self.mlp = ExpertBlocks(self, shape.experts, self.blocks) if shape.experts else Mlp(self)
        self.latents = Latents(self) if shape.latent else None
        self.chunks = KeptChunks(self, self.ulysses) if in_chunks(decisions) else None
        """Attention in chunks, each of one or more row blocks; None where it is about all rows at once."""

    def forward(self, blocks: list[RowBlock], out: str) -> None:
        """Write the whole forward; ``blocks`` has one block with all rows, which row-wise recompute divides."""
        self.cast_weights()
        if self.chunks is not None:
            self.chunks.forward(self.blocks)
        else:
            self._each_queries_keys_values()
            attention.forward(self.builder, self.decisions, self.shape.attention)
            sink(self)
        for number, rows in enumerate(self.blocks):
            self._begin(number)
            self._project(rows)
            self.mlp.first_product(rows)
            self.mlp.second_product(rows, out)
        self.suffix = ""

    def recompute(self, rows: RowBlock, index: int, *, whole: bool) -> None:
        """Write nothing: backward rebuilds each block where it reads it."""

    def backward(self, grad_out: str, grad_in: str) -> None:
        """Write the backward from ``grad_out`` (of the layer's output) to ``grad_in`` (of its input)."""
        inside = self.shape.attention
        if self.chunks is None:
            self.own("d_attn", inside.tokens, inside.attention_width)
        for number, rows in enumerate(self.blocks):
            self._begin(number)
            phase, self.builder.phase = self.builder.phase, Phase.RECOMPUTE
            attended = self._project(rows)
            source = self.mlp.first_product(rows)
            self.builder.phase = phase
            self.mlp.block_backward(rows, grad_out, source)
            self._project_backward(rows, attended)
        self.suffix = ""
        phase, self.builder.phase = self.builder.phase, Phase.RECOMPUTE
        if self.chunks is not None:
            self.chunks.rebuild()
            self.builder.phase = phase
            self.chunks.backward(grad_in)
            return
        self._each_queries_keys_values()
        self.builder.phase = phase
        self.own("d_qkv", inside.tokens, inside.qkv_width)
        sink_backward(self)
        attention.backward(self.builder, self.decisions, inside)
        self._part_norms()
        for number, rows in enumerate(self.blocks):
            self._begin(number)
            self._product_backward(rows, grad_in)
        self.suffix = ""

    def _each_queries_keys_values(self) -> None:
        """Write norm, QKV product and positions of every block."""
        for number, rows in enumerate(self.blocks):
            self._begin(number)
            self._queries_keys_values(rows)
        self.suffix = ""

    def _part_norms(self) -> None:
        """Give the first norm other buffers from here on; else a block of it lives through attention's backward."""
        before, phase = self.builder, Phase.RECOMPUTE
        made = f"{phase}.norm1.wide"
        slots = (*FIRST_NORM, made) if before.has(made) else FIRST_NORM
        self.builder = before.under({slot: f"{slot}.again" for slot in slots}, "")
        for slot in slots:
            held = before.all(slot).tokens, before.features(slot)
            self.builder.own(slot, before.buffer_class(slot), before.dtype(slot), *held)
        if self.fp8 is not None:
            self.fp8.builder = self.builder

    def _begin(self, number: int) -> None:
        """Let names of instructions end in the number of a block, where there are several."""
        self.suffix = f".b{number}" if len(self.blocks) > 1 else ""

    def _at(self, slot: str, rows: RowBlock) -> Rows:
        """Return the rows of a block in a tensor of attention: sequence-sharded ones have room for one block."""
        return Rows(slot, *rows) if self.shape.ulysses == 1 else Rows(f"{slot}_seq", 0, rows[1])

    def _head_sharded(self, slot: str, rows: RowBlock) -> Rows:
        degree = self.shape.ulysses
        return Rows(slot, degree * rows[0], degree * rows[1])

    def _packed(self, rows: RowBlock) -> Rows:
        """Return a block's rows of the packed Q, K and V before they are exchanged or split."""
        if self.shape.ulysses > 1:
            self.own("qkv_seq", self.room, self.shape.qkv_width)
        if self.shape.kv_cache_tokens:
            inside, degree = self.shape.attention, self.shape.ulysses
            self.own("qkv", degree * self.room, inside.qkv_width)
            return Rows("qkv" if degree == 1 else "qkv_seq", 0, rows[1])
        if not self.builder.has("qkv"):
            self.own("qkv", self.shape.attention.tokens, self.shape.attention.qkv_width)
        return self._at("qkv", rows)

    def _room_of(self, rows: Rows) -> int:
        """Return the tokens of the buffer of the packed Q, K and V, or of their gradient, before they are exchanged."""
        return self.builder.all(rows.slot).tokens

    def _raw(self, rows: RowBlock) -> Rows:
        """Return a block's rows of the input of the norm of heads."""
        return Rows(RAW, 0, rows[1]) if self.builder.phase is Phase.FORWARD else Rows(RAW, *rows)

    def _block(self, rows: RowBlock) -> LatentBlock:
        """Return where a block's rows lie in latents and in the buffers that make heads of them."""
        at = (0, rows[1])
        return LatentBlock(rows, at, at if self.builder.phase is Phase.FORWARD else rows, self.room)

    def _queries_keys_values(self, rows: RowBlock) -> None:
        """Write norm, QKV product and positions of a block, and the all-to-all to the ranks of their heads."""
        first, tokens = rows
        if self.latents is not None:
            packed, block = self._packed(rows), self._block(rows)
            self.latents.compress(block)
            self.latents.expand(block, packed)
            self._exchange_and_split(packed, rows)
            return
        norms.norm(self, "norm1", "x", rows, (0, tokens))
        packed = self._packed(rows)
        room = self._room_of(packed)

        def product(x: Rows, into: RowBlock) -> None:
            made = Rows(packed.slot, packed.first + into[0], into[1])
            shared_heads.product(self, x, made, room)

        shard = self.shard_rows(self.read_by_product("norm1"), (0, tokens))
        self.gather_and_multiply("norm1", shard, "norm1_full", (0, tokens), product, tokens=self.room)
        shared_heads.exchange(self, packed, room)
        positions(self, packed, self._raw(rows), first=first - packed.first)
        self._exchange_and_split(packed, rows)

    def _exchange_and_split(self, packed: Rows, rows: RowBlock) -> None:
        """Write the all-to-all of a block's Q, K and V, and beside a KV cache of the prefix their copies."""
        at = (0, rows[1]) if self.shape.kv_cache_tokens else rows
        self.ulysses.to_head_ranks("qkv", packed, self._head_sharded("qkv", at), self.suffix)
        if self.shape.kv_cache_tokens:
            fresh, queries = self.builder.phase is Phase.FORWARD, self._head_sharded("q", rows)
            keys = Rows(KV, self.shape.attention.start + queries.first, queries.tokens) if fresh else None
            split(self.builder, f"qkv.split{self.suffix}", self._head_sharded("qkv", at), queries, keys)

    def _project(self, rows: RowBlock) -> Rows:
        """Write the projection of a block and the residual sum; return its input as the weight's gradient reads it."""
        attended, at, width = self._at("attn", rows), (0, rows[1]), self.shape.attention_width
        if not self.builder.has(attended.slot):
            self.own(attended.slot, self.room, width)  # not a skeletal tensor: the projection reads it in FP8
        self.ulysses.to_sequence_ranks("attn", self._head_sharded("attn", rows), attended, self.suffix)
        kept = attended
        if self.fp8 is not None:
            kept = Rows(self.attended(attended.slot, kept=True), *at)
            self.quantise(attended, kept)
            attended = Rows(self.attended(attended.slot), *at)

        def product(x: Rows, out: Rows) -> None:
            self.linear("proj", x, out, self.shape.hidden, width, bias=False)

        summed = self.multiply_and_scatter("proj", attended, "proj_out", 0, product, tokens=self.room)
        self.residual("resid_add", "x", summed, out="resid", rows=at, at=rows, bias="proj.bias")
        return kept

    def _project_backward(self, rows: RowBlock, attended: Rows) -> None:
        """Write the gradients of a block's projection, and the all-to-all of that of attention's output."""
        hidden, width = self.shape.hidden, self.shape.attention_width
        if self.shape.ulysses > 1:
            self.own("d_attn_seq", self.room, width)
        head_sharded = self.chunks.output_gradient(rows) if self.chunks else self._head_sharded("d_attn", rows)
        d_attended = head_sharded if self.shape.ulysses == 1 else Rows("d_attn_seq", 0, rows[1])
        grad = self.shard_rows("d_resid", rows)
        gathered = self.before_gather(grad, "proj")

        def product(some: Rows, into: RowBlock) -> None:
            made = Rows(d_attended.slot, d_attended.first + into[0], into[1])
            self.dgrad("proj", some, made, width, hidden)

        d_proj = self.gather_and_multiply("proj.grad", gathered, "d_proj_full", (0, rows[1]), product, tokens=self.room)
        self.ulysses.to_head_ranks("d_attn", d_attended, head_sharded, self.suffix)
        if self.chunks is not None:
            self.chunks.store_output_gradient(rows)
        self.wgrad("proj", d_proj, attended, hidden, width)
        self.bgrad("proj", grad, hidden)

    def _product_backward(self, rows: RowBlock, grad_in: str) -> None:
        """Write the backward of a block from the gradient of its packed Q, K and V to that of the layer's input."""
        at = (0, rows[1])
        if self.shape.ulysses > 1:
            self.own("d_qkv_seq", self.room, self.shape.qkv_width)
        d_qkv = self._at("d_qkv", rows)
        self.ulysses.to_sequence_ranks("d_qkv", self._head_sharded("d_qkv", rows), d_qkv, self.suffix)
        if self.latents is not None:
            self._norm_again(rows)
            self.latents.backward(self._block(rows), d_qkv, grad_in)
            return
        positions_backward(self, d_qkv, first=rows[0] - d_qkv.first, raw=Rows(RAW, *rows))
        grad = shared_heads.product_gradient(self, d_qkv, self._room_of(d_qkv))
        self._norm_again(rows)
        self.product_and_norm_backward(
            "qkv",
            "norm1",
            grad=grad,
            source=None,
            norm_input="x",
            residual_grad="d_resid",
            out=grad_in,
            rows=rows,
            at=at,
            tokens=self.room,
        )

    def _norm_again(self, rows: RowBlock) -> None:
        """Write the first norm of a block once more."""
        phase, suffix = self.builder.phase, self.suffix
        self.builder.phase, self.suffix = Phase.RECOMPUTE, f".again{suffix}"
        norms.norm(self, "norm1", "x", rows, (0, rows[1]), for_wgrad=True)
        self.builder.phase, self.suffix = phase, suffix
