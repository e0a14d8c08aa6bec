"""What packed documents leave of attention: the pairs of every call, on the rank that has most of them.

A rank's calls are those of whole sequences (``attention``); of each, only pairs of one document count. Where
context-parallel ranks share a sequence, their shares differ:

    --document-cuts sequence    the sequence is cut into 2 x cp chunks, as without documents. A document that lies in
                                one chunk is attended on that rank alone, at the cost of its length squared.
    --document-cuts documents   every document is cut into 2 x cp chunks, so that all ranks have equal pairs. Documents
                                are filled up to a multiple of 2 x cp rows (Transformer Engine's THD form).

All ranks of a ring wait for each other in every layer, so the rank with most pairs of a micro-batch sets its pace; and
a step ends with the data-parallel replica whose micro-batches have most of them. Both maxima are taken over drawn
sequences (``contract/documents.py``); prices are of their mean over micro-batches and steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from memo_sim.contract.documents import SEED, Documents, packed, pairs_of
from memo_sim.contract.knobs import DocumentCuts
from memo_sim.contract.plan import Decisions

DRAWN_STEPS = 8
"""Steps over which the slowest replica is averaged."""

Segments = tuple[tuple[int, int, int], ...]
"""(Queries, keys, pairs) of one call, by classes of pieces of like size: their mean lengths, and all their pairs."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How a step's attention spreads, in pairs of one sequence."""

    pairs: float
    """Pairs of a whole sequence, without filled-up rows; all ranks of a ring together."""
    ranks: float
    """Pairs of the fullest rank of a micro-batch, as a multiple of the mean of the ring's ranks; 1 without a ring."""
    replicas: float
    """Pairs of the slowest replica of a step, as a multiple of the mean; 1 without replicas."""
    filled: float
    """Share of rows that fill documents up."""
    pieces: float
    """Mean number of pieces of documents in a sequence."""
    crossing: float
    """Share of the ring's hops that a rank's queries need: some document has queries here and keys there."""


Piece = tuple[int, int]
"""First row and end of a document's piece in its sequence."""


def own_segments(decisions: Decisions, window: int = 0) -> Segments:
    """Return the segments of the causal call over a rank's own rows; empty without documents.

    ``window``: how many keys a query sees at most; 0: all. Only where a rank has whole sequences.
    """
    return _segments_of(decisions, 0, window)


def step_segments(decisions: Decisions, step: int) -> Segments:
    """Return the segments of the unmasked calls over the keys of a ring's ``step``; empty without documents."""
    return _segments_of(decisions, step)


def gathered_segments(decisions: Decisions) -> Segments:
    """Return the segments of the unmasked calls over the keys of all other ranks; empty without documents."""
    return _segments_of(decisions, -1)


