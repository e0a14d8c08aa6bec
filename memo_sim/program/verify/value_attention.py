"""Attention for ``value_rules.py``: calls, merges, rings, gradients, norms of heads, rotary and sinks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memo_sim.program.ir.work import Attention, Exchange, WindowedAttention
from memo_sim.program.verify.value_call import Call
from memo_sim.program.verify.value_operands import Wanted, add_gradient, agree, weight
from memo_sim.program.verify.value_rows import Held, Value, add_range
from memo_sim.program.verify.value_terms import (
    FROM_LATE,
    FROM_NEXT,
    FROM_PART,
    OTHERS,
    OWN,
    WINDOW,
    Packed,
    Spans,
    chain,
    half_of_a_part,
    halves_of_parts,
    inside,
    joined,
    keys_needed,
    part_at,
    place_of,
    positions_of,
    rows_of,
    sequence_starts,
    shown,
    whole,
    window_of,
)

if TYPE_CHECKING:
    from memo_sim.program.verify.values import Values


HALVES = "halves"
"""Mark of keys, and of their gradients, whose early halves of all sequences come first."""
SEQUENCES = "sequences"
"""Mark of keys of all ranks, and of their gradients, where all ranks' rows of one sequence come before the next's."""


# Calls


def _queries(call: Call, role: str, tokens: int) -> Iterator[tuple[int, int, Value | None, int]]:
    """Yield (first row of ``tokens`` rows, rows, value, row) of the queries of a call.

    A call with half as many outputs as queries is one of the late half of every sequence.
    """
    for first, low, rows in _late_rows(call, call.tokens(role), tokens):
        for held in call.rows(role, first, rows):
            yield held.first - first + low, held.end - held.first, held.value, held.row


def _late_rows(call: Call, of: int, tokens: int) -> list[tuple[int, int, int]]:
    """Return (first row of ``of`` rows, first row of ``tokens`` rows, rows): all, or the late half of each sequence."""
    if of != 2 * tokens:
        return [(0, 0, tokens)]
    batch = call.values.decisions.micro_batch
    length, half = of // batch, tokens // batch
    return [(n * length + half, n * half, half) for n in range(batch)]


def _keys(  # noqa: PLR0911 - one return per kind of keys
    call: Call, queries: Value | None, row: int, tokens: int
) -> tuple[object, Value | None, int]:
    """Check a call's keys against its queries; return the terms that they are, and the keys with their first row."""
    v, work = call.values, call.work
    assert isinstance(work, Attention)
    causal = "none" if v.model.bidirectional else "causal"
    window = window_of(v, queries.layer) if queries is not None else 0
    given = work.window if isinstance(work, WindowedAttention) else 0
    if queries is not None and given != window:
        call.fault(f"the window is {given}, not {window}, that of layer {queries.layer}")
    if not call.has("kv"):
        if work.mask != causal:
            call.fault(f"the mask of a rank's own tokens is {work.mask}")
        return frozenset({OWN}), queries, row
    if queries is not None and window:
        good = _windows_keys(call, queries, row, tokens, window)
        return (frozenset({WINDOW}) if good else None), queries, row
    rows = call.rows("kv")
    value, first = rows[0].value, rows[0].row
    if any(each.value is None for each in rows) or value is None:
        return None, None, 0
    if len(rows) != 1:
        found = ", ".join(f"{each.value} (row {each.row})" for each in rows)
        call.fault(f"kv holds keys of several values: {found}")
        return None, None, 0
    same = queries is None or (value.layer, value.micro_batch, value.part) == (
        queries.layer,
        queries.micro_batch,
        queries.part,
    )
    if value.name != "kv" or not same:
        call.wrong("kv", value, first, f"the keys of {queries}")
        return None, None, 0
    end = first + call.tokens("kv")
    if value.terms is None:
        # Halves of what a ring divides may have outputs with different terms, and are then looked at one by one.
        fits = first <= row < row + tokens <= end if v.divided_parts else (row, row + tokens) == (first, end)
        if work.mask == "causal" and not fits:
            call.fault(f"a causal square of queries [{row}, {row + tokens}) and keys [{first}, {end})")
        if v.divided_parts:
            return _parts_keys(call, 0, first, end), value, first
        return Spans((), (first, end)) if work.mask == "causal" else Spans(((first, end),)), value, first
    return _ranks_keys(call, value, first, end), value, first


def _is_by_sequence(call: Call) -> bool:
    """Return whether a call is checked sequence by sequence: those beside a KV cache, where one rank has all tokens."""
    v, work = call.values, call.work
    several = v.decisions.micro_batch > 1 and v.layout.ring == 1
    return several and call.has("kv") and not isinstance(work, WindowedAttention)


def _queries_by_sequence(call: Call, role: str) -> Iterator[tuple[int, int, Value | None, int]]:
    """Yield (first row, rows, value, row) of the queries of each sequence of a call."""
    assert isinstance(call.work, Attention)
    length = call.work.q_tokens
    for begun in range(0, call.tokens(role), length):
        for held in call.rows(role, begun, length):
            yield held.first, held.end - held.first, held.value, held.row


