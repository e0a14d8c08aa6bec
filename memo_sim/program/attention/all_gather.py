"""Attention under context parallelism with all keys and values gathered (Megatron-LM's and Llama 3's all-gather form).

Ranks hold the zigzag's chunks as in the ring (``ring.py``). Keys and values of all ranks are gathered beside the
local causal square, and one more call attends to all that precede; its part merges by log-sum-exp. In backward they are
gathered again, a kernel writes the gradients of all keys and values aside, and these are reduce-scattered.

The gathered rows lie in the zigzag's order: every rank's early chunk, then every rank's late chunk, so that what comes
before an early chunk is one range (chunks c0 .. c7 of cp 4, rank 3 holds c3 and c4):

    gathered   | c0 | c1 | c2 | c3 | c7 | c6 | c5 | c4 |
    rank 3      `--- before both of its chunks, c3 is its own: 2 chunks of queries x 3 of keys, half a square a hop

Against the ring: as many bytes and FLOPs, two calls instead of cp, one wait for all rows instead of one for the last
hop, and buffers of cp shards instead of two. Representative: rank cp - 1, as there. The late chunk of another rank also
attends to what later ranks hold before it, in two more calls: in the picture that of rank 1 (c6) to c2 c3 and to c5 c4.
"""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.attention.partial import Part, add, own_d_q, pack, part_backward, part_forward
from memo_sim.program.ir.builder import Rows, TemplateBuilder, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Lane
from memo_sim.program.ir.work import Collective, Rowwise
from memo_sim.program.layout.shape import Shape

ALL, MINE = "kv.all", "kv.mine"
D_ALL, D_MINE = "d_kv.all", "d_kv.mine"


def start(builder: TemplateBuilder, decisions: Decisions, shape: Shape, suffix: str = "") -> None:
    """Write what comes before the local square: the packing and gathering of keys and values."""
    for name, ranks in ((MINE, 1), (ALL, shape.cp)):
        if not builder.has(name):
            builder.own(name, BufferClass.EXCHANGE, decisions.dtype, ranks * shape.tokens, 2 * shape.kv_width)
    pack(builder, decisions, shape, MINE, suffix)
    builder.emit(
        f"kv.gather{suffix}",
        "all_gather",
        Lane.COLLECTIVE,
        Collective("all_gather", _all_bytes(decisions, shape), shape.cp, "cp"),
        shard=reads(builder.all(MINE)),
        full=writes(builder.all(ALL)),
    )


def forward(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write what follows the local square: the parts of all other keys before, merged into ``attn`` and ``lse``."""
    for part in _parts(shape):
        most = keys_before(shape)
        part_forward(builder, decisions, shape, part, "attn.before", merge="attn.merge", most_keys=most)


def backward(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write what follows the local square's backward: gradients of all keys before, summed at the ranks they are of."""
    for name, ranks in ((D_ALL, shape.cp), (D_MINE, 1)):
        builder.own(name, BufferClass.EXCHANGE, decisions.dtype, ranks * shape.tokens, 2 * shape.kv_width)
    own_d_q(builder, decisions, shape)
    for part in _parts(shape):
        into = Rows(D_ALL, part.keys.first, part.keys.tokens)
        most = keys_before(shape)
        part_backward(builder, decisions, shape, part, "attn.before.bwd", into=into, most_keys=most)
        queries = Rows("d_q.part", 0, part.queries(shape))
        add(builder, decisions, f"d_q.add{part.suffix}", queries, builder.all("d_qkv"))
    for i, rows in enumerate(_unmet(shape)):
        size = rows.tokens * 2 * shape.kv_width * DTYPE_BYTES[decisions.dtype]
        work = Rowwise("zero", rows.tokens, 0, size)
        builder.emit(f"d_kv.clear{i or ''}", "zero", Lane.COMPUTE, work, target=writes(rows))
    builder.emit(
        "d_kv.scatter",
        "reduce_scatter",
        Lane.COLLECTIVE,
        Collective("reduce_scatter", _all_bytes(decisions, shape), shape.cp, "cp"),
        full=reads(builder.all(D_ALL)),
        shard=writes(builder.all(D_MINE)),
    )
    add(builder, decisions, "d_kv.return", builder.all(D_MINE), builder.all("d_qkv"))


def _parts(shape: Shape) -> list[Part]:
    """Return what precedes this rank's chunks but is not its own: early chunks before both, and others its late one."""
    half, rank, cp = shape.tokens // 2, shape.cp_rank, shape.cp
    parts = [Part(Rows(ALL, 0, rank * half))] if rank else []
    if later := (cp - 1 - rank) * half:
        parts.append(Part(Rows(ALL, (rank + 1) * half, later), late=True, suffix=".early"))
        parts.append(Part(Rows(ALL, (cp + rank + 1) * half, later), late=True, suffix=".late"))
    return parts


def _unmet(shape: Shape) -> list[Rows]:
    """Return the gathered rows that no part meets: what follows this rank's chunks, and the chunks themselves."""
    half, rank, cp = shape.tokens // 2, shape.cp_rank, shape.cp
    if rank == cp - 1:
        return [Rows(D_ALL, rank * half, (cp + 1) * half)]
    return [Rows(D_ALL, rank * half, half), Rows(D_ALL, cp * half, (rank + 1) * half)]


def keys_before(shape: Shape) -> int:
    """Return how many gathered rows precede both chunks of rank cp - 1: every early chunk but its own."""
    return (shape.cp - 1) * (shape.tokens // 2)


def _all_bytes(decisions: Decisions, shape: Shape) -> int:
    return shape.cp * shape.tokens * 2 * shape.kv_width * DTYPE_BYTES[decisions.dtype]
