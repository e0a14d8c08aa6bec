"""Which token of the micro-batch lies at which row of a rank: what positions, inputs and labels follow.

A micro-batch's tokens count sequence by sequence. Context parallelism gives rank r chunks r and 2 x cp - 1 - r of every
sequence (``ring.py``), and METP its; a rank's rows are one sequence after the other. Ulysses divides those rows, row
block by row block, so that attention finds them in order whichever block was exchanged (``ulysses.py``). With cp 2,
ulysses 2, 16 tokens, and row blocks that end at row 2 of 4:

    cp rank 0      0  1  2  3 | 12 13 14 15
    ulysses 0      0  1 | 12 13        its first row block, then its second
    ulysses 1      2  3 | 14 15

Tensor-parallel ranks share the rows of their group; a gathered row block has them in this order. Sequence parallelism
divides them once more, in the same way, outside of the products. Subsequences are runs of a rank's rows, each with row
blocks of its own, so that a token shard has every subsequence's part of it in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from memo_sim.contract.plan import Decisions
from memo_sim.program.layout.attention_chunks import attention_chunks
from memo_sim.program.layout.multiplex import boundaries
from memo_sim.program.layout.partition import partition, swapped_parts
from memo_sim.program.layout.rank_order import coordinate


@dataclass(frozen=True, slots=True)
class Run:
    """Rows [row, row + tokens) that hold tokens [token, token + tokens) of the micro-batch, of one sequence."""

    row: int
    token: int
    tokens: int


def row_blocks(decisions: Decisions, subsequence: int = 0) -> list[tuple[int, int]]:
    """Return (first row, rows) of the blocks in which a layer's rows of a subsequence are made, gathered and exchanged.

    They end where recompute begins, so that it repeats forward's calls (``activations.py``), and where any stage lets
    another play the rows before (``multiplex.py``): all stages have one order of a token shard's rows. So do chunks of
    attention. Rows count from the subsequence's first.
    """
    if decisions.attention_chunk_tokens:
        return attention_chunks(decisions)
    tokens, swapped = partition(decisions)[subsequence], swapped_parts(decisions)[subsequence]
    ends = {0, tokens} | boundaries(decisions, subsequence, swapped)
    if decisions.recompute == "tokenwise":
        ends.add(swapped)
    return [(first, end - first) for first, end in pairwise(sorted(ends))]


def clipped_runs(blocks: Iterable[tuple[int, int]], first: int, rows: int) -> Iterator[tuple[int, int]]:
    """Yield (first row, rows) of what the row blocks have of rows [first, first + rows)."""
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


def token_runs(decisions: Decisions, rank: int = 0) -> tuple[Run, ...]:
    """Return the runs of a rank's rows, in order of rows; their rows are ``decisions.local_tokens``."""
    layout = decisions.layout
    whole = _ring_runs(decisions, coordinate("metp" if layout.metp > 1 else "cp", layout, rank))
    if layout.ulysses == 1:
        return tuple(whole)
    mine = coordinate("ulysses", layout, rank)
    starts = [(first, layout.ulysses * first + mine * rows, rows) for first, rows in row_blocks(decisions)]
    return tuple(
        Run(first + run.row - start, run.token, run.tokens)
        for first, start, rows in starts
        for run in clipped(whole, start, rows)
    )


def shard_runs(decisions: Decisions, rank: int = 0) -> tuple[Run, ...]:
    """Return the runs of a rank's sequence-parallel token shard; those of all its rows without sequence parallelism."""
    layout, runs = decisions.layout, token_runs(decisions, rank)
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
    """Yield what ``runs`` have of rows [first, first + rows)."""
    for run in runs:
        low, high = max(run.row, first), min(run.row + run.tokens, first + rows)
        if low < high:
            yield Run(low, run.token + low - run.row, high - low)


def _ring_runs(decisions: Decisions, rank: int) -> list[Run]:
    ranks, length = decisions.layout.ring, decisions.seq_tokens
    starts = range(0, decisions.micro_batch * length, length)
    if ranks == 1:
        return [Run(start, start, length) for start in starts]
    chunk = length // (2 * ranks)
    places = (rank * chunk, (2 * ranks - 1 - rank) * chunk)
    tokens = [start + place for start in starts for place in places]
    return [Run(i * chunk, token, chunk) for i, token in enumerate(tokens)]
