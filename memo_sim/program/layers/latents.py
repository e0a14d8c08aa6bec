"""Operators of latent attention (MLA): from a layer's input to the heads of Q, K and V, and back.

They serve layers whose buffers hold all rows (``latent_attention.py``, which describes the operators) and layers whose
buffers hold one row block (``rowwise.py``). A ``Block`` says where the rows of a block lie.
"""

from __future__ import annotations

from typing import NamedTuple

from memo_sim.program.ir.builder import Rows, accumulates, reads, writes
from memo_sim.program.ir.kinds import Phase
from memo_sim.program.operators import norms
from memo_sim.program.operators import workspaces as table
from memo_sim.program.operators.operators import OperatorWriter, RowBlock


class Passes(NamedTuple):
    """How often a kernel of memo-exec reads and writes an element, in elements of the plan's dtype."""

    read: int
    written: int


NORM = {"fp32": Passes(3, 2), "bf16": Passes(8, 6), "fp16": Passes(8, 6)}
NORM_BACKWARD = {"fp32": Passes(14, 10), "bf16": Passes(25, 19), "fp16": Passes(25, 19)}
"""Passes of the norms of latents: torch operators, which widen half floats to fp32 (``memo_exec/kernels/latent.py``).
No profile has measured them, so these passes have the rate of memory-bound kernels."""
ROTATION = Passes(4, 3)
"""Passes of a rotation in place: a copy of one half, two products, two sums."""


class Block(NamedTuple):
    """Where the rows of a row block lie: the first one, and how many."""

    rows: RowBlock
    """In the layer's input and in its gradient."""
    at: RowBlock
    """In norm1, and in buffers that only these operators use."""
    latents: RowBlock
    """In the latents before and after their norms, which backward may hold whole."""
    room: int
    """Number of a rank's rows in buffers that only these operators use."""


