"""Causal attention of a subsequence: over its own tokens, and over the KV cache of the prefix (SPPO 5.1).

A layer has one buffer of keys and values for the whole micro-batch, ``prefix.kv``. Each subsequence writes its own rows
of that buffer, and keeps its queries in slot ``q`` instead of the packed Q, K, V. Forward makes two calls: a causal
square over the own rows, and one call without a mask over all earlier rows. Their outputs merge by log-sum-exp.

Backward goes from the last subsequence to the first and sums gradients of keys and values in ``prefix.d_kv``. The last
subsequence writes all rows; the others add to the rows that they attend to. After a subsequence has added its own
square its rows are complete, and they are packed with the gradients of its queries.

    prefix.kv     |    s0    |   s1   | s2 |             prefix.d_kv   |    s0    |   s1   | s2 |
    forward s1      `- before -'`square'                  backward s2     `w before -'-------'`w sq'
                                                          backward s1     `+ before -'`+ sq -' -> complete, joined

A sum may have hundreds of terms, so sums are fp32. A kernel writes its gradients in the plan's dtype to a buffer of
their own, for one run of earlier subsequences at a time (``Shape.sums``). Each run has its own buffer of sums, which is
free once its rows are complete.

Of a micro-batch of several sequences, a subsequence has its tokens of every sequence (``layout/token_order.py``). Then
the earlier keys of one sequence do not lie side by side, and there is one call for each earlier subsequence.

With a window there is one call in each direction, over the subsequence's own keys and the few right before them, which
lie side by side in the KV cache. Of several sequences they do not, and are copied. Keys before the window are not read
again; the KV cache holds them until the layer's backward all the same. A subsequence writes the first term of every sum
that no later one has reached.

Every later subsequence reads keys and values, in forward and backward, so they stay on the device (SPPO's type 0). The
other skeletal tensors are read only in their own backward (type 1), and may be swapped to the host.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Literal

from memo_sim.contract.plan import Decisions
from memo_sim.program.attention import partial as attention_part
from memo_sim.program.attention.partial import (
    Part,
    add,
    attention_work,
    own_d_q,
    part_backward,
    part_forward,
    put,
    workspace,
)
from memo_sim.program.ir.builder import Rows, TemplateBuilder, reads, writes
from memo_sim.program.ir.instruction import BufferClass, Families, Family, Lane
from memo_sim.program.ir.kinds import FamilyKind, Phase
from memo_sim.program.ir.work import Attention
from memo_sim.program.layout.partition import partition
from memo_sim.program.layout.shape import Shape

KV, D_KV = "prefix.kv", "prefix.d_kv"
SUM_DTYPE: Literal["fp32"] = "fp32"
"""Dtype of the sums of gradients: of keys over subsequences, and of queries over runs of keys."""
ASIDE = "d_kv.part"
BEHIND = "behind.d_kv"
"""Start of the names of buffers that receive gradients of these rows from stages that compute later rows
(``pipeline/helper_stage.py``)."""
KEY_PART, MERGE = "attn.before", "attn.merge"
SEEN = "kv.seen"
"""Keys of a window, of several sequences; recompute has its own, which die long before backward's."""


def families(decisions: Decisions, shape: Shape, count: int) -> list[Family]:
    """Return the buffer families of the KV cache and its gradients, ``count`` of each; none without subsequences."""
    if not shape.kv_cache_tokens:
        return []
    kind, width = BufferClass.KV_CACHE, shape.cache_width
    sums = [
        Family(rows.slot, kind, SUM_DTYPE, rows.tokens, width, count, kind=FamilyKind.PER_LAYER)
        for _, rows in sums_of(shape)
    ]
    cache = Family(KV, kind, decisions.dtype, shape.kv_cache_tokens, width, count, kind=FamilyKind.PER_LAYER)
    return [cache, *sums]


def sums_of(shape: Shape, first: int = 0, tokens: int | None = None) -> list[tuple[int, Rows]]:
    """Return the buffers that sum gradients of KV cache rows [first, first + tokens); of all rows without ``tokens``.

    One entry for each run of subsequences: the first row, and the rows in the run's buffer.
    """
    end, ends = shape.kv_cache_tokens if tokens is None else first + tokens, shape.sums or (shape.kv_cache_tokens,)
    return [
        (begun, Rows(f"{D_KV}.{i}" if shape.sums else D_KV, begun - before, until - begun))
        for i, (before, after) in enumerate(pairwise((0, *ends)))
        if (begun := max(first, before)) < (until := min(end, after))
    ]


