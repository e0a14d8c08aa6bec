"""Causal attention of a subsequence: over its own tokens, and over the keys and values of all before it (SPPO 5.1).

A layer has one buffer of keys and values for the whole micro-batch, ``carried.kv``. Each subsequence writes its rows of
it and keeps its queries apart (``q``, in the place of the packed Q, K, V). The causal square over its own rows and one
call without a mask over all rows before merge by log-sum-exp. Backward goes from the last subsequence to the first, and
sums gradients of keys and values in ``carried.d_kv``: the last one writes all of its rows, the others add to those that
they attend to. When a subsequence has added its own square, its rows are complete, and join its queries' gradients.

    carried.kv     |    s0    |   s1   | s2 |             carried.d_kv   |    s0    |   s1   | s2 |
    forward s1      `- before -'`square'                  backward s2     `w before -'-------'`w sq'
                                                          backward s1     `+ before -'`+ sq -' -> complete, joined

Keys and values are read by every later subsequence, forward and backward, so they stay on the device (SPPO's type 0);
the other skeletal tensors are read in their own backward alone (type 1), and may travel to the host.
"""

from __future__ import annotations

from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.attention_part import (
    Part,
    add,
    attention_work,
    own_d_q,
    part_backward,
    part_forward,
    workspace,
)
from memo_sim.program.builder import Rows, TemplateBuilder, reads, writes
from memo_sim.program.instruction import BufferClass, Family, Lane
from memo_sim.program.shape import Shape
from memo_sim.program.work import Rowwise

KV, D_KV = "carried.kv", "carried.d_kv"
BEHIND = "behind.d_kv"
"""Starts the names of what others, who play the rows behind these, add to these rows' gradients (``guest.py``)."""
KEY_PART, MERGE = "attn.before", "attn.merge"


def families(decisions: Decisions, shape: Shape, count: int) -> list[Family]:
    """Return the buffers of keys and values and of their gradients, ``count`` of each; none for a whole micro-batch."""
    if not shape.carried:
        return []
    sizes = (BufferClass.CARRIED, decisions.dtype, shape.carried, 2 * shape.kv_width, count)
    return [Family(KV, *sizes), Family(D_KV, *sizes)]


def bind(builder: TemplateBuilder, found: dict[str, Family], shape: Shape, *, gradients: bool) -> None:
    """Add what a forward or (``gradients``) a backward template needs of them."""
    if shape.carried:
        builder.bind(found[KV], slot=KV)
        if gradients:
            builder.bind(found[D_KV], slot=D_KV)
            for name in [name for name in found if name.startswith(BEHIND)]:
                builder.bind(found[name], slot=name)


def split(
    builder: TemplateBuilder, decisions: Decisions, shape: Shape, packed: Rows, suffix: str, *, keys: bool
) -> None:
    """Copy packed rows apart: queries to slot ``q`` and (``keys``) keys and values to their place among all.

    Recompute leaves the keys: they are there since forward.
    """
    width = shape.qkv_width if keys else shape.q_width
    size = packed.tokens * width * DTYPE_BYTES[decisions.dtype]
    builder.emit(
        f"qkv.split{suffix}",
        "qkv.split",
        Lane.COMPUTE,
        Rowwise("qkv.split", packed.tokens, size, size),
        qkv=reads(packed),
        q=writes(Rows("q", packed.first, packed.tokens)),
        kv=writes(Rows(KV, shape.start + packed.first, packed.tokens)) if keys else None,
    )


def forward(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write attention forward: reads slots ``q`` and ``carried.kv``, writes ``attn`` and ``lse``."""
    work = attention_work(decisions, shape, shape.tokens, shape.tokens, "causal", backward=False)
    builder.emit(
        "attn",
        "attention",
        Lane.COMPUTE,
        work,
        q=reads(builder.all("q")),
        kv=reads(_own(KV, shape)),
        out=writes(builder.all("attn")),
        lse=writes(builder.all("lse")),
        workspace=workspace(builder, decisions, work, "attn.scratch"),
    )
    if shape.start:
        before = Part(Rows(KV, 0, shape.start))
        part_forward(builder, decisions, shape, before, KEY_PART, merge=MERGE, most_keys=shape.start)


def backward(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write attention backward: reads ``q``, ``carried.kv``, ``attn``, ``lse``, ``d_attn``; writes ``d_qkv``.

    Keys' gradients are written to ``carried.d_kv`` by the last subsequence, and by others aside and added.
    """
    mine, last = _own(D_KV, shape), shape.start + shape.tokens == shape.carried
    d_q = builder.own("d_q", BufferClass.TRANSIENT, decisions.dtype, shape.tokens, shape.q_width)
    if not last:
        rows = max(shape.tokens, shape.start)
        builder.own("d_kv.part", BufferClass.TRANSIENT, decisions.dtype, rows, 2 * shape.kv_width)
    work = attention_work(decisions, shape, shape.tokens, shape.tokens, "causal", backward=True)
    into = mine if last else Rows("d_kv.part", 0, shape.tokens)
    builder.emit(
        "attn.bwd",
        "attention.bwd",
        Lane.COMPUTE,
        work,
        grad=reads(builder.all("d_attn")),
        q=reads(builder.all("q")),
        kv=reads(_own(KV, shape)),
        out=reads(builder.all("attn")),
        lse=reads(builder.all("lse")),
        grad_q=writes(builder.all(d_q)),
        grad_kv=writes(into),
        workspace=workspace(builder, decisions, work, "attn.bwd.scratch"),
    )
    if not last:
        add(builder, decisions, "d_kv.add", into, mine)
    if shape.start:
        _before_backward(builder, decisions, shape, last=last)
    for slot in builder.starting(BEHIND):
        add(builder, decisions, f"d_kv.add{slot.removeprefix(BEHIND)}", builder.all(slot), mine)
    size = shape.tokens * shape.qkv_width * DTYPE_BYTES[decisions.dtype]
    builder.emit(
        "qkv.join",
        "qkv.join",
        Lane.COMPUTE,
        Rowwise("qkv.join", shape.tokens, size, size),
        grad_q=reads(builder.all(d_q)),
        grad_kv=reads(mine),
        grad_qkv=writes(builder.all("d_qkv")),
    )


def _before_backward(builder: TemplateBuilder, decisions: Decisions, shape: Shape, *, last: bool) -> None:
    """Write the backward of the call over all earlier keys."""
    own_d_q(builder, decisions, shape)
    earlier = Rows(D_KV, 0, shape.start)
    into = earlier if last else Rows("d_kv.part", 0, shape.start)
    before = Part(Rows(KV, 0, shape.start))
    part_backward(builder, decisions, shape, before, f"{KEY_PART}.bwd", into=into, most_keys=shape.start)
    add(builder, decisions, "d_q.add", builder.all("d_q.part"), builder.all("d_q"))
    if not last:
        add(builder, decisions, "d_kv.add.before", into, earlier)


def _own(slot: str, shape: Shape) -> Rows:
    """Return the subsequence's own rows of a carried buffer."""
    return Rows(slot, shape.start, shape.tokens)
