"""Every ordering between instructions of different lanes, derived from program order and token ranges.

A write must come after the previous write and the reads since (WAW, WAR), a read after the last write (RAW), range by
range, device and host buffers alike. Orders inside a lane are implied (lanes are FIFO) and so are edges that an
earlier edge between the same two lanes already enforces; both are dropped.

Memory is handed out in program order too. A dynamic device buffer that a lane other than compute touches first takes
bytes that compute may still be using, and one that such a lane touches last gives bytes that compute may use again; so
its birth waits for the compute before it, and the births after its death wait for the other lanes' last uses, which
may still be under way when compute has had its own. Nor does any lane touch it before it is born, not even rows that no
other lane writes.

      compute   [fwd l0 writes A]...............[fwd l2 writes A]
      d2h                  [offload reads A]........^
                 RAW -----------^    WAR -----------|
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memo_sim.program.analysis.columns import Columns, Flags, Ints
from memo_sim.program.ir.instruction import Lane, Mode


@dataclass(frozen=True)
class Edges:
    """``consumer[i]`` may start when ``producer[i]`` has ended; sorted by consumer."""

    producer: Ints
    consumer: Ints


def derive_edges(columns: Columns) -> Edges:
    """Return the cross-lane edges of the program, none implied by another through lane order."""
    shared = _shared(columns)
    segment, instruction, mode = _segments(columns, shared)
    lane = columns.lane[instruction]
    writes = (mode & Mode.WRITE) > 0
    producers: list[Ints] = []
    consumers: list[Ints] = []
    row = np.arange(len(segment), dtype=np.int64)
    starts = np.flatnonzero(np.r_[True, segment[1:] != segment[:-1]]) if len(segment) else row
    group_start = np.repeat(starts, np.diff(np.r_[starts, len(segment)]))
    last_write = _last_before(writes, row, group_start)
    for producer_lane in _distinct(lane):
        in_lane = lane == producer_lane
        # RAW and WAW: the last write before this access, when it was made on the other lane.
        found = (last_write >= 0) & (lane != producer_lane) & in_lane[np.maximum(last_write, 0)]
        producers.append(instruction[last_write[found]])
        consumers.append(instruction[found])
        # WAR: the last read on the other lane since the last write.
        reads = in_lane & ((mode & Mode.READ) > 0)
        last_read = _last_before(reads, row, group_start)
        found = writes & (lane != producer_lane) & (last_read > last_write)
        producers.append(instruction[last_read[found]])
        consumers.append(instruction[found])
    memory_producers, memory_consumers = _memory_edges(columns, shared)
    return _reduced(
        np.concatenate([*producers, memory_producers]), np.concatenate([*consumers, memory_consumers]), columns.lane
    )


def _shared(columns: Columns) -> Flags:
    """Return which buffers several lanes touch."""
    touching = np.zeros(len(columns.buffer_bytes), dtype=np.int64)
    np.bitwise_or.at(touching, columns.operand_buffer, 1 << columns.lane[columns.operand_instruction])
    found: Flags = (touching & (touching - 1)) > 0
    return found


def _memory_edges(columns: Columns, shared: Flags) -> tuple[Ints, Ints]:
    """Return the orderings that handing out memory in program order asks for, as (producers, consumers)."""
    total = len(columns.lane)
    birth = np.full(len(columns.buffer_bytes), total, dtype=np.int64)
    death = np.full(len(columns.buffer_bytes), -1, dtype=np.int64)
    np.minimum.at(birth, columns.operand_buffer, columns.operand_instruction)
    np.maximum.at(death, columns.operand_buffer, columns.operand_instruction)
    used = columns.buffer_dynamic & (death >= 0)
    births, deaths = _distinct(birth[used]), _distinct(death[used])
    kernels = np.flatnonzero(columns.lane == Lane.COMPUTE)
    early = births[columns.lane[births] != Lane.COMPUTE]
    before = np.searchsorted(kernels, early) - 1
    producers, consumers = [kernels[before[before >= 0]]], [early[before >= 0]]
    touches = np.flatnonzero((shared & columns.buffer_dynamic)[columns.operand_buffer])
    buffer, instruction = columns.operand_buffer[touches], columns.operand_instruction[touches]
    # Operands stand in program order, so the first of a buffer and a lane is that lane's first touch.
    place = buffer * len(Lane) + columns.lane[instruction]
    _, firsts = np.unique(place, return_index=True)
    lasts = len(place) - 1 - np.unique(place[::-1], return_index=True)[1]
    late, dead = deaths[columns.lane[deaths] != Lane.COMPUTE], death[buffer[lasts]]
    # Where another lane's last use is a read before the end, it may still be under way then; on a write the end waits.
    under_way = (columns.lane[instruction[lasts]] != Lane.COMPUTE) & (instruction[lasts] < dead)
    under_way &= columns.operand_mode[touches][lasts] == Mode.READ
    late, dead = np.r_[late, instruction[lasts][under_way]], np.r_[late, dead[under_way]]
    for lane in _distinct(columns.lane[births]):
        here = births[columns.lane[births] == lane]
        elsewhere = columns.lane[late] != lane
        after = np.searchsorted(here, dead[elsewhere], side="right")
        found = after < len(here)
        producers.append(late[elsewhere][found])
        consumers.append(here[after[found]])
    born, touched = birth[buffer[firsts]], instruction[firsts]
    other = columns.lane[born] != columns.lane[touched]
    return np.concatenate([*producers, born[other]]), np.concatenate([*consumers, touched[other]])


def _segments(columns: Columns, shared: Flags) -> tuple[Ints, Ints, Ints]:
    """Cut the buffers that several lanes touch at every range boundary; return (segment, instruction, mode)."""
    buffer = columns.operand_buffer
    keep = shared[buffer] & (columns.operand_end > columns.operand_first)
    buffer, instruction, mode = buffer[keep], columns.operand_instruction[keep], columns.operand_mode[keep]
    first, end = columns.operand_first[keep], columns.operand_end[keep]
    span = int(end.max(initial=0)) + 1
    begins, ends = buffer * span + first, buffer * span + end
    cuts = np.sort(np.concatenate((begins, ends)))
    cuts = cuts[np.append(True, cuts[1:] != cuts[:-1])[: len(cuts)]]  # np.unique, which hashes, is slower
    low = np.searchsorted(cuts, begins)
    pieces = np.searchsorted(cuts, ends) - low
    source = np.repeat(np.arange(len(buffer), dtype=np.int64), pieces)
    within = np.arange(len(source), dtype=np.int64) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    segment = low[source] + within
    order = np.argsort(segment, kind="stable")  # operands stand in program order
    return segment[order], instruction[source][order], mode[source][order]


def _distinct(numbers: Ints) -> Ints:
    """Return the different ones of small numbers, in order."""
    return np.flatnonzero(np.bincount(numbers))


def _last_before(flags: np.ndarray, row: Ints, group_start: Ints) -> Ints:
    """Return for each row the last earlier row of its group where ``flags`` holds, or -1."""
    latest = np.maximum.accumulate(np.where(flags, row, -1)) if len(row) else row
    before = np.r_[-1, latest[:-1]] if len(row) else row
    return np.where(before >= group_start, before, -1)


def _reduced(producer: Ints, consumer: Ints, lane: Ints) -> Edges:
    """Drop edges implied by lane order and another edge between the same two lanes."""
    kept_producers, kept_consumers = [], []
    pair = lane[producer] * len(Lane) + lane[consumer]
    for value in _distinct(pair):
        chosen = pair == value
        p, c = producer[chosen], consumer[chosen]
        order = np.lexsort((p, c))
        p, c = p[order], c[order]
        best = np.maximum.accumulate(p)
        last_of_consumer = np.r_[c[1:] != c[:-1], True]
        # Keep, per consumer, its latest producer, and only where that is later than what earlier consumers waited for.
        first_row = np.maximum.accumulate(np.where(np.r_[True, c[1:] != c[:-1]], np.arange(len(c)), 0))
        before = np.where(first_row > 0, best[np.maximum(first_row - 1, 0)], -1)
        keep = last_of_consumer & (best > before)
        kept_producers.append(best[keep])
        kept_consumers.append(c[keep])
    if not kept_producers:
        empty = np.zeros(0, dtype=np.int64)
        return Edges(empty, empty)
    p, c = np.concatenate(kept_producers), np.concatenate(kept_consumers)
    order = np.lexsort((p, c))
    return Edges(p[order], c[order])