def bind(builder: TemplateBuilder, found: Families, shape: Shape, *, gradients: bool) -> None:
    """Bind the KV cache to a template's slots, and with ``gradients`` (backward) the sums of its gradients too."""
    if shape.kv_cache_tokens:
        builder.bind(found[KV], slot=KV)
        if gradients:
            for _, rows in sums_of(shape, 0, shape.start + shape.tokens):
                builder.bind(found[rows.slot], slot=rows.slot)
            for name, family in found.items():
                if family.kind is FamilyKind.LATER_GRADIENTS:
                    builder.bind(family, slot=name)


def split(builder: TemplateBuilder, shape: Shape, packed: Rows, suffix: str, *, keys: bool) -> None:
    """Copy queries from packed rows to slot ``q``, and with ``keys`` the keys and values to their rows of the KV cache.

    Recompute omits ``keys``: the KV cache still holds them from forward.
    """
    kv = Rows(KV, shape.start + packed.first, packed.tokens) if keys else None
    attention_part.split(builder, f"qkv.split{suffix}", packed, Rows("q", packed.first, packed.tokens), kv)


def forward(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write attention forward: reads slots ``q`` and ``prefix.kv``, writes ``attn`` and ``lse``."""
    builder.cut()
    own_square(builder, decisions, shape, _seen(builder, decisions, shape))
    if shape.start and not shape.window:
        before = calls(decisions, [(0, Rows(KV, 0, shape.start))])
        longest = max(rows.tokens for _, rows in before)
        for number, (_, rows) in enumerate(before):
            part = Part(rows, suffix=f".k{number}" if len(before) > 1 else "")
            part_forward(builder, decisions, shape, part, KEY_PART, merge=MERGE, most_keys=longest)


def own_square(builder: TemplateBuilder, decisions: Decisions, shape: Shape, keys: Rows) -> None:
    """Write the causal call over the subsequence's own ``keys``, and with a window those before them."""
    work = attention_work(decisions, shape, shape.tokens, keys.tokens, "causal", backward=False, window=shape.window)
    builder.emit(
        "attn",
        "attention",
        Lane.COMPUTE,
        work,
        q=reads(builder.all("q")),
        kv=reads(keys),
        out=writes(builder.all("attn")),
        lse=writes(builder.all("lse")),
        workspace=workspace(builder, decisions, work, "attn.scratch"),
    )


def backward(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write attention backward: reads ``q``, ``prefix.kv``, ``attn``, ``lse``, ``d_attn``; writes ``d_qkv``.

    Gradients of keys and values are summed in ``prefix.d_kv`` (``sums_of``).
    """
    if shape.window:
        _windowed_backward(builder, decisions, shape)
        return
    ((_, mine),) = sums_of(shape, shape.start, shape.tokens)
    earlier = calls(decisions, sums_of(shape, 0, shape.start))
    longest = max((rows.tokens for _, rows in earlier), default=0)
    dtype = SUM_DTYPE if earlier else decisions.dtype
    d_q = builder.own("d_q", BufferClass.TRANSIENT, dtype, shape.tokens, shape.q_width)
    if earlier:
        own_d_q(builder, decisions, shape)
    if not is_direct(builder, decisions, shape):
        room = max(shape.tokens, longest)
        builder.own(ASIDE, BufferClass.TRANSIENT, decisions.dtype, room, shape.cache_width)
    queries = builder.all(d_q)
    own_square_backward(builder, decisions, shape, queries, written_rows(builder, decisions, shape, mine), mine)
    for run, (first, rows) in enumerate(earlier):
        part = Part(Rows(KV, first, rows.tokens), suffix=f".k{run}" if len(earlier) > 1 else "")
        written = written_rows(builder, decisions, shape, rows)
        part_backward(builder, decisions, shape, part, f"{KEY_PART}.bwd", into=written, most_keys=longest)
        add(builder, decisions, f"d_q.add{part.suffix}", builder.all("d_q.part"), queries)
        sum_into(builder, decisions, shape, f".before{part.suffix}", written, rows)
    summed = _with_behind(builder, decisions, mine)
    attention_part.join(builder, "qkv.join", queries, summed, builder.all("d_qkv"))


def own_square_backward(  # noqa: PLR0917 - the context, and where both gradients go
    builder: TemplateBuilder, decisions: Decisions, shape: Shape, queries: Rows, written: Rows, into: Rows
) -> None:
    """Write the backward of the subsequence's causal square: the first term of the gradients of its queries.

    The kernel writes gradients of keys to ``written``, from where they move into the sums ``into``.
    """
    work = attention_work(decisions, shape, shape.tokens, shape.tokens, "causal", backward=True)
    into_q = queries if builder.dtype(queries.slot) == decisions.dtype else builder.all("d_q.part")
    _own_call_backward(builder, decisions, work, _own(KV, shape), into_q, written)
    if into_q != queries:
        put(builder, "d_q.put", into_q, queries)
    sum_into(builder, decisions, shape, "", written, into)


def calls(decisions: Decisions, earlier: list[tuple[int, Rows]]) -> list[tuple[int, Rows]]:
    """Return runs of earlier rows of the KV cache as one call each reads them: cut where subsequences end.

    A run is its first row of the cache and rows of a buffer. Of a micro-batch of one sequence a run is one call.
    """
    if decisions.micro_batch == 1:
        return earlier
    ends = (0, *accumulate(decisions.layout.ulysses * rows for rows in partition(decisions)))
    return [
        (low, Rows(rows.slot, rows.first + low - first, high - low))
        for first, rows in earlier
        for start, end in pairwise(ends)
        if (low := max(first, start)) < (high := min(first + rows.tokens, end))
    ]


def rows_before(decisions: Decisions, shape: Shape, sequence: int, count: int) -> list[Rows]:
    """Return the rows of the KV cache that have a sequence's last ``count`` tokens before a subsequence, in order.

    Of a micro-batch of one sequence they lie side by side. Of several, they are in the earlier subsequences.
    """
    sequences = decisions.micro_batch
    if sequences == 1:
        return [Rows(KV, shape.start - count, count)] if count else []
    found, left, end = list[Rows](), count, shape.start
    sizes = [decisions.layout.ulysses * rows for rows in partition(decisions)]
    for begun, rows in reversed(list(zip((0, *accumulate(sizes)), sizes, strict=False))):
        if begun >= end or not left:
            continue
        length = rows // sequences
        taken = min(left, length)
        found.append(Rows(KV, begun + (sequence + 1) * length - taken, taken))
        left -= taken
    return found[::-1]


def _windowed_backward(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> None:
    """Write ``backward`` with a window: one call, whose gradients of keys begin a sum or are added to it."""
    keys = _seen(builder, decisions, shape)
    queries = builder.all(builder.own("d_q", BufferClass.TRANSIENT, decisions.dtype, shape.tokens, shape.q_width))
    builder.own(ASIDE, BufferClass.TRANSIENT, decisions.dtype, keys.tokens, 2 * shape.kv_width)
    work = attention_work(decisions, shape, shape.tokens, keys.tokens, "causal", backward=True, window=shape.window)
    _own_call_backward(builder, decisions, work, keys, queries, builder.all(ASIDE))
    puts, adds = list[tuple[int, Rows]](), list[tuple[int, Rows]]()
    at = 0
    for pieces in _windows_of_sequences(decisions, shape):
        # A later subsequence reached a sequence's last keys, and began their sums.
        old = 0 if is_last(shape) else shape.window - 1
        left = max(0, sum(rows.tokens for rows in pieces) - old)
        for rows in pieces:
            new = min(left, rows.tokens)
            left -= new
            puts += [(at + first - rows.first, sums) for first, sums in sums_of(shape, rows.first, new)]
            begun, more = rows.first + new, rows.tokens - new
            adds += [(at + first - rows.first, sums) for first, sums in sums_of(shape, begun, more)]
            at += rows.tokens
    for number, (first, rows) in enumerate(puts):
        put(builder, f"d_kv.put{number or ''}", Rows(ASIDE, first, rows.tokens), rows)
    for number, (first, rows) in enumerate(adds):
        add(builder, decisions, f"d_kv.add{number or ''}", Rows(ASIDE, first, rows.tokens), rows)
    ((_, mine),) = sums_of(shape, shape.start, shape.tokens)
    attention_part.join(builder, "qkv.join", queries, mine, builder.all("d_qkv"))


def _own_call_backward(  # noqa: PLR0917 - the context, the keys, and both gradients
    builder: TemplateBuilder, decisions: Decisions, work: Attention, keys: Rows, grad_q: Rows, grad_kv: Rows
) -> None:
    """Write the backward of the call that reads the subsequence's own keys, and with a window those before them."""
    builder.emit(
        "attn.bwd",
        "attention.bwd",
        Lane.COMPUTE,
        work,
        grad=reads(builder.all("d_attn")),
        q=reads(builder.all("q")),
        kv=reads(keys),
        out=reads(builder.all("attn")),
        lse=reads(builder.all("lse")),
        grad_q=writes(grad_q),
        grad_kv=writes(grad_kv),
        workspace=workspace(builder, decisions, work, "attn.bwd.scratch"),
    )


def _windows_of_sequences(decisions: Decisions, shape: Shape) -> list[list[Rows]]:
    """Return the rows of the KV cache whose keys each sequence's queries see: a window's before, and their own."""
    sequences = decisions.micro_batch
    length, before = shape.tokens // sequences, min(shape.start // sequences, shape.window - 1)
    return [
        _side_by_side(
            [*rows_before(decisions, shape, n, before), Rows(KV, shape.start + n * length, length)],
        )
        for n in range(sequences)
    ]


def _side_by_side(pieces: list[Rows]) -> list[Rows]:
    """Return rows of one buffer with neighbours joined."""
    found = list[Rows]()
    for rows in pieces:
        if found and found[-1].first + found[-1].tokens == rows.first:
            found[-1] = Rows(rows.slot, found[-1].first, found[-1].tokens + rows.tokens)
        else:
            found.append(rows)
    return found


def _seen(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> Rows:
    """Return the keys that one call reads: the subsequence's own, and with a window those before them.

    Of several sequences, a window's keys are copied first: the keys of one sequence lie apart in the KV cache.
    """
    if not shape.window:
        return Rows(KV, shape.start, shape.tokens)
    windows = _windows_of_sequences(decisions, shape)
    if len(windows) == 1:
        return windows[0][0]
    slot = f"{SEEN}.rec" if builder.phase is Phase.RECOMPUTE else SEEN
    tokens = sum(rows.tokens for pieces in windows for rows in pieces)
    builder.own(slot, BufferClass.TRANSIENT, decisions.dtype, tokens, shape.cache_width)
    at, again = 0, ".bwd" if builder.phase is Phase.BACKWARD else ""
    for sequence, pieces in enumerate(windows):
        for number, rows in enumerate(pieces):
            put(builder, f"kv.seen.q{sequence}.{number}{again}", rows, Rows(slot, at, rows.tokens))
            at += rows.tokens
    return builder.all(slot)


def is_last(shape: Shape) -> bool:
    """Return whether no later subsequence attends to these rows; backward begins with this subsequence."""
    return shape.start + shape.tokens == shape.kv_cache_tokens


def is_direct(builder: TemplateBuilder, decisions: Decisions, shape: Shape) -> bool:
    """Return whether kernels write gradients of keys and values straight to the sums: first term, and same dtype."""
    return is_last(shape) and builder.dtype(sums_of(shape)[0][1].slot) == decisions.dtype


def written_rows(builder: TemplateBuilder, decisions: Decisions, shape: Shape, into: Rows) -> Rows:
    """Return the rows to which a kernel writes gradients that belong to the sums ``into``."""
    return into if is_direct(builder, decisions, shape) else Rows(ASIDE, 0, into.tokens)


def sum_into(  # noqa: PLR0917 - the context, and both buffers
    builder: TemplateBuilder, decisions: Decisions, shape: Shape, name: str, written: Rows, into: Rows
) -> None:
    """Move what a kernel wrote to a buffer of its own into the sums: copy the first term, add the others."""
    if written == into:
        return
    if is_last(shape):
        put(builder, f"d_kv.put{name}", written, into)
    else:
        add(builder, decisions, f"d_kv.add{name}", written, into)


def _with_behind(builder: TemplateBuilder, decisions: Decisions, mine: Rows) -> Rows:
    """Return the complete gradients of these rows' keys and values, including those computed by other stages.

    The first buffer comes from the owner stage and is a sum itself (``pipeline/helper_stage.py``); the others are added
    to it.
    """
    behind = builder.bound_to(FamilyKind.LATER_GRADIENTS)
    if not behind:
        return mine
    summed = builder.all(behind[0])
    builder.cut()
    add(builder, decisions, "d_kv.add.own", mine, summed)
    for slot in behind[1:]:
        add(builder, decisions, f"d_kv.add{slot.removeprefix(BEHIND)}", builder.all(slot), summed)
    return summed


def _own(slot: str, shape: Shape) -> Rows:
    """Return the subsequence's own rows of a KV cache buffer."""
    return Rows(slot, shape.start, shape.tokens)
