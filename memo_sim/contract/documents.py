"""Documents packed into sequences: the histogram of their lengths, and how they fill sequences.

Packed sequences are cut from one stream of documents:

    documents   |  a  |    b    | c |      d      | ...
    sequences   |  a  |    b    | c |  d1 |  d2   |         d is cut where a sequence ends; d2 begins the next one

A document, or the piece of one that lies in a sequence, attends to itself alone. A sequence of pieces n1, n2, ... has
(n1^2 + n2^2 + ...) / 2 pairs of a query and a key under a causal mask, where one document has n^2 / 2.

Lengths are drawn from the histogram with a fixed seed, each document by its count, so every figure that follows from
the packing is exact for the drawn documents and the same on every machine.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from math import exp, log
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec

from memo_sim.contract.attended_pairs import pairs_in_window
from memo_sim.contract.errors import BadInput, UsageError
from memo_sim.contract.files import check_regular, read_regular
from memo_sim.contract.units import MOST_TOKENS, parse_tokens

MOST_LENGTHS = 256
"""Distinct lengths of a histogram in a plan; a file with more is rounded to steps of an eighth of an octave."""
MOST_COUNT = 2**40
STEPS_OF_OCTAVE = 8
DRAWN_DOCUMENTS = 2**15
"""Documents that are drawn for the figures of a packing, as far as ``DRAWN_SEQUENCES`` allow."""
DRAWN_SEQUENCES = (8, 256)
"""Least and most sequences that are drawn."""
SEED = 0
EXPONENTIAL_COUNT = 1_000_000
"""Documents of the histogram that ``mean=,max=`` stands for."""

Length = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MOST_COUNT)]


class Documents(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The lengths of the documents that sequences are packed from."""

    lengths: Annotated[tuple[tuple[Length, Count], ...], msgspec.Meta(min_length=1, max_length=MOST_LENGTHS)]
    """(Tokens of a document, how many documents are so long), by tokens."""
    most: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)] = 0
    """Most pieces of documents in one sequence; a step with more is refused. 0: derived (``most_pieces``)."""
    source: str = ""
    """What the lengths were made from, as it was given."""

    def __post_init__(self) -> None:
        """Refuse lengths that are not in order."""
        lengths = [tokens for tokens, _ in self.lengths]
        if lengths != sorted(set(lengths)):
            raise ValueError("lengths must be in increasing order, each once")

    def __str__(self) -> str:
        """Return what tables show: what was given, or the mean."""
        return self.source or f"{len(self.lengths)} lengths, mean {self.mean:,.0f} tokens"

    @property
    def mean(self) -> float:
        """Mean tokens of a document."""
        return sum(tokens * count for tokens, count in self.lengths) / sum(count for _, count in self.lengths)

    def draw(self, random: Random) -> Iterator[int]:
        """Yield lengths of documents without end."""
        ends = list(accumulate(count for _, count in self.lengths))
        while True:
            yield self.lengths[bisect_right(ends, random.random() * ends[-1])][0]

    def scaled(self, factor: float) -> Documents:
        """Return documents whose lengths are ``factor`` times as long, each of at least one token."""
        counts: dict[int, int] = {}
        for tokens, count in self.lengths:
            shorter = max(1, round(factor * tokens))
            counts[shorter] = counts.get(shorter, 0) + count
        return Documents(lengths=tuple(sorted(counts.items())), source=self.source)

    def most_pieces(self, seq_tokens: int) -> int:
        """Return the declared maximum of pieces in one sequence.

        Unless it is given, half as many again as in the fullest of the drawn sequences, and 16.
        """
        if self.most:
            return self.most
        fullest = max(len(pieces) for pieces in packed(self, seq_tokens))
        return min(seq_tokens, fullest + fullest // 2 + 16)

    def pairs(self, seq_tokens: int, window: int = 0) -> float:
        """Return the pairs of a query and a key in a sequence, counted as in ``Model.step_flops``: half of squares.

        ``window``: how many keys a query sees at most; 0: all of its document's before it.
        """
        drawn = packed(self, seq_tokens)
        return sum(pairs_of(tokens, window) for pieces in drawn for tokens in pieces) / len(drawn)


def pairs_of(tokens: int, window: int = 0) -> float:
    """Return the pairs of a query and a key in a document: half of its square, or those that a window leaves."""
    return pairs_in_window(tokens, tokens, window) if 0 < window < tokens else tokens * tokens / 2


def attended_share(documents: Documents | None, seq_tokens: int) -> float:
    """Return the share of a causal mask's pairs that packed documents attend; 1 without documents."""
    return 1.0 if documents is None else 2 * documents.pairs(seq_tokens) / float(seq_tokens) ** 2


def fill(lengths: Iterator[int], seq_tokens: int, multiple: int = 1) -> Iterator[tuple[int, ...]]:
    """Yield the pieces of documents in each sequence of a stream without end.

    ``multiple``: the rows of a piece are rounded up to a multiple; the pieces are then those rows, not their tokens.
    """
    left = 0
    while True:
        pieces, room = [], seq_tokens
        while room:
            left = left or -(-next(lengths) // multiple) * multiple
            pieces.append(min(left, room))
            left -= pieces[-1]
            room -= pieces[-1]
        yield tuple(pieces)


@lru_cache(maxsize=64)
def packed(documents: Documents, seq_tokens: int, multiple: int = 1) -> tuple[tuple[int, ...], ...]:
    """Return the pieces of each drawn sequence: few sequences where they have many documents."""
    least, most = DRAWN_SEQUENCES
    count = min(most, max(least, int(DRAWN_DOCUMENTS * documents.mean / seq_tokens)))
    sequences = fill(documents.draw(Random(SEED)), seq_tokens, multiple)
    return tuple(next(sequences) for _ in range(count))


_KEYED = re.compile(r"(mean|max|most)=([0-9]+[kKmM]?)")


def parse_documents(text: str, *, option: str) -> Documents:
    """Return the documents of ``mean=2k,max=64k``, or of a file with one ``length`` or ``length,count`` a line.

    ``mean=,max=``: lengths are exponential, cut at ``max``, with that mean. ``most=``: see ``Documents.most``.

    Raises:
        UsageError: when the text is neither.
        BadInput: when the file cannot be read, or a line is no length.
    """
    if "=" not in text:
        return _of_file(text)
    given = {match[1]: match[2] for part in text.split(",") if (match := _KEYED.fullmatch(part))}
    numbers = {name: parse_tokens(value, option=option) for name, value in given.items()}
    if len(given) != len(text.split(",")) or not {"mean", "max"} <= numbers.keys():
        raise UsageError(
            "not the lengths of documents",
            got=repr(text),
            wanted="mean=TOKENS,max=TOKENS, or a file with one length a line",
            hint=f"{option} mean=2k,max=64k",
        )
    if numbers["mean"] > numbers["max"]:
        raise UsageError(
            "the mean length of documents is above their longest",
            got=repr(text),
            wanted=f"a mean of at most {numbers['max']} tokens",
            hint=f"{option} mean=2k,max=64k",
        )
    lengths = _exponential(numbers["mean"], numbers["max"])
    return Documents(lengths=lengths, most=numbers.get("most", 0), source=text)


def documents_of(lengths: Sequence[int], *, source: str = "") -> Documents:
    """Return the histogram of ``lengths``."""
    counts: dict[int, int] = {}
    for tokens in lengths:
        counts[tokens] = counts.get(tokens, 0) + 1
    return Documents(lengths=_rounded(counts), source=source)


def _of_file(text: str) -> Documents:
    path = Path(text)
    check_regular(path)
    counts: dict[int, int] = {}
    for number, line in enumerate(read_regular(path).decode("utf-8", "replace").splitlines(), 1):
        if not line.strip():
            continue
        found = re.fullmatch(r"\s*([0-9]{1,12})\s*(?:,\s*([0-9]{1,12})\s*)?", line)
        tokens, count = (int(found[1]), int(found[2] or 1)) if found else (0, 0)
        if not (0 < tokens <= MOST_TOKENS and count):
            raise BadInput(
                "not the length of a document",
                where=f"{path}: line {number}",
                got=repr(line[:80]),
                wanted=f"tokens from 1 to {MOST_TOKENS}, or tokens,count",
            )
        counts[tokens] = counts.get(tokens, 0) + count
    if not counts:
        raise BadInput("the file has no lengths of documents", where=str(path), wanted="one length a line")
    return Documents(lengths=_rounded(counts), source=path.name)


def _rounded(counts: dict[int, int]) -> tuple[tuple[int, int], ...]:
    """Return the histogram by tokens; with too many lengths, neighbours share their mean."""
    if len(counts) <= MOST_LENGTHS:
        return tuple(sorted(counts.items()))
    steps: dict[int, list[int]] = {}
    for tokens, count in counts.items():
        step = steps.setdefault(int(STEPS_OF_OCTAVE * log(tokens, 2)), [0, 0])
        step[0] += tokens * count
        step[1] += count
    merged: dict[int, int] = {}
    for total, count in steps.values():
        merged[round(total / count)] = merged.get(round(total / count), 0) + count
    return tuple(sorted(merged.items()))


def _exponential(mean: int, longest: int) -> tuple[tuple[int, int], ...]:
    """Return the histogram of exponential lengths that are cut at ``longest`` and have this mean.

    min(X, longest) with X of scale s has the mean s (1 - exp(-longest / s)), from which s follows by bisection.
    """
    if mean == longest:
        return ((longest, EXPONENTIAL_COUNT),)
    low, high = mean / 2, mean * 2.0
    while high * (1 - exp(-longest / high)) < mean:
        high *= 2
    for _ in range(100):
        scale = (low + high) / 2
        low, high = (scale, high) if scale * (1 - exp(-longest / scale)) < mean else (low, scale)
    ends = sorted({min(longest, max(1, round(2 ** (n / STEPS_OF_OCTAVE)))) for n in range(STEPS_OF_OCTAVE * 31)})
    counts = {longest: round(EXPONENTIAL_COUNT * exp(-longest / scale))}
    for before, end in zip([0, *ends], ends, strict=False):
        count = round(EXPONENTIAL_COUNT * (exp(-before / scale) - exp(-end / scale)))
        # the mean of an exponential between two ends
        tokens = max(1, round(before + scale - (end - before) / (exp((end - before) / scale) - 1)))
        counts[tokens] = counts.get(tokens, 0) + count
    return _rounded({tokens: count for tokens, count in counts.items() if count})
