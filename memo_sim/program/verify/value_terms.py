"""Terms of sums: partial attention, gradients of queries and keys, sums over parts of weights (``values.py``).

The output of attention over part of the keys, and the log-sum-exp, are sums with these keys as terms, which merges
join. A query needs its own key and all before it (all keys without a causal mask), each once. The gradient of a query
has the same terms. The gradient of a key has a term of every query that needs the key.

Terms are written in one of four ways:

- ``Spans``, of positions in a sequence, where one rank has all tokens (subsequences and chunks without a ring).
- A set of ``("own",)`` and ("hop", hops, half) or ("rank", rank, half), where a ring has the tokens in zigzag order:
  rank r has chunks r and 2 p - 1 - r of 2 p, its early and its late half.
- A set of ("square", part) and ("hop", hops, half) or ("rank", rank, half), where a ring divides every part of a
  sequence, a chunk or a subsequence, in zigzag order; halves are counted over all parts. Gradients of a part's keys
  have ("by", part) and ("others", part): the queries of a part on the rank of the keys, and on all others.
- A set of names or numbers: of ranks, where attention writes its scores, and of parts of weights (METP).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from memo_sim.program.verify.value_call import Call
from memo_sim.program.verify.value_rows import Value, add_range

if TYPE_CHECKING:
    from memo_sim.program.verify.values import Values


class Spans(NamedTuple):
    """Positions in a sequence whose tokens are terms of a sum: ``whole`` ranges, and one causal ``square``, if there.

    ``anything``: other stages added terms that nothing here tells.
    """

    whole: tuple[tuple[int, int], ...] = ()
    square: tuple[int, int] | None = None
    anything: bool = False


class Packed(NamedTuple):
    """Terms of the gradient of the packed Q, K, V: those of the queries, and those of keys and values."""

    queries: object
    keys: object


WITHOUT_ADAPTER = frozenset({"without adapter"})
"""The only term of a product to which its low-rank adapter has yet to add."""
OWN = ("own",)
OTHERS = ("others",)
WINDOW = ("window",)
"""All keys of a window, which one call reads; and the gradient that this call makes of its own keys."""
FROM_NEXT, FROM_LATE = ("next",), ("late",)
"""Gradients of the last keys of a chunk, by the queries of the chunk behind it: on another rank, or on this one."""
FROM_PART = ("part",)
"""Gradients of a subsequence's last keys, by the queries of the next one, whose first chunk is on the same rank."""


def window_of(v: Values, layer: int) -> int:
    """Return the window of a layer, or 0 where its tokens see all keys before them."""
    window = v.model.layer(layer).window
    return window if window < v.decisions.seq_tokens else 0


def chain(v: Values) -> list[str]:
    """Return the packed Q, K, V from the product on: before the norm of heads, before rotary, and complete."""
    steps = v.model.qk_norm + (not v.model.learned_positions)
    return [*(f"qkv.{n}" for n in range(steps)), "qkv"]


def product_name(v: Values) -> str:
    """Return the name of what the QKV product makes."""
    return "qkv.part" if v.tp > v.model.kv_heads else chain(v)[0]


def gradient_before_heads(v: Values) -> str:
    """Return the name of the gradient of the packed Q, K, V before rotary and the norm of heads."""
    return f"d_{chain(v)[0]}"


def gradient_name(v: Values) -> str:
    """Return the name of the gradient of the QKV product's result."""
    return "d_qkv.part" if v.tp > v.model.kv_heads else gradient_before_heads(v)


def inside(v: Values, name: str) -> str:
    """Return the name inside attention, where Ulysses has whole sequences of some heads."""
    return f"{name}^" if v.layout.ulysses > 1 else name


# Terms


