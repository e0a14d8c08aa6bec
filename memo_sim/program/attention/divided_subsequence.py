"""Attention of a subsequence whose rows context-parallel ranks divide.

Every rank has its share of each subsequence in zigzag order, as ``ring.py`` divides a whole sequence: of 2 x cp parts,
rank r has parts r and 2*cp - 1 - r, its early and its late half. The KV cache of a rank has its own rows alone. The
keys of other ranks arrive in blocks: the subsequence's own rows, and each run of earlier rows (``subsequence.py``).

    rank 0   | s0: 0 3 | s1: 0 3 |      queries s1, keys s1   a causal square, then what the zigzag order leaves
    rank 1   | s0: 1 2 | s1: 1 2 |      queries s1, keys s0   own 0 3, then 1 2 of rank 1: all pairs, without a mask

The ranks exchange blocks in one of two forms:

- Ring: each block goes round the ring, and in backward so do the sums of its gradients (``chunk_ring.py``). Two
  buffers of one block alternate.
- All-gather: each block is gathered from all ranks, and one call attends to it (``all_gather.py``). In backward a
  reduce-scatter sums its gradients. Two buffers of cp blocks alternate, so that a block is gathered beside the calls
  over the block before it.

A block has whole subsequences, and at least an eighth of a rank's rows if there are as many before it. Each subsequence
sends all blocks before it again. So with N equal subsequences, forward sends (N + 1) / 2 times the bytes of a sequence
that is not divided. Backward sends as many bytes of keys, and as many of gradients.

Of a micro-batch of several sequences a block is one subsequence, which one call can read. The subsequence's own keys
are copied before they travel: the early halves of all sequences, then the late ones, so that a half is one range.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.attention import subsequence as prefix
from memo_sim.program.attention.all_gather import parts_of_earlier_keys, rows_without_queries
from memo_sim.program.attention.chunk_ring import DOUBLE_BUFFER_SLOTS, ChunkRing
from memo_sim.program.attention.partial import Part, add, join, own_d_q, part_backward, part_forward
from memo_sim.program.ir.builder import Access, Rows, TemplateBuilder, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Lane
from memo_sim.program.ir.kinds import Phase
from memo_sim.program.ir.work import Collective, Rowwise
from memo_sim.program.layout.partition import partition
from memo_sim.program.layout.shape import Shape
from memo_sim.program.layout.subsequence import run_ends
from memo_sim.program.operators.library_calls import CHUNKS, in_equal_calls


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of the KV cache that ranks exchange at once: those of the subsequence, or a run of earlier ones."""

    name: str
    """End of the names of the block's instructions."""
    keys: Rows
    sums: Rows
    """Where the gradients of these keys are summed."""
    own: bool
    """Whether they are the subsequence's own rows, which need a causal mask."""


