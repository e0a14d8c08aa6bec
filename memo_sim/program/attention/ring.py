"""Ring attention over context-parallel ranks in zigzag order (Megatron-LM CP, Ring Attention).

The sequence is cut into 2 x cp chunks. Rank r holds chunks r and 2*cp - 1 - r, so that every rank has the same work.
Step 0 is the local causal square. In step j rank r attends to the keys and values of rank r - j:

- Keys of an earlier rank: all queries attend to the early half of the keys.
- Keys of a later rank: the late half of the queries attends to all keys, in one call for each half of the keys.

Both cases cost half a square. Partial outputs merge by log-sum-exp.

Keys and values travel one hop a step, beside the attention of the step before. In backward the sums of gradients travel
too: a kernel writes its gradients to a buffer of their own while the sums of the previous rank arrive. The rank adds
both and sends the result on. After cp - 1 hops the sums reach the rank that holds the keys. Only the last hop overlaps
with no compute.

A micro-batch may have several sequences. A rank's rows are then one sequence after the other, each with its early chunk
before its late chunk. The buffer that travels has the early chunks of all sequences first, so that a half is one range.

A plan needs two exchange buffers, which alternate. An eager framework allocates a new buffer for every hop of a
forward, and all of them live as long as the attention (TransformerEngine 1.3, AttnFuncWithCP).

The representative rank is cp - 1: all other ranks are earlier ones, so a step is one call. All ranks have the same
exchanges, buffers and FLOPs, so one placement serves all of them. ``Shape.cp_rank`` selects the rank whose program is
written. Two calls of half the queries are a little slower than one call. By the curves of an A800, rank 0 computes
0.1 % longer than the representative at 64K tokens a rank and cp 2. At 16K tokens a rank and cp 8 it is 2 %.
"""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.attention.partial import Part, add, own_d_q, pack, part_backward, part_forward
from memo_sim.program.ir.builder import Rows, TemplateBuilder, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Lane
from memo_sim.program.ir.work import Attention, Exchange, Rowwise
from memo_sim.program.layout.documents import shared, step_segments
from memo_sim.program.layout.shape import Shape

DOUBLE_BUFFER_SLOTS = 2
"""Number of exchange buffers between which hops alternate."""


def start(builder: TemplateBuilder, decisions: Decisions, shape: Shape, suffix: str = "") -> None:
    """Write the instructions before the local square: pack this rank's keys and values, then the first hop."""
    slots = DOUBLE_BUFFER_SLOTS if suffix else _forward_slots(decisions, shape)
    _buffers(builder, decisions, shape, "kv", slots)
    pack(builder, decisions, shape, _buffer("kv", 0), suffix)
    _hop(builder, decisions, shape, 1, "kv", slots, suffix=suffix)


