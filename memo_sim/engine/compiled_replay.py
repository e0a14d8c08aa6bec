"""The replay of requests on PyTorch's caching allocator (``memory/replay.py``) compiled by numba, with equal results.

It is imported only by ``fast_replay.py``, where numba is installed. It has the allocator's default settings, with which
plans are replayed: no garbage collection, no largest split size, no expandable segments. All requests belong to one
stream. A block is a row of a table; the free blocks of a pool are the numbers of such rows, by size, then address.

    row of ``blocks``    address, size, pool, block before, block after, whether it is allocated, events it waits for
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numba import njit
from numpy.typing import NDArray

from memo_sim.contract.requests import Requests
from memo_sim.memory.device_allocator import DEFAULT, DeviceCall
from memo_sim.memory.device_config import (
    BLOCK_BYTES,
    ROUNDED_ALONE_BYTES,
    SEGMENT_UNIT_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
)
from memo_sim.memory.initial_states import Beginning
from memo_sim.memory.replay import AllocationCosts, DeviceStop, Iteration, Replay, ReplayOutOfMemory, RunAhead

Ints = NDArray[np.int64]

STATES = "states"
"""What a failed request of an initial state is called."""

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
KINDS: tuple[Literal["synchronize", "malloc", "free"], ...] = ("synchronize", "malloc", "free")
"""Kinds of device calls, by their number."""

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

SIGNATURE = (
    "Tuple((int64[::1], int64[:, ::1], int64[:, ::1], int64))("
    "int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64,"  # the operations and sizes
    "int64[::1], int64[::1], int64[::1], int64[::1],"  # what waits for other streams
    "int64[:, :, ::1], int64[:, ::1], int64[:, ::1])"  # queues, and results
)


@dataclass(frozen=True)
class _Operations:
    """What the allocator is asked for, in order; initial states are numbered behind the buffers."""

    kind: Ints
    number: Ints
    place: Ints
    """Place of the instant among those of all iterations; ``NONE`` outside them."""
    iteration: Ints
    instants: Ints
    """Instants of one iteration, at which a buffer is born or has died."""
    sizes: Ints
    """Requested bytes of each buffer, and of each state."""

    @classmethod
    def of(cls, requests: Requests, beginning: Beginning | None, iterations: int) -> _Operations:
        """Return the operations of all iterations; at each instant, ends come before requests."""
        sizes, lower, upper = (_ints(each) for each in (requests.size_bytes, requests.lower, requests.upper))
        lasting = (lower == 0) & (upper == (upper.max() if len(upper) else 0)) & (sizes > 0)
        played, buffers = np.flatnonzero((sizes > 0) & ~lasting), len(sizes)
        states = [_ints(each) for each in _states(beginning)]
        bounds = buffers + np.cumsum([0, *map(len, states)])
        temporary, before, behind, later = (np.arange(*each) for each in pairwise(bounds.tolist()))
        prelude = [
            (OF_STATE, temporary),
            (OF_STATE, before),
            (RELEASE, temporary),
            (OF_STATE, behind),
            (OF_BUFFER, np.flatnonzero(lasting)),
        ]

        at = np.concatenate([upper[played], lower[played]])
        kind = np.repeat([RELEASE, OF_BUFFER], len(played))
        order = np.lexsort((np.concatenate([played, played]), kind == OF_BUFFER, at))
        instants, place = np.unique(at, return_inverse=True)
        kind, number, place = kind[order], np.concatenate([played, played])[order], place[order]

        parts = [(np.full(len(some), each), some, np.full(len(some), NONE), NONE) for each, some in prelude]
        for iteration in range(iterations):
            parts.append((kind, number, place + iteration * len(instants), iteration))
            parts.append((_ints([END_OF_STEP]), _ints([NONE]), _ints([NONE]), iteration))
            if not iteration:
                parts.append((np.full(len(later), OF_STATE), later, np.full(len(later), NONE), iteration))
        kinds, numbers, places = (np.concatenate([part[at] for part in parts]).astype(np.int64) for at in range(3))
        of_iteration = np.repeat(_ints([part[3] for part in parts]), [len(part[0]) for part in parts])
        return cls(kinds, numbers, places, of_iteration, instants, np.concatenate([sizes, *states]))


@dataclass(frozen=True)
class _Waits:
    """Which buffers wait for which streams when they are freed, and how far the device has come.

    ``until``: the instant whose work a buffer's block waits for; ``done``: by the host's instant, as in ``RunAhead``.
    """

    streams: int
    bounds: Ints
    stream: Ints
    until: Ints
    done: Ints

    @classmethod
    def of(cls, ahead: RunAhead | None, requests: Requests, numbers: int) -> _Waits:
        """Return the waits of ``numbers`` buffers and states, of which states wait for nothing."""
        if ahead is None:
            return cls(0, np.zeros(numbers + 1, dtype=np.int64), *(_ints(()) for _ in range(3)))
        streams = {stream: number for number, stream in enumerate(ahead.work)}
        work = {stream: _ints(instants) for stream, instants in ahead.work.items()}
        counts, stream, until = np.zeros(numbers, dtype=np.int64), list[int](), list[int]()
        for buffer in sorted(ahead.streams):
            counts[buffer] = len(ahead.streams[buffer])
            for each in ahead.streams[buffer]:
                given = int(np.searchsorted(work[each], requests.upper[buffer]))
                stream.append(streams[each])
                until.append(int(work[each][given - 1]) if given else -1)
        bounds = np.concatenate([[0], np.cumsum(counts)])
        return cls(len(streams), bounds, _ints(stream), _ints(until), _ints(ahead.done))


def replay_compiled(
    requests: Requests,
    *,
    iterations: int,
    capacity_bytes: int,
    costs: AllocationCosts,
    ahead: RunAhead | None,
    beginning: Beginning | None,
) -> Replay:
    """Return what ``memory.replay.replay`` returns with the default settings and without a reserve."""
    asked = _Operations.of(requests, beginning, iterations)
    waits, each = _Waits.of(ahead, requests, len(asked.sizes)), len(asked.instants)
    queues = np.empty((2, waits.streams, iterations * len(waits.stream)), dtype=np.int64)
    ends, peaks = np.zeros((ENDS, waits.streams), np.int64), np.zeros((2, iterations * each), np.int64)
    totals, stops, calls, failed = _replay(
        *(asked.kind, asked.number, asked.place, np.tile(asked.instants, iterations), asked.sizes, capacity_bytes),
        *(waits.bounds, waits.stream, waits.until, waits.done),
        *(queues, ends, peaks),
    )
    begun = int(asked.iteration[failed]) + 1 if failed != NONE else iterations
    steps = [
        Iteration(asked.instants.tolist(), *(peak[number * each : (number + 1) * each].tolist() for peak in peaks))
        for number in range(begun)
    ]
    if failed != NONE and asked.place[failed] != NONE:  # the instant of the failed request has no peak
        done = int(asked.place[failed]) % each
        for column in (steps[-1].instants, steps[-1].allocated_bytes, steps[-1].reserved_bytes):
            del column[done:]
    made = [DeviceCall(KINDS[kind], size) for kind, size in calls[: totals[CALLS]].tolist()]
    for at, first, last in stops[: totals[STOPS]].tolist():
        device, instant = made[first:last], int(asked.instants[asked.place[at] % each])
        name, retried = requests.ids[asked.number[at]], any(call.kind == "synchronize" for call in device)
        stop = DeviceStop(instant, name, tuple(device), costs.seconds(device), retried)
        steps[asked.iteration[at]].stops.append(stop)
    return Replay(
        iterations=steps,
        live_peak_bytes=int(totals[LIVE_PEAK]),
        allocated_peak_bytes=int(totals[PEAK_ALLOCATED]),
        reserved_peak_bytes=int(totals[PEAK_RESERVED]),
        segments_allocated=int(totals[MALLOCS]),
        segments_freed=int(totals[FREES]),
        allocation_retries=int(totals[RETRIES]),
        out_of_memory=_failed(asked, failed, totals, requests) if failed != NONE else None,
    )


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)


def _states(beginning: Beginning | None) -> tuple[Sequence[int], ...]:
    if beginning is None:
        return (), (), (), ()
    return beginning.temporary, beginning.before, beginning.behind, beginning.later


def _failed(asked: _Operations, at: int, totals: Ints, requests: Requests) -> ReplayOutOfMemory:
    number, place = int(asked.number[at]), int(asked.place[at])
    size = int(asked.sizes[number])
    return ReplayOutOfMemory(
        iteration=int(asked.iteration[at]),
        instant=0 if place == NONE else int(asked.instants[place % len(asked.instants)]),
        buffer=STATES if asked.kind[at] == OF_STATE else requests.ids[number],
        requested_bytes=size,
        segment_bytes=DEFAULT.segment_bytes(DEFAULT.block_bytes(size)),
        allocated_bytes=int(totals[ALLOCATED_BYTES]),
        reserved_bytes=int(totals[RESERVED_BYTES]),
    )


@njit(cache=True, error_model="numpy")
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


@njit(cache=True, error_model="numpy")
def _add(blocks, pools, counts, row):
    """Add a free block to its pool."""
    number = blocks[row, POOL]
    count = counts[number]
    at = _at(blocks, pools[number], count, blocks[row, SIZE], blocks[row, ADDRESS])
    for place in range(count, at, -1):
        pools[number, place] = pools[number, place - 1]
    pools[number, at] = row
    counts[number] = count + 1


@njit(cache=True, error_model="numpy")
def _take_out(pools, counts, number, at):
    """Remove the free block at a place of a pool."""
    counts[number] -= 1
    for place in range(at, counts[number]):
        pools[number, place] = pools[number, place + 1]


@njit(cache=True, error_model="numpy")
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


@njit(cache=True, error_model="numpy")
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


@njit(cache=True, error_model="numpy")
def _event_passed(blocks, pools, counts, totals, row):
    """Note that one of the events has passed for which a block waits."""
    blocks[row, EVENTS] -= 1
    if blocks[row, EVENTS] == 0:
        _take_back(blocks, pools, counts, totals, row)


@njit(cache=True, error_model="numpy")
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


@njit(cache=True, error_model="numpy")
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


@njit(cache=True, error_model="numpy")
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


@njit(cache=True, error_model="numpy")
def _catch_up(totals, ends, instant):
    """Note that the host has waited for the device before ``instant``."""
    totals[CAUGHT_UP] = instant - 1
    for stream in range(ends.shape[1]):
        ends[FIRST, stream], ends[LAST, stream], ends[KNOWN, stream] = 0, 0, 0


@njit(cache=True, error_model="numpy")
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


@njit(SIGNATURE, cache=True, error_model="numpy")
def _replay(  # noqa: PLR0912, PLR0915 - one loop
    operations, number_of, place_of, instants, sizes, limit,
    bounds, streams, until, done,
    queues, ends, peaks,
):  # fmt: skip
    """Play the operations, and return the counters, the stops of the device, its calls, and the operation that failed.

    ``number_of``: the buffer of each operation; ``place_of``: its place in the rows of ``peaks``, ``NONE`` where they
    have none; ``instants``: the instant of each place.
    """
    requests = 0
    for each in operations:
        requests += each <= OF_BUFFER
    # A request makes two rows at most: a segment, and the part that is cut from it. Rows are used again, so most of
    # this memory is never touched.
    blocks, pools = np.empty((2 * requests + 1, FIELDS), np.int64), np.empty((2, 2 * requests + 1), np.int64)
    counts, totals = np.zeros(2, np.int64), np.zeros(TOTALS, np.int64)
    calls, stops = np.empty((3 * requests + 1, 2), np.int64), np.empty((requests + 1, 3), np.int64)
    totals[SPARE], totals[CAUGHT_UP] = NONE, -1
    rows = np.empty(len(sizes), np.int64)
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
            return totals, stops, calls, at
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
    return totals, stops, calls, NONE
