"""The zigzag ring over context-parallel ranks (Megatron-LM CP, Ring Attention), around the local square.

With cp ranks the sequence is cut into 2 x cp chunks and rank r holds chunks r and 2*cp - 1 - r, so that every rank
has the same work. Step 0 is the local causal square. Step j meets the keys and values of rank r - j: when they come
from an earlier rank all queries attend to their early half, when from a later rank only the late half of the queries
attends (to all of them, half by half); both cost half a square. Partial outputs merge by log-sum-exp.

Keys and values travel one hop a step beside the attention of the step before. In backward a kernel writes its
gradients aside while the sums made so far arrive from the previous rank, adds them, and sends them on; they end at home
after cp - 1 hops. Only the last hop has nothing to hide behind.

With several sequences in a micro-batch a rank's rows are one sequence after the other, in each the early chunk before
the late one; what travels has every sequence's early chunk before the late ones, so that a half is one range.

An eager framework has a fresh buffer for every hop of a forward, and they live as long as its attention
(TransformerEngine 1.3, AttnFuncWithCP); what is sent on from one of two buffers is what a plan needs.

Representative: rank cp - 1, for which every other rank is an earlier one: one call a step. Ranks have the same
exchanges and the same buffers, and as many FLOPs, so one placement serves all of them; ``Shape.cp_rank`` says whose
program is written. Two calls of half the queries are a little slower than one: by an A800's curves rank 0's compute
takes 0.1 % longer than the representative's at 64K tokens a rank and cp 2, and 2 % at 16K tokens and cp 8.
"""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.attention.partial import Part, add, own_d_q, pack, part_backward, part_forward
from memo_sim.program.ir.builder import Rows, TemplateBuilder, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Lane
from memo_sim.program.ir.work import Exchange, Rowwise
from memo_sim.program.layout.shape import Shape

DOUBLE_BUFFER_SLOTS = 2
"""Exchange buffers that hops take in turn."""


def start(builder: TemplateBuilder, decisions: Decisions, shape: Shape, suffix: str = "") -> None:
    """Write what comes before the local square: this rank's keys and values, and the first hop."""
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
    """Write the steps after the local square's backward, and the last hop's arrival.

    METP writes that itself, behind what it has to do beside the hop.
    """
    for step in range(1, shape.cp):
        _step_backward(builder, decisions, shape, step)
    if shape.ring == "cp":
        arrive(builder, decisions, shape)


def arrive(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Add the gradients that other ranks have of this rank's keys and values to its own."""
    add(builder, decisions, "d_kv.return", builder.all(_buffer("d_kv", shape.cp)), builder.all("d_qkv"))


def _forward_slots(decisions: Decisions, shape: Shape) -> int:
    return shape.cp if decisions.memory_policy == "eager" else DOUBLE_BUFFER_SLOTS


def _buffer(kind: str, step: int, slots: int = DOUBLE_BUFFER_SLOTS) -> str:
    """Name of the exchange buffer that holds the keys and values (or gradients) of ``step``: ``slots`` take turns."""
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
                2 * shape.kv_width,
            )


def _hop(  # noqa: PLR0917 - what and whose, which buffers, and where it stands
    builder: TemplateBuilder,
    decisions: Decisions,
    shape: Shape,
    step: int,
    kind: str,
    slots: int = DOUBLE_BUFFER_SLOTS,
    *,
    suffix: str = "",
) -> None:
    """Send this step's buffer to the next rank while the following step's arrives from the previous one."""
    size = shape.tokens * 2 * shape.kv_width * DTYPE_BYTES[decisions.dtype]
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
    """Return what this rank's queries meet at ``step``: keys of an earlier rank, or, once around, of a later one.

    Without a mask all meet all, half of the keys at a time: so they lie, sequence by sequence, in what travels.
    """
    slot = _buffer("kv", step, slots)
    if decisions.model.bidirectional:
        return [Part(_half(slot, shape, late=late), suffix=(".early", ".late")[late]) for late in (False, True)]
    if step <= shape.cp_rank:
        return [Part(_half(slot, shape))]
    return [Part(_half(slot, shape, late=late), late=True, suffix=(".early", ".late")[late]) for late in (False, True)]


def _step_backward(builder: TemplateBuilder, decisions: Decisions, shape: Shape, step: int) -> None:
    if step + 1 < shape.cp:
        _hop(builder, decisions, shape, step + 1, "kv", suffix=".bwd")
    _buffers(builder, decisions, shape, "d_kv")
    own_d_q(builder, decisions, shape)
    sums, parts, half = _buffer("d_kv", step), _parts(decisions, shape, step), shape.tokens // 2
    if step == 1 and len(parts) == 1:
        _clear_late(builder, decisions, shape, sums)
    if step > 1 and not builder.has("d_kv.part"):
        builder.own("d_kv.part", BufferClass.TRANSIENT, decisions.dtype, half, 2 * shape.kv_width)
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
    """Zero the sums of the late half, to which the first rank on their way adds nothing."""
    rows = Rows(slot, shape.tokens // 2, shape.tokens - shape.tokens // 2)
    size = rows.tokens * 2 * shape.kv_width * DTYPE_BYTES[decisions.dtype]
    builder.emit("d_kv.clear", "zero", Lane.COMPUTE, Rowwise("zero", rows.tokens, 0, size), target=writes(rows))
