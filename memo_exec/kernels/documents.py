"""Packed documents in a step: where they end, which rows of a call belong to one, and where positions restart.

The ends of documents are data of a step. They are known on the host before the step, from the data loader, so no kernel
reads them from the device. Attention is called once for each document, on views of its rows, or by a kernel that takes
where they end in a tensor, which is written before the step (``input.documents``). The rows of a rank that
belong to one document lie together, and so do the keys of each call (``memo_sim/program/attention/``):

    sequence     | a a a a a a a b | b b b b b b b b | b c c c c c c c | c c c c d d d d |     cp 2, chunks 0 .. 3
    rank 1       |   chunk 1: b b b b b b b b | chunk 2: b c c c c c c c |                     own rows: b, then c
    keys of 0    |   chunk 0: a a a a a a a b |                                                b alone has queries here
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from memo_exec.kernels.call import Call, Context, Ends
from memo_sim.contract.errors import CannotRun, UsageError
from memo_sim.contract.plan import Decisions
from memo_sim.program.ir.work import Attention


@dataclass(frozen=True, slots=True)
class Segment:
    """The queries and keys of one document in one call, as rows of one sequence of it."""

    sequence: int
    queries: slice
    keys: slice


def segments(call: Call, work: Attention) -> Iterator[Segment]:
    """Yield the documents of an attention call that have both queries and keys."""
    own, rows = _own_chunks(call.context)
    queries, keys = own[len(own) - work.q_tokens // rows :], work.chunks or own
    for sequence, ends in enumerate(call.context.ends(call.micro_batch)):
        for first, end in pairwise((0, *ends)):
            mine, theirs = (_rows(part, rows, first, end) for part in (queries, keys))
            if mine is not None and theirs is not None:
                yield Segment(sequence, mine, theirs)


def own_ends(context: Context, micro_batch: int) -> list[int]:
    """Return where documents begin among the rows of a rank's attention, and the end of the last one.

    Rows count over all sequences of the micro-batch; documents without a row here are left out.
    """
    own, rows = _own_chunks(context)
    found = [0]
    for sequence, ends in enumerate(context.ends(micro_batch)):
        parts = [_rows(own, rows, first, end) for first, end in pairwise((0, *ends))]
        found += [sequence * len(own) * rows + part.stop for part in parts if part is not None]
    return found


def _own_chunks(context: Context) -> tuple[tuple[int, ...], int]:
    """Return the chunks of a sequence that a rank's attention has, of 2 x cp, and the rows of a chunk."""
    ring, rank = context.decisions.layout.ring, context.mesh.at("cp")
    chunks = 2 * ring if ring > 1 else 1
    return (rank, chunks - 1 - rank) if chunks > 1 else (0,), context.decisions.seq_tokens // chunks


def _rows(chunks: Sequence[int], rows: int, first: int, end: int) -> slice | None:
    """Return which rows of ``chunks`` hold tokens [first, end) of a sequence; None for none."""
    found = [
        (place * rows + low - chunk * rows, place * rows + high - chunk * rows)
        for place, chunk in enumerate(chunks)
        if (low := max(first, chunk * rows)) < (high := min(end, (chunk + 1) * rows))
    ]
    if not found:
        return None
    assert all(before[1] == after[0] for before, after in pairwise(found)), "a document's rows lie apart"
    return slice(found[0][0], found[-1][1])


def check_documents(decisions: Decisions) -> None:
    """Refuse plans whose documents memo-exec does not play.

    Raises:
        CannotRun: when ranks cut every document, or positions are scaled by the length of the sequence.
    """
    if decisions.documents is None:
        return
    if decisions.document_cuts != "sequence":
        raise CannotRun(
            "memo-exec cuts sequences, not every document: which rows a rank has would change from step to step",
            where="$.decisions.document_cuts",
            got=decisions.document_cuts,
            wanted="sequence",
            hint="make the plan with --document-cuts sequence; the other cuts are a prediction only",
        )
    scaling = decisions.model.rope_scaling
    if scaling is not None and scaling.kind in ("dynamic", "longrope"):
        raise CannotRun(
            "rotary positions that are scaled by the sequence's length have no form for packed documents",
            where="$.decisions.model.rope_scaling",
            got=scaling.kind,
            wanted="linear, llama3, yarn or no scaling",
            hint="make the plan without --documents",
        )


def check_room(decisions: Decisions, ends: Ends, path: Path | None = None) -> None:
    """Refuse sequences with more documents than the plan has room for; ``path``: the file that they come from.

    Raises:
        UsageError: naming the number to plan for.
    """
    if decisions.documents is None:
        return
    room, most = decisions.documents.most_pieces(decisions.seq_tokens), max(map(len, ends), default=0)
    if most > room:
        raise UsageError(
            "a sequence has more documents than the plan has room for",
            where=str(path) if path else "decisions.documents.most",
            got=most,
            wanted=f"at most {room}",
            hint=f"plan with --documents mean=TOKENS,max=TOKENS,most={most}, or with a file of the data's lengths",
        )


def squares(ends: Ends) -> int:
    """Return the sum of the squares of the documents' tokens."""
    return sum((end - first) ** 2 for each in ends for first, end in pairwise((0, *each)))
