"""Causal attention of a subsequence: over its own tokens, and over the keys and values of all before it (SPPO 5.1).

A layer has one buffer of keys and values for the whole micro-batch, ``carried.kv``. Each subsequence writes its rows of
it and keeps its queries apart (``q``, in the place of the packed Q, K, V). The causal square over its own rows and one
call without a mask over all rows before merge by log-sum-exp. Backward goes from the last subsequence to the first, and
sums gradients of keys and values in ``carried.d_kv``, in fp32, for there may be hundreds of terms: the last one writes
all of its rows, the others add to those that they attend to. Kernels write a block of keys at a time aside, in the
plan's dtype. When a subsequence has added its own square, its rows are complete, and join its queries' gradients.

    carried.kv     |    s0    |   s1   | s2 |             carried.d_kv   |    s0    |   s1   | s2 |
    forward s1      `- before -'`square'                  backward s2     `w before -'-------'`w sq'
                                                          backward s1     `+ before -'`+ sq -' -> complete, joined

Keys and values are read by every later subsequence, forward and backward, so they stay on the device (SPPO's type 0);
the other skeletal tensors are read in their own backward alone (type 1), and may travel to the host.
"""

from __future__ import annotations

from typing import Literal

from memo_sim.contract.plan import SWAP_GRANULE_TOKENS, Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.attention_part import (
    Part,
    add,
    attention_work,
    own_d_q,
    part_backward,
    part_forward,
    put,
    workspace,
)
from memo_sim.program.builder import Rows, TemplateBuilder, reads, writes
from memo_sim.program.instruction import BufferClass, Family, Lane
from memo_sim.program.shape import Shape
from memo_sim.program.work import Rowwise

KV, D_KV = "carried.kv", "carried.d_kv"
SUM_DTYPE: Literal["fp32"] = "fp32"
"""What gradients are summed in: by one subsequence after the other, and by one block of keys after the other."""
ASIDE = "d_kv.part"
KEY_BLOCKS = 8
"""Of a whole sequence, the most that backward takes earlier keys in: what is written aside is an eighth of them."""
BEHIND = "behind.d_kv"
"""Starts the names of what others, who play the rows behind these, add to these rows' gradients (``guest.py``)."""
KEY_PART, MERGE = "attn.before", "attn.merge"


def families(decisions: Decisions, shape: Shape, count: int) -> list[Family]:
    """Return the buffers of keys and values and of their gradients, ``count`` of each; none for a whole micro-batch."""
    if not shape.carried:
        return []
    rows, width = shape.carried, 2 * shape.kv_width
    dtypes = {KV: decisions.dtype, D_KV: SUM_DTYPE}
    return [Family(name, BufferClass.CARRIED, dtype, rows, width, count) for name, dtype in dtypes.items()]


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
    """Write attention backward: reads ``q``, ``carried.kv``, ``attn``, ``lse``, ``d_attn``; writes ``d_qkv``."""
    mine, several = _own(D_KV, shape), shape.start > 0
    d_q = builder.own(
        "d_q", BufferClass.TRANSIENT, SUM_DTYPE if several else decisions.dtype, shape.tokens, shape.q_width
    )
    if several:
        own_d_q(builder, decisions, shape)
    blocks = _earlier(builder, decisions, shape)
    if not _direct(builder, decisions, shape):
        rows = max((shape.tokens, *(block.tokens for block in blocks)))
        builder.own(ASIDE, BufferClass.TRANSIENT, decisions.dtype, rows, 2 * shape.kv_width)
    work = attention_work(decisions, shape, shape.tokens, shape.tokens, "causal", backward=True)
    queries = builder.all(d_q)
    into_q = queries if builder.dtype(d_q) == decisions.dtype else builder.all("d_q.part")
    into = _written(builder, decisions, shape, mine)
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
        grad_q=writes(into_q),
        grad_kv=writes(into),
        workspace=workspace(builder, decisions, work, "attn.bwd.scratch"),
    )
    if into_q != queries:
        put(builder, "d_q.put", into_q, queries)
    _sum(builder, decisions, shape, "", into, mine)
    for i, block in enumerate(blocks):
        _before_backward(builder, decisions, shape, block, f".k{i}" if len(blocks) > 1 else "", blocks[0].tokens)
    size = shape.tokens * shape.qkv_width * DTYPE_BYTES[decisions.dtype]
    summed = _with_behind(builder, decisions, mine)
    given = sum(rows.tokens * builder.row_bytes(rows.slot) for rows in (queries, summed))
    builder.emit(
        "qkv.join",
        "qkv.join",
        Lane.COMPUTE,
        Rowwise("qkv.join", shape.tokens, given, size),
        grad_q=reads(queries),
        grad_kv=reads(summed),
        grad_qkv=writes(builder.all("d_qkv")),
    )