def forward(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write attention forward: reads slots ``q`` and ``prefix.kv``, writes ``attn`` and ``lse``."""
    blocks = _blocks(decisions, shape)
    exchange = _exchange(decisions)(builder, decisions, shape, blocks)
    exchange.start(blocks[0])
    prefix.own_square(builder, decisions, shape, blocks[0].keys)
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        exchange.forward(block, following)


def backward(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write attention backward: reads ``q``, ``prefix.kv``, ``attn``, ``lse``, ``d_attn``; writes ``d_qkv``.

    Gradients of this rank's keys and values are summed in ``prefix.d_kv``, with the terms of all ranks.
    """
    blocks = _blocks(decisions, shape)
    exchange = _exchange(decisions)(builder, decisions, shape, blocks)
    queries = builder.all(builder.own("d_q", BufferClass.TRANSIENT, prefix.SUM_DTYPE, shape.tokens, shape.q_width))
    own_d_q(builder, decisions, shape)
    exchange.start(blocks[0])
    prefix.own_square_backward(builder, decisions, shape, queries, exchange.written(blocks[0].sums), blocks[0].sums)
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        exchange.backward(block, following)
    if len(blocks) == 1:
        exchange.finish()
    join(builder, "qkv.join", queries, blocks[0].sums, builder.all("d_qkv"))
    if len(blocks) > 1:  # the last hop brings gradients of earlier rows, so it runs beside the copy above
        exchange.finish()


def most_gathered_keys(decisions: Decisions) -> int:
    """Return the most keys that one call over a gathered block reads: those of the longest run, from all ranks.

    Of several sequences a block is one subsequence (``_blocks``).

    Raises:
        Infeasible: as ``partition``.
    """
    parts = partition(decisions)
    ends = run_ends(parts) if decisions.micro_batch == 1 else tuple(accumulate(parts))
    return decisions.layout.cp * decisions.layout.ulysses * max(end - begun for begun, end in pairwise((0, *ends)))


def _blocks(decisions: Decisions, shape: Shape) -> list[Block]:
    """Return the blocks of keys that a subsequence attends to: its own, then each run of earlier ones.

    Of several sequences a run is one subsequence, because a call reads no more (``prefix.calls``).
    """
    ((_, mine),) = prefix.sums_of(shape, shape.start, shape.tokens)
    earlier = prefix.calls(decisions, prefix.sums_of(shape, 0, shape.start))
    return [
        Block("", Rows(prefix.KV, shape.start, shape.tokens), mine, own=True),
        *(Block(f".k{i}", Rows(prefix.KV, at, sums.tokens), sums, own=False) for i, (at, sums) in enumerate(earlier)),
    ]


def _exchange(decisions: Decisions) -> type[_RingOfBlocks | _GatheredBlocks]:
    return _GatheredBlocks if decisions.layout.cp_exchange == "all_gather" else _RingOfBlocks


class _Calls:
    """Writes the unmasked calls of one subsequence, whose workspaces have room for the longest block.

    Both forms of exchange have these methods:

    - ``start`` writes the first transfer of a block's keys.
    - ``forward`` writes the calls over a block, without the causal square, and starts the ``following`` block.
    - ``backward`` writes the backward of these calls, and starts the ``following`` block.
    - ``finish`` adds the gradients that other ranks computed for the last block to their sum.
    """

    def __init__(self, builder: TemplateBuilder, decisions: Decisions, shape: Shape, blocks: list[Block]) -> None:
        self.builder, self.decisions, self.shape = builder, decisions, shape
        self.several = decisions.micro_batch > 1
        self.room = self.most_keys = self.rows_aside = max(block.keys.tokens for block in blocks)
        self._due: tuple[Block, Rows] | None = None
        """The block whose gradients come from other ranks next, and where they arrive."""

    def written(self, into: Rows) -> Rows:
        """Return the rows to which a kernel writes gradients that belong to the sums ``into``."""
        if prefix.is_direct(self.builder, self.decisions, self.shape):
            return into
        return self.aside(into.tokens)

    def aside(self, tokens: int) -> Rows:
        """Return rows of the buffer for the gradients of one call, which is added at its first use."""
        if not self.builder.has(prefix.ASIDE):
            width = self.shape.cache_width
            self.builder.own(prefix.ASIDE, BufferClass.TRANSIENT, self.decisions.dtype, self.rows_aside, width)
        return Rows(prefix.ASIDE, 0, tokens)

    def attend(self, part: Part) -> None:
        """Write one call, and merge its output into ``attn`` and ``lse``."""
        most = self.most_keys
        part_forward(
            self.builder, self.decisions, self.shape, part, prefix.KEY_PART, merge=prefix.MERGE, most_keys=most
        )

    def attend_backward(self, part: Part, into: Rows) -> None:
        """Write the backward of one call, and add the gradients of its queries to their sum."""
        builder, decisions, shape = self.builder, self.decisions, self.shape
        name = f"{prefix.KEY_PART}.bwd"
        part_backward(builder, decisions, shape, part, name, into=into, most_keys=self.most_keys)
        tokens, queries = part.queries(shape), builder.all("d_q")
        if not self.several:  # the late halves of several sequences lie apart
            queries = Rows("d_q", shape.tokens - tokens, tokens)
        add(builder, decisions, f"d_q.add{part.suffix}", Rows("d_q.part", 0, tokens), queries)


class _RingOfBlocks(_Calls):
    """Passes each block round the ring."""

    def __init__(self, builder: TemplateBuilder, decisions: Decisions, shape: Shape, blocks: list[Block]) -> None:
        super().__init__(builder, decisions, shape, blocks)
        self.ring = ChunkRing(builder, decisions, shape, self.room)

    def start(self, block: Block) -> None:
        self.ring.start(block.name, block.keys, square=block.own)

    def forward(self, block: Block, following: Block | None) -> None:
        if not block.own:
            self.attend(Part(block.keys, suffix=block.name))
        for steps in self.ring.steps(block.name, block.keys.tokens, square=block.own):
            for step in steps:
                suffix = f".ring{step.hops}{block.name}{step.suffix}"
                self.attend(Part(step.keys, late=step.late, suffix=suffix))
        if following is not None:
            self.start(following)

    def backward(self, block: Block, following: Block | None) -> None:
        builder, decisions, tokens = self.builder, self.decisions, block.keys.tokens
        if not block.own:
            written = self.written(block.sums)
            self.attend_backward(Part(block.keys, suffix=block.name), written)
            prefix.sum_into(builder, decisions, self.shape, block.name, written, block.sums)
        self.finish()
        if block.own:
            self.ring.begin_sums(block.name, tokens)
        for steps in self.ring.steps(block.name, tokens, square=block.own):
            for step in steps:
                suffix, sums = f".ring{step.hops}{block.name}{step.suffix}", self.ring.sums(step)
                into = sums if step.hops == 1 else self.aside(sums.tokens)
                self.attend_backward(Part(step.keys, late=step.late, suffix=suffix), into)
                if step.hops > 1:
                    add(builder, decisions, f"d_kv.add{suffix}", into, sums)
            self._due = block, self.ring.pass_sums(block.name, steps[0].hops, tokens)
        if following is not None:
            self.start(following)

    def finish(self) -> None:
        if self._due is not None:
            block, arrived = self._due
            halves = block.own and self.several
            add(self.builder, self.decisions, f"d_kv.return{block.name}", arrived, block.sums, halves=halves)
            self._due = None


class _GatheredBlocks(_Calls):
    """Gathers each block from all ranks: the early half of every rank's rows, then the late half of every rank's.

    Of several sequences, a block of earlier keys is gathered sequence by sequence (op ``all_gather.sequences``), so
    that one call reads it. The subsequence's own keys are copied before: the early halves of all sequences, then the
    late ones. The halves of one sequence then lie apart, and there is one call for each rank.
    """

    def __init__(self, builder: TemplateBuilder, decisions: Decisions, shape: Shape, blocks: list[Block]) -> None:
        super().__init__(builder, decisions, shape, blocks)
        self.most_keys, self.rows_aside = shape.cp * self.room, shape.tokens
        self._again = ".rec" if builder.phase is Phase.RECOMPUTE else ""
        """End of the names of the buffers of recompute, which die long before backward gathers blocks again."""
        self._slots = {block.name: i % DOUBLE_BUFFER_SLOTS for i, block in enumerate(blocks)}

    def start(self, block: Block) -> None:
        mine = block.keys
        if block.own and self.several:
            packed, size = self._rows("kv.mine", block, 1), mine.tokens * self.builder.row_bytes(mine.slot)
            work = Rowwise("kv.pack", mine.tokens, size, size)
            self.builder.emit("kv.pack", "kv.pack", Lane.COMPUTE, work, kv=reads(mine), out=writes(packed))
            mine = packed
        gathered = writes(self._rows("kv.all", block, self.shape.cp))
        self._collective("all_gather", "kv.gather", block, shard=reads(mine), full=gathered)

    def forward(self, block: Block, following: Block | None) -> None:
        if following is not None:
            self.start(following)
        for part in self._parts(block):
            self.attend(part)

    def backward(self, block: Block, following: Block | None) -> None:
        if following is not None:
            self.start(following)
        gradients = self._rows("d_kv.all", block, self.shape.cp)
        for part in self._parts(block):
            self.attend_backward(part, Rows(gradients.slot, part.keys.first, part.keys.tokens))
        for i, (first, tokens) in enumerate(rows_without_queries(self.shape) if block.own else ()):
            work = Rowwise("zero", tokens, 0, tokens * self.builder.row_bytes(gradients.slot))
            target = writes(Rows(gradients.slot, first, tokens))
            self.builder.emit(f"d_kv.clear{i or ''}", "zero", Lane.COMPUTE, work, target=target)
        mine = self._rows("d_kv.mine", block, 1)
        self._collective("reduce_scatter", "d_kv.scatter", block, full=reads(gradients), shard=writes(mine))
        self.finish()
        self._due = block, mine

    def finish(self) -> None:
        if self._due is None:
            return
        block, arrived = self._due
        if block.own:  # the causal square wrote the first term
            add(self.builder, self.decisions, "d_kv.return", arrived, block.sums, halves=self.several)
        else:
            prefix.sum_into(self.builder, self.decisions, self.shape, f".return{block.name}", arrived, block.sums)
        self._due = None

    def _parts(self, block: Block) -> list[Part]:
        """Return the calls over a block that was gathered: all of its keys, or of its own those in zigzag order."""
        everyone = self._rows("kv.all", block, self.shape.cp)
        if block.own:
            return parts_of_earlier_keys(self.decisions, self.shape, everyone.slot)
        return [Part(everyone, suffix=block.name)]

    def _rows(self, name: str, block: Block, ranks: int) -> Rows:
        """Return the rows of a block, from ``ranks`` ranks, in one of two buffers that is added at its first use."""
        slot = f"{name}{self._again}{self._slots[block.name]}"
        if not self.builder.has(slot):
            width = self.shape.cache_width
            self.builder.own(slot, BufferClass.EXCHANGE, self.decisions.dtype, ranks * self.room, width)
        return Rows(slot, 0, ranks * block.keys.tokens)

    def _collective(self, op: Literal["all_gather", "reduce_scatter"], name: str, block: Block, **rows: Access) -> None:
        size = self.shape.cp * block.keys.tokens * self.shape.cache_width * DTYPE_BYTES[self.decisions.dtype]
        by_sequence = self.several and not block.own
        calls = in_equal_calls(self.decisions, op, size, self.decisions.micro_batch if by_sequence else CHUNKS)
        work = Collective(op, size, self.shape.cp, "cp", calls=calls)
        self.builder.emit(f"{name}{block.name}", f"{op}.sequences" if by_sequence else op, Lane.CP, work, **rows)
