"""Derives the orderings between instructions of different lanes from program order and token ranges.

A write comes after the previous write (WAW) and the reads since then (WAR). A read comes after the last write (RAW).
This holds range by range, for device and host buffers. Orders inside a lane are implied, because lanes are FIFO. An
edge that an earlier edge between the same two lanes already enforces is implied too. Both are dropped.

Device memory is allocated in program order too, which adds edges:

- A dynamic buffer whose first user is not on the compute lane takes bytes that compute may still be using. Its birth
  waits for the compute before it.
- A dynamic buffer whose last user is not on the compute lane frees bytes that compute may use again. The next births
  wait for that lane's last use.
- Other lanes' last reads may still be under way when the buffer's last user is done. The next births wait for them too.
- No lane touches a buffer before its birth, not even rows that no other lane writes.

      compute   [fwd l0 writes A]...............[fwd l2 writes A]
      d2h                  [offload reads A]........^
                 RAW -----------^    WAR -----------|
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from memo_sim.program.analysis.columns import NUMBER, Columns, Flags, FoldedColumns, Ints, Operands, distinct
from memo_sim.program.ir.instruction import Lane, Mode

AT_ONCE = 1 << 18
"""Operands whose buffers are looked at together, which needs about 30 MB. No edge joins uses of two buffers."""


@dataclass(frozen=True)
class Edges:
    """``consumer[i]`` may start when ``producer[i]`` has ended; sorted by consumer."""

    producer: Ints
    consumer: Ints


def derive_edges(columns: Columns | FoldedColumns) -> Edges:
    """Return the cross-lane edges of the program, without edges that others imply through lane order.

    Buffers of one part of the operands are in no other. So what an equal repetition adds is the same, further on.
    """
    shared = [_shared(each) for each in columns.operands]
    found = _in_repetitions(columns, shared)
    found += _memory_edges(
        columns.lane, _Uses.joined([_uses(*each) for each in zip(columns.operands, shared, strict=True)])
    )
    return _reduced(*_concatenated(found), columns.lane)


def edges_of_rows(columns: Columns | FoldedColumns) -> Edges:
    """Return the edges that follow from rows alone, as ``derive_edges`` does, without those of memory.

    They hold for a part of a program, too, whose buffers have another birth and death in the whole.
    """
    shared = [_shared(each) for each in columns.operands]
    return _reduced(*_concatenated(_in_repetitions(columns, shared)), columns.lane)


def _in_repetitions(columns: Columns | FoldedColumns, shared: list[Flags]) -> list[tuple[Ints, Ints]]:
    """Return the producers and consumers of what two lanes do to the same rows, in all repetitions."""
    found = list[tuple[Ints, Ints]]()
    for operands, flags in zip(columns.operands, shared, strict=True):
        edges = _conflicts(operands, flags)
        if operands.once:
            found += edges
        elif edges:  # what one repetition implies, each of them does
            once = _reduced(*_concatenated(edges), operands.lane)
            producer, consumer = operands.instructions(np.array([once.producer, once.consumer]))
            found.append((producer, consumer))
    return found


def _concatenated(edges: list[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    """Return the producers and the consumers of all edges."""
    none = np.zeros(0, dtype=NUMBER)
    producers, consumers = ([none, *each] for each in zip(*edges, strict=True)) if edges else ([none], [none])
    return np.concatenate(producers, dtype=NUMBER), np.concatenate(consumers, dtype=NUMBER)


def _conflicts(operands: Operands, shared: Flags) -> list[tuple[Ints, Ints]]:
    """Return the producers and consumers of what two lanes do to the same rows, in one repetition."""
    if not shared.any():
        return []
    if len(operands.buffer) <= AT_ONCE:
        return _conflicts_of(operands, shared)
    until = np.cumsum(np.bincount(operands.buffer, minlength=len(shared)) * shared)
    bounds = [*range(0, int(until[-1]), AT_ONCE), int(until[-1])]
    parts = (shared & (until > first) & (until <= end) for first, end in pairwise(bounds))
    return [edges for part in parts for edges in _conflicts_of(operands, part)]


def _conflicts_of(operands: Operands, shared: Flags) -> list[tuple[Ints, Ints]]:
    """Return the conflicts over some of the buffers that several lanes touch."""
    segment, instruction, mode = _segments(operands, shared)
    lane = operands.lane[instruction]
    writes = (mode & Mode.WRITE) > 0
    row = np.arange(len(segment), dtype=NUMBER)
    starts = np.flatnonzero(_begins(segment)).astype(NUMBER)
    group_start = np.repeat(starts, np.diff(np.append(starts, len(segment))))
    last_write = _last_before(writes, row, group_start)
    # RAW and WAW: the last write before this access, when it was made on another lane.
    found = (last_write >= 0) & (lane != lane[np.maximum(last_write, 0)])
    edges = [(instruction[last_write[found]], instruction[found])]
    reading = (mode & Mode.READ) > 0
    for producer_lane in _distinct_small(lane[reading]):
        # WAR: the last read on the other lane since the last write.
        last_read = _last_before(reading & (lane == producer_lane), row, group_start)
        found = writes & (lane != producer_lane) & (last_read > last_write)
        edges.append((instruction[last_read[found]], instruction[found]))
    return edges


def _shared(operands: Operands) -> Flags:
    """Return a flag for each buffer of a repetition: whether several lanes touch it."""
    lane, last = operands.lane[operands.instruction], np.empty(len(operands.bases), dtype=NUMBER)
    last[operands.buffer] = lane
    found = np.zeros(len(operands.bases), dtype=np.bool_)
    found[operands.buffer[lane != last[operands.buffer]]] = True
    return found


@dataclass(frozen=True)
class _Uses:
    """How dynamic buffers are used."""

    birth: Ints
    death: Ints
    """By buffer: its first and its last user."""
    late: Ints
    """A lane's last use of a buffer that dies later, where it may still be under way then."""
    dead: Ints
    """The death of that buffer."""
    born: Ints
    """The birth of a buffer on another lane than that of a first use."""
    first: Ints
    """That lane's first use of it."""

    @classmethod
    def joined(cls, uses: list[_Uses]) -> _Uses:
        """Return the uses of several sets of operands."""
        return cls(*(np.concatenate(each) for each in zip(*(vars(one).values() for one in uses), strict=True)))


