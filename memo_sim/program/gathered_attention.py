"""Attention under context parallelism with all keys and values gathered (Megatron-LM's and Llama 3's all-gather form).

Ranks hold the zigzag's chunks as in the ring (``ring.py``). Keys and values of all ranks are gathered beside the
local causal square, and one more call attends to all that precede; its part merges by log-sum-exp. In backward they are
gathered again, a kernel writes the gradients of all keys and values aside, and these are reduce-scattered.

The gathered rows lie in the zigzag's order: every rank's early chunk, then every rank's late chunk, so that what comes
before an early chunk is one range (chunks c0 .. c7 of cp 4, rank 3 holds c3 and c4):

    gathered   | c0 | c1 | c2 | c3 | c7 | c6 | c5 | c4 |
    rank 3      `--- before both of its chunks, c3 is its own: 2 chunks of queries x 3 of keys, half a square a hop

Against the ring: as many bytes and FLOPs, two calls instead of cp, one wait for all rows instead of one for the last
hop, and buffers of cp shards instead of two. Representative: rank cp - 1, as there.
"""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.attention_part import add, own_d_q, pack, part_backward, part_forward
from memo_sim.program.builder import Rows, TemplateBuilder, reads, writes
from memo_sim.program.instruction import BufferClass, Lane
from memo_sim.program.shape import Shape
from memo_sim.program.work import Collective, Rowwise

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
    """Write what follows the local square: the part of all keys before, merged into ``attn`` and ``lse``."""
    keys = Rows(ALL, 0, keys_before(shape))
    part_forward(builder, decisions, shape, keys, "attn.before", merge="attn.merge")


def backward(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write what follows the local square's backward: gradients of all keys before, summed at the ranks they are of."""
    for name, ranks in ((D_ALL, shape.cp), (D_MINE, 1)):
        builder.own(name, BufferClass.EXCHANGE, decisions.dtype, ranks * shape.tokens, 2 * shape.kv_width)
    own_d_q(builder, decisions, shape)
    before = keys_before(shape)
    keys, into = Rows(ALL, 0, before), Rows(D_ALL, 0, before)
    part_backward(builder, decisions, shape, keys, "attn.before.bwd", into=into)
    add(builder, decisions, "d_q.add", builder.all("d_q.part"), builder.all("d_qkv"))
    others = Rows(D_ALL, before, shape.cp * shape.tokens - before)
    size = others.tokens * 2 * shape.kv_width * DTYPE_BYTES[decisions.dtype]
    builder.emit("d_kv.clear", "zero", Lane.COMPUTE, Rowwise("zero", others.tokens, 0, size), target=writes(others))
    builder.emit(
        "d_kv.scatter",
        "reduce_scatter",
        Lane.COLLECTIVE,
        Collective("reduce_scatter", _all_bytes(decisions, shape), shape.cp, "cp"),
        full=reads(builder.all(D_ALL)),
        shard=writes(builder.all(D_MINE)),
    )
    add(builder, decisions, "d_kv.home", builder.all(D_MINE), builder.all("d_qkv"))


def keys_before(shape: Shape) -> int:
    """Return how many gathered rows precede both chunks of rank cp - 1: every early chunk but its own."""
    return (shape.cp - 1) * (shape.tokens // 2)


def _all_bytes(decisions: Decisions, shape: Shape) -> int:
    return shape.cp * shape.tokens * 2 * shape.kv_width * DTYPE_BYTES[decisions.dtype]
