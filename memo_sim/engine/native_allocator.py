"""PyTorch's caching allocator (``memory/device_allocator.py``) as numba compiles it: with its default settings.

There is no garbage collection, no largest split size, and there are no expandable segments. All requests belong to one
stream. A block is a row of a table; the free blocks of a pool are the numbers of such rows, by size, then address.

    row of ``blocks``    address, size, pool, block before, block after, whether it is allocated, events it waits for

It allocates nothing and raises nothing, so that its code needs neither Python nor numba's runtime (``native.py``).
"""

from __future__ import annotations

from memo_sim.memory.device_allocator import DEFAULT
from memo_sim.memory.device_config import (
    BLOCK_BYTES,
    ROUNDED_ALONE_BYTES,
    SEGMENT_UNIT_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
)

LARGE_SEGMENT_BYTES = DEFAULT.large_segment_bytes
NONE = -1
"""The number of no row, no buffer and no size."""

ADDRESS, SIZE, POOL, BEFORE, AFTER, ALLOCATED, EVENTS, FIELDS = range(8)
"""Columns of ``blocks``. ``EVENTS`` have to pass before a freed block is free."""

SMALL, LARGE = 0, 1
"""The pools."""

WAITING, UNTIL = 0, 1
"""Queues of each stream: rows of blocks that wait for it, and the instants whose work these wait for."""

HEAD, TAIL, PASSED, FIRST, LAST, KNOWN, ENDS = range(7)
"""Of each stream: the ends of its ``WAITING``, how many of them the next request takes back; the ends of its ``UNTIL``,
and whether something has waited since the host last waited for the device."""

SYNCHRONIZE, MALLOC, FREE = range(3)
"""Kinds of device calls."""

(
    ALLOCATED_BYTES,
    RESERVED_BYTES,
    PEAK_ALLOCATED,
    PEAK_RESERVED,
    LIVE,
    LIVE_PEAK,
    MALLOCS,
    FREES,
    RETRIES,
    END,
    ROWS,
    SPARE,
    CALLS,
    STOPS,
    CAUGHT_UP,
    TOTALS,
) = range(16)
"""Counters. ``ROWS`` of ``blocks`` were used. ``SPARE`` is the first that can be used again; it leads to the others."""

OF_STATE, OF_BUFFER, RELEASE, END_OF_STEP = range(4)
"""Operations: requests for an initial state and for a buffer, the end of either, and the end of a step."""