def _uses(operands: Operands, shared: Flags) -> _Uses:
    """Return how the dynamic buffers of all repetitions are used."""
    birth, death = operands.first_and_last
    used = operands.dynamic & (death >= 0)
    touches = np.flatnonzero((shared & operands.dynamic)[operands.buffer])
    buffer, instruction = operands.buffer[touches], operands.instruction[touches]
    place, order = sorted_with_places(buffer.astype(np.int64) * len(Lane) + operands.lane[instruction])
    begins = _begins(place)
    lasts = order[np.append(begins[1:], True)[: len(place)]]
    first, last, of = instruction[order[begins]], instruction[lasts], buffer[lasts]
    born, dead, lane = birth[of], death[of], operands.lane
    # The last use may still be under way at the buffer's death if it is a read; the last user waits for writes.
    late = (lane[last] != Lane.COMPUTE) & (last < dead) & (operands.mode[touches][lasts] == Mode.READ)
    apart = lane[born] != lane[first]
    pairs = ((birth[used], death[used]), (last[late], dead[late]), (born[apart], first[apart]))
    return _Uses(*(each for pair in pairs for each in operands.instructions(np.array(pair))))


def _memory_edges(lanes: Ints, uses: _Uses) -> list[tuple[Ints, Ints]]:
    """Return the edges that allocation in program order needs, as (producers, consumers)."""
    births, deaths = _distinct_small(uses.birth), _distinct_small(uses.death)
    kernels = np.flatnonzero(lanes == Lane.COMPUTE)
    early = births[lanes[births] != Lane.COMPUTE]
    before = np.searchsorted(kernels, early) - 1
    edges = [(uses.born, uses.first), (kernels[before[before >= 0]], early[before >= 0])]
    ends = deaths[lanes[deaths] != Lane.COMPUTE]
    late, dead = np.concatenate((ends, uses.late)), np.concatenate((ends, uses.dead))
    for lane in _distinct_small(lanes[births]):
        here = births[lanes[births] == lane]
        elsewhere = lanes[late] != lane
        after = np.searchsorted(here, dead[elsewhere], side="right")
        found = after < len(here)
        edges.append((late[elsewhere][found], here[after[found]]))
    return edges