class Latents:
    """Writes the operators of one layer's latents."""

    def __init__(self, writer: OperatorWriter, *, rebuilt: bool = False) -> None:
        """``rebuilt``: whether backward expands all heads again from latents that forward has kept."""
        self.writer, self.shape = writer, writer.shape
        assert writer.shape.latent is not None
        self.latent, self.rebuilt = writer.shape.latent, rebuilt

    @property
    def _kv_width(self) -> int:
        """Features of the product that makes keys without positions, and values."""
        return self.shape.heads * (self.latent.nope_dim + self.latent.value_dim)

    @property
    def _query_passes(self) -> Passes:
        """Elements of a token that the assembly reads and writes of the queries, whose rotary parts it rotates."""
        rotated = self.shape.heads * self.latent.rope_dim
        return Passes(ROTATION.read * rotated, ROTATION.written * rotated)

    @property
    def _query_source(self) -> tuple[str, int]:
        """The slot that the product of queries reads, and its features."""
        return ("q_latent", self.latent.q_rank) if self.latent.q_rank else ("norm1", self.shape.hidden)

    @staticmethod
    def _rows_of(source: str, block: Block) -> RowBlock:
        """Return the rows of a block in what a product of heads reads: norm1, or a latent."""
        return block.at if source == "norm1" else block.latents

    def compress(self, block: Block) -> None:
        """Write norm1, the product that makes the latents, and their norms, of this rank's token shard."""
        writer, latent = self.writer, self.latent
        norms.norm(writer, "norm1", "x", block.rows, block.at)
        x, made = writer.shard_rows("norm1", block.at), writer.shard_rows("latent", block.latents)
        writer.linear("latent", x, made, latent.width, self.shape.hidden, bias=False)
        normed, passes = latent.q_rank + latent.kv_rank, NORM[writer.dtype]
        ranks = {"q": latent.q_rank, "kv": latent.kv_rank}
        latents = {name: writer.shard_rows(f"{name}_latent", block.latents) for name, rank in ranks.items() if rank}
        written = {name: writer.made(kept, ranks[name]) for name, kept in latents.items()}
        writer.memory_bound(
            "latent.norm",
            "latent.norm",
            made.tokens,
            passes.read * normed + latent.rope_dim,
            passes.written * normed + latent.rope_dim,
            scratch=table.latent_norm_workspace_bytes(made.tokens, normed, writer.dtype),
            x=reads(made),
            q_weight=writer.param("q_latent_norm.weight"),
            kv_weight=writer.param("kv_latent_norm.weight"),
            q=writes(written["q"]) if latent.q_rank else None,
            kv=writes(written["kv"]),
            rope=writes(writer.shard_rows(self._rotary_key(block.room), block.at)),
            stats=writes(writer.shard_rows("latent_stats", block.latents)),
        )
        for name, kept in latents.items():
            writer.quantise(written[name], kept)

    def _rotary_key(self, room: int) -> str:
        """Return the slot of the shared rotary key before its rotation; kept where backward expands heads again."""
        if self.rebuilt:
            return "k_rope"
        writer = self.writer
        return writer.own(f"{writer.builder.phase}.k_rope", self.shape.shard(room), self.latent.rope_dim)

    def expand(self, block: Block, packed: Rows) -> None:
        """Write the products that make the heads, and their assembly in the ``packed`` Q, K and V."""
        writer, shape, latent, phase = self.writer, self.shape, self.latent, self.writer.builder.phase
        first, room = block.at[0], block.room
        source, width = self._query_source
        mine = writer.shard_rows(writer.read_by_product(source), self._rows_of(source, block))
        x = writer.product_input("q_up", writer.gather(source, mine, f"{source}_full", first, tokens=room))
        writer.linear("q_up", x, packed, shape.q_width, width, bias=False, op="latent.q_up")
        mine = writer.shard_rows(writer.read_by_product("kv_latent"), block.latents)
        kv = writer.gather("kv_latent", mine, "kv_latent_full", first, tokens=room)
        made = Rows(writer.own(f"{phase}.kv_up", room, self._kv_width), *block.at)
        writer.linear("kv_up", kv, made, self._kv_width, latent.kv_rank, bias=False)
        key = writer.shard_rows(self._rotary_key(room), block.at)
        rope = writer.gather("k_rope", key, "k_rope_full", first, tokens=room)
        writer.memory_bound(
            "latent.assemble",
            "latent.assemble",
            made.tokens,
            self._kv_width + latent.rope_dim + self._query_passes.read,
            shape.cache_width + self._query_passes.written,
            scratch=table.latent_rotary_workspace_bytes(made.tokens, shape.heads, latent.rope_dim, writer.dtype),
            first=block.rows[0] - packed.first,
            kv=reads(made),
            rope=reads(rope),
            qkv=accumulates(packed),
        )

    def backward(self, block: Block, d_qkv: Rows, grad_in: str) -> None:
        """Write the backward from the gradient of the packed Q, K, V of a block to that of the layer's input."""
        writer, shape, latent = self.writer, self.shape, self.latent
        tokens, at = block.rows[1], block.at
        d_kv = Rows(writer.own("d_kv_up", block.room, self._kv_width), *at)
        d_rope = Rows(writer.own("d_k_rope", block.room, latent.rope_dim), *at)
        writer.memory_bound(
            "latent.assemble.bwd",
            "latent.assemble.bwd",
            tokens,
            shape.cache_width + self._query_passes.read,
            self._kv_width + latent.rope_dim + self._query_passes.written,
            scratch=table.latent_rotary_workspace_bytes(tokens, shape.heads, latent.rope_dim, writer.dtype),
            first=block.rows[0] - d_qkv.first,
            grad=accumulates(d_qkv),
            kv=writes(d_kv),
            rope=writes(d_rope),
        )
        summed_kv = self._up_backward(block, "kv_up", ("kv_latent", latent.kv_rank), d_kv, self._kv_width)
        summed_rope = writer.scatter("d_k_rope", d_rope, tokens=block.room)
        queried = self._up_backward(block, "q_up", self._query_source, d_qkv, shape.q_width, op="latent.q_up")
        writer.own("d_latent", shape.shard(block.room), latent.width)
        d_latent = writer.shard_rows("d_latent", at)
        normed, passes = latent.q_rank + latent.kv_rank, NORM_BACKWARD[writer.dtype]
        writer.memory_bound(
            "latent.norm.bwd",
            "latent.norm.bwd",
            d_latent.tokens,
            passes.read * normed + latent.rope_dim,
            passes.written * normed + latent.rope_dim,
            scratch=table.latent_norm_backward_workspace_bytes(d_latent.tokens, normed),
            q=reads(queried) if latent.q_rank else None,
            kv=reads(summed_kv),
            rope=reads(summed_rope),
            x=reads(writer.shard_rows("latent", block.latents)),
            stats=reads(writer.shard_rows("latent_stats", block.latents)),
            q_weight=writer.param("q_latent_norm.weight"),
            kv_weight=writer.param("kv_latent_norm.weight"),
            out=writes(d_latent),
            grad_q_weight=writer.grad("q_latent_norm.weight"),
            grad_kv_weight=writer.grad("kv_latent_norm.weight"),
        )
        writer.wgrad("latent", d_latent, writer.shard_rows("norm1", at), latent.width, shape.hidden)
        if latent.q_rank:
            writer.own("d_norm1", shape.shard(block.room), shape.hidden)
            grad = writer.shard_rows("d_norm1", at)
            writer.dgrad("latent", d_latent, grad, shape.hidden, latent.width)
        else:  # the queries' product reads norm1 as well, so its gradient is there already
            grad = queried
            writer.dgrad("latent", d_latent, grad, shape.hidden, latent.width, op="linear.dgrad.add")
        norms.norm_backward(
            writer, "norm1", grad=grad, norm_input="x", residual_grad="d_resid", out=grad_in, rows=block.rows, at=at
        )

    def _up_backward(
        self, block: Block, name: str, read: tuple[str, int], grad: Rows, n: int, *, op: str = "linear"
    ) -> Rows:
        """Write the gradients of an up-projection's weight and input; return the input's, summed over heads.

        ``read``: the slot of the input, and its features. ``n``: features that the product makes.
        """
        writer, (first, tokens), (source, k) = self.writer, block.at, read
        mine = writer.shard_rows(source, self._rows_of(source, block))
        if self.rebuilt and self.shape.gathered:
            x, shard = writer.builder.all(f"{Phase.RECOMPUTE}.{source}_full"), None
        else:
            x = writer.gather_again(source, mine, f"{source}_full", first, tokens=block.room)
            shard = mine if x != mine else None
        d_source = f"d_{source}"
        partial = Rows(writer.own(d_source, block.room, k), first, tokens)
        writer.dgrad(name, grad, partial, k, n, op=f"{op}.dgrad")
        summed = writer.scatter(d_source, partial, tokens=block.room)
        writer.wgrad(name, grad, x, n, k, shard=shard, op=f"{op}.wgrad")
        return summed