def _at(blocks, pool, count, size, address):
    """Return the place in a pool of the first free block that is not before ``size``, then ``address``."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        row = pool[middle]
        if blocks[row, SIZE] < size or (blocks[row, SIZE] == size and blocks[row, ADDRESS] < address):
            low = middle + 1
        else:
            high = middle
    return low


def _add(blocks, pools, counts, row):
    """Add a free block to its pool."""
    number = blocks[row, POOL]
    count = counts[number]
    at = _at(blocks, pools[number], count, blocks[row, SIZE], blocks[row, ADDRESS])
    for place in range(count, at, -1):
        pools[number, place] = pools[number, place - 1]
    pools[number, at] = row
    counts[number] = count + 1


def _take_out(pools, counts, number, at):
    """Remove the free block at a place of a pool."""
    counts[number] -= 1
    for place in range(at, counts[number]):
        pools[number, place] = pools[number, place + 1]


def _new_row(blocks, totals):
    """Return a row for a new block: one that was used before, if there is one."""
    row = totals[SPARE]
    if row == NONE:
        row = totals[ROWS]
        totals[ROWS] += 1
    else:
        totals[SPARE] = blocks[row, AFTER]
    blocks[row, BEFORE] = blocks[row, AFTER] = NONE
    blocks[row, ALLOCATED] = blocks[row, EVENTS] = 0
    return row


def _take_back(blocks, pools, counts, totals, row):
    """Add a block that is free now to its pool, joined with its free neighbours."""
    for side in (BEFORE, AFTER):
        other = blocks[row, side]
        if other == NONE or blocks[other, ALLOCATED] or blocks[other, EVENTS]:
            continue
        number = blocks[other, POOL]
        at = _at(blocks, pools[number], counts[number], blocks[other, SIZE], blocks[other, ADDRESS])
        _take_out(pools, counts, number, at)
        if side == BEFORE:
            blocks[row, ADDRESS] = blocks[other, ADDRESS]
        beyond = blocks[other, side]
        blocks[row, side] = beyond
        if beyond != NONE:
            blocks[beyond, BEFORE + AFTER - side] = row
        blocks[row, SIZE] += blocks[other, SIZE]
        blocks[other, AFTER] = totals[SPARE]
        totals[SPARE] = other
    _add(blocks, pools, counts, row)


def _event_passed(blocks, pools, counts, totals, row):
    """Note that one of the events has passed for which a block waits."""
    blocks[row, EVENTS] -= 1
    if blocks[row, EVENTS] == 0:
        _take_back(blocks, pools, counts, totals, row)


def _release_all(blocks, pools, counts, totals, calls, queues, ends):
    """Wait for every stream, then release all free segments that are not split."""
    calls[totals[CALLS], 0], calls[totals[CALLS], 1] = SYNCHRONIZE, 0
    totals[CALLS] += 1
    for stream in range(ends.shape[1]):
        for place in range(ends[HEAD, stream], ends[TAIL, stream]):
            _event_passed(blocks, pools, counts, totals, queues[WAITING, stream, place])
        ends[HEAD, stream] = ends[TAIL, stream]
        ends[PASSED, stream] = 0
    for number in (LARGE, SMALL):
        left = 0
        for place in range(counts[number]):
            row = pools[number, place]
            if blocks[row, BEFORE] != NONE or blocks[row, AFTER] != NONE:
                pools[number, left] = row
                left += 1
                continue
            calls[totals[CALLS], 0], calls[totals[CALLS], 1] = FREE, blocks[row, SIZE]
            totals[CALLS] += 1
            totals[FREES] += 1
            totals[RESERVED_BYTES] -= blocks[row, SIZE]
            blocks[row, AFTER] = totals[SPARE]
            totals[SPARE] = row
        counts[number] = left


def _new_segment(blocks, totals, calls, size, limit):
    """Return a block with a segment of its own, in no pool; ``NONE`` if the device has too little memory."""
    if size <= SMALL_BYTES:
        segment = SMALL_SEGMENT_BYTES
    elif size < ROUNDED_ALONE_BYTES:
        segment = LARGE_SEGMENT_BYTES
    else:
        segment = (size + SEGMENT_UNIT_BYTES - 1) // SEGMENT_UNIT_BYTES * SEGMENT_UNIT_BYTES
    if totals[RESERVED_BYTES] + segment > limit:
        return NONE
    calls[totals[CALLS], 0], calls[totals[CALLS], 1] = MALLOC, segment
    totals[CALLS] += 1
    totals[MALLOCS] += 1
    totals[RESERVED_BYTES] += segment
    totals[PEAK_RESERVED] = max(totals[PEAK_RESERVED], totals[RESERVED_BYTES])
    row = _new_row(blocks, totals)
    blocks[row, ADDRESS], blocks[row, SIZE] = totals[END], segment
    blocks[row, POOL] = SMALL if size <= SMALL_BYTES else LARGE
    totals[END] += segment
    return row


def _malloc(blocks, pools, counts, totals, calls, queues, ends, requested, limit):
    """Return a block for a request; ``NONE`` when the limit does not suffice, even after an allocation retry."""
    for stream in range(ends.shape[1]):
        for _ in range(ends[PASSED, stream]):
            place = ends[HEAD, stream]
            ends[HEAD, stream] += 1
            _event_passed(blocks, pools, counts, totals, queues[WAITING, stream, place])
        ends[PASSED, stream] = 0
    size = (requested + BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES
    number = SMALL if size <= SMALL_BYTES else LARGE
    at = _at(blocks, pools[number], counts[number], size, NONE)
    if at < counts[number]:
        row = pools[number, at]
        _take_out(pools, counts, number, at)
    else:
        row = _new_segment(blocks, totals, calls, size, limit)
        if row == NONE:
            _release_all(blocks, pools, counts, totals, calls, queues, ends)
            totals[RETRIES] += 1
            row = _new_segment(blocks, totals, calls, size, limit)
        if row == NONE:
            return NONE
    left = blocks[row, SIZE] - size
    if left >= BLOCK_BYTES if number == SMALL else left > SMALL_BYTES:
        front = _new_row(blocks, totals)
        before = blocks[row, BEFORE]
        blocks[front, ADDRESS], blocks[front, SIZE] = blocks[row, ADDRESS], size
        blocks[front, POOL], blocks[front, BEFORE], blocks[front, AFTER] = number, before, row
        if before != NONE:
            blocks[before, AFTER] = front
        blocks[row, BEFORE] = front
        blocks[row, ADDRESS] += size
        blocks[row, SIZE] = left
        _add(blocks, pools, counts, row)
        row = front
    blocks[row, ALLOCATED] = 1
    totals[ALLOCATED_BYTES] += blocks[row, SIZE]
    totals[PEAK_ALLOCATED] = max(totals[PEAK_ALLOCATED], totals[ALLOCATED_BYTES])
    totals[LIVE] += requested
    totals[LIVE_PEAK] = max(totals[LIVE_PEAK], totals[LIVE])
    return row


def _catch_up(totals, ends, instant):
    """Note that the host has waited for the device before ``instant``."""
    totals[CAUGHT_UP] = instant - 1
    for stream in range(ends.shape[1]):
        ends[FIRST, stream], ends[LAST, stream], ends[KNOWN, stream] = 0, 0, 0


def _reach(totals, queues, ends, done):
    """Note that blocks no longer wait for work that the device has done."""
    done = max(done, totals[CAUGHT_UP])
    for stream in range(ends.shape[1]):
        if not ends[KNOWN, stream]:
            continue
        passed = 0
        while ends[FIRST, stream] < ends[LAST, stream] and queues[UNTIL, stream, ends[FIRST, stream]] <= done:
            ends[FIRST, stream] += 1
            passed += 1
        ends[PASSED, stream] = min(passed, ends[TAIL, stream] - ends[HEAD, stream])


def serve(  # noqa: PLR0912 - one loop
    operations, number_of, place_of, instants, sizes, limit,
    bounds, streams, until, done,
    queues, ends, peaks,
    blocks, pools, counts, totals, calls, stops, rows,
):  # fmt: skip
    """Serve the operations; return the number of the one that failed, or ``NONE``.

    ``number_of``: the buffer of each operation; ``place_of``: its place in the rows of ``peaks``, ``NONE`` where they
    have none; ``instants``: the instant of each place.

    The counters ``totals``, the device's ``calls`` and the ``stops`` for them are results as ``peaks`` are; so are the
    ``blocks``, the ``pools`` with ``counts`` of free ones, and the ``rows`` of buffers and states.
    """
    totals[SPARE], totals[CAUGHT_UP] = NONE, -1
    last_place, has_reached = NONE, False
    for at in range(len(operations)):
        number, place, operation = number_of[at], place_of[at], operations[at]
        if operation == END_OF_STEP:
            for stream in range(ends.shape[1]):
                if ends[KNOWN, stream]:
                    ends[PASSED, stream] = ends[TAIL, stream] - ends[HEAD, stream]
            _catch_up(totals, ends, 0)
            continue
        if place != last_place:
            last_place, has_reached = place, False
            if place != NONE:
                peaks[0, place], peaks[1, place] = totals[ALLOCATED_BYTES], totals[RESERVED_BYTES]
        if operation == RELEASE:
            row = rows[number]
            blocks[row, ALLOCATED] = 0
            totals[ALLOCATED_BYTES] -= blocks[row, SIZE]
            totals[LIVE] -= sizes[number]
            blocks[row, EVENTS] = bounds[number + 1] - bounds[number]
            for wait in range(bounds[number], bounds[number + 1]):
                stream = streams[wait]
                queues[WAITING, stream, ends[TAIL, stream]] = row
                queues[UNTIL, stream, ends[LAST, stream]] = until[wait]
                ends[TAIL, stream] += 1
                ends[LAST, stream] += 1
                ends[KNOWN, stream] = 1
            if blocks[row, EVENTS] == 0:
                _take_back(blocks, pools, counts, totals, row)
            if place != NONE:
                peaks[0, place] = totals[ALLOCATED_BYTES]
            continue
        if place != NONE and len(done) and not has_reached:
            _reach(totals, queues, ends, done[instants[place]])
            has_reached = True
        called, retries = totals[CALLS], totals[RETRIES]
        row = _malloc(blocks, pools, counts, totals, calls, queues, ends, sizes[number], limit)
        if row == NONE:
            return at
        rows[number] = row
        if totals[RETRIES] > retries and operation == OF_BUFFER:
            _catch_up(totals, ends, instants[place] if place != NONE else 0)
        if place == NONE:
            continue
        if totals[CALLS] > called:
            stop = totals[STOPS]
            totals[STOPS] += 1
            stops[stop, 0], stops[stop, 1], stops[stop, 2] = at, called, totals[CALLS]
        peaks[0, place] = max(peaks[0, place], totals[ALLOCATED_BYTES])
        peaks[1, place] = max(peaks[1, place], totals[RESERVED_BYTES])
    return NONE