def _segments(operands: Operands, shared: Flags) -> tuple[Ints, Ints, Ints]:
    """Cut the buffers that several lanes touch at every range boundary; return (segment, instruction, mode)."""
    buffer = operands.buffer
    keep = shared[buffer] & (operands.end > operands.first)
    buffer, instruction, mode = buffer[keep], operands.instruction[keep], operands.mode[keep]
    first, end = operands.first[keep], operands.end[keep]
    # Nearly every buffer is touched in one range only, and is one segment.
    count = len(shared)
    whole_first, whole_end = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    whole_first[buffer], whole_end[buffer] = first, end
    divided = np.zeros(count, dtype=bool)
    divided[buffer[(whole_first[buffer] != first) | (whole_end[buffer] != end)]] = True
    cut = divided[buffer]
    some, other = np.flatnonzero(cut), np.flatnonzero(~cut)
    span = int(end[some].max(initial=0)) + 1
    base = buffer[some].astype(np.int64) * span
    begins, ends = base + first[some], base + end[some]
    chosen = _examples(begins, ends)
    cuts = distinct(np.concatenate((begins[chosen], ends[chosen])))
    low = np.searchsorted(cuts, begins)
    pieces = np.searchsorted(cuts, ends) - low
    source = np.repeat(np.arange(len(some), dtype=np.int64), pieces)
    within = np.arange(len(source), dtype=np.int64) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    segment = np.concatenate((buffer[other], count + low[source] + within))
    source = np.concatenate((other, some[source]))
    segment, order = sorted_with_places(segment)
    source = source[order]
    instruction, mode = instruction[source], mode[source]
    # What one lane does to a segment several times on end: its first and last time imply all orders.
    doing = operands.lane[instruction] << int(Mode.ACCUMULATE).bit_length()
    doing |= mode
    first_time = _begins(segment) | _begins(doing)
    kept = first_time | np.append(first_time[1:], True)[: len(first_time)]
    return segment[kept], instruction[kept], mode[kept]


def _examples(begins: Ints, ends: Ints) -> Flags:
    """Choose at least one of all equal pairs, and few of them; to sort thousands of equal pairs would take longer."""
    hashed = (begins ^ (begins >> 16) ^ (ends << 5)) & 0xFFFF
    last = np.empty(1 << 16, dtype=NUMBER)
    last[hashed] = np.arange(len(hashed), dtype=NUMBER)
    example = last[hashed]
    chosen: Flags = (begins[example] != begins) | (ends[example] != ends)
    chosen[example] = True
    return chosen


def sorted_with_places(numbers: Ints) -> tuple[Ints, Ints]:
    """Return numbers in increasing order, and their places; equal ones stay in order. None may be negative."""
    places = _places(numbers)
    return numbers[places], places


def _places(numbers: Ints, places: Ints | None = None) -> Ints:
    """Return the places of numbers in increasing order; equal ones stay in the order of ``places``, or of ``numbers``.

    It sorts 16 bits after 16 bits, because NumPy sorts numbers of 16 bits by counting: several times faster.
    """
    most = int(numbers.max(initial=0))
    for shift in range(0, max(most.bit_length(), 1), 16):
        digit = (numbers >> shift).astype(np.uint16) if most >> 16 else numbers.astype(np.uint16)
        if places is None:
            places = np.argsort(digit, kind="stable").astype(NUMBER)
        else:
            places = places[np.argsort(digit[places], kind="stable")]
    assert places is not None
    return places


def _begins(numbers: Ints) -> Flags:
    """Return a flag for each number: whether another one, or none, comes before it."""
    found = np.ones(len(numbers), dtype=np.bool_)
    found[1:] = numbers[1:] != numbers[:-1]
    return found


def _distinct_small(numbers: Ints) -> Ints:
    """Return the distinct values of an array of small numbers, in increasing order."""
    return np.flatnonzero(np.bincount(numbers))


def _last_before(flags: np.ndarray, row: Ints, group_start: Ints) -> Ints:
    """Return for each row the last earlier row of its group where ``flags`` is true, or -1."""
    latest = np.maximum.accumulate(np.where(flags, row, -1)) if len(row) else row
    before = np.concatenate(([-1], latest[:-1])) if len(row) else row
    return np.where(before >= group_start, before, -1)


def _reduced(producer: Ints, consumer: Ints, lane: Ints) -> Edges:
    """Drop edges that lane order and another edge between the same two lanes imply."""
    if not len(producer):
        return Edges(producer, consumer)
    pair = lane[producer] * len(Lane)
    pair += lane[consumer]
    # By consumer, the latest producer of each pair of lanes: best of the rows of a pair so far.
    order = _places(pair, _places(consumer))
    pair, consumer, producer = pair[order], consumer[order], producer[order]
    other_pair = _begins(pair)
    base = np.cumsum(other_pair, dtype=np.int64)
    base *= len(lane)
    best = np.maximum.accumulate(base + producer)
    firsts = np.flatnonzero(other_pair | _begins(consumer))
    best = best[np.append(firsts[1:], len(best)) - 1]
    # Keep each consumer's latest producer, and only if it is later than those that earlier consumers waited for.
    keep = best > np.append(-1, best[:-1])
    keep |= other_pair[firsts]
    firsts = firsts[keep]
    producer, consumer = (best[keep] - base[firsts]).astype(NUMBER), consumer[firsts]
    order = _places(consumer, _places(producer))
    return Edges(producer[order], consumer[order])
