"""The QKV product when tensor-parallel ranks share key/value heads (Megatron-LM, ``core/transformer/attention.py``).

With more ranks than key/value heads the weights are still divided evenly, so a rank multiplies by its query heads and
by a part of one key head and one value head. No weights are copied, and no gradients of weights are reduced for that:

    forward    the product of the rank's part; all-gather of the packed Q, K, V over tp; the rank picks its query heads
               and the whole key/value head that these read
    backward   each rank places the gradients of what it picked among zeros; reduce-scatter over tp adds up what the
               ranks that share a head give it, and returns each rank its part

      4 query heads, 2 key/value heads, tp 4, rank 2     product  q2 | k1, first half | v1, first half
                                                         picked   q2 | k1 | v1

Norms of heads and rotary embedding come after the gather, because they need whole heads. Megatron-LM gathers queries
too: its packed weights are ordered by key/value head, so an even part is not one rank's heads.
"""

from __future__ import annotations

from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.ir.builder import Rows, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Lane
from memo_sim.program.ir.work import Collective, Rowwise
from memo_sim.program.operators.operators import OperatorWriter


def product(writer: OperatorWriter, source: Rows, packed: Rows, room: int) -> None:
    """Write the QKV product of ``source``: to ``packed``, or to a buffer of ``room`` rows that ``exchange`` reads."""
    shape = writer.shape
    part = _part(writer, packed, room) if shape.shared_by > 1 else packed
    writer.linear("qkv", source, part, shape.product_width, shape.hidden)


def exchange(writer: OperatorWriter, packed: Rows, room: int) -> None:
    """Write what brings the product's result to ``packed``; nothing where ranks have key/value heads of their own."""
    shape, builder = writer.shape, writer.builder
    if shape.shared_by == 1:
        return
    part = _part(writer, packed, room)
    ranks = _by_rank(writer, f"{builder.phase}.qkv_ranks", part, room)
    builder.emit(
        f"qkv.gather{writer.suffix}",
        "heads.all_gather",
        Lane.TP,
        Collective("all_gather", _bytes(writer, ranks), shape.tp, "tp"),
        shard=reads(part),
        full=writes(ranks),
    )
    size = _bytes(writer, packed)
    builder.emit(
        f"qkv.pick{writer.suffix}",
        "heads.pick",
        Lane.COMPUTE,
        Rowwise("transpose", packed.tokens, size, size),
        source=reads(ranks),
        target=writes(packed),
    )


def product_gradient(writer: OperatorWriter, d_qkv: Rows, room: int) -> Rows:
    """Write the gradient of the product's result, given that of the packed Q, K, V; return where it is."""
    shape, builder = writer.shape, writer.builder
    if shape.shared_by == 1:
        return d_qkv
    part = Rows(writer.own("d_qkv_part", room, shape.product_width), d_qkv.first, d_qkv.tokens)
    ranks = _by_rank(writer, "d_qkv_ranks", part, room)
    builder.emit(
        f"d_qkv.place{writer.suffix}",
        "heads.place",
        Lane.COMPUTE,
        Rowwise("transpose", d_qkv.tokens, _bytes(writer, d_qkv), _bytes(writer, ranks)),
        source=reads(d_qkv),
        target=writes(ranks),
    )
    builder.emit(
        f"d_qkv.scatter{writer.suffix}",
        "heads.reduce_scatter",
        Lane.TP,
        Collective("reduce_scatter", _bytes(writer, ranks), shape.tp, "tp"),
        full=reads(ranks),
        shard=writes(part),
    )
    return part


def _part(writer: OperatorWriter, packed: Rows, room: int) -> Rows:
    """Return the rows of the product's result that belong to those of ``packed``."""
    return Rows(writer.own("qkv_part", room, writer.shape.product_width), packed.first, packed.tokens)


def _by_rank(writer: OperatorWriter, name: str, part: Rows, room: int) -> Rows:
    """Return the rows of all ranks' parts: of one call, one rank's after the other's."""
    tp = writer.shape.tp
    writer.own(name, tp * room, writer.shape.product_width, BufferClass.EXCHANGE)
    return Rows(name, tp * part.first, tp * part.tokens)


def _bytes(writer: OperatorWriter, rows: Rows) -> int:
    return rows.tokens * writer.builder.features(rows.slot) * DTYPE_BYTES[writer.dtype]
