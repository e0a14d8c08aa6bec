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
"""

from __future__ import annotations

from typing import Literal

from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.attention.partial import add, attention_work, join, own_d_q, workspace
from memo_sim.program.ir.builder import Access, Rows, TemplateBuilder, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Lane
from memo_sim.program.ir.kinds import Phase
from memo_sim.program.ir.work import Exchange, Rowwise
from memo_sim.program.layout.shape import Shape

Half = Literal["early", "late"]
HALVES: tuple[Half, Half] = ("early", "late")
FROM_OTHERS = "d_kv.from_others"
"""Gradients of this rank's keys that another rank computed."""


def forward(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write forward: reads ``qkv``, writes ``attn`` and ``lse``."""
    _exchange_keys(builder, decisions, shape, "")
    for half in HALVES:
        rows, keys = _own(shape, half), _keys(builder, shape, half)
        work = attention_work(decisions, shape, rows[1], keys.tokens, "causal", backward=False, window=shape.window)
        builder.emit(
            f"attn.{half}",
            "attention",
            Lane.COMPUTE,
            work,
            qkv=reads(Rows("qkv", *rows)),
            kv=reads(keys),
            out=writes(Rows("attn", *rows)),
            lse=writes(Rows("lse", *rows)),
            workspace=_workspace(builder, decisions, shape, "attn.scratch", backward=False),
        )


def backward(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write backward: reads ``qkv``, ``attn``, ``lse`` and ``d_attn``, writes ``d_qkv``."""
    _exchange_keys(builder, decisions, shape, ".bwd")
    own_d_q(builder, decisions, shape)
    before = shape.window - 1
    for half in HALVES:
        rows, keys = _own(shape, half), _keys(builder, shape, half)
        gradients = _buffer(builder, decisions, shape, f"d_kv.{half}", before + rows[1])
        work = attention_work(decisions, shape, rows[1], keys.tokens, "causal", backward=True, window=shape.window)
        builder.emit(
            f"attn.{half}.bwd",
            "attention.bwd",
            Lane.COMPUTE,
            work,
            grad=reads(Rows("d_attn", *rows)),
            qkv=reads(Rows("qkv", *rows)),
            kv=reads(keys),
            out=reads(Rows("attn", *rows)),
            lse=reads(Rows("lse", *rows)),
            grad_q=writes(Rows("d_q.part", *rows)),
            grad_kv=writes(Rows(gradients, keys.first, keys.tokens)),
            workspace=_workspace(builder, decisions, shape, "attn.bwd.scratch", backward=True),
        )
    if before:
        _return_gradients(builder, decisions, shape)
    for half in HALVES:
        rows = _own(shape, half)
        summed = Rows(f"d_kv.{half}", before, rows[1])
        join(builder, f"qkv.join.{half}", Rows("d_q.part", *rows), summed, Rows("d_qkv", *rows))


def _exchange_keys(builder: TemplateBuilder, decisions: Decisions, shape: Shape, suffix: str) -> None:
    """Write this rank's keys behind those of its neighbours, which arrive from one rank before and one behind."""
    before, size = shape.window - 1, 2 * shape.kv_width * DTYPE_BYTES[decisions.dtype]
    for half in HALVES:
        rows = _own(shape, half)
        keys = _key_buffer(builder, half)
        _buffer(builder, decisions, shape, keys, before + rows[1])
        builder.emit(
            f"kv.pack.{half}{suffix}",
            "kv.pack",
            Lane.COMPUTE,
            Rowwise("kv.pack", rows[1], rows[1] * size, rows[1] * size),
            qkv=reads(Rows("qkv", *rows)),
            out=writes(Rows(keys, before, rows[1])),
        )
        if before:
            sent, received = Rows(keys, rows[1], before), Rows(keys, 0, before)
            _hop(builder, f"kv.hop.{half}{suffix}", shape, half, (sent, received), before * size, back=False)
    if before and _is_last(shape):
        early, late = (_key_buffer(builder, half) for half in HALVES)
        work = Rowwise("copy", before, before * size, before * size)
        source, target = reads(Rows(early, shape.tokens // 2, before)), writes(Rows(late, 0, before))
        builder.emit(f"kv.own{suffix}", "copy", Lane.COMPUTE, work, source=source, target=target)


def _return_gradients(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Send gradients of other ranks' keys back, and add those that arrive to the last keys of each chunk."""
    before, size = shape.window - 1, 2 * shape.kv_width * DTYPE_BYTES[decisions.dtype]
    if _is_last(shape):
        last = Rows("d_kv.early", shape.tokens // 2, before)
        add(builder, decisions, "d_kv.add.own", Rows("d_kv.late", 0, before), last)
    for half in HALVES:
        begin = Rows(f"d_kv.{half}", 0, before)
        if (half == "late" and _is_last(shape)) or (half == "early" and not shape.cp_rank):
            work = Rowwise("zero", before, 0, before * size)
            builder.emit(f"d_kv.clear.{half}", "zero", Lane.COMPUTE, work, target=writes(begin))
        arrived = Rows(_buffer(builder, decisions, shape, f"{FROM_OTHERS}.{half}", before), 0, before)
        _hop(builder, f"d_kv.hop.{half}", shape, half, (begin, arrived), before * size, back=True)
    for half in HALVES:
        last = Rows(f"d_kv.{half}", shape.tokens // 2, before)
        add(builder, decisions, f"d_kv.add.{half}", builder.all(f"{FROM_OTHERS}.{half}"), last)


def _hop(  # noqa: PLR0917 - the context, and what travels
    builder: TemplateBuilder, name: str, shape: Shape, half: Half, rows: tuple[Rows, Rows], size: int, *, back: bool
) -> None:
    """Exchange rows with the neighbours; early keys and gradients of late keys go to the next rank, others back."""
    distance = 1 if (half == "early") != back else shape.cp - 1
    sent, received = rows
    work = Exchange(size, shape.cp, shape.ring, distance)
    builder.emit(name, "send_recv", Lane.P2P, work, send=reads(sent), recv=writes(received))


def _own(shape: Shape, half: Half) -> tuple[int, int]:
    """Return first row and rows of a chunk in this rank's tensors."""
    chunk = shape.tokens // 2
    return (chunk if half == "late" else 0, chunk)


def _keys(builder: TemplateBuilder, shape: Shape, half: Half) -> Rows:
    """Return the keys that a chunk's queries see; no keys precede those of the first chunk."""
    before, chunk = shape.window - 1, shape.tokens // 2
    first = before if half == "early" and not shape.cp_rank else 0
    return Rows(_key_buffer(builder, half), first, before + chunk - first)


def _key_buffer(builder: TemplateBuilder, half: Half) -> str:
    """Return the name of a chunk's keys and values; recompute has its own, which die long before backward's."""
    return f"kv.{half}{'.rec' if builder.phase is Phase.RECOMPUTE else ''}"


def _is_last(shape: Shape) -> bool:
    """Return whether this rank's two chunks are neighbours in the sequence."""
    return shape.cp_rank == shape.cp - 1


def _buffer(builder: TemplateBuilder, decisions: Decisions, shape: Shape, name: str, tokens: int) -> str:
    if not builder.has(name):
        builder.own(name, BufferClass.EXCHANGE, decisions.dtype, tokens, 2 * shape.kv_width)
    return name


def _workspace(
    builder: TemplateBuilder, decisions: Decisions, shape: Shape, name: str, *, backward: bool
) -> Access | None:
    """Return the scratch that both calls share, which has room for the one with more keys on any rank."""
    if builder.has(name):
        return writes(builder.all(name))
    chunk = shape.tokens // 2
    keys = chunk + shape.window - 1
    work = attention_work(decisions, shape, chunk, keys, "causal", backward=backward, window=shape.window)
    return workspace(builder, decisions, work, name)