def _earlier(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> list[Rows]:
    """Return the earlier keys in the row blocks that backward takes at once.

    What a kernel writes aside is as long as a block. None is shorter than the subsequence: so each call's grid of keys
    is at least as large as the causal square's.
    """
    most = max(shape.tokens, -(-shape.carried // KEY_BLOCKS))
    if _direct(builder, decisions, shape) or shape.start <= most:
        return [Rows(KV, 0, shape.start)] if shape.start else []
    count = -(-shape.start // most)
    rows = -(-shape.start // (count * SWAP_GRANULE_TOKENS)) * SWAP_GRANULE_TOKENS
    return [Rows(KV, first, min(rows, shape.start - first)) for first in range(0, shape.start, rows)]


def _before_backward(  # noqa: PLR0917 - which block, its name's end, and how long the longest is
    builder: TemplateBuilder, decisions: Decisions, shape: Shape, keys: Rows, suffix: str, most: int
) -> None:
    """Write the backward of the call over a block of earlier keys."""
    into = Rows(D_KV, keys.first, keys.tokens)
    written = _written(builder, decisions, shape, into)
    part = Part(keys, suffix=suffix)
    part_backward(builder, decisions, shape, part, f"{KEY_PART}.bwd", into=written, most_keys=most)
    add(builder, decisions, f"d_q.add{suffix}", builder.all("d_q.part"), builder.all("d_q"))
    _sum(builder, decisions, shape, f".before{suffix}", written, into)


def _last(shape: Shape) -> bool:
    """Whether no later subsequence attends to these rows: backward begins with it."""
    return shape.start + shape.tokens == shape.carried


def _direct(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> bool:
    """Whether kernels can write gradients of keys and values where they belong: the first term, in their own dtype."""
    return _last(shape) and builder.dtype(D_KV) == decisions.dtype


def _written(builder: TemplateBuilder, decisions: Decisions, shape: Shape, into: Rows) -> Rows:
    """Return where a kernel writes the gradients that belong ``into`` the carried ones."""
    return into if _direct(builder, decisions, shape) else Rows(ASIDE, 0, into.tokens)


def _sum(builder: TemplateBuilder, decisions: Decisions, shape: Shape, name: str, written: Rows, into: Rows) -> None:  # noqa: PLR0917
    """Bring what a kernel wrote aside to the carried gradients: as the first term, or added."""
    if written == into:
        return
    if _last(shape):
        put(builder, f"d_kv.put{name}", written, into)
    else:
        add(builder, decisions, f"d_kv.add{name}", written, into)


def _with_behind(builder: TemplateBuilder, decisions: Decisions, mine: Rows) -> Rows:
    """Return the complete gradients of these rows' keys and values, with what others have computed of them.

    The first that comes is the home's, a sum itself (``guest.py``): the others are added to it.
    """
    behind = builder.starting(BEHIND)
    if not behind:
        return mine
    summed = builder.all(behind[0])
    add(builder, decisions, "d_kv.add.own", mine, summed)
    for slot in behind[1:]:
        add(builder, decisions, f"d_kv.add{slot.removeprefix(BEHIND)}", builder.all(slot), summed)
    return summed


def _own(slot: str, shape: Shape) -> Rows:
    """Return the subsequence's own rows of a carried buffer."""
    return Rows(slot, shape.start, shape.tokens)
