"""Ulysses: attention over whole sequences for a part of the heads, between two all-to-alls (DeepSpeed-Ulysses).

Outside attention tensors are sequence-sharded: a rank holds a part of the tokens with all features. Inside attention
they are head-sharded: a rank holds all tokens of its context-parallel shard with ``1 / ulysses`` of the heads. Both
forms have the same bytes:

    sequence-sharded   tokens x width                      head-sharded   ulysses x tokens x (width / ulysses)

              | h0 h1 |                                               | h0 |  tokens of rank 0
    rank 0    | h0 h1 |  its tokens    -- all-to-all -->     rank 0   | h0 |  tokens of rank 1

In forward a layer exchanges Q, K and V to head-sharded form and the output back to sequence-sharded form. In backward
it exchanges the output's gradient to head-sharded form and the gradients of Q, K and V back. With as many key/value
heads as query heads each pass sends 4 x tokens x hidden elements, whatever the degree. Sequence-sharded rows are packed
by head before they are sent, and unpacked after they arrive. Head-sharded rows lie in the order of ranks and need
neither.

Token shards are cut at the same row blocks as the whole: rows [first, first + n) of every rank arrive as rows
[ulysses x first, ulysses x (first + n)). Recompute of rows [swapped_tokens, end) therefore exchanges only those rows.
Each rank needs whole heads. Where several ranks read one key/value head, rows that are grouped by rank have a copy of
it for each of them, and unpacking adds up the copies' gradients (``layout/heads.py``).
"""

from __future__ import annotations

from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.ir.builder import Rows, TemplateBuilder, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Lane
from memo_sim.program.ir.work import Collective, Rowwise
from memo_sim.program.layout.shape import Shape
from memo_sim.program.operators.library_calls import by_row_block


class Ulysses:
    """Writes the exchanges of one template; with degree 1 it writes none, and both forms are the same slot."""

    def __init__(self, builder: TemplateBuilder, shape: Shape, dtype: str, *, room: int = 0) -> None:
        """``room``: the most rows of one exchange; 0 for all of the rank's rows."""
        self.room = room
        self.builder = builder
        self.shape = shape
        self.dtype = dtype

    def sequence_sharded(self, slot: str) -> str:
        """Return the slot that holds the sequence-sharded form of the tensor in ``slot``."""
        return slot if self.shape.ulysses == 1 else f"{slot}_seq"

    def to_heads(self, slot: str, rows: Rows, suffix: str = "") -> None:
        """Exchange sequence-sharded ``rows`` into their head-sharded form in ``slot``."""
        self.to_head_ranks(slot, rows, self._head_sharded(slot, rows), suffix)

    def to_head_ranks(self, name: str, sequence_sharded: Rows, head_sharded: Rows, suffix: str) -> None:
        """Exchange rows from sequence-sharded to head-sharded form; ``name`` is the name of the tensor."""
        if self.shape.ulysses == 1:
            return
        width = self.builder.features(sequence_sharded.slot)
        sent = self._exchange(f"{name}.packed", self.shape.grouped_width(width), sequence_sharded)
        self._copy(f"{name}.pack{suffix}", sequence_sharded, sent)
        self._all_to_all(f"{name}.to_heads{suffix}", sent, head_sharded, width)

    def to_tokens(self, slot: str, rows: Rows, suffix: str = "") -> None:
        """Exchange the head-sharded form in ``slot`` into the sequence-sharded ``rows``."""
        self.to_sequence_ranks(slot, self._head_sharded(slot, rows), rows, suffix)

    def to_sequence_ranks(self, name: str, head_sharded: Rows, sequence_sharded: Rows, suffix: str) -> None:
        """Exchange rows from head-sharded to sequence-sharded form; ``name`` is the name of the tensor."""
        if self.shape.ulysses == 1:
            return
        width = self.builder.features(sequence_sharded.slot)
        arrived = self._exchange(f"{name}.arrived", self.shape.grouped_width(width), sequence_sharded)
        self._all_to_all(f"{name}.to_tokens{suffix}", head_sharded, arrived, width)
        self._copy(f"{name}.unpack{suffix}", arrived, sequence_sharded)

    def _head_sharded(self, slot: str, rows: Rows) -> Rows:
        degree = self.shape.ulysses
        return Rows(slot, degree * rows.first, degree * rows.tokens)

    def _exchange(self, name: str, width: int, rows: Rows) -> Rows:
        """Return the rows in an exchange buffer of the template's phase; add the buffer at its first use."""
        name = f"{self.builder.phase}.{name}"
        if not self.builder.has(name):
            self.builder.own(name, BufferClass.EXCHANGE, self.dtype, self.room or self.shape.tokens, width)
        return Rows(name, 0 if self.room else rows.first, rows.tokens)

    def _all_to_all(self, name: str, send: Rows, recv: Rows, width: int) -> None:
        # The ranks make the same call, so its size is that of the rank with the most heads.
        fullest = self.shape.ulysses * self.shape.fullest_width(width)
        rows = min(send, recv, key=lambda side: side.tokens)  # the sequence-sharded side
        size = rows.tokens * fullest * DTYPE_BYTES[self.dtype]
        calls = by_row_block(self.builder, "all_to_all", rows, size)
        work = Collective("all_to_all", size, self.shape.ulysses, "ulysses", calls=calls)
        self.builder.emit(name, "all_to_all", Lane.ULYSSES, work, send=reads(send), recv=writes(recv))

    def _copy(self, name: str, source: Rows, target: Rows) -> None:
        """Emit the copy that rearranges heads in memory: it reads and writes every element once."""
        work = Rowwise("transpose", source.tokens, self._bytes(source), self._bytes(target))
        self.builder.emit(name, "heads.transpose", Lane.COMPUTE, work, source=reads(source), target=writes(target))

    def _bytes(self, rows: Rows) -> int:
        return rows.tokens * self.builder.features(rows.slot) * DTYPE_BYTES[self.dtype]