def shared(segments: Segments, calls: int) -> Segments:
    """Return the segments of one of several calls that share them equally."""
    return tuple((queries, keys, pairs // calls) for queries, keys, pairs in segments)


def pace_of(decisions: Decisions) -> Pace:
    """Return how the documents of a plan spread over ranks and replicas."""
    return _balance(*_key(decisions)).pace


def most_pieces(decisions: Decisions) -> int:
    """Return the most pieces of documents that a micro-batch may have; 0 without documents."""
    documents = decisions.documents
    return decisions.micro_batch * documents.most_pieces(decisions.seq_tokens) if documents else 0


def _segments_of(decisions: Decisions, call: int, window: int = 0) -> Segments:
    if decisions.documents is None:
        return ()
    return _balance(*_key(decisions), window).segments.get(call, ((1, 1, 0),))


def _key(decisions: Decisions) -> tuple[Documents, int, int, int, int, int, DocumentCuts]:
    layout = decisions.layout
    assert decisions.documents is not None
    return (
        *(decisions.documents, decisions.seq_tokens, decisions.micro_batch, decisions.micro_batches),
        *(layout.dp, layout.ring, decisions.document_cuts),
    )


@dataclass(frozen=True, slots=True)
class _Balance:
    pace: Pace
    segments: dict[int, Segments]


class _Classes:
    """Sums pairs by classes of pieces whose queries and keys lie between the same powers of two."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], list[int]] = {}

    def add(self, queries: int, keys: int, pairs: int) -> None:
        if pairs:
            found = self._found.setdefault((queries.bit_length(), keys.bit_length()), [0, 0, 0])
            for i, value in enumerate((queries * pairs, keys * pairs, pairs)):
                found[i] += value

    def segments(self, factor: float) -> Segments:
        """Return the classes, with pairs times ``factor``; lengths are means over pairs."""
        return tuple(
            (max(1, round(q / pairs)), max(1, round(k / pairs)), round(pairs * factor))
            for _, (q, k, pairs) in sorted(self._found.items())
        )


@lru_cache(maxsize=256)
def _balance(  # noqa: PLR0917 - the fields of a plan that it depends on
    documents: Documents,
    seq_tokens: int,
    micro_batch: int,
    count: int,
    dp: int,
    ring: int,
    cuts: DocumentCuts,
    window: int = 0,
) -> _Balance:
    multiple = 2 * ring if ring > 1 and cuts == "documents" else 1  # as ``token_order.rows_of_a_cut``
    drawn = packed(documents, seq_tokens, multiple)
    batches = [
        [piece for lengths in taken for piece in _pieces(lengths, seq_tokens)] for taken in _grouped(drawn, micro_batch)
    ]
    rows = sum(map(sum, drawn))
    totals, fullest = [], []
    calls: dict[int, _Classes] = {}
    needed = 0
    for pieces in batches:
        by_rank = _pairs_by_rank(pieces, seq_tokens, ring, cuts, window)
        rank = by_rank.index(max(by_rank))
        totals.append(sum(by_rank))
        fullest.append(by_rank[rank])
        needed += _sum_calls(calls, pieces, seq_tokens, ring, rank, cuts, window)
    whole, most = sum(totals) / len(batches), sum(fullest) / len(batches)
    replicas = _slowest(fullest, dp, count) / most
    real = documents.pairs(seq_tokens)
    unfilled = packed(documents, seq_tokens)
    mean = sum(map(sum, unfilled)) / sum(map(len, unfilled))
    pace = Pace(
        pairs=real,
        ranks=most * ring / whole,
        replicas=replicas,
        filled=max(0.0, 1 - mean * sum(map(len, drawn)) / rows) if multiple > 1 else 0.0,
        pieces=sum(map(len, drawn)) / len(drawn),
        crossing=needed / (len(batches) * (ring - 1)) if ring > 1 else 1.0,
    )
    return _Balance(pace, {call: found.segments(replicas / len(batches)) for call, found in calls.items()})


def _grouped(drawn: tuple[tuple[int, ...], ...], size: int) -> Iterator[list[tuple[int, ...]]]:
    """Yield the sequences of each micro-batch; the drawn sequences repeat where there are too few for one."""
    for first in range(0, max(1, len(drawn) - size + 1), size):
        yield [drawn[(first + i) % len(drawn)] for i in range(size)]


def _pieces(lengths: Iterable[int], seq_tokens: int) -> Iterator[Piece]:
    first = 0
    for tokens in lengths:
        yield first, first + tokens
        first += tokens
    assert first == seq_tokens


def _chunks(piece: Piece, chunk: int) -> Iterator[tuple[int, int, int]]:
    """Yield (number of the chunk of a sequence, first row, end) of each part of a piece."""
    first, end = piece
    for number in range(first // chunk, -(-end // chunk)):
        yield number, max(first, number * chunk), min(end, (number + 1) * chunk)


def _rank_of(chunk: int, ring: int) -> int:
    return min(chunk, 2 * ring - 1 - chunk)


def _pairs_by_rank(pieces: list[Piece], seq_tokens: int, ring: int, cuts: DocumentCuts, window: int = 0) -> list[int]:
    """Return each rank's pairs: a query has those with itself and the document's earlier keys, its own half."""
    if ring == 1:
        return [int(sum(pairs_of(end - first, window) for first, end in pieces))]
    if cuts == "documents":
        return [sum((end - first) ** 2 for first, end in pieces) // (2 * ring)] * ring
    found, chunk = [0] * ring, seq_tokens // (2 * ring)
    for piece in pieces:
        for number, low, high in _chunks(piece, chunk):
            found[_rank_of(number, ring)] += ((high - piece[0]) ** 2 - (low - piece[0]) ** 2) // 2
    return found


def _sum_calls(  # noqa: PLR0917 - the sums, and what they are of
    calls: dict[int, _Classes],
    pieces: list[Piece],
    seq_tokens: int,
    ring: int,
    rank: int,
    cuts: DocumentCuts,
    window: int = 0,
) -> int:
    """Add the pairs of a rank's calls: 0 its own rows, 1.. the steps of a ring, -1 all these steps.

    Returns the number of steps with a document that has queries here and keys there.
    """
    steps: set[int] = set()

    def add(step: int, queries: int, keys: int, pairs: int) -> None:
        for call in (step, -1) if step else (0,):
            calls.setdefault(call, _Classes()).add(queries, keys, pairs)
        if step and pairs:
            steps.add(step)

    for piece in pieces:
        if ring == 1 or cuts == "documents":
            part = (piece[1] - piece[0]) // (2 * ring) if ring > 1 else 0
            own = 2 * part if ring > 1 else piece[1] - piece[0]
            add(0, own, own, int(pairs_of(own, window)))
            for step in range(1, ring):
                add(step, own, part, own * part)
            continue
        parts = list(_chunks(piece, seq_tokens // (2 * ring)))
        mine = [(number, low, high) for number, low, high in parts if _rank_of(number, ring) == rank]
        own = sum(high - low for _, low, high in mine)
        add(0, own, own, own * own // 2)
        for number, low, high in mine:
            for other, first, end in parts:
                if other < number and (owner := _rank_of(other, ring)) != rank:
                    add((rank - owner) % ring, high - low, end - first, (high - low) * (end - first))
    return len(steps)


def _slowest(fullest: list[int], dp: int, count: int) -> float:
    """Return the mean pairs of a micro-batch of the slowest of ``dp`` replicas with ``count`` micro-batches each."""
    if dp == 1:
        return sum(fullest) / len(fullest)
    random, slowest = Random(SEED), 0.0
    for _ in range(DRAWN_STEPS):
        slowest += max(sum(random.choices(fullest, k=count)) for _ in range(dp)) / count
    return max(slowest / DRAWN_STEPS, sum(fullest) / len(fullest))
