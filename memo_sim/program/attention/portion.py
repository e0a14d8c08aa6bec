"""Causal attention of a portion of a subsequence, of several sequences: one call for each run of its sequences.

In a multiplexed pipeline, helper stages compute the first rows of a subsequence and the owner stage the others
(``layout/multiplex.py``). Of a micro-batch of several sequences these rows are some whole sequences and parts of one or
two (``layout/sequence_rows.py``). Whole ones side by side are one batch; a part of a sequence is a batch of one, and
attends to the rows of its own sequence before it:

    rows of a subsequence     | first seq. | second ... |         helper: the first sequence, and rows 0 to 2 of the
                              ' helper ........'owner . '         second. Owner: the second's last rows, which attend to
                                                                  the helper's rows 0 to 2 of the second

The keys of earlier subsequences lie apart, and are read by one call each, as for whole subsequences
(``subsequence.py``). Rows that attend to none of a helper's have no gradient for its keys.
"""

from __future__ import annotations

from itertools import accumulate, chain

from memo_sim.contract.plan import Decisions
from memo_sim.program.attention import subsequence as prefix
from memo_sim.program.attention.partial import (
    Part,
    add,
    attention_work,
    join,
    own_d_q,
    part_backward,
    part_forward,
    put,
    workspace,
)
from memo_sim.program.attention.subsequence import BEHIND, KEY_PART, KV, MERGE, SUM_DTYPE, sums_of
from memo_sim.program.ir.builder import Access, Rows, TemplateBuilder, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Lane
from memo_sim.program.ir.kinds import FamilyKind
from memo_sim.program.ir.work import Attention
from memo_sim.program.layout.partition import partition
from memo_sim.program.layout.sequence_rows import SequenceRows, sequence_rows
from memo_sim.program.layout.shape import Shape
from memo_sim.program.operators.workspaces import attention_workspace_bytes

SUMMED = "d_kv.sum"
"""Sums of the gradients of keys that helpers of later rows attend to, and not the owner."""


def is_portion(decisions: Decisions, shape: Shape) -> bool:
    """Return whether rows are a part of a subsequence of several sequences."""
    if decisions.micro_batch == 1 or not decisions.layout.multiplexed:
        return False
    parts = tuple(shape.ulysses * rows for rows in partition(decisions))
    return (shape.start, shape.tokens) not in zip((0, *accumulate(parts)), parts, strict=False)


