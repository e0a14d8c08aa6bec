"""Attention with a window over context-parallel ranks: each rank gets the few keys right before its own chunks.

A token sees ``window`` keys: its own and those right before it. In zigzag order rank r has chunks r and 2*cp - 1 - r
(``ring.py``). The keys right before an early chunk lie at the end of the early chunk of rank r - 1, those before a late
chunk at the end of the late chunk of rank r + 1. So window - 1 keys and values travel one hop in each direction, and no
further, however many ranks there are:

    chunks      | c0 | c1 | c2 | c3 | c4 | c5 | c6 | c7 |       cp 4
    early       rank 0 -> 1 -> 2 -> 3                           the last keys of c0, c1, c2
    late        rank 3 <- 2 <- 1 <- 0  is  c4 <- c5 ...         rank r sends the last keys of its late chunk to r - 1

                rank 3 has c3 and c4, so the keys before c4 are its own; no keys precede c0 of rank 0

A buffer holds the keys that come from another rank (its first window - 1 rows) and the chunk's own behind them. One
call for each chunk attends to that buffer; the queries belong to the last keys. There is no partial output to merge. In
backward the gradients of the keys of another rank travel back and are added to those of its own queries.

Hops are a ring's: what rank cp - 1 receives for its late chunk, and rank 0 for its early chunk, is of no use. Rank
cp - 1 copies its own keys over it, and rank 0 has fewer keys. Gradients that belong to no rank are sent as zeros.

A window may be as long as a chunk and one more: keys beyond the neighbouring chunk do not travel
(``compatibility.py``).

Of a micro-batch of several sequences, each has transfers and calls of its own: the chunks of two sequences do not lie
side by side.

Ranks divide every subsequence in the same way. Its keys are copied out of the KV cache. The last chunk of the
subsequence before lies on rank 0, so what rank 0 sees before its early chunk is in its own KV cache. In backward rank 0
starts the sum of the gradients of these keys, which the backward of the subsequence before adds to. The other ranks
start it with zeros, so that all ranks have the same buffers at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.attention import subsequence as prefix
from memo_sim.program.attention.partial import add, attention_work, join, own_d_q, put, workspace
from memo_sim.program.ir.builder import Access, Rows, TemplateBuilder, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Lane
from memo_sim.program.ir.kinds import Phase
from memo_sim.program.ir.work import Attention, Exchange, Rowwise
from memo_sim.program.layout.shape import Shape

Half = Literal["early", "late"]
HALVES: tuple[Half, Half] = ("early", "late")
FROM_OTHERS = "d_kv.from_others"
"""Gradients of this rank's keys that another rank computed."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One of this rank's two chunks of one sequence."""

    half: Half
    sequence: int
    first: int
    """First row in the rank's tensors."""
    tokens: int
    before: int
    """Keys that a chunk's first query sees before its own."""
    several: bool
    """Whether the micro-batch has several sequences."""

    @property
    def name(self) -> str:
        """End of the names of the chunk's instructions."""
        return f"{self.half}.q{self.sequence}" if self.several else self.half

    @property
    def rows(self) -> tuple[int, int]:
        """First row and rows in the rank's tensors."""
        return self.first, self.tokens

    @property
    def at(self) -> int:
        """First row in a buffer of keys, which has those before a chunk and the chunk's own of every sequence."""
        return self.sequence * (self.before + self.tokens)

    @property
    def others(self) -> tuple[int, int]:
        """First row and rows, in such a buffer, of the keys before the chunk."""
        return self.at, self.before

    @property
    def own(self) -> tuple[int, int]:
        """First row and rows, in such a buffer, of the chunk's own keys."""
        return self.at + self.before, self.tokens

    @property
    def last(self) -> tuple[int, int]:
        """First row and rows, in such a buffer, of the chunk's last keys, which the next chunk's queries see."""
        return self.at + self.tokens, self.before


