"""Packed documents in a step: where they end, which rows of a call belong to one, and where positions restart.

The ends of documents are data of a step. They are known on the host before the step, from the data loader, so no kernel
reads them from the device. Attention is called once for each document, on views of its rows, or by a kernel that takes
where they end in a tensor, which is written before the step (``input.documents``). A rank's rows of one document:

    sequence     | a a a a a a a b | b b b b b b b b | b c c c c c c c | c c c c d d d d |     cp 2, chunks 0 .. 3
    rank 1       |   chunk 1: b b b b b b b b | chunk 2: b c c c c c c c |                     own rows: b, then c
    keys of 0    |   chunk 0: a a a a a a a b |                                                b alone has queries here

Where ranks cut every document instead, each has an early and a late chunk of all of them (``layout/token_order.py``).
These lie apart, so the rows of a document are copied together for its call, and its results back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from memo_exec.kernels.call import Call, Context, Ends
from memo_sim.contract.errors import CannotRun, UsageError
from memo_sim.contract.plan import Decisions
from memo_sim.program.ir.work import Attention
from memo_sim.program.layout.token_order import cuts_documents


@dataclass(frozen=True, slots=True)
class Segment:
    """The queries and keys of one document in one call, as runs of rows of one sequence of it, in order of tokens.

    There are several runs where ranks cut every document, and where an all-gather brings chunks in reverse order.
    """

    sequence: int | None
    queries: tuple[slice, ...]
    keys: tuple[slice, ...]

    @property
    def at(self) -> slice:
        """The sequence, as an index that keeps its dimension."""
        return slice(None) if self.sequence is None else slice(self.sequence, self.sequence + 1)


EVERYTHING = Segment(None, (slice(None),), (slice(None),))
"""All rows of all sequences."""


class Joined:
    """Runs of rows of (batch, rows, ...) tensors as one: a view of a single run, or a copy of several."""

    def __init__(self, runs: tuple[slice, ...], at: slice) -> None:
        """``at``: the sequence that the rows are of."""
        self._runs, self._at = runs, at

    def of(self, tensor: Tensor) -> Tensor:
        """Return the rows of a tensor, in the order of runs."""
        if len(self._runs) == 1:
            return tensor[self._at, self._runs[0]]
        return torch.cat([tensor[self._at, run] for run in self._runs], dim=1)

    @contextmanager
    def written(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield tensors to write the rows to; several runs are then copied to their places."""
        targets = tuple(self.of(tensor) for tensor in tensors)
        yield targets
        if len(self._runs) == 1:
            return
        lengths = [run.stop - run.start for run in self._runs]
        for tensor, target in zip(tensors, targets, strict=True):
            for run, rows in zip(self._runs, torch.split(target, lengths, dim=1), strict=True):
                tensor[self._at, run] = rows


def segments(call: Call, work: Attention) -> Iterator[Segment]:
    """Yield the documents of an attention call that have both queries and keys."""
    own, rows = _own_chunks(call.context)
    queries, keys = own[len(own) - work.q_tokens // rows :], work.chunks or own
    for sequence, ends in enumerate(call.context.ends(call.micro_batch)):
        for document in pairwise((0, *ends)):
            mine, theirs = (_rows(call.context, chunks, document) for chunks in (queries, keys))
            if mine and theirs:
                yield Segment(sequence, mine, theirs)


def own_ends(context: Context, micro_batch: int) -> list[int]:
    """Return where documents begin among the rows of a rank's attention, and the end of the last one.

    Rows count over all sequences of the micro-batch; documents without a row here are left out. Where every document is
    cut, the ends are those of its early chunks alone.
    """
    own, rows = _own_chunks(context)
    found = [0]
    for sequence, ends in enumerate(context.ends(micro_batch)):
        parts = [_rows(context, own, document) for document in pairwise((0, *ends))]
        found += [sequence * len(own) * rows + part[0].stop for part in parts if part]
    return found


def _own_chunks(context: Context) -> tuple[tuple[int, ...], int]:
    """Return the chunks of a sequence that a rank's attention has, of 2 x cp, and the rows of a chunk."""
    ring, rank = context.decisions.layout.ring, context.mesh.at("cp")
    chunks = 2 * ring if ring > 1 else 1
    return (rank, chunks - 1 - rank) if chunks > 1 else (0,), context.decisions.seq_tokens // chunks


def _rows(context: Context, chunks: Sequence[int], document: tuple[int, int]) -> tuple[slice, ...]:
    """Return which rows of ``chunks`` hold the tokens [first, end) of a document; neighbouring runs are joined."""
    (first, end), decisions = document, context.decisions
    count = 2 * decisions.layout.ring
    rows = decisions.seq_tokens // count if count > 2 else decisions.seq_tokens
    found: list[slice] = []
    for place, chunk in enumerate(chunks):
        if cuts_documents(decisions):
            low, high = first // count, end // count
        else:
            low, high = max(first, chunk * rows) - chunk * rows, min(end, (chunk + 1) * rows) - chunk * rows
        if low >= high:
            continue
        run = slice(place * rows + low, place * rows + high)
        if found and found[-1].stop == run.start:
            found[-1] = slice(found[-1].start, run.stop)
        else:
            found.append(run)
    return tuple(found)


def check_documents(decisions: Decisions) -> None:
    """Refuse plans whose documents memo-exec does not play.

    Raises:
        CannotRun: when positions are scaled by the length of the sequence.
    """
    if decisions.documents is None:
        return
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
