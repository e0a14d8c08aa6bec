"""Building blocks of every form of attention: calls over part of the keys, their workspace, merges and gradient sums.

An output over part of the keys comes with its log-sum-exp, so that two outputs merge exactly. Gradients of such a part
go to a buffer of their own and are then added to the sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from memo_sim.contract.plan import Decisions
from memo_sim.contract.units import DTYPE_BYTES
from memo_sim.program.ir.builder import Access, Rows, TemplateBuilder, accumulates, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Lane
from memo_sim.program.ir.work import Attention, Mask, Rowwise, WindowedAttention
from memo_sim.program.layout.documents import Segments, most_pieces
from memo_sim.program.layout.shape import Shape
from memo_sim.program.layout.token_order import cuts_documents
from memo_sim.program.operators.workspaces import (
    FLASH_TILE_TOKENS,
    PADS_DOCUMENTS,
    attention_workspace_bytes,
    sum_workspace_bytes,
)

DOCUMENTS = "input.documents"
"""Slot and family of the ends of packed documents."""


def attention_work(
    decisions: Decisions,
    shape: Shape,
    q: int,
    k: int,
    mask: Mask,
    *,
    backward: bool,
    window: int = 0,
    segments: Segments = (),
    sequences: int = 0,
) -> Attention:
    """Return the work of one call; ``q`` queries and ``k`` keys are counted over all of its sequences.

    ``window``: how many keys a query sees at most; 0: all that the mask leaves. ``segments``: the pairs of packed
    documents among them. ``sequences``: how many there are; 0: all of the micro-batch.
    """
    batch = sequences or decisions.micro_batch
    kind = partial(WindowedAttention, window=window) if window else Attention
    return kind(
        batch=batch,
        q_tokens=q // batch,
        k_tokens=k // batch,
        mask=mask,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=decisions.model.head_dim,
        backward=backward,
        kernel=decisions.kernels.attention,
        dtype=decisions.dtype,
        narrow_values=decisions.model.narrow_values,
        segments=segments,
    )


def documents(builder: TemplateBuilder) -> dict[str, Access]:
    """Return where packed documents end as an operand; none where a sequence is one document."""
    return {"documents": reads(builder.all(DOCUMENTS))} if builder.has(DOCUMENTS) else {}


def workspace(builder: TemplateBuilder, decisions: Decisions, work: Attention, name: str) -> Access | None:
    """Add a buffer for the kernel's scratch, which lives for one instruction; None when the kernel needs none."""
    groups, deterministic = decisions.kernels.head_groups, decisions.deterministic
    copied = _joined_bytes(decisions, work)
    if decisions.documents is not None and work.backward and work.kernel in PADS_DOCUMENTS:
        more = FLASH_TILE_TOKENS * most_pieces(decisions) // work.batch
        work = replace(work, q_tokens=work.q_tokens + more, k_tokens=work.k_tokens + more)
    return builder.scratch(name, copied + attention_workspace_bytes(work, groups, deterministic=deterministic))


def _joined_bytes(decisions: Decisions, work: Attention) -> int:
    """Return the bytes of a document's rows, copied together for a call, where they lie apart (``token_order.py``).

    Forward copies Q, K, V and the output, backward also its gradient and theirs; all of a sequence's rows at most.
    """
    if decisions.documents is None or not cuts_documents(decisions):
        return 0
    size, statistics = work.head_dim * DTYPE_BYTES[work.dtype], DTYPE_BYTES["fp32"]
    queries, keys = work.q_tokens * work.heads, 2 * work.k_tokens * work.kv_heads
    tensors = (4 * queries + 2 * keys) if work.backward else (2 * queries + keys)
    return (tensors * size + queries * statistics) // decisions.kernels.head_groups


def pack(builder: TemplateBuilder, decisions: Decisions, shape: Shape, target: str, suffix: str = "") -> None:
    """Copy this rank's keys and values out of the packed Q, K, V into ``target``."""
    size = shape.tokens * shape.cache_width * DTYPE_BYTES[decisions.dtype]
    builder.emit(
        f"kv.pack{suffix}",
        "kv.pack",
        Lane.COMPUTE,
        Rowwise("kv.pack", shape.tokens, size, size),
        qkv=reads(builder.all("qkv")),
        out=writes(builder.all(target)),
    )