def forward(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write forward: reads ``qkv``, or ``q`` and ``prefix.kv`` of a subsequence; writes ``attn`` and ``lse``."""
    _exchange_keys(builder, decisions, shape, "")
    for chunk in _chunks(decisions, shape):
        keys = _keys(builder, shape, chunk)
        builder.emit(
            f"attn.{chunk.name}",
            "attention",
            Lane.COMPUTE,
            _work(decisions, shape, chunk, keys, backward=False),
            **_queries(shape, chunk),
            kv=reads(keys),
            out=writes(Rows("attn", *chunk.rows)),
            lse=writes(Rows("lse", *chunk.rows)),
            workspace=_workspace(builder, decisions, shape, "attn.scratch", backward=False),
        )


def backward(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write backward: reads what forward reads and writes, and ``d_attn``; writes ``d_qkv``.

    Of a subsequence, gradients of keys and values are summed in ``prefix.d_kv``.
    """
    _exchange_keys(builder, decisions, shape, ".bwd")
    own_d_q(builder, decisions, shape)
    for chunk in _chunks(decisions, shape):
        keys = _keys(builder, shape, chunk)
        gradients = _buffer(builder, decisions, shape, f"d_kv.{chunk.half}", chunk.before + chunk.tokens)
        builder.emit(
            f"attn.{chunk.name}.bwd",
            "attention.bwd",
            Lane.COMPUTE,
            _work(decisions, shape, chunk, keys, backward=True),
            grad=reads(Rows("d_attn", *chunk.rows)),
            **_queries(shape, chunk),
            kv=reads(keys),
            out=reads(Rows("attn", *chunk.rows)),
            lse=reads(Rows("lse", *chunk.rows)),
            grad_q=writes(Rows("d_q.part", *chunk.rows)),
            grad_kv=writes(Rows(gradients, keys.first, keys.tokens)),
            workspace=_workspace(builder, decisions, shape, "attn.bwd.scratch", backward=True),
        )
    if shape.window > 1:
        _start_earlier_sums(builder, decisions, shape)
        _return_gradients(builder, decisions, shape)
    for chunk in _chunks(decisions, shape):
        summed = Rows(f"d_kv.{chunk.half}", *chunk.own)
        if shape.kv_cache_tokens:
            _sum_of_subsequence(builder, decisions, shape, chunk, summed)
        else:
            queries, packed = Rows("d_q.part", *chunk.rows), Rows("d_qkv", *chunk.rows)
            join(builder, f"qkv.join.{chunk.name}", queries, summed, packed)
    if shape.kv_cache_tokens:
        ((_, mine),) = prefix.sums_of(shape, shape.start, shape.tokens)
        join(builder, "qkv.join", builder.all("d_q.part"), mine, builder.all("d_qkv"))


def _chunks(decisions: Decisions, shape: Shape) -> Iterator[_Chunk]:
    """Yield the early and the late chunk of every sequence."""
    count, before = decisions.micro_batch, shape.window - 1
    tokens = shape.tokens // (2 * count)
    for sequence in range(count):
        for place, half in enumerate(HALVES):
            yield _Chunk(half, sequence, (2 * sequence + place) * tokens, tokens, before, count > 1)


def _work(decisions: Decisions, shape: Shape, chunk: _Chunk, keys: Rows, *, backward: bool) -> Attention:
    """Return the work of a chunk's call, which is about one sequence."""
    count = decisions.micro_batch
    queries, seen = count * chunk.tokens, count * keys.tokens
    work = attention_work(decisions, shape, queries, seen, "causal", backward=backward, window=shape.window)
    return replace(work, batch=1)


def _queries(shape: Shape, chunk: _Chunk) -> dict[str, Access]:
    """Return a chunk's queries as an operand."""
    name = "q" if shape.kv_cache_tokens else "qkv"
    return {name: reads(Rows(name, *chunk.rows))}


def _exchange_keys(builder: TemplateBuilder, decisions: Decisions, shape: Shape, suffix: str) -> None:
    """Write this rank's keys behind those of its neighbours, which arrive from one rank before and one behind."""
    before, size = shape.window - 1, 2 * shape.kv_width * DTYPE_BYTES[decisions.dtype]
    for chunk in _chunks(decisions, shape):
        keys = _buffer(builder, decisions, shape, _key_buffer(builder, chunk.half), before + chunk.tokens)
        _pack(builder, shape, chunk, Rows(keys, *chunk.own), suffix)
        if before:
            sent, received = Rows(keys, *chunk.last), Rows(keys, *chunk.others)
            _hop(
                builder, f"kv.hop.{chunk.name}{suffix}", shape, chunk.half, (sent, received), before * size, back=False
            )
    if before and _is_last(shape):
        for early, late in _pairs(decisions, shape):
            source = Rows(_key_buffer(builder, "early"), *early.last)
            target = Rows(_key_buffer(builder, "late"), *late.others)
            put(builder, f"kv.own{_of(early)}{suffix}", source, target)
    if before and shape.start and not shape.cp_rank:
        for early, _ in _pairs(decisions, shape):
            (source,) = prefix.rows_before(decisions, shape, early.sequence, before)
            put(builder, f"kv.earlier{_of(early)}{suffix}", source, Rows(_key_buffer(builder, "early"), *early.others))


def _pack(builder: TemplateBuilder, shape: Shape, chunk: _Chunk, out: Rows, suffix: str) -> None:
    """Copy a chunk's keys and values out of the packed Q, K, V, or out of the KV cache."""
    name, size = f"kv.pack.{chunk.name}{suffix}", chunk.tokens * builder.row_bytes(out.slot)
    if shape.kv_cache_tokens:
        put(builder, name, Rows(prefix.KV, shape.start + chunk.first, chunk.tokens), out)
        return
    work, op = Rowwise("kv.pack", chunk.tokens, size, size), "kv.pack.sequence" if chunk.several else "kv.pack"
    builder.emit(name, op, Lane.COMPUTE, work, qkv=reads(Rows("qkv", *chunk.rows)), out=writes(out))


def _pairs(decisions: Decisions, shape: Shape) -> list[tuple[_Chunk, _Chunk]]:
    """Return the early and the late chunk of each sequence."""
    chunks = list(_chunks(decisions, shape))
    return list(zip(chunks[::2], chunks[1::2], strict=True))


def _of(chunk: _Chunk) -> str:
    """Return the end of the name of an instruction that there is for each sequence."""
    return f".q{chunk.sequence}" if chunk.several else ""


def _start_earlier_sums(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Start the sums of the gradients of the keys before a subsequence: those that rank 0 has, or zeros."""
    if not shape.start:
        return
    for early, _ in _pairs(decisions, shape):
        (keys,) = prefix.rows_before(decisions, shape, early.sequence, early.before)
        ((_, sums),) = prefix.sums_of(shape, keys.first, keys.tokens)
        name = f"d_kv.earlier{_of(early)}"
        if not shape.cp_rank:
            put(builder, name, Rows("d_kv.early", *early.others), sums)
            continue
        work = Rowwise("zero", sums.tokens, 0, sums.tokens * builder.row_bytes(sums.slot))
        builder.emit(name, "zero", Lane.COMPUTE, work, target=writes(sums))


def _sum_of_subsequence(
    builder: TemplateBuilder, decisions: Decisions, shape: Shape, chunk: _Chunk, summed: Rows
) -> None:
    """Move the gradients of a chunk's keys to their sums, which the last keys' later queries may have begun."""
    begun = chunk.before if chunk.half == "late" and not prefix.is_last(shape) else 0
    ((_, into),) = prefix.sums_of(shape, shape.start + chunk.first, chunk.tokens)
    new = chunk.tokens - begun
    if new:
        put(builder, f"d_kv.put.{chunk.name}", Rows(summed.slot, summed.first, new), Rows(into.slot, into.first, new))
    if begun:
        part, rows = Rows(summed.slot, summed.first + new, begun), Rows(into.slot, into.first + new, begun)
        add(builder, decisions, f"d_kv.add.{chunk.name}.later", part, rows)


def _return_gradients(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Send gradients of other ranks' keys back, and add those that arrive to the last keys of each chunk."""
    before, size = shape.window - 1, 2 * shape.kv_width * DTYPE_BYTES[decisions.dtype]
    if _is_last(shape):
        for early, late in _pairs(decisions, shape):
            last = Rows("d_kv.early", *early.last)
            add(builder, decisions, f"d_kv.add.own{_of(early)}", Rows("d_kv.late", *late.others), last)
    for chunk in _chunks(decisions, shape):
        half, begin = chunk.half, Rows(f"d_kv.{chunk.half}", *chunk.others)
        if (half == "late" and _is_last(shape)) or (half == "early" and not shape.cp_rank):
            work = Rowwise("zero", before, 0, before * size)
            builder.emit(f"d_kv.clear.{chunk.name}", "zero", Lane.COMPUTE, work, target=writes(begin))
        arrived = Rows(_buffer(builder, decisions, shape, f"{FROM_OTHERS}.{half}", before), *_arrived(chunk))
        _hop(builder, f"d_kv.hop.{chunk.name}", shape, half, (begin, arrived), before * size, back=True)
    for chunk in _chunks(decisions, shape):
        last = Rows(f"d_kv.{chunk.half}", *chunk.last)
        arrived = Rows(f"{FROM_OTHERS}.{chunk.half}", *_arrived(chunk))
        add(builder, decisions, f"d_kv.add.{chunk.name}", arrived, last)


def _arrived(chunk: _Chunk) -> tuple[int, int]:
    """Return first row and rows of the gradients of a chunk's last keys that another rank computed."""
    return chunk.sequence * chunk.before, chunk.before


def _hop(  # noqa: PLR0917 - the context, and what travels
    builder: TemplateBuilder, name: str, shape: Shape, half: Half, rows: tuple[Rows, Rows], size: int, *, back: bool
) -> None:
    """Exchange rows with the neighbours; early keys and gradients of late keys go to the next rank, others back."""
    distance = 1 if (half == "early") != back else shape.cp - 1
    sent, received = rows
    work = Exchange(size, shape.cp, shape.ring, distance)
    builder.emit(name, "send_recv", Lane.P2P, work, send=reads(sent), recv=writes(received))


def _keys(builder: TemplateBuilder, shape: Shape, chunk: _Chunk) -> Rows:
    """Return the keys that a chunk's queries see; no keys precede those of the first chunk."""
    none = chunk.half == "early" and not shape.cp_rank and not shape.start
    first = chunk.own[0] if none else chunk.at
    return Rows(_key_buffer(builder, chunk.half), first, chunk.at + chunk.before + chunk.tokens - first)


def _key_buffer(builder: TemplateBuilder, half: Half) -> str:
    """Return the name of a chunk's keys and values; recompute has its own, which die long before backward's."""
    return f"kv.{half}{'.rec' if builder.phase is Phase.RECOMPUTE else ''}"


def _is_last(shape: Shape) -> bool:
    """Return whether this rank's two chunks are neighbours in the sequence."""
    return shape.cp_rank == shape.cp - 1


def _buffer(builder: TemplateBuilder, decisions: Decisions, shape: Shape, name: str, tokens: int) -> str:
    """Add a buffer with ``tokens`` rows of every sequence at its first use, and return its name."""
    if not builder.has(name):
        rows = decisions.micro_batch * tokens
        builder.own(name, BufferClass.EXCHANGE, decisions.dtype, rows, 2 * shape.kv_width)
    return name


def _workspace(
    builder: TemplateBuilder, decisions: Decisions, shape: Shape, name: str, *, backward: bool
) -> Access | None:
    """Return the scratch that all calls share, which has room for the one with more keys on any rank."""
    if builder.has(name):
        return writes(builder.all(name))
    chunk = next(_chunks(decisions, shape))
    work = _work(decisions, shape, chunk, Rows("", 0, chunk.before + chunk.tokens), backward=backward)
    return workspace(builder, decisions, work, name)
