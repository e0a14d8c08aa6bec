"""Context-parallel attention that gathers all keys and values (the all-gather form of Megatron-LM and Llama 3).

Each rank holds two zigzag chunks, as in the ring (``ring.py``). An all-gather of keys and values runs beside the local
causal square. A second call then attends to all earlier keys, and its output merges by log-sum-exp. Backward gathers
the keys and values again. It writes gradients for the keys and values of all ranks, and a reduce-scatter sums them.

The gathered rows keep the zigzag order: the early chunk of every rank, then the late chunk of every rank. The keys
before an early chunk are therefore one range. Example with chunks c0 .. c7 of cp 4, where rank 3 holds c3 and c4:

    gathered   | c0 | c1 | c2 | c3 | c7 | c6 | c5 | c4 |
    rank 3      `--- before both of its chunks, c3 is its own: 2 chunks of queries x 3 of keys, half a square a hop

Compared with the ring, this form

- moves the same bytes and computes the same FLOPs;
- needs two attention calls instead of cp;
- waits once for all rows, where the ring waits for the last hop only;
- needs buffers of cp shards, where the ring needs two.

Of a micro-batch of several sequences, a rank's rows of a chunk are one sequence after the other, in the order in which
they travel in a ring. Then the keys of a sequence are one range on one rank alone, and there are as many calls as in a
ring.

The representative rank is cp - 1, as in the ring. On any other rank the late chunk also attends to keys of later ranks
that precede it, in two more calls. In the picture, the late chunk of rank 1 (c6) attends to c2 c3 and to c5 c4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.attention.partial import Part, add, own_d_q, pack, part_backward, part_forward
from memo_sim.program.ir.builder import Rows, TemplateBuilder, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Lane
from memo_sim.program.ir.kinds import Phase
from memo_sim.program.ir.work import Collective, Rowwise
from memo_sim.program.layout.documents import gathered_segments, shared
from memo_sim.program.layout.shape import Shape
from memo_sim.program.operators.library_calls import CHUNKS, in_equal_calls

D_ALL, D_MINE = "d_kv.all", "d_kv.mine"


def _gathered(builder: TemplateBuilder) -> tuple[str, str]:
    """Return the buffers of all ranks' keys and values, and of this rank's.

    Recompute has its own. Its rows die with its attention, long before backward gathers them again.
    """
    again = ".rec" if builder.phase is Phase.RECOMPUTE else ""
    return f"kv.all{again}", f"kv.mine{again}"


def start(builder: TemplateBuilder, decisions: Decisions, shape: Shape, suffix: str = "") -> None:
    """Write the instructions before the local square: pack keys and values, then gather them."""
    everyone, mine = _gathered(builder)
    for name, ranks in ((mine, 1), (everyone, shape.cp)):
        if not builder.has(name):
            builder.own(name, BufferClass.EXCHANGE, decisions.dtype, ranks * shape.tokens, shape.cache_width)
    pack(builder, decisions, shape, mine, suffix)
    builder.emit(
        f"kv.gather{suffix}",
        "all_gather",
        Lane.CP,
        _collective("all_gather", decisions, shape),
        shard=reads(builder.all(mine)),
        full=writes(builder.all(everyone)),
    )


def forward(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write the calls after the local square, over all other earlier keys; merge them into ``attn`` and ``lse``."""
    for part in parts_of_earlier_keys(decisions, shape, _gathered(builder)[0]):
        most = most_keys(decisions, shape)
        part_forward(builder, decisions, shape, part, "attn.before", merge="attn.merge", most_keys=most)


