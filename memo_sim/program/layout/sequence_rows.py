"""Rows of a subsequence by the sequences of the micro-batch that they belong to.

Of a micro-batch of several sequences, a subsequence has its tokens of every sequence, one sequence after the other
(``token_order.py``). Rows of one portion of it (``multiplex.py``) are rows of some of these sequences alone:

    subsequence 1 of three sequences    |  first ..... |  second .... |  third ..... |
    one portion                                  `- 0 -'------ 1 -----'
    keys before its rows of the first sequence    that sequence's rows of subsequence 0, and of this one before row 0

Whole sequences side by side are one call of attention, a part of one sequence is a call of its own. Rows are those
inside attention, where Ulysses has all tokens of some heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from memo_sim.contract.plan import Decisions
from memo_sim.program.layout.partition import partition

Range = tuple[int, int]
"""First row, and number of rows."""


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Rows of one subsequence: a part of one sequence, or all rows of ``sequences`` sequences side by side.

    Rows are counted from the first row of the micro-batch.
    """

    first: int
    tokens: int
    sequences: int
    earlier: tuple[Range, ...]
    """Rows whose keys come before these of the same sequences, one range for each call that reads them."""


def sequence_rows(decisions: Decisions, first: int, tokens: int) -> tuple[SequenceRows, ...]:
    """Return rows [first, first + tokens) of the micro-batch, which are of one subsequence, by their sequences.

    Every earlier subsequence has keys of a range of its own. A part of a sequence has its subsequence's rows before it
    as one more. Of one sequence, all earlier rows lie side by side and are one range.
    """
    sequences = decisions.micro_batch
    if sequences == 1:
        return (SequenceRows(first, tokens, 1, ((0, first),) if first else ()),)
    parts = _parts(decisions)
    starts = (0, *accumulate(parts))
    x = subsequence_at(decisions, first)
    length, end = parts[x] // sequences, first + tokens
    found = list[SequenceRows]()
    while first < end:
        number, begun = divmod(first - starts[x], length)
        whole = 0 if begun else (end - first) // length
        rows = whole * length or min(length - begun, end - first)
        count = whole or 1
        before = [
            (start + number * (part // sequences), count * (part // sequences))
            for start, part in zip(starts, parts[:x], strict=False)
        ]
        if begun:
            before.append((first - begun, begun))
        found.append(SequenceRows(first, rows, count, tuple(before)))
        first += rows
    return tuple(found)


def subsequence_at(decisions: Decisions, row: int) -> int:
    """Return the number of the subsequence that a row of the micro-batch is in."""
    return next(number for number, end in enumerate(accumulate(_parts(decisions))) if row < end)


def sequences_of(decisions: Decisions, first: int, tokens: int) -> range:
    """Return the numbers of the sequences that rows of one subsequence belong to."""
    parts, x = _parts(decisions), subsequence_at(decisions, first)
    start, length = sum(parts[:x]), parts[x] // decisions.micro_batch
    return range((first - start) // length, (first + tokens - start - 1) // length + 1)


def first_seen(decisions: Decisions, first: int) -> int:
    """Return the first row of its subsequence that the row ``first`` attends to: its sequence's first there."""
    parts, x = _parts(decisions), subsequence_at(decisions, first)
    start, length = sum(parts[:x]), parts[x] // decisions.micro_batch
    return start + (first - start) // length * length


def sequence_at(decisions: Decisions, row: int) -> int:
    """Return the number of the sequence that a row of the micro-batch belongs to."""
    return sequences_of(decisions, row, 1).start


def keys_by_sequence(decisions: Decisions, first: int, tokens: int) -> Iterator[Range]:
    """Yield the rows of earlier subsequences that rows of one subsequence attend to, each of one sequence, in order."""
    parts, read = _parts(decisions), sequences_of(decisions, first, tokens)
    for start, part in zip((0, *accumulate(parts)), parts[: subsequence_at(decisions, first)], strict=False):
        length = part // decisions.micro_batch
        for number in read:
            yield start + number * length, length


def earlier_ranges(decisions: Decisions, first: int, tokens: int) -> tuple[Range, ...]:
    """Return the same rows with neighbours joined."""
    return side_by_side(keys_by_sequence(decisions, first, tokens))


def _parts(decisions: Decisions) -> tuple[int, ...]:
    """Return the rows of each subsequence inside attention."""
    return tuple(decisions.layout.ulysses * rows for rows in partition(decisions))


def side_by_side(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return ranges in the order of rows, with neighbours joined."""
    found = list[Range]()
    for first, tokens in ranges:
        if found and sum(found[-1]) == first:
            found[-1] = found[-1][0], found[-1][1] + tokens
        else:
            found.append((first, tokens))
    return tuple(found)