def split(builder: TemplateBuilder, name: str, packed: Rows, q: Rows, kv: Rows | None) -> None:
    """Copy queries out of the packed Q, K, V, and keys and values too unless ``kv`` is None."""
    moved = sum(rows.tokens * builder.row_bytes(rows.slot) for rows in (q, kv) if rows is not None)
    builder.emit(
        name,
        "qkv.split",
        Lane.COMPUTE,
        Rowwise("qkv.split", packed.tokens, moved, moved),
        qkv=reads(packed),
        q=writes(q),
        kv=None if kv is None else writes(kv),
    )


def join(builder: TemplateBuilder, name: str, grad_q: Rows, grad_kv: Rows, packed: Rows) -> None:
    """Copy the gradients of queries, keys and values into the gradient of the packed Q, K, V."""
    given, joined = (
        sum(rows.tokens * builder.row_bytes(rows.slot) for rows in sides) for sides in ((grad_q, grad_kv), (packed,))
    )
    builder.emit(
        name,
        "qkv.join",
        Lane.COMPUTE,
        Rowwise("qkv.join", packed.tokens, given, joined),
        grad_q=reads(grad_q),
        grad_kv=reads(grad_kv),
        grad_qkv=writes(packed),
    )


def add(
    builder: TemplateBuilder, decisions: Decisions, name: str, part: Rows, into: Rows, *, halves: bool = False
) -> None:
    """Add gradients from their own buffer to a sum.

    ``into`` may have more features (the packed Q, K, V) or a wider dtype (fp32). Where it has twice the rows, ``part``
    has those of the late half of each sequence. ``halves``: ``part`` has the early halves of all sequences, then the
    late ones.
    """
    features, kernel = builder.features(part.slot), decisions.kernels.attention
    dtype, summed = builder.dtype(part.slot), builder.dtype(into.slot)
    given, moved = (part.tokens * features * DTYPE_BYTES[each] for each in (dtype, summed))
    scratch = sum_workspace_bytes(part.tokens, features, dtype, summed, kernel)
    builder.emit(
        name,
        "grad.accumulate.halves" if halves else "grad.accumulate",
        Lane.COMPUTE,
        Rowwise("grad.accumulate", part.tokens, given + moved, moved),
        x=reads(part),
        out=accumulates(into),
        workspace=builder.scratch(f"{name}.scratch", scratch),
    )


def put(builder: TemplateBuilder, name: str, part: Rows, into: Rows) -> None:
    """Copy the first term of a sum from its own buffer to the buffer of the sum."""
    given, written = (rows.tokens * builder.row_bytes(rows.slot) for rows in (part, into))
    work = Rowwise("copy", part.tokens, given, written)
    builder.emit(name, "copy", Lane.COMPUTE, work, source=reads(part), target=writes(into))


def queries(builder: TemplateBuilder, own: tuple[int, int] | None = None) -> dict[str, Access]:
    """Return a call's queries as an operand: slot ``q`` beside a KV cache of the prefix, else the packed ``qkv``.

    ``own``: the first of the rows, and their number; by default all.
    """
    name = "q" if builder.has("q") else "qkv"
    return {name: reads(own_rows(builder, name, own))}


def own_rows(builder: TemplateBuilder, slot: str, own: tuple[int, int] | None) -> Rows:
    """Return the rows ``own`` (first row, rows) of a slot, or all."""
    return Rows(slot, *own) if own else builder.all(slot)


@dataclass(frozen=True, slots=True)
class Part:
    """One unmasked call: queries of this rank against ``keys`` of other ranks or of earlier subsequences.

    The queries are all of the rank's, or with ``late`` the late half of each sequence, or the rows ``own``.
    """

    keys: Rows
    late: bool = False
    suffix: str = ""
    """End of the instructions' names, to tell apart several calls of the same step."""
    segments: Segments = ()
    """The pairs of packed documents; empty for one document."""
    chunks: tuple[int, ...] = ()
    """The chunks of a sequence, of 2 x cp, whose keys these are."""
    own: tuple[int, int] | None = None
    """First row and number of rows of the queries, where they are those of some sequences alone."""
    sequences: int = 0
    """The number of these sequences; 0: all of the micro-batch."""

    def queries(self, shape: Shape) -> int:
        """Return the number of queries."""
        if self.own:
            return self.own[1]
        return shape.tokens // 2 if self.late else shape.tokens

    def work(self, decisions: Decisions, shape: Shape, *, backward: bool) -> Attention:
        """Return the work of the call."""
        queries, keys = self.queries(shape), self.keys.tokens
        work = attention_work(
            decisions,
            shape,
            queries,
            keys,
            "none",
            backward=backward,
            segments=self.segments,
            sequences=self.sequences,
        )
        return replace(work, chunks=self.chunks) if self.segments else work