def forward(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write the steps after the local square."""
    slots = _forward_slots(decisions, shape)
    for step in range(1, shape.cp):
        if step + 1 < shape.cp:
            _hop(builder, decisions, shape, step + 1, "kv", slots)
        for part in _parts(decisions, shape, step, slots):
            name, merge = f"attn.ring{step}", f"attn.merge{step}"
            part_forward(builder, decisions, shape, part, name, merge=merge, most_keys=shape.tokens // 2)


def backward(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write the steps after the local square's backward, and add the gradients that the last hop brings.

    METP calls ``arrive`` itself, after the products that run beside the last hop.
    """
    for step in range(1, shape.cp):
        _step_backward(builder, decisions, shape, step)
    if shape.ring == "cp":
        arrive(builder, decisions, shape)


def arrive(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Add the gradients that other ranks computed for this rank's keys and values to its own."""
    add(builder, decisions, "d_kv.return", builder.all(_buffer("d_kv", shape.cp)), builder.all("d_qkv"))


def step_works(decisions: Decisions, shape: Shape) -> list[Attention]:
    """Return the attention calls of the step after the local square, of its forward and its backward."""
    parts = _parts(decisions, shape, 1)
    return [part.work(decisions, shape, backward=backward) for part in parts for backward in (False, True)]


def _forward_slots(decisions: Decisions, shape: Shape) -> int:
    return shape.cp if decisions.memory_policy == "eager" else DOUBLE_BUFFER_SLOTS


def _buffer(kind: str, step: int, slots: int = DOUBLE_BUFFER_SLOTS) -> str:
    """Return the name of the exchange buffer for the keys and values (or gradients) of ``step``, one of ``slots``."""
    return f"{kind}.ring{step % slots}"


def _buffers(
    builder: TemplateBuilder, decisions: Decisions, shape: Shape, kind: str, slots: int = DOUBLE_BUFFER_SLOTS
) -> None:
    for slot_number in range(slots):
        if not builder.has(_buffer(kind, slot_number, slots)):
            builder.own(
                _buffer(kind, slot_number, slots),
                BufferClass.EXCHANGE,
                decisions.dtype,
                shape.tokens,
                shape.cache_width,
            )


def _hop(  # noqa: PLR0917 - the context, the step, and the buffers
    builder: TemplateBuilder,
    decisions: Decisions,
    shape: Shape,
    step: int,
    kind: str,
    slots: int = DOUBLE_BUFFER_SLOTS,
    *,
    suffix: str = "",
) -> None:
    """Send the buffer of ``step - 1`` to the next rank, and receive the buffer of ``step`` from the previous rank."""
    size = shape.tokens * shape.cache_width * DTYPE_BYTES[decisions.dtype]
    apart = shape.ring != "metp" or decisions.layout.overlap_exchanges
    builder.emit(
        f"{kind}.hop{step}{suffix}",
        "send_recv",
        Lane.P2P if apart else Lane.COMPUTE,
        Exchange(size, shape.cp, shape.ring),
        send=reads(builder.all(_buffer(kind, step - 1, slots))),
        recv=writes(builder.all(_buffer(kind, step, slots))),
    )


def _half(slot: str, shape: Shape, *, late: bool = False) -> Rows:
    """Return the early or the late half of a rank's tokens of ``slot``."""
    half = shape.tokens // 2
    return Rows(slot, half if late else 0, half)


def _parts(decisions: Decisions, shape: Shape, step: int, slots: int = DOUBLE_BUFFER_SLOTS) -> list[Part]:
    """Return the calls of this rank's queries at ``step``.

    The keys are those of an earlier rank, or of a later rank once ``step`` exceeds the own coordinate. Without a mask
    all queries attend to all keys, in one call for each half, because the halves of several sequences lie apart.
    """
    slot = _buffer("kv", step, slots)
    if decisions.model.bidirectional:
        return [Part(_half(slot, shape, late=late), suffix=(".early", ".late")[late]) for late in (False, True)]
    segments = step_segments(decisions, step)
    owner = (shape.cp_rank - step) % shape.cp
    chunks = (owner, 2 * shape.cp - 1 - owner)
    if step <= shape.cp_rank:
        return [Part(_half(slot, shape), segments=segments, chunks=chunks[:1])]
    shares = shared(segments, 2)
    return [
        Part(
            _half(slot, shape, late=late),
            late=True,
            suffix=(".early", ".late")[late],
            segments=shares,
            chunks=chunks[late : late + 1],
        )
        for late in (False, True)
    ]


def _step_backward(builder: TemplateBuilder, decisions: Decisions, shape: Shape, step: int) -> None:
    if step + 1 < shape.cp:
        _hop(builder, decisions, shape, step + 1, "kv", suffix=".bwd")
    _buffers(builder, decisions, shape, "d_kv")
    own_d_q(builder, decisions, shape)
    sums, parts, half = _buffer("d_kv", step), _parts(decisions, shape, step), shape.tokens // 2
    if step == 1 and len(parts) == 1:
        _clear_late(builder, decisions, shape, sums)
    if step > 1 and not builder.has("d_kv.part"):
        builder.own("d_kv.part", BufferClass.TRANSIENT, decisions.dtype, half, shape.cache_width)
    for part in parts:
        own_sum = Rows(sums, part.keys.first, half)
        into = own_sum if step == 1 else builder.all("d_kv.part")
        part_backward(builder, decisions, shape, part, f"attn.ring{step}.bwd", into=into, most_keys=half)
        queries = Rows("d_q.part", 0, part.queries(shape))
        add(builder, decisions, f"d_q.add{step}{part.suffix}", queries, builder.all("d_qkv"))
        if step > 1:
            add(builder, decisions, f"d_kv.add{step}{part.suffix}", into, own_sum)
    _hop(builder, decisions, shape, step + 1, "d_kv")


def _clear_late(builder: TemplateBuilder, decisions: Decisions, shape: Shape, slot: str) -> None:
    """Zero the late half of the sums: the rank where they start attends to the early half only."""
    rows = Rows(slot, shape.tokens // 2, shape.tokens - shape.tokens // 2)
    size = rows.tokens * shape.cache_width * DTYPE_BYTES[decisions.dtype]
    builder.emit("d_kv.clear", "zero", Lane.COMPUTE, Rowwise("zero", rows.tokens, 0, size), target=writes(rows))