def forward(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write attention forward: reads slots ``q`` and ``prefix.kv``, writes ``attn`` and ``lse``."""
    builder.cut()
    rows = sequence_rows(decisions, shape.start, shape.tokens)
    squares = [_square(decisions, shape, each, backward=False) for each in rows]
    parts = [_parts_before(shape, number, each) for number, each in enumerate(rows)]
    _share_workspace(builder, decisions, "attn", squares)
    works = [part.work(decisions, shape, backward=False) for part in chain.from_iterable(parts)]
    _share_workspace(builder, decisions, KEY_PART, works)
    for number, (each, square, before) in enumerate(zip(rows, squares, parts, strict=True)):
        own = each.first - shape.start, each.tokens
        builder.emit(
            f"attn.q{number}",
            "attention",
            Lane.COMPUTE,
            square,
            q=reads(Rows("q", *own)),
            kv=reads(Rows(KV, each.first, each.tokens)),
            out=writes(Rows("attn", *own)),
            lse=writes(Rows("lse", *own)),
            workspace=_workspace(builder, "attn"),
        )
        for part in before:
            part_forward(builder, decisions, shape, part, KEY_PART, merge=MERGE, most_keys=0)


def backward(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write attention backward: reads ``q``, ``prefix.kv``, ``attn``, ``lse``, ``d_attn``; writes ``d_qkv``.

    Gradients of keys and values are summed in ``prefix.d_kv``. The last subsequence writes the first term of every sum
    of keys that these rows attend to.
    """
    rows = sequence_rows(decisions, shape.start, shape.tokens)
    squares = [_square(decisions, shape, each, backward=True) for each in rows]
    parts = [_parts_before(shape, number, each) for number, each in enumerate(rows)]
    earlier = list(chain.from_iterable(parts))
    builder.own("d_q", BufferClass.TRANSIENT, SUM_DTYPE if earlier else decisions.dtype, shape.tokens, shape.q_width)
    if earlier:
        own_d_q(builder, decisions, shape)
    if not prefix.is_direct(builder, decisions, shape):
        room = max(*(each.tokens for each in rows), *(part.keys.tokens for part in earlier), 0)
        builder.own(prefix.ASIDE, BufferClass.TRANSIENT, decisions.dtype, room, shape.cache_width)
    _share_workspace(builder, decisions, "attn.bwd", squares)
    name = f"{KEY_PART}.bwd"
    _share_workspace(builder, decisions, name, [part.work(decisions, shape, backward=True) for part in earlier])
    for number, (each, square, before) in enumerate(zip(rows, squares, parts, strict=True)):
        own = each.first - shape.start, each.tokens
        _square_backward(builder, decisions, shape, number, each, square)
        for part in before:
            ((_, sums),) = sums_of(shape, part.keys.first, part.keys.tokens)
            written = prefix.written_rows(builder, decisions, shape, sums)
            part_backward(builder, decisions, shape, part, name, into=written, most_keys=0)
            grad_q = Rows("d_q.part", 0, each.tokens)
            add(builder, decisions, f"d_q.add{part.suffix}", grad_q, Rows("d_q", *own))
            prefix.sum_into(builder, decisions, shape, f".before{part.suffix}", written, sums)
    builder.cut()
    _join(builder, decisions, shape)


def _square(decisions: Decisions, shape: Shape, rows: SequenceRows, *, backward: bool) -> Attention:
    """Return the work of the causal call of rows over their own keys."""
    return attention_work(
        decisions, shape, rows.tokens, rows.tokens, "causal", backward=backward, sequences=rows.sequences
    )


def _parts_before(shape: Shape, number: int, rows: SequenceRows) -> list[Part]:
    """Return the calls over the keys before rows of the same sequences; ``number``: that of the rows."""
    own = rows.first - shape.start, rows.tokens
    return [
        Part(Rows(KV, *keys), suffix=f".q{number}.k{n}", own=own, sequences=rows.sequences)
        for n, keys in enumerate(rows.earlier)
    ]


def _share_workspace(builder: TemplateBuilder, decisions: Decisions, name: str, works: list[Attention]) -> None:
    """Add the scratch that calls share, as large as that of the call which needs most."""
    if works:
        groups, deterministic = decisions.kernels.head_groups, decisions.deterministic
        sizes = [attention_workspace_bytes(work, groups, deterministic=deterministic) for work in works]
        workspace(builder, decisions, works[sizes.index(max(sizes))], f"{name}.scratch")


def _workspace(builder: TemplateBuilder, name: str) -> Access | None:
    slot = f"{name}.scratch"
    return writes(builder.all(slot)) if builder.has(slot) else None


def _square_backward(  # noqa: PLR0917 - the context, the rows and their call
    builder: TemplateBuilder, decisions: Decisions, shape: Shape, number: int, rows: SequenceRows, work: Attention
) -> None:
    """Write the backward of the call over the rows' own keys: the first term of the gradients of their queries."""
    own = rows.first - shape.start, rows.tokens
    ((_, sums),) = sums_of(shape, rows.first, rows.tokens)
    d_q, written = Rows("d_q", *own), prefix.written_rows(builder, decisions, shape, sums)
    into_q = d_q if builder.dtype("d_q") == decisions.dtype else Rows("d_q.part", 0, rows.tokens)
    builder.emit(
        f"attn.bwd.q{number}",
        "attention.bwd",
        Lane.COMPUTE,
        work,
        grad=reads(Rows("d_attn", *own)),
        q=reads(Rows("q", *own)),
        kv=reads(Rows(KV, rows.first, rows.tokens)),
        out=reads(Rows("attn", *own)),
        lse=reads(Rows("lse", *own)),
        grad_q=writes(into_q),
        grad_kv=writes(written),
        workspace=_workspace(builder, "attn.bwd"),
    )
    if into_q != d_q:
        put(builder, f"d_q.put.q{number}", into_q, d_q)
    prefix.sum_into(builder, decisions, shape, f".q{number}", written, sums)


def _join(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Pack the gradients of queries with those of keys and values, to which other stages have sent terms.

    What the owner sends are sums, of all rows or, of the last subsequence, of those that its own rows attend to. Only
    the rows of the last sequence have terms of helpers of later rows. Other rows are complete here.
    """
    ((_, mine),) = sums_of(shape, shape.start, shape.tokens)
    behind = [builder.all(slot) for slot in builder.bound_to(FamilyKind.LATER_GRADIENTS)]
    summed = Rows(SUMMED, 0, 0)
    if behind and builder.dtype(behind[0].slot) == SUM_DTYPE:
        summed = behind.pop(0)
        add(builder, decisions, "d_kv.add.own", _last(mine, summed.tokens), summed)
    elif behind:
        summed = builder.all(builder.own(SUMMED, BufferClass.TRANSIENT, SUM_DTYPE, behind[0].tokens, shape.cache_width))
        put(builder, "d_kv.put.own", _last(mine, summed.tokens), summed)
    for rows in behind:
        add(builder, decisions, f"d_kv.add{rows.slot.removeprefix(BEHIND)}", rows, _last(summed, rows.tokens))
    complete = shape.tokens - summed.tokens
    for name, at, grads in (("own", 0, Rows(mine.slot, mine.first, complete)), ("summed", complete, summed)):
        if grads.tokens:
            packed = Rows("d_qkv", at, grads.tokens)
            join(builder, f"qkv.join.{name}", Rows("d_q", at, grads.tokens), grads, packed)


def _last(rows: Rows, tokens: int) -> Rows:
    """Return the last of some rows."""
    return Rows(rows.slot, rows.first + rows.tokens - tokens, tokens)