def backward(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write the calls after the local square's backward; sum each key's gradients at the rank that holds the key."""
    for name, ranks in ((D_ALL, shape.cp), (D_MINE, 1)):
        builder.own(name, BufferClass.EXCHANGE, decisions.dtype, ranks * shape.tokens, shape.cache_width)
    own_d_q(builder, decisions, shape)
    for part in parts_of_earlier_keys(decisions, shape, _gathered(builder)[0]):
        into = Rows(D_ALL, part.keys.first, part.keys.tokens)
        most = most_keys(decisions, shape)
        part_backward(builder, decisions, shape, part, "attn.before.bwd", into=into, most_keys=most)
        queries = Rows("d_q.part", 0, part.queries(shape))
        add(builder, decisions, f"d_q.add{part.suffix}", queries, builder.all("d_qkv"))
    for i, (first, tokens) in enumerate(rows_without_queries(shape)):
        size = tokens * shape.cache_width * DTYPE_BYTES[decisions.dtype]
        work = Rowwise("zero", tokens, 0, size)
        builder.emit(f"d_kv.clear{i or ''}", "zero", Lane.COMPUTE, work, target=writes(Rows(D_ALL, first, tokens)))
    builder.emit(
        "d_kv.scatter",
        "reduce_scatter",
        Lane.CP,
        _collective("reduce_scatter", decisions, shape),
        full=reads(builder.all(D_ALL)),
        shard=writes(builder.all(D_MINE)),
    )
    add(builder, decisions, "d_kv.return", builder.all(D_MINE), builder.all("d_qkv"))


def parts_of_earlier_keys(decisions: Decisions, shape: Shape, everyone: str) -> list[Part]:
    """Return the earlier keys of other ranks, rows of ``everyone``.

    Early chunks come before both own chunks, other chunks before the late one.
    """
    if decisions.micro_batch > 1:
        return _parts_of_each_rank(shape, everyone)
    half, rank, cp = shape.tokens // 2, shape.cp_rank, shape.cp
    parts = [Part(Rows(everyone, 0, rank * half), chunks=tuple(range(rank)))] if rank else []
    if later := (cp - 1 - rank) * half:
        chunks = tuple(range(rank + 1, cp))
        for place, suffix, held in (
            (rank + 1, ".early", chunks),
            (cp + rank + 1, ".late", tuple(2 * cp - 1 - chunk for chunk in chunks)),
        ):
            parts.append(Part(Rows(everyone, place * half, later), late=True, suffix=suffix, chunks=held))
    segments = shared(gathered_segments(decisions), len(parts))
    return [replace(part, segments=segments) for part in parts]


def _parts_of_each_rank(shape: Shape, everyone: str) -> list[Part]:
    """Return the earlier keys of several sequences: of one rank in each call, because a rank's rows of a chunk are one
    sequence after the other.
    """
    half, rank, cp = shape.tokens // 2, shape.cp_rank, shape.cp
    parts = [Part(Rows(everyone, of * half, half), suffix=f".rank{of}") for of in range(rank)]
    for of in range(rank + 1, cp):
        for place, suffix in ((of, ".early"), (cp + of, ".late")):
            parts.append(Part(Rows(everyone, place * half, half), late=True, suffix=f".rank{of}{suffix}"))
    return parts


def rows_without_queries(shape: Shape) -> list[tuple[int, int]]:
    """Return (first row, rows) of the gathered rows that no call reads: this rank's own chunks and all later keys."""
    half, rank, cp = shape.tokens // 2, shape.cp_rank, shape.cp
    if rank == cp - 1:
        return [(rank * half, (cp + 1) * half)]
    return [(rank * half, half), (cp * half, (rank + 1) * half)]


def most_keys(decisions: Decisions, shape: Shape) -> int:
    """Return the most gathered rows that one call reads.

    They are those before both chunks of rank cp - 1: every early chunk but its own. Of several sequences it is one
    rank's.
    """
    ranks = shape.cp - 1 if decisions.micro_batch == 1 else 1
    return ranks * (shape.tokens // 2)


def _collective(kind: Literal["all_gather", "reduce_scatter"], decisions: Decisions, shape: Shape) -> Collective:
    """Return the exchange of all ranks' keys and values, or of their gradients."""
    size = shape.cp * shape.tokens * shape.cache_width * DTYPE_BYTES[decisions.dtype]
    return Collective(kind, size, shape.cp, "cp", calls=in_equal_calls(decisions, kind, size, CHUNKS))
