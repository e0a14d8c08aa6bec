"""Token order: which token of the micro-batch lies at which row of a rank. Positions, inputs and labels follow it.

Tokens of a micro-batch are counted sequence by sequence. Context parallelism gives rank r chunks r and 2 x cp - 1 - r
of every sequence (``attention/ring.py``), and METP does the same among its ranks. A rank's rows are one sequence after
the other. Ulysses divides these rows, each row block by itself, so that the head-sharded rows of every exchanged block
are in order (``attention/ulysses.py``). Example with cp 2, ulysses 2, 16 tokens, and row blocks that end at row 2 of 4:

    cp rank 0      0  1  2  3 | 12 13 14 15
    ulysses 0      0  1 | 12 13        its first row block, then its second
    ulysses 1      2  3 | 14 15

Where packed documents are cut one by one (``Decisions.document_cuts``), every document has 2 x cp chunks of its own. A
rank's rows of a sequence are then the early chunks of all documents, and after them the late ones; which tokens these
are differs from step to step.

Where a sequence is divided into subsequences, or attention's into chunks, a micro-batch of several sequences has these
parts one after the other, each with its tokens of every sequence:

    two sequences in two parts    0  1  2  3 | 8  9 10 11 || 4  5  6  7 | 12 13 14 15

The ranks of a ring divide every subsequence, and every chunk of attention, in the same zigzag order:

    cp rank 0, two subsequences    0  3 | 4  7 of eight parts of the sequence: the first and the last of each four
    cp rank 1                      1  2 | 5  6

All ranks of a tensor-parallel group have the same rows, and a gathered row block has them in this order. Outside of the
products, sequence parallelism divides the rows of each block once more in the same way. Subsequences are runs of a
rank's rows, each with its own row blocks. A token shard therefore holds its share of each subsequence, one after the
other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from memo_sim.contract.plan import Decisions
from memo_sim.program.layout.attention_chunks import attention_chunks, in_chunks, ranks_of_a_chunk
from memo_sim.program.layout.multiplex import boundaries
from memo_sim.program.layout.partition import partition, swapped_parts
from memo_sim.program.layout.rank_order import coordinate
from memo_sim.program.layout.rowwise_blocks import is_rowwise, rowwise_blocks

Ends = Sequence[Sequence[int]]
"""For each sequence of a micro-batch, where its documents end."""


@dataclass(frozen=True, slots=True)
class Run:
    """Rows [row, row + tokens) that hold tokens [token, token + tokens) of the micro-batch, all of one sequence."""

    row: int
    token: int
    tokens: int


def row_blocks(decisions: Decisions, subsequence: int = 0) -> list[tuple[int, int]]:
    """Return (first row, rows) of the blocks in which a layer computes, gathers and exchanges a subsequence's rows.

    Blocks end

    - where recompute begins, so that it repeats the calls of forward (``layers/activations.py``);
    - where any stage divides a task with a helper stage (``multiplex.py``), so that token shards have the same order of
      rows on all stages;
    - where a chunk of attention ends;
    - where a block of row-wise recompute ends (``rowwise_blocks.py``).

    Rows count from the first row of the subsequence.
    """
    if decisions.attention_chunk_tokens:
        return attention_chunks(decisions)
    if is_rowwise(decisions):
        return rowwise_blocks(decisions, partition(decisions)[subsequence])
    tokens, swapped = partition(decisions)[subsequence], swapped_parts(decisions)[subsequence]
    ends = {0, tokens} | boundaries(decisions, subsequence, swapped)
    if decisions.recompute == "tokenwise":
        ends.add(swapped)
    return [(first, end - first) for first, end in pairwise(sorted(ends))]


def clipped_runs(blocks: Iterable[tuple[int, int]], first: int, rows: int) -> Iterator[tuple[int, int]]:
    """Yield (first row, rows) of the intersection of each row block with rows [first, first + rows)."""
    for start, length in blocks:
        low, high = max(start, first), min(start + length, first + rows)
        if low < high:
            yield low, high - low


def _every_block(decisions: Decisions) -> Iterator[tuple[int, int]]:
    """Yield the row blocks of all subsequences, in rows of the rank."""
    first = 0
    for number, tokens in enumerate(partition(decisions)):
        yield from ((first + start, rows) for start, rows in row_blocks(decisions, number))
        first += tokens


def token_runs(decisions: Decisions, rank: int = 0, ends: Ends = ()) -> tuple[Run, ...]:
    """Return the runs of a rank's rows, in the order of rows; together they have ``decisions.local_tokens`` rows.

    ``ends``: where packed documents end in each sequence of the micro-batch, for plans that cut every document.
    """
    layout = decisions.layout
    whole = _ring_runs(decisions, coordinate(layout.ring_group, layout, rank), ends)
    if layout.ulysses == 1:
        return tuple(whole)
    mine = coordinate("ulysses", layout, rank)
    starts = [(first, layout.ulysses * first + mine * rows, rows) for first, rows in _every_block(decisions)]
    return tuple(
        Run(first + run.row - start, run.token, run.tokens)
        for first, start, rows in starts
        for run in clipped(whole, start, rows)
    )


def shard_runs(decisions: Decisions, rank: int = 0, ends: Ends = ()) -> tuple[Run, ...]:
    """Return the runs of a rank's sequence-parallel token shard, or of all its rows without sequence parallelism."""
    layout, runs = decisions.layout, token_runs(decisions, rank, ends)
    if layout.tp == 1 or not layout.sequence_parallel:
        return runs
    mine = coordinate("tp", layout, rank)
    starts = [
        (first // layout.tp, first + mine * (n // layout.tp), n // layout.tp) for first, n in _every_block(decisions)
    ]
    return tuple(
        Run(first + run.row - start, run.token, run.tokens)
        for first, start, rows in starts
        for run in clipped(runs, start, rows)
    )


def clipped(runs: Iterable[Run], first: int, rows: int) -> Iterator[Run]:
    """Yield the intersection of each of ``runs`` with rows [first, first + rows)."""
    for run in runs:
        low, high = max(run.row, first), min(run.row + run.tokens, first + rows)
        if low < high:
            yield Run(low, run.token + low - run.row, high - low)


def _ring_runs(decisions: Decisions, rank: int, ends: Ends) -> list[Run]:
    ranks, length = decisions.layout.ring, decisions.seq_tokens
    if cuts_documents(decisions):
        return [run for number, each in enumerate(ends) for run in _document_runs(decisions, rank, number, each)]
    starts = range(0, decisions.micro_batch * length, length)
    if ranks == 1:
        return _in_parts(decisions) if len(starts) > 1 else [Run(0, 0, length)]
    runs, row = list[Run](), 0
    for first, tokens in _divided(decisions):
        for start in starts:
            chunk = tokens // (2 * ranks)
            for place in (rank, 2 * ranks - 1 - rank):
                runs.append(Run(row, start + first + place * chunk, chunk))
                row += chunk
    return runs


def _divided(decisions: Decisions) -> list[tuple[int, int]]:
    """Return (first token, tokens) of each part of a sequence that a ring divides.

    The parts are chunks of attention, subsequences, or the whole sequence.
    """
    if in_chunks(decisions):
        ranks, sequences = ranks_of_a_chunk(decisions), decisions.micro_batch
        return [(first * ranks // sequences, rows * ranks // sequences) for first, rows in attention_chunks(decisions)]
    if decisions.layout.subsequences == 1:
        return [(0, decisions.seq_tokens)]
    ranks, parts = decisions.layout.ulysses * decisions.layout.ring, partition(decisions)
    lengths = [rows * ranks // decisions.micro_batch for rows in parts]
    return list(zip((0, *accumulate(lengths)), lengths, strict=False))


def _in_parts(decisions: Decisions) -> list[Run]:
    """Return the runs of several whole sequences: part by part, where subsequences or chunks divide them."""
    sequences, ulysses = decisions.micro_batch, decisions.layout.ulysses
    parts = partition(decisions)
    if decisions.attention_chunk_tokens:
        parts = tuple(rows for _, rows in attention_chunks(decisions))
    runs, row = list[Run](), 0
    for first, rows in zip((0, *accumulate(parts)), parts, strict=False):
        token, tokens = first * ulysses // sequences, rows * ulysses // sequences
        for sequence in range(sequences):
            runs.append(Run(row, sequence * decisions.seq_tokens + token, tokens))
            row += tokens
    return runs


def cuts_documents(decisions: Decisions) -> bool:
    """Return whether ranks cut every document, so that the tokens of their rows are data of a step."""
    return decisions.document_cuts == "documents" and decisions.layout.ring > 1


def rows_of_a_cut(decisions: Decisions) -> int:
    """Return what the rows of a document are a multiple of: 2 x cp where ranks cut every document, else 1."""
    return 2 * decisions.layout.ring if cuts_documents(decisions) else 1


def _document_runs(decisions: Decisions, rank: int, sequence: int, ends: Sequence[int]) -> Iterator[Run]:
    """Yield the chunks of every document of a sequence: all early ones, then all late ones."""
    chunks, length = 2 * decisions.layout.ring, decisions.seq_tokens
    half = length // chunks
    for place, chunk in enumerate((rank, chunks - 1 - rank)):
        begin = (2 * sequence + place) * half
        for first, end in pairwise((0, *ends)):
            tokens = (end - first) // chunks
            yield Run(begin + first // chunks, sequence * length + first + chunk * tokens, tokens)
