"""Chunks of attention beside a ring: ranks send the keys and values of one chunk to the next rank, and so on.

The ranks divide every chunk in zigzag order, as ``ring.py`` divides a whole sequence: of 2 x cp parts, rank r has parts
r and 2*cp - 1 - r, its early and its late half. The queries of a chunk meet the keys of an earlier chunk in cp calls
without a mask: first those of the own rank, then those that arrive. The keys of their own chunk are a ring as without
chunks, a causal square and half a square a hop. One hop of cp 2 and two chunks:

    rank 0   | c0: 0 3 | c1: 0 3 |        queries c1, keys c0   own 0 3, then 1 2 of rank 1: all pairs
    rank 1   | c0: 1 2 | c1: 1 2 |        queries c1, keys c1   own square, then half a square

Each pair of chunks sends its keys round the ring again, in cp - 1 hops. Backward sends them as often, and equally often
the sums of their gradients, which start at the next rank and end at the rank that has the keys. That rank adds what
arrives to its fp32 sum over the chunks of queries. A pair's last hop runs beside the first call of the next pair of the
same keys.

Of a micro-batch of several sequences, a rank's rows of a chunk are one sequence after the other, each with its early
half first. Keys of the queries' own chunk are copied before they travel: the early halves of all sequences, then the
late ones, so that a half is one range. Gradients that return in this order are added to those of each sequence.

Bytes: a rank's K and V of a layer are B bytes. With n chunks a forward sends (cp - 1) x B x (n + 1) / 2, which is
(n + 1) / 2 times as much as without chunks. A hop is as easy to hide as in a ring whose sequence is one chunk long.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memo_sim.contract.plan import Decisions
from memo_sim.program.ir.builder import Rows, TemplateBuilder, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Lane
from memo_sim.program.ir.work import Exchange, Rowwise
from memo_sim.program.layout.shape import Shape

DOUBLE_BUFFER_SLOTS = 2
"""Number of exchange buffers between which hops alternate."""


@dataclass(frozen=True, slots=True)
class Step:
    """One call over keys that arrived: of all queries of a chunk, or with ``late`` of their late half."""

    hops: int
    """How many ranks away the keys were computed."""
    keys: Rows
    late: bool = False
    suffix: str = ""
    """End of the instruction's name, to tell apart two calls of one step."""
    several: bool = False
    """Whether the rows are of several sequences, whose late halves lie apart."""

    def of(self, queries: Rows) -> Rows:
        """Return the rows of ``queries`` that have those of this call: all, where late halves lie apart."""
        return late_half(queries) if self.late and not self.several else queries

    def count(self, queries: Rows) -> int:
        """Return how many of ``queries`` this call is about."""
        return queries.tokens // 2 if self.late else queries.tokens


def late_half(rows: Rows) -> Rows:
    """Return the late half of a chunk's rows."""
    half = rows.tokens // 2
    return Rows(rows.slot, rows.first + half, rows.tokens - half)


class ChunkRing:
    """Writes the hops of a chunk's keys and values, and of the sums of their gradients; with cp 1 it writes none."""

    def __init__(self, builder: TemplateBuilder, decisions: Decisions, shape: Shape, room: int) -> None:
        """``shape``: the sizes inside attention. ``room``: the rows of the longest chunk."""
        self.builder, self.decisions, self.shape, self.room = builder, decisions, shape, room

    @property
    def several(self) -> bool:
        """Whether rows are of several sequences: what travels then has the early halves of all of them first."""
        return self.decisions.micro_batch > 1 and self.shape.cp > 1

    def start(self, name: str, keys: Rows, *, square: bool) -> None:
        """Write the first hop of a pair of chunks, named ``name``: it runs beside the call over the own ``keys``.

        ``square``: queries and keys are of the same chunk, so that other ranks need halves of the keys.
        """
        if self.shape.cp == 1:
            return
        if self.several and square:
            packed, size = self._rows("kv", 0, keys.tokens), keys.tokens * self.builder.row_bytes(keys.slot)
            work = Rowwise("kv.pack", keys.tokens, size, size)
            self.builder.emit(f"kv.pack{name}", "kv.pack", Lane.COMPUTE, work, kv=reads(keys), out=writes(packed))
            keys = packed
        self._hop("kv", 1, name, keys)

    def steps(self, name: str, tokens: int, *, square: bool) -> Iterator[list[Step]]:
        """Yield the calls over the ``tokens`` keys of each other rank; write each hop before the calls it is beside.

        ``square``: queries and keys are of the same chunk.
        """
        cp = self.shape.cp
        for hops in range(1, cp):
            keys = self._rows("kv", hops, tokens)
            if hops + 1 < cp:
                self._hop("kv", hops + 1, name, keys)
            if not square:
                yield [Step(hops, keys)]
                continue
            early = Rows(keys.slot, 0, tokens // 2)
            if hops <= self.shape.cp_rank:  # keys of an earlier rank: only their early half comes before all queries
                yield [Step(hops, early)]
            else:
                late = Step(hops, late_half(keys), late=True, suffix=".late", several=self.several)
                yield [Step(hops, early, late=True, suffix=".early", several=self.several), late]

    def sums(self, step: Step) -> Rows:
        """Return where the gradients of a step's keys are summed, on their way to the rank that has the keys."""
        return Rows(self._slot("d_kv", step.hops), step.keys.first, step.keys.tokens)

    def begin_sums(self, name: str, tokens: int) -> None:
        """Write zeros to the sums of the late half of a causal square's keys, if the first step reads the early half.

        Only the rank where sums start needs it: later ranks add to what arrives.
        """
        if self.shape.cp_rank < 1:
            return
        rows = late_half(self._rows("d_kv", 1, tokens))
        size = rows.tokens * self.builder.row_bytes(rows.slot)
        work = Rowwise("zero", rows.tokens, 0, size)
        self.builder.emit(f"d_kv.clear{name}", "zero", Lane.COMPUTE, work, target=writes(rows))

    def pass_sums(self, name: str, hops: int, tokens: int) -> Rows:
        """Write the hop of the sums after step ``hops``; return where the sums of the next step arrive."""
        return self._hop("d_kv", hops + 1, name, self._rows("d_kv", hops, tokens))

    def _hop(self, kind: str, step: int, name: str, sent: Rows) -> Rows:
        """Write the hop that brings the buffer of ``step`` from the previous rank, and return its rows."""
        received, ring = self._rows(kind, step, sent.tokens), self.shape.ring
        apart = ring != "metp" or self.decisions.layout.overlap_exchanges
        self.builder.emit(
            f"{kind}.hop{step}{name}",
            "send_recv",
            Lane.P2P if apart else Lane.COMPUTE,
            Exchange(sent.tokens * self.builder.row_bytes(sent.slot), self.shape.cp, ring),
            send=reads(sent),
            recv=writes(received),
        )
        return received

    def _rows(self, kind: str, step: int, tokens: int) -> Rows:
        return Rows(self._slot(kind, step), 0, tokens)

    def _slot(self, kind: str, step: int) -> str:
        """Return the exchange buffer of ``step``, which is added at its first use."""
        slot = f"{kind}.ring{step % DOUBLE_BUFFER_SLOTS}"
        if not self.builder.has(slot):
            width = self.shape.cache_width
            self.builder.own(slot, BufferClass.EXCHANGE, self.decisions.dtype, self.room, width)
        return slot