def joined(one: object, other: object) -> object | None:
    """Return the terms of two sums together; None when they share a term or do not belong together."""
    if isinstance(one, Spans) and isinstance(other, Spans):
        whole: list[tuple[int, int]] | None = list(one.whole)
        for first, end in other.whole:
            whole = None if whole is None else add_range(whole, first, end)
        if whole is None or (one.square and other.square):
            return None
        return Spans(tuple(whole), one.square or other.square, one.anything or other.anything)
    if isinstance(one, frozenset) and isinstance(other, frozenset):
        return None if one & other else one | other
    return None


def whole(call: Call, role: str, value: Value, row: int, tokens: int) -> Value | None:
    """Return a value whose sum is complete, without its terms; None after a fault."""
    terms = value.terms
    if terms is None or (isinstance(terms, tuple) and not isinstance(terms, Spans | Packed)):
        return value
    if not _is_whole(call, value, row, row + tokens):
        call.wrong(role, value, row, f"the whole sum: it has {shown(terms)}")
        return None
    return value._replace(terms=None)


def shown(terms: object) -> str:
    """Return the terms of a sum as text."""
    if isinstance(terms, frozenset):
        return f"terms {sorted(terms, key=str)}"
    return str(terms)


def _is_whole(call: Call, value: Value, first: int, end: int) -> bool:  # noqa: PLR0911 - one return a kind of sum
    v, terms, name = call.values, value.terms, value.name.rstrip("^|")
    if terms == WITHOUT_ADAPTER:
        return False
    if name == "d_kv" and (window := window_of(v, value.layer)):
        return _windows_keys_are_whole(v, terms, (first, end), window)
    if terms == {WINDOW}:
        return True
    if isinstance(terms, Packed):
        queries = _queries_are_whole(v, terms.queries, first, end)
        if isinstance(terms.keys, frozenset) and v.layout.ring > 1 and v.layout.cp_exchange != "rsa":
            return queries and terms.keys == {OWN, OTHERS}
        if v.layout.cp_exchange == "rsa" and isinstance(terms.keys, frozenset):
            return queries and terms.keys == {"dk", "dv"}
        return queries and terms.keys == {OWN}
    if name in ("attn", "lse", "attn.raw", "lse.raw", "d_q"):
        return _queries_are_whole(v, terms, first, end)
    if name == "d_kv" and isinstance(terms, Spans):
        return _keys_are_whole(v, terms, first, end)
    if name == "d_kv" and v.divided_parts:
        later = {c for c in range(len(v.divided_parts)) if c >= part_at(v, first)}
        return end <= v.divided_parts[min(later)][1] and terms == {(by, c) for by in ("by", "others") for c in later}
    if name in ("proj", "down", "d_norm1", "d_norm2") and isinstance(terms, frozenset):
        return len(terms) == v.layout.metp
    return False


