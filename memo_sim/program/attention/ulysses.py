"""Ulysses: attention over whole sequences for a part of the heads, between two all-to-alls (DeepSpeed-Ulysses).

Outside of attention a rank of ``ulysses`` holds a part of the tokens with all features ("home"); inside all tokens of
its context-parallel shard with ``1 / ulysses`` of the heads. Both have the same bytes:

    home   tokens x width                                  heads   ulysses x tokens x (width / ulysses)

              | h0 h1 |                                               | h0 |  tokens of rank 0
    rank 0    | h0 h1 |  its tokens    -- all-to-all -->     rank 0   | h0 |  tokens of rank 1

A layer sends Q, K and V to the heads and the output home, and in backward the output's gradient to the heads and those
of Q, K and V home: 4 x tokens x hidden each way for equal heads, whatever the degree. What is sent is packed by head
before, what arrives home is unpacked after; on the heads' side rows lie in the ranks' order and need neither.

Token shards are cut at the same row blocks as the whole: rows [first, first + n) of every rank arrive as rows [ulysses
x first, ulysses x (first + n)), so recompute of [swapped_tokens, end) sends those alone. The degree is limited by heads
and key/value heads: each rank needs whole ones.
"""

from __future__ import annotations

from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.ir.builder import Rows, TemplateBuilder, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Lane
from memo_sim.program.ir.work import Collective, Rowwise
from memo_sim.program.layout.shape import Shape


class Ulysses:
    """Writes the exchanges of one template; with degree 1 none are written, and home is where the heads are."""

    def __init__(self, builder: TemplateBuilder, shape: Shape, dtype: str, *, room: int = 0) -> None:
        """``room``: the most rows that are exchanged at once, where those are not all of the rank's."""
        self.room = room
        self.builder = builder
        self.shape = shape
        self.dtype = dtype

    def sequence_sharded(self, slot: str) -> str:
        """Return the slot that holds this rank's own tokens of what attention calls ``slot``."""
        return slot if self.shape.ulysses == 1 else f"{slot}_seq"

    def to_heads(self, slot: str, rows: Rows, suffix: str = "") -> None:
        """Send ``rows`` of the home slot to the ranks of their heads, into ``slot``."""
        self.to_head_ranks(slot, rows, self._head_sharded(slot, rows), suffix)

    def to_head_ranks(self, name: str, sequence_sharded: Rows, head_sharded: Rows, suffix: str) -> None:
        """Send rows from their ranks to those of their heads; ``name`` is the tensor's."""
        if self.shape.ulysses == 1:
            return
        width = self.builder.features(sequence_sharded.slot)
        sent = self._exchange(f"{name}.packed", width, sequence_sharded)
        self._copy(f"{name}.pack{suffix}", sequence_sharded, sent)
        self._all_to_all(f"{name}.to_heads{suffix}", sent, head_sharded, width)

    def to_tokens(self, slot: str, rows: Rows, suffix: str = "") -> None:
        """Send what ranks hold of ``slot`` for the tokens of ``rows``, a home slot's, to the ranks of those tokens."""
        self.to_sequence_ranks(slot, self._head_sharded(slot, rows), rows, suffix)

    def to_sequence_ranks(self, name: str, head_sharded: Rows, sequence_sharded: Rows, suffix: str) -> None:
        """Send rows from the ranks of their heads home; ``name`` is the tensor's."""
        if self.shape.ulysses == 1:
            return
        width = self.builder.features(sequence_sharded.slot)
        arrived = self._exchange(f"{name}.arrived", width, sequence_sharded)
        self._all_to_all(f"{name}.to_tokens{suffix}", head_sharded, arrived, width)
        self._copy(f"{name}.unpack{suffix}", arrived, sequence_sharded)

    def _head_sharded(self, slot: str, rows: Rows) -> Rows:
        degree = self.shape.ulysses
        return Rows(slot, degree * rows.first, degree * rows.tokens)

    def _exchange(self, name: str, width: int, rows: Rows) -> Rows:
        """Return the rows' place in an exchange buffer of the template's phase."""
        name = f"{self.builder.phase}.{name}"
        if not self.builder.has(name):
            self.builder.own(name, BufferClass.EXCHANGE, self.dtype, self.room or self.shape.tokens, width)
        return Rows(name, 0 if self.room else rows.first, rows.tokens)

    def _all_to_all(self, name: str, send: Rows, recv: Rows, width: int) -> None:
        tokens = min(send.tokens, recv.tokens)
        work = Collective("all_to_all", tokens * width * DTYPE_BYTES[self.dtype], self.shape.ulysses, "ulysses")
        self.builder.emit(name, "all_to_all", Lane.COLLECTIVE, work, send=reads(send), recv=writes(recv))

    def _copy(self, name: str, source: Rows, target: Rows) -> None:
        """Emit the rearrangement of heads in memory, every element read and written once."""
        size = source.tokens * self.builder.features(source.slot) * DTYPE_BYTES[self.dtype]
        work = Rowwise("transpose", source.tokens, size, size)
        self.builder.emit(name, "heads.transpose", Lane.COMPUTE, work, source=reads(source), target=writes(target))