def part_forward(
    builder: TemplateBuilder, decisions: Decisions, shape: Shape, part: Part, name: str, *, merge: str, most_keys: int
) -> None:
    """Write one unmasked call and merge its output into ``attn`` and ``lse`` by log-sum-exp.

    Calls with the same ``name`` share one workspace, sized for all queries against ``most_keys`` keys, so that every
    rank has the same buffers.
    """
    tokens = part.queries(shape)
    if not builder.has("attn.part"):
        builder.own("attn.part", BufferClass.TRANSIENT, decisions.dtype, shape.tokens, shape.attention_width)
        builder.own("lse.part", BufferClass.TRANSIENT, "fp32", shape.tokens, shape.heads)
    out, lse = Rows("attn.part", 0, tokens), Rows("lse.part", 0, tokens)
    builder.emit(
        f"{name}{part.suffix}",
        "attention",
        Lane.COMPUTE,
        part.work(decisions, shape, backward=False),
        **queries(builder, part.own),
        **documents(builder),
        kv=reads(part.keys),
        out=writes(out),
        lse=writes(lse),
        workspace=_shared_workspace(builder, decisions, shape, name, most_keys, backward=False),
    )
    merged = own_rows(builder, "attn", part.own), own_rows(builder, "lse", part.own)
    merge_part(builder, f"{merge}{part.suffix}", (out, lse), merged)


def merge_part(builder: TemplateBuilder, name: str, part: tuple[Rows, Rows], whole: tuple[Rows, Rows]) -> None:
    """Merge the output and log-sum-exp of one call into ``whole``, which holds those of the calls before it."""
    (out, lse), (whole_out, whole_lse) = part, whole
    moved = out.tokens * (builder.row_bytes(out.slot) + builder.row_bytes(lse.slot))
    builder.emit(
        name,
        "attention.merge",
        Lane.COMPUTE,
        Rowwise("attention.merge", out.tokens, 2 * moved, moved),
        part=reads(out),
        part_lse=reads(lse),
        out=accumulates(whole_out),
        lse=accumulates(whole_lse),
    )


def part_backward(
    builder: TemplateBuilder, decisions: Decisions, shape: Shape, part: Part, name: str, *, into: Rows, most_keys: int
) -> None:
    """Write the backward of one unmasked call.

    Gradients of its keys and values go to ``into``, gradients of its queries to slot ``d_q.part``. The workspace is
    shared as in ``part_forward``.
    """
    tokens = part.queries(shape)
    builder.emit(
        f"{name}{part.suffix}",
        "attention.bwd",
        Lane.COMPUTE,
        part.work(decisions, shape, backward=True),
        grad=reads(own_rows(builder, "d_attn", part.own)),
        **queries(builder, part.own),
        **documents(builder),
        kv=reads(part.keys),
        out=reads(own_rows(builder, "attn", part.own)),
        lse=reads(own_rows(builder, "lse", part.own)),
        grad_q=writes(Rows("d_q.part", 0, tokens)),
        grad_kv=writes(into),
        workspace=_shared_workspace(builder, decisions, shape, name, most_keys, backward=True),
    )


def _shared_workspace(
    builder: TemplateBuilder, decisions: Decisions, shape: Shape, name: str, keys: int, *, backward: bool
) -> Access | None:
    if builder.has(f"{name}.scratch"):
        return writes(builder.all(f"{name}.scratch"))
    work = attention_work(decisions, shape, shape.tokens, keys, "none", backward=backward)
    return workspace(builder, decisions, work, f"{name}.scratch")


def own_d_q(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Add the buffer to which ``part_backward`` writes gradients of the queries."""
    if not builder.has("d_q.part"):
        builder.own("d_q.part", BufferClass.TRANSIENT, decisions.dtype, shape.tokens, shape.q_width)