def _windows_keys_are_whole(v: Values, terms: object, keys: tuple[int, int], window: int) -> bool:
    """Return whether keys have the terms of all queries that see them: their own chunk's, and the next one's."""
    if isinstance(terms, Spans):
        for first, end in sequence_starts(v, *keys):
            position = place_of(v, first).position
            low, high = terms.whole[0] if len(terms.whole) == 1 else (end, end)
            needed = min(v.attended // v.decisions.micro_batch, position + end - first + window - 1)
            if low > position or high < needed:
                return False
        return True
    if not isinstance(terms, frozenset):
        return False
    return all(_chunks_keys_are_whole(v, terms, *rows, window - 1) for rows in _chunks_of(v, *keys))


def _chunks_keys_are_whole(v: Values, terms: frozenset[object], first: int, end: int, before: int) -> bool:
    """Return whether keys of one chunk have the terms of their own chunk, and the last ones those of the next one."""
    place, ranks = place_of(v, first), set(range(v.layout.ring))
    chunk = (place.end - place.first) // 2
    late = first - place.first >= chunk
    last = place.first + (1 + late) * chunk - before
    if (first >= last) != (end > last):
        return False
    if end <= last:
        return terms == {WINDOW}
    wanted = {WINDOW, FROM_NEXT}
    if not late:
        v.ring_ranks &= {v.layout.ring - 1} if FROM_LATE in terms else ranks - {v.layout.ring - 1}
        wanted |= {FROM_LATE} & terms
    elif place.part + 2 < len(v.starts):  # another subsequence follows
        v.ring_ranks &= {0} if FROM_PART in terms else ranks - {0}
        wanted |= {FROM_PART} & terms
    return bool(v.ring_ranks) and terms == wanted


def _queries_are_whole(v: Values, terms: object, first: int, end: int) -> bool:  # noqa: PLR0911 - one a form
    """Return whether queries [first, end) have all of their keys."""
    if isinstance(terms, Spans):
        if v.model.bidirectional:
            return terms.whole == ((0, v.attended),) and terms.square is None
        if terms.square is None:
            return False
        low, _ = terms.square
        return _inside(v, terms.square, first, end) and terms.whole == (((0, low),) if low else ())
    if not isinstance(terms, frozenset):
        return False
    ring = v.layout.ring
    if v.layout.cp_exchange == "rsa":
        return len(terms) == ring
    if ring == 1:
        return terms == {OWN}
    if v.divided_parts:
        halves, needed = _halves_of_queries(v, first, end), keys_of_parts_needed
    else:
        halves, needed = _halves(v, first, end), keys_needed
    fits = {rank for rank in v.ring_ranks if all(needed(v, rank, half) == _on(v, rank, terms) for half in halves)}
    v.ring_ranks = fits or v.ring_ranks
    return bool(fits)


class Place(NamedTuple):
    """Where a row inside attention is: its subsequence or chunk, and its sequence of the micro-batch."""

    part: int
    sequence: int
    first: int
    """First row of the sequence's rows of this subsequence."""
    end: int
    position: int
    """Rows of the sequence before this row, on this rank."""


def place_of(v: Values, row: int) -> Place:
    """Return where a row inside attention is: each subsequence or chunk has its rows of every sequence."""
    batch, starts = v.decisions.micro_batch, v.attention_starts
    part = next(n for n in range(len(starts) - 1) if row < starts[n + 1])
    low, high = starts[part], starts[part + 1]
    length = (high - low) // batch
    sequence, offset = divmod(row - low, length)
    first = low + sequence * length
    return Place(part, sequence, first, first + length, low // batch + offset)


def rows_of(v: Values, sequence: int, first: int, end: int) -> list[tuple[int, int]]:
    """Return the rows (first, end) that have positions [first, end) of a sequence, one range a subsequence."""
    batch, found = v.decisions.micro_batch, list[tuple[int, int]]()
    for low, high in pairwise(v.attention_starts):
        length = (high - low) // batch
        begin, until = max(first, low // batch), min(end, high // batch)
        if begin < until:
            shift = low + sequence * length - low // batch
            found.append((begin + shift, until + shift))
    return found


def sequence_starts(v: Values, first: int, end: int) -> list[tuple[int, int]]:
    """Return rows [first, end) cut where another sequence, or one's rows of another subsequence, begins.

    Of one sequence they are whole: its rows are in the order of positions.
    """
    if v.decisions.micro_batch == 1:
        return [(first, end)]
    found = list[tuple[int, int]]()
    while first < end:
        until = min(end, place_of(v, first).end)
        found.append((first, until))
        first = until
    return found


def positions_of(v: Values, rows: Sequence[tuple[int, int]], sequence: int) -> list[tuple[int, int]]:
    """Return the positions of a sequence that ranges of rows have."""
    cut = [(place_of(v, low), low, high) for first, end in rows for low, high in sequence_starts(v, first, end)]
    return [(at.position, at.position + high - low) for at, low, high in cut if at.sequence == sequence]


def _chunks_of(v: Values, first: int, end: int) -> list[tuple[int, int]]:
    """Return rows [first, end) cut where another chunk of the ring begins."""
    found = list[tuple[int, int]]()
    while first < end:
        place = place_of(v, first)
        middle = (place.first + place.end) // 2
        until = min(end, middle if first < middle else place.end)
        found.append((first, until))
        first = until
    return found


def part_at(v: Values, row: int) -> int:
    """Return the number of the chunk or subsequence that a row inside attention is in."""
    return next(number for number, (_, end) in enumerate(v.divided_parts) if row < end)


def half_of_a_part(v: Values, half: int) -> tuple[int, int]:
    """Return the first row and the end of a half of a chunk or subsequence; halves are counted over all of them."""
    low, high = v.divided_parts[half // 2]
    middle = (low + high) // 2
    return (middle, high) if half % 2 else (low, middle)


def halves_of_parts(v: Values, first: int, end: int) -> set[int]:
    """Return the halves of chunks or subsequences that rows [first, end) are in, counted over all of them."""
    bounds = [half_of_a_part(v, n) for n in range(2 * len(v.divided_parts))]
    return {n for n, (low, high) in enumerate(bounds) if low < end and first < high}


def _halves_of_queries(v: Values, first: int, end: int) -> set[int]:
    """Return the halves that rows [first, end) of queries are in: every sequence of a part has its early half first."""
    found, batch = set[int](), v.decisions.micro_batch
    for number, (low, high) in enumerate(v.divided_parts):
        half = (high - low) // (2 * batch)
        begins = range(low, high, half)
        found |= {2 * number + n % 2 for n, begun in enumerate(begins) if begun < end and first < begun + half}
    return found


def keys_of_parts_needed(v: Values, rank: int, half: int) -> set[object]:
    """Return the terms of half of a rank's queries of a chunk or subsequence: its own in zigzag order, all earlier."""
    part, which = divmod(half, 2)
    own = keys_needed(v, rank, which)
    others = {(of, late) for of in range(v.layout.ring) for late in (0, 1) if ("rank", of, late) in own}
    beside = {("rank", of, 2 * part + late) for of, late in others}
    before = {("rank", of, n) for of in range(v.layout.ring) for n in range(2 * part)}
    return {("square", part), *beside, *before}


def _on(v: Values, rank: int, terms: frozenset[object]) -> set[object]:
    """Return terms with hops told as ranks, seen from ``rank``."""
    found: set[object] = set()
    for term in terms:
        assert isinstance(term, tuple)
        found.add(("rank", (rank - term[1]) % v.layout.ring, term[2]) if term[0] == "hop" else term)
    return found


def keys_needed(v: Values, rank: int, half: int) -> set[object]:
    """Return the terms of a half of a rank's queries: the chunks that come before, or all without a mask."""
    ring = v.layout.ring

    def place(of: int, which: int) -> int:
        return 2 * ring - 1 - of if which else of

    others = {(of, which) for of in range(ring) if of != rank for which in (0, 1)}
    before = {(of, w) for of, w in others if v.model.bidirectional or place(of, w) < place(rank, half)}
    return {OWN, *(("rank", of, which) for of, which in before)}


def _halves(v: Values, first: int, end: int) -> set[int]:
    """Return which halves of their sequences rows [first, end) are in."""
    length = v.attended // v.decisions.micro_batch
    half = length // 2
    return {0 if (n % 2) == 0 else 1 for n in range(first // half, -(-end // half))}


def _keys_are_whole(v: Values, terms: Spans, first: int, end: int) -> bool:
    """Return whether keys [first, end) have the terms of all queries at or after them."""
    if v.model.bidirectional:
        return terms.whole == ((0, v.attended),)
    if terms.square is None:
        return False
    high, length = terms.square[1], v.attended // v.decisions.micro_batch
    rest = ((high, length),) if high < length else ()
    return _inside(v, terms.square, first, end) and (terms.anything or terms.whole == rest)


def _inside(v: Values, positions: tuple[int, int], first: int, end: int) -> bool:
    """Return whether rows [first, end) have positions in their sequences inside a range of them."""
    low, high = positions
    cut = [(place_of(v, begun).position, until - begun) for begun, until in sequence_starts(v, first, end)]
    return all(low <= position and position + rows <= high for position, rows in cut)