def _keys_of_sequence(
    call: Call, at: int, queries: Value, row: int, tokens: int
) -> tuple[Spans | None, Value | None, int]:
    """Check that queries, from row ``at`` of a call on, and keys of one sequence of the call are of one sequence.

    Returns the positions of the keys, the keys, and their first row.
    """
    v, work = call.values, call.work
    assert isinstance(work, Attention)
    if queries is not None and (window := window_of(v, queries.layer)):
        call.fault(f"the window is 0, not {window}, that of layer {queries.layer}")
    rows = call.rows("kv", at // work.q_tokens * work.k_tokens, work.k_tokens)
    value, first = rows[0].value, rows[0].row
    if any(each.value is None for each in rows) or value is None:
        return None, None, 0
    if len(rows) != 1 or value != queries._replace(name="kv", terms=None):
        found = ", ".join(f"{each.value} (row {each.row})" for each in rows)
        call.fault(f"kv holds {found}, not the keys of one sequence of {queries}")
        return None, None, 0
    keys, asking = place_of(v, first), place_of(v, row)
    end = first + work.k_tokens
    if end > keys.end or row + tokens > asking.end or keys.sequence != asking.sequence:
        call.fault(f"queries [{row}, {row + tokens}) and keys [{first}, {end}) are not of one sequence")
        return None, None, 0
    seen = keys.position, keys.position + work.k_tokens
    if work.mask != "causal":
        return Spans((seen,)), value, first
    if (row, row + tokens) != (first, end):
        call.fault(f"a causal square of queries [{row}, {row + tokens}) and keys [{first}, {end})")
    return Spans((), seen), value, first


def _windows_keys(call: Call, queries: Value, row: int, tokens: int, window: int) -> bool:
    """Check that keys are those of a call's queries and the ``window`` - 1 before them."""
    v = call.values
    found: list[tuple[int, int, int]] = []
    for each in call.rows("kv"):
        if each.value is None:
            return False
        if each.value._replace(terms=None) != queries._replace(name="kv", terms=None):
            call.wrong("kv", each.value, each.row, f"the keys of {queries}")
            return False
        found.append((_hops(each.value), each.row, each.row + each.end - each.first))
    allowed = _windows_of_ranks(v, row, tokens, window)
    fits = {rank for rank in v.ring_ranks if allowed.get(rank) == _side_by_side(found)}
    if not fits:
        call.fault(f"kv has the keys {found} (hops, first row, end), which are no window of {window} of these queries")
        return False
    v.ring_ranks = fits
    return True


def _hops(keys: Value) -> int:
    """Return how many ranks away keys were computed."""
    return keys.terms[1] if isinstance(keys.terms, tuple) else 0


def _windows_of_ranks(v: Values, row: int, tokens: int, window: int) -> dict[int, list[tuple[int, int, int]]]:
    """Return, by rank of the ring, the keys (hops, first row, end) that queries [row, row + tokens) see."""
    before, ring, end = window - 1, v.layout.ring, row + tokens

    def earlier(at: int) -> list[tuple[int, int, int]]:
        """Return this rank's own keys right before row ``at``."""
        place = place_of(v, at)
        return [(0, *rows) for rows in rows_of(v, place.sequence, max(0, place.position - before), place.position)]

    if ring == 1:
        starts = sequence_starts(v, row, end)
        pieces = [[*earlier(low), (0, low, high)] for low, high in starts]
        return {0: _side_by_side([each for piece in pieces for each in piece])}
    place = place_of(v, row)
    chunk = (place.end - place.first) // 2
    if tokens != chunk or row not in (place.first, place.first + chunk):
        return {}
    own = _side_by_side([*earlier(row), (0, row, end)])
    late = row > place.first
    others = [(ring - 1 if late else 1, end - before, end)] if before else []
    alone = ring - 1 if late else 0
    return {rank: own if rank == alone else [*others, (0, row, end)] for rank in range(ring)}


def _side_by_side(keys: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return keys (hops, first row, end) with neighbours joined."""
    found: list[tuple[int, int, int]] = []
    for hops, first, end in keys:
        if found and found[-1][0] == hops and found[-1][2] == first:
            found[-1] = (hops, found[-1][1], end)
        else:
            found.append((hops, first, end))
    return found


def _ranks_keys(call: Call, value: Value, first: int, end: int) -> frozenset[object]:
    """Return the terms that keys [first, end) of other ranks are: whole halves of what a rank has."""
    v, half, ring = call.values, call.values.attended // 2, call.values.layout.ring
    if isinstance(call.work, Attention) and call.work.mask != "none":
        call.fault("keys of other ranks have a causal mask")
    if v.divided_parts:
        assert isinstance(value.terms, tuple)
        if value.terms[0] == "all":
            return _gathered_parts_keys(call, value.terms[1:], first, end)
        return _parts_keys(call, value.terms[1], first, end, halves=HALVES in value.terms)
    if value.terms == "all" and v.decisions.micro_batch > 1 and end - first > half:
        call.fault(f"gathered keys [{first}, {end}) mix the rows of several sequences")
    terms: set[object] = set()
    for n in range(first // half, -(-end // half)):
        if not first <= n * half <= (n + 1) * half <= end:
            call.fault(f"keys [{first}, {end}) of another rank are not whole halves of {v.attended}")
        elif value.terms == "all":
            terms.add(("rank", n % ring, n // ring))
        else:
            assert isinstance(value.terms, tuple)
            terms.add(("hop", value.terms[1], n))
    return frozenset(terms)


def _parts_keys(call: Call, hops: int, first: int, end: int, *, halves: bool = False) -> frozenset[object]:
    """Return the terms that keys [first, end) of chunks or subsequences are, which were computed ``hops`` ranks before.

    Keys of a causal square are one whole part. Others are whole halves of parts. ``halves``: the early halves of all
    sequences come first; without that, several sequences have no half that is one range.
    """
    v, work = call.values, call.work
    if isinstance(work, Attention) and work.mask == "causal":
        part = part_at(v, first)
        if (first, end) != v.divided_parts[part]:
            low, high = v.divided_parts[part]
            call.fault(f"the causal square of keys [{first}, {end}) is not that of rows [{low}, {high})")
        return frozenset({("square", part)})
    found = _whole_halves(call, first, end)
    _check_one_part(call, first, end)
    if len(found) == 1 and v.decisions.micro_batch > 1 and not halves:
        call.fault(f"keys [{first}, {end}) are no half of several sequences, which lie one after the other")
    return frozenset(("hop", hops, n) for n in found)


def _check_one_part(call: Call, first: int, end: int) -> None:
    """Check that keys of several sequences are of one subsequence: in two, those of a sequence lie apart."""
    v = call.values
    if v.decisions.micro_batch > 1 and place_of(v, first).part != place_of(v, end - 1).part:
        call.fault(f"keys [{first}, {end}) are of several parts, in which the keys of a sequence lie apart")


def _whole_halves(call: Call, first: int, end: int) -> set[int]:
    """Return the halves that rows [first, end) of chunks or subsequences are, counted over all of them."""
    found = halves_of_parts(call.values, first, end)
    ends = {each for n in found for each in half_of_a_part(call.values, n)}
    if first not in ends or end not in ends:
        call.fault(f"keys [{first}, {end}) are not whole halves of what ranks divide")
    return found


def _gathered_parts_keys(call: Call, gathered: Sequence[Any], first: int, end: int) -> frozenset[object]:
    """Return the terms that rows [first, end) are, of rows ``gathered`` of all ranks: early halves, then late ones.

    Of several sequences, a call reads all keys of a part, gathered by sequences, or one half of one rank's keys.
    """
    v, (low, high, *marks) = call.values, gathered
    ring, half = v.layout.ring, (high - low) // 2
    several, everything = v.decisions.micro_batch > 1, (first, end) == (0, ring * (high - low))
    one_part = (low, high) in v.divided_parts
    if several and not (one_part and (SEQUENCES in marks if everything else HALVES in marks and end - first == half)):
        call.fault(f"gathered keys [{first}, {end}) of rows [{low}, {high}) mix the rows of several sequences")
    if everything:
        return frozenset(("rank", of, n) for of in range(ring) for n in _whole_halves(call, low, high))
    if not one_part or first % half or end % half:
        call.fault(f"gathered keys [{first}, {end}) are not whole halves of one part of what ranks divide")
    part = part_at(v, low)
    return frozenset(("rank", n % ring, 2 * part + n // ring) for n in range(first // half, end // half))


def _query_role(call: Call) -> str:
    return "q" if call.has("q") else "qkv"


def _is_query(call: Call, role: str, value: Value, row: int) -> bool:
    wanted = "q" if role == "q" else inside(call.values, "qkv")
    if value.name == wanted:
        return True
    call.wrong(role, value, row, wanted)
    return False


def attention(call: Call) -> None:
    """Check one call: its queries, and which of their keys it has."""
    v, role = call.values, _query_role(call)
    by_sequence = _is_by_sequence(call)
    pieces = _queries_by_sequence(call, role) if by_sequence else _queries(call, role, call.tokens("out"))
    for first, tokens, value, row in pieces:
        terms: object = None
        if value is not None and _is_query(call, role, value, row):
            if by_sequence:
                terms, _, _ = _keys_of_sequence(call, first, value, row, tokens)
            else:
                terms, _, _ = _keys(call, value, row, tokens)
        for made in ("out", "lse"):
            name = inside(v, "attn") if made == "out" else "lse"
            if v.model.sinks:  # they are written into the whole output (``sink``)
                name = inside(v, f"{made.replace('out', 'attn')}.raw") if made == "out" else "lse.raw"
            result = None if value is None or terms is None else value._replace(name=name, terms=terms)
            call.put(made, first, tokens, result, row)


def merge(call: Call) -> None:
    """Merge the output of one call, and its log-sum-exp, into those of the calls before."""
    for part, into in (("part", "out"), ("part_lse", "lse")):
        _add(call, part, into)
    _same_rows(call, "out", "lse")


def _same_rows(call: Call, *roles: str) -> None:
    """Check that roles hold rows of one layer, micro-batch and part, with the same terms."""
    for _, _, values in call.pieces(*roles):
        (one, row), (other, at) = values
        if one is None or other is None:
            continue
        if one._replace(name="") != other._replace(name="") or row != at:
            call.wrong(roles[1], other, at, f"that of {one} (row {row})")


def _add(call: Call, part: str, into: str) -> None:
    """Add the terms of an operand to a sum; an operand of half as many rows has the late halves of sequences."""
    places = _late_rows(call, call.tokens(into), call.tokens(part))
    for begin, low, rows in places:
        for given in call.rows(part, low, rows):
            at = begin + given.first - low
            for old in call.rows(into, at, given.end - given.first):
                row = given.row + old.first - at
                value = _sum(call, into, old, given.value, row)
                at_row = row if old.value is not None and old.value.name == "zero" else old.row
                call.put(into, old.first, old.end - old.first, value, at_row)


def _sum(  # noqa: PLR0911 - one return per kind of sum
    call: Call, role: str, old: Held, new: Value | None, row: int
) -> Value | None:
    """Return the value of a row with one more term in its sum."""
    if old.value is None or new is None:
        return None
    if old.value.name == "zero":
        return new
    if new.name == "zero" and old.value.name == "d_kv" and isinstance(old.value.terms, frozenset):
        return old.value._replace(terms=old.value.terms | {FROM_NEXT})  # no chunk, or none of another rank, follows
    plain, term = old.value._replace(terms=None), new._replace(terms=None)
    if plain != term or old.row != row:
        call.fault(f"{role} holds {old.value} (row {old.row}); {new} (row {row}) is not one more term")
        return None
    if isinstance(old.value.terms, tuple) and isinstance(new.terms, tuple) and old.value.terms[:1] == ("from",):
        return _ring_sum(call, old.value, new)
    terms = joined(old.value.terms, _returned(call, new.terms))
    if terms is None:
        call.fault(f"{role} has {shown(old.value.terms)} already; {shown(new.terms)} is not one more term")
        return None
    return old.value._replace(terms=terms)


def _returned(call: Call, terms: object) -> object:
    """Return the terms of gradients of a part's keys that came back from all other ranks; other terms as they are."""
    ring = call.values.layout.ring
    if not call.values.divided_parts or not isinstance(terms, tuple) or terms[:2] != ("from", ring):
        return terms
    if len(terms[2]) < ring - 1 or (HALVES in terms) != (call.instruction.op == "grad.accumulate.halves"):
        return terms
    return frozenset({("others", terms[3])})


def backward(call: Call) -> None:
    """Backward of one call: it needs the whole output and log-sum-exp of its queries, and the same keys."""
    v, role = call.values, _query_role(call)
    result = "grad_q" if call.has("grad_q") else "grad_qkv"
    total = call.tokens(result)
    if _is_by_sequence(call):
        _backward_by_sequence(call, role, result)
        return
    places = _late_rows(call, call.tokens(role), total)
    keys: object = None
    known: Value | None = None
    row_of_keys, queries, late = 0, list[tuple[int, int]](), len(places) > 1 or places[0][0] > 0
    for begin, low, rows in places:
        for first, tokens, value, row in _agreed(call, role, begin, rows):
            terms = None
            if value is not None:
                terms, found, row_of_keys = _keys(call, value, row, tokens)
                keys, known = terms, found
                queries.append((row, row + tokens))
            at = first - begin + low
            made = None
            if value is not None and terms is not None:
                made = value._replace(name="d_q", terms=terms)
                if result == "grad_qkv":
                    made = value._replace(name=inside(v, "d_qkv"), terms=Packed(terms, frozenset({OWN})))
            call.put(result, at, tokens, made, row)
    if call.has("grad_kv"):
        _gradient_of_keys(call, known, keys, row_of_keys, queries, late=late)


def _backward_by_sequence(call: Call, role: str, result: str) -> None:
    """Check the backward of a call sequence by sequence: each one's keys get terms of its queries alone."""
    v, work = call.values, call.work
    assert isinstance(work, Attention)
    for begun in range(0, call.tokens(role), work.q_tokens):
        known: Value | None = None
        terms: Spans | None = None
        row_of_keys, queries = 0, list[tuple[int, int]]()
        for first, tokens, value, row in _agreed(call, role, begun, work.q_tokens):
            made = None
            if value is not None:
                terms, known, row_of_keys = _keys_of_sequence(call, first, value, row, tokens)
                queries += positions_of(v, [(row, row + tokens)], place_of(v, row).sequence)
                made = value._replace(name="d_q", terms=terms) if terms is not None else None
            call.put(result, first, tokens, made, row)
        gradient = None
        if known is not None and terms is not None:
            gradient = known._replace(name="d_kv", terms=terms if terms.square else _spans(queries))
        call.put("grad_kv", begun // work.q_tokens * work.k_tokens, work.k_tokens, gradient, row_of_keys)


def _agreed(call: Call, role: str, first: int, tokens: int) -> Iterator[tuple[int, int, Value | None, int]]:
    """Yield (first row, rows, queries, row) of rows whose gradient, output and log-sum-exp are those of the queries."""
    v = call.values
    wanted = {"grad": inside(v, "d_attn"), role: "q" if role == "q" else inside(v, "qkv")}
    wanted |= {"out": inside(v, "attn"), "lse": "lse"}
    for begun, rows, values in call.pieces(*wanted):
        low, high = max(begun, first), min(begun + rows, first + tokens)
        if low >= high:
            continue
        found, at = _alike(call, wanted, values, rows)
        yield low, high - low, found, at + low - begun


def _alike(
    call: Call, wanted: Mapping[str, str], values: Sequence[tuple[Value | None, int]], tokens: int
) -> tuple[Value | None, int]:
    """Check that operands hold the values with the names ``wanted``, alike in all but the name, from one row on.

    Returns the first operand's value and row; no value after a fault, and where one is not known.
    """
    found: Value | None = None
    sound, at = True, 0
    for (role, name), (given, row) in zip(wanted.items(), values, strict=True):
        value = None if given is None else whole(call, role, given, row, tokens)
        if value is None:
            sound = False
        elif value.name != name:
            call.wrong(role, value, row, name)
            sound = False
        elif found is None:
            found, at = value, row
        elif value._replace(name="") != found._replace(name="") or row != at:
            call.wrong(role, value, row, f"that of {found} (row {at})")
            sound = False
    return found if sound else None, at


def _gradient_of_keys(
    call: Call, keys: Value | None, terms: object, first: int, queries: list[tuple[int, int]], *, late: bool
) -> None:
    tokens, value = call.tokens("grad_kv"), None
    if keys is not None and terms == {WINDOW}:
        _gradient_of_windows_keys(call, keys, queries)
        return
    if keys is not None and terms is not None:
        made: object
        if call.values.divided_parts:
            part = part_at(call.values, queries[0][0])
            if not isinstance(keys.terms, tuple):
                made = frozenset({("by", part)})
            elif keys.terms[0] == "all":
                made = (*keys.terms, part)
            else:
                made = ("from", keys.terms[1], frozenset({keys.terms[1]}), part, *keys.terms[2:])
        elif isinstance(terms, Spans):
            made = terms if terms.square else _spans(queries)
        elif keys.terms == "all":
            made = "all"
        else:
            assert isinstance(keys.terms, tuple)
            made = ("from", keys.terms[1], frozenset({keys.terms[1]}))
        value = keys._replace(name="d_kv", terms=made)
    call.put("grad_kv", 0, tokens, value, first)


def _gradient_of_windows_keys(call: Call, keys: Value, queries: list[tuple[int, int]]) -> None:
    """Write the gradients of a window's keys: of the queries' own, and of those before them."""
    v, (row, _) = call.values, queries[0]
    for first, end, value, at in call.rows("kv"):
        assert value is not None
        if v.layout.ring == 1:  # terms are of positions: rows of one sequence
            for low, high in sequence_starts(v, at, at + end - first):
                made = _spans(positions_of(v, queries, place_of(v, low).sequence))
                call.put("grad_kv", first + low - at, high - low, keys._replace(name="d_kv", terms=made), low)
            continue
        terms: object = frozenset({WINDOW})
        low = first
        if _hops(value):
            terms = ("before", _hops(value))
        elif at < row:  # keys of this rank, right before those of the queries
            low = min(end, first + row - at)
            before = FROM_LATE if place_of(v, row).first < row else FROM_PART
            early = keys._replace(name="d_kv", terms=frozenset({before}))
            call.put("grad_kv", first, low - first, early, at)
        if low < end:
            call.put("grad_kv", low, end - low, keys._replace(name="d_kv", terms=terms), at + low - first)


def _spans(queries: list[tuple[int, int]]) -> Spans:
    ranges: list[tuple[int, int]] | None = []
    for first, end in queries:
        ranges = add_range(ranges, first, end) if ranges is not None else None
    return Spans(tuple(ranges or ()))


# Rings


def pack(call: Call) -> None:
    """Copy keys and values out of the packed Q, K, V, or a part's alone; early halves of all sequences come first."""
    if call.has("kv"):
        _pack_part(call)
        return
    rows = call.rows("qkv")
    wanted = inside(call.values, "qkv")
    value, first = rows[0].value, rows[0].row
    window = 0 if value is None else window_of(call.values, value.layer)
    part = first > 0 and not window
    by_sequence = call.instruction.op == "kv.pack.sequence"
    if by_sequence != (window > 0 and call.values.decisions.micro_batch > 1):
        call.fault("a window's keys, and only these, are copied sequence by sequence")
    if len(rows) != 1 or value is None or value.name != wanted or part:
        if value is not None:
            call.wrong("qkv", value, first, f"all rows of {wanted}")
        value = None
    made = None if value is None else value._replace(name="kv", terms=("shift", 0))
    call.put("out", 0, call.tokens("out"), made, first)


def _pack_part(call: Call) -> None:
    """Copy the keys and values of one chunk, the early halves of all sequences first."""
    (held, *others), parts = call.rows("kv"), call.values.divided_parts
    value, made = held.value, None
    if value is not None:
        if (
            not others
            and value.name == "kv"
            and value.terms is None
            and (held.row, held.row + held.end - held.first) in parts
        ):
            made = value._replace(terms=("shift", 0, HALVES))
        else:
            call.wrong("kv", value, held.row, "this rank's keys of one chunk")
    call.put("out", 0, call.tokens("out"), made, held.row)


def gather_keys(call: Call) -> None:
    """Gather every rank's keys and values: the early half of every rank, then the late half of every rank."""
    rows = call.rows("shard")
    value = rows[0].value
    if call.values.divided_parts:
        packed = call.values.decisions.micro_batch > 1 and call.instruction.op == "all_gather"
        held = ("shift", 0, HALVES) if packed else None
        known = len(rows) == 1 and value is not None and value.name == "kv" and value.terms == held
        if value is not None and not known:
            wanted = "this rank's keys, early halves first" if packed else "this rank's rows of the KV cache"
            call.wrong("shard", value, rows[0].row, wanted)
        marks = (HALVES,) if packed else (SEQUENCES,) if call.instruction.op == "all_gather.sequences" else ()
        gathered = ("all", rows[0].row, rows[0].row + call.tokens("shard"), *marks)
        made = value._replace(terms=gathered) if known and value is not None else None
        call.put("full", 0, call.tokens("full"), made, 0)
        return
    good = len(rows) == 1 and value is not None and value.name == "kv" and value.terms == ("shift", 0)
    if value is not None and not good:
        call.wrong("shard", value, rows[0].row, "this rank's keys and values")
    call.put("full", 0, call.tokens("full"), value._replace(terms="all") if good and value is not None else None, 0)


def scatter_keys(call: Call) -> None:
    """Sum the gradients of every rank's keys: this rank has written its terms, and zeros where it has none."""
    v, half, ring = call.values, call.values.attended // 2, call.values.layout.ring
    if v.divided_parts:
        _scatter_parts_keys(call)
        return
    rows, known, found = call.rows("full"), None, set[tuple[int, int]]()
    for first, end, value, row in rows:
        if value is None:
            continue
        if value.name == "zero":
            continue
        if value.name != "d_kv" or value.terms != "all" or row != first:
            call.wrong("full", value, row, f"gradients of the keys of row {first}")
            continue
        known = value if known is None else known
        if value != known:
            call.wrong("full", value, row, f"{known}")
        found |= {(n % ring, n // ring) for n in range(first // half, -(-end // half))}
    fits = set()
    for rank in v.ring_ranks:
        needed = _needed_by_both_halves(v, rank)
        if {("rank", of, which) for of, which in found} == needed - {OWN}:
            fits.add(rank)
    if known is not None and not fits:
        call.fault(f"full has gradients of the keys {sorted(found)}, which are those of no rank")
    v.ring_ranks = fits or v.ring_ranks
    value = None if known is None or not fits else known._replace(terms=("from", ring, frozenset(range(1, ring))))
    call.put("shard", 0, call.tokens("shard"), value, 0)


def _scatter_parts_keys(call: Call) -> None:
    """Sum the gradients of every rank's keys of one subsequence, or of a run of earlier ones, which all need."""
    v, ring = call.values, call.values.layout.ring
    rows = call.rows("full")
    known = next((each.value for each in rows if each.value is not None and each.value.name == "d_kv"), None)
    if known is None or any(each.value is None for each in rows) or not isinstance(known.terms, tuple):
        if known is None and all(each.value is not None for each in rows):
            call.fault("sums zeros in place of gradients of keys")
        call.put("shard", 0, call.tokens("shard"), None)
        return
    _, low, high, *marks, part = known.terms
    if (SEQUENCES in marks) != (call.instruction.op == "reduce_scatter.sequences"):
        call.wrong("full", known, low, "gradients in the order in which they are summed")
    half, found = (high - low) // 2, set[tuple[int, int]]()
    for first, end, value, row in rows:
        assert value is not None
        if value.name == "zero":
            continue
        if value != known or row != first:
            call.wrong("full", value, row, f"{known} (row {first})")
        found |= {(n % ring, n // ring) for n in range(first // half, -(-end // half))}
    everyone = {(of, which) for of in range(ring) for which in (0, 1)}
    made: object = None
    if high <= v.divided_parts[part][0]:
        made = frozenset({("by", part), ("others", part)}) if found == everyone else None
    elif (low, high) == v.divided_parts[part]:
        terms = {("rank", of, which) for of, which in found}
        fits = {rank for rank in v.ring_ranks if terms == _needed_by_both_halves(v, rank) - {OWN}}
        made = frozenset({("others", part)}) if fits else None
        if fits and HALVES in marks:
            made = ("from", ring, frozenset(range(1, ring)), part, HALVES)
        v.ring_ranks = fits or v.ring_ranks
    if made is None:
        call.fault(
            f"full has gradients of the keys {sorted(found)} of rows [{low}, {high}), which are those of no rank"
        )
    call.put("shard", 0, call.tokens("shard"), None if made is None else known._replace(terms=made), low)


def _needed_by_both_halves(v: Values, rank: int) -> set[object]:
    return keys_needed(v, rank, 0) | keys_needed(v, rank, 1)


def send_gradients(call: Call, rows: list[Held]) -> None:
    """Pass sums of gradients of keys on: they have this rank's terms where its queries need the keys.

    What arrives has the terms of all ranks on its way, whichever half of the keys these needed.
    """
    work, v = call.work, call.values
    assert isinstance(work, Exchange)
    if window_of(v, call.instance.layer):
        _send_windows_gradients(call, work, rows)
        return
    ring = work.ranks
    known = next((each.value for each in rows if each.value is not None and each.value.name == "d_kv"), None)
    terms = None if known is None else known.terms
    if any(each.value is None for each in rows) or known is None or not isinstance(terms, tuple):
        if known is None and all(each.value is not None for each in rows):
            call.fault("sends zeros in place of gradients of keys")
        call.put("recv", 0, call.tokens("recv"), None)
        return
    hop, base, end_of_keys, all_needed = terms[1], 0, v.attended, False
    if v.divided_parts:
        base = next(each.row - each.first for each in rows if each.value is known)
        end_of_keys, own = base + call.tokens("send"), v.divided_parts[terms[3]]
        all_needed = end_of_keys <= own[0]  # the queries are of a later chunk or subsequence
        if not all_needed and (base, end_of_keys) != own:
            call.fault(f"sends gradients of the keys [{base}, {end_of_keys}) of queries of rows [{own[0]}, {own[1]})")
    half = (end_of_keys - base) // 2
    have: dict[int, frozenset[int]] = {}
    for first, end, value, row in rows:
        assert value is not None
        same = value.name == "zero" or (
            value._replace(terms=None) == known._replace(terms=None) and row == first + base
        )
        if not same or (value.name != "zero" and (not isinstance(value.terms, tuple) or value.terms[1] != hop)):
            call.wrong("send", value, row, f"{known} (row {first})")
            continue
        for n in range(first // half, -(-end // half)):
            of = frozenset[int]() if value.name == "zero" else value.terms[2]  # type: ignore[index]
            have[n] = of if n not in have else have[n] & of
    earlier = frozenset(range(1, hop))
    fits = set()
    for rank in v.ring_ranks:
        needed = _needed_by_both_halves(v, rank)
        owner = (rank - hop) % ring
        wanted = {n: earlier | {hop} if all_needed or ("rank", owner, n) in needed else earlier for n in (0, 1)}
        if wanted == have:
            fits.add(rank)
    if not fits:
        shown = {n: sorted(of) for n, of in have.items()}
        call.fault(f"send has the gradients of keys {hop} ranks before with the terms of ranks {shown} places on")
    v.ring_ranks = fits or v.ring_ranks
    value = known._replace(terms=("from", hop + 1, frozenset(range(1, hop + 1)), *terms[3:])) if fits else None
    call.put("recv", 0, call.tokens("recv"), value, base)


def _send_windows_gradients(call: Call, work: Exchange, rows: list[Held]) -> None:
    """Send gradients of the keys before a chunk to the rank that has them; zeros where no rank does."""
    for first, end, value, row in rows:
        made = value
        if value is not None and value.name != "zero":
            terms = value.terms
            home = isinstance(terms, tuple) and terms[0] == "before" and (terms[1] + work.distance) % work.ranks == 0
            if not home:
                call.wrong("send", value, row, f"gradients of keys that rank {work.distance} places on has")
            made = value._replace(terms=frozenset({FROM_NEXT})) if home else None
        call.put("recv", first, end - first, made, row)


def _ring_sum(call: Call, old: Value, new: Value) -> Value | None:
    """Return the sum of gradients of keys that come from ranks of the ring."""
    assert isinstance(old.terms, tuple)
    assert isinstance(new.terms, tuple)
    if old.terms[1] != new.terms[1] or old.terms[2] & new.terms[2] or old.terms[3:] != new.terms[3:]:
        call.fault(f"gradients of keys {old.terms[1]} ranks before get those of keys {new.terms[1]} before")
        return None
    return old._replace(terms=("from", old.terms[1], old.terms[2] | new.terms[2], *old.terms[3:]))


def accumulate(call: Call) -> None:
    """Add a term to the gradient of queries, of keys, or of both packed."""
    rows = call.rows("x")
    names = {each.value.name for each in rows if each.value is not None}
    packed = inside(call.values, "d_qkv")
    into = {each.value.name for each in call.rows("out") if each.value is not None}
    if packed not in into or not names <= {"d_q", "d_kv"}:
        _add(call, "x", "out")
        return
    for begin, low, count in _late_rows(call, call.tokens("out"), call.tokens("x")):
        for given in call.rows("x", low, count):
            at = begin + given.first - low
            for old in call.rows("out", at, given.end - given.first):
                row = given.row + old.first - at
                call.put("out", old.first, old.end - old.first, _packed_sum(call, old, given.value, row), old.row)


def _packed_sum(call: Call, old: Held, new: Value | None, row: int) -> Value | None:
    """Return the gradient of the packed Q, K, V with one more term of queries or of keys."""
    value = old.value
    if value is None or new is None or not isinstance(value.terms, Packed):
        return None
    same = (value.layer, value.micro_batch, value.part) == (new.layer, new.micro_batch, new.part) and old.row == row
    queries, keys = value.terms
    terms: object = None
    if same and new.name == "d_q":
        queries = terms = joined(queries, new.terms)
    elif same and isinstance(new.terms, tuple):
        ring = call.values.layout.ring
        home = new.terms[:1] == ("from",) and new.terms[1] == ring and len(new.terms[2]) == ring - 1
        keys = terms = joined(keys, frozenset({OTHERS})) if home else None
    if terms is None:
        call.fault(f"out holds {value} (row {old.row}); {new} (row {row}, {shown(new.terms)}) is not one more term")
        return None
    return value._replace(terms=Packed(queries, keys))


def split(call: Call) -> None:
    """Copy queries, and keys and values where they are asked for, out of the packed Q, K, V."""
    wanted = inside(call.values, "qkv")
    for first, end, value, row in call.rows("qkv"):
        if value is not None and value.name != wanted:
            call.wrong("qkv", value, row, wanted)
        good = value is not None and value.name == wanted
        for role, name in (("q", "q"), ("kv", "kv")):
            call.put(role, first, end - first, value._replace(name=name) if good and value is not None else None, row)


def join(call: Call) -> None:
    """Copy whole gradients of queries, keys and values into that of the packed Q, K, V."""
    for first, tokens, values in call.pieces("grad_q", "grad_kv"):
        found, at = _alike(call, {"grad_q": "d_q", "grad_kv": "d_kv"}, values, tokens)
        made = None if found is None else found._replace(name=inside(call.values, "d_qkv"))
        call.put("grad_qkv", first, tokens, made, at)


# Norm of heads, rotary embedding


QK_KEPT = {"raw": "qk_raw", "saved": "qk_saved", "stats": "qk_stats"}
"""What the norm of queries and keys keeps for backward, by role: its input, or what modules save of it."""


def _in_place(
    role: str, names: Callable[[Values], dict[str, str]], kept: Mapping[str, str] | None = None
) -> Callable[[Call], None]:
    def rule(call: Call) -> None:
        steps = names(call.values)
        for first, end, held, row in call.rows(role):
            value = None if held is None else whole(call, role, held, row, end - first)
            if value is not None and value.name not in steps:
                call.wrong(role, value, row, " or ".join(steps))
                value = None
            call.put(role, first, end - first, None if value is None else value._replace(name=steps[value.name]), row)
            for other, name in (kept or {}).items():
                call.put(other, first, end - first, None if value is None else value._replace(name=name), row)

    return rule


def _normed(v: Values) -> dict[str, str]:
    names = chain(v)
    return {names[0]: names[1]} if v.model.qk_norm else {}


def _rotated(v: Values) -> dict[str, str]:
    names = chain(v)
    return {} if v.model.learned_positions else {names[-2]: names[-1]}


def _unrotated(v: Values) -> dict[str, str]:
    return {f"d_{after}": f"d_{before}" for before, after in _rotated(v).items()}


def qk_norm(call: Call) -> None:
    """Check the norm of the heads of queries and keys, which also keeps its input, or what its modules save."""
    _in_place("qkv", _normed, QK_KEPT)(call)
    _weights(call, "qkv")


def _weights(call: Call, role: str) -> list[Held]:
    rows = call.rows(role)
    for each in rows:
        if each.value is not None:
            for part in ("q", "k"):
                weight(call, f"{part}_weight", f"{part}_norm.weight", each.value.layer)
    return rows


def qk_norm_backward(call: Call) -> None:
    """Check the backward of ``qk_norm``, in place."""
    names = chain(call.values)
    kept: dict[str, Wanted] = {role: name for role, name in QK_KEPT.items() if call.has(role)}
    for first, tokens, values in call.pieces("grad", *kept):
        found = agree(call, {"grad": f"d_{names[1]}", **kept}, values, tokens)
        if found is not None:
            for part in ("q", "k"):
                source = found[2] if isinstance(found[2], tuple) else 0
                add_gradient(call, f"grad_{part}_weight", f"{part}_norm.weight", found, tokens, source)
        value = None if found is None else Value(f"d_{names[0]}", *found[:3])
        call.put("grad", first, tokens, value, found[3] if found else 0)
    _weights(call, "grad")


# Sinks


def sink(call: Call) -> None:
    """Write the sinks into the whole output and log-sum-exp of the keys."""
    raw = {"out": inside(call.values, "attn.raw"), "lse": "lse.raw"}
    for first, tokens, values in call.pieces("out", "lse"):
        found, at = _alike(call, raw, values, tokens)
        if found is not None:
            weight(call, "sinks", "sinks", found.layer)
        for role, name in (("out", inside(call.values, "attn")), ("lse", "lse")):
            call.put(role, first, tokens, None if found is None else found._replace(name=name), at)


def sink_backward(call: Call) -> None:
    """Add every row's gradient of the sinks."""
    v = call.values
    wanted: dict[str, Wanted] = {"grad": inside(v, "d_attn"), "out": inside(v, "attn"), "lse": "lse"}
    for _, tokens, values in call.pieces(*wanted):
        found = agree(call, wanted, values, tokens)
        if found is not None:
            weight(call, "sinks", "sinks", found[0])
            add_gradient(call, "grad_sinks", "sinks", found, tokens)


RULES: dict[str, Callable[[Call], None]] = {
    "attention": attention,
    "attention.bwd": backward,
    "attention.merge": merge,
    "attention.sink": sink,
    "attention.sink.bwd": sink_backward,
    "kv.pack": pack,
    "kv.pack.sequence": pack,
    "qkv.split": split,
    "qkv.join": join,
    "grad.accumulate.halves": accumulate,
    "qk_norm": qk_norm,
    "qk_norm.bwd": qk_norm_backward,
    "rotary": _in_place("qkv", _rotated),
    "rotary.bwd": _in_place("grad", _unrotated),
}
"""The rule of every op of attention."""
