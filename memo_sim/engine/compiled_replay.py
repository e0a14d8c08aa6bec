"""The replay of requests on PyTorch's caching allocator (``memory/replay.py``) compiled by numba, with equal results.

The allocator itself is in ``native_allocator.py``; it has the default settings, with which plans are replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from memo_sim.engine.native import Native, Source
from memo_sim.engine.native_allocator import (
    ALLOCATED_BYTES,
    CALLS,
    END_OF_STEP,
    ENDS,
    FIELDS,
    FREES,
    LIVE_PEAK,
    MALLOCS,
    NONE,
    OF_BUFFER,
    OF_STATE,
    PEAK_ALLOCATED,
    PEAK_RESERVED,
    RELEASE,
    RESERVED_BYTES,
    RETRIES,
    STOPS,
    TOTALS,
    serve,
)
from memo_sim.memory.device_allocator import DEFAULT, DeviceCall
from memo_sim.memory.initial_states import Beginning
from memo_sim.memory.problem import Ints
from memo_sim.memory.replay import (
    AllocationCosts,
    DeviceStop,
    Iteration,
    Replay,
    ReplayOutOfMemory,
    Requested,
    RunAhead,
)

STATES = "states"
"""What a failed request of an initial state is called."""

KINDS: tuple[Literal["synchronize", "malloc", "free"], ...] = ("synchronize", "malloc", "free")
"""Kinds of device calls, by their number."""

SOURCE = Source(
    serve,
    (
        *("int64[:]", "int64[:]", "int64[:]", "int64[:]", "int64[:]", "int64"),  # the operations and sizes
        *("int64[:]", "int64[:]", "int64[:]", "int64[:]"),  # what waits for other streams
        *("int64[:, :, :]", "int64[:, :]", "int64[:, :]"),  # queues, and peaks
        *("int64[:, :]", "int64[:, :]", "int64[:]", "int64[:]", "int64[:, :]", "int64[:, :]", "int64[:]"),
    ),
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
    def of(cls, requests: Requested, beginning: Beginning | None, iterations: int) -> _Operations:
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
    def of(cls, ahead: RunAhead | None, upper: Ints, numbers: int) -> _Waits:
        """Return the waits of ``numbers`` buffers and states, of which states wait for nothing.

        ``upper``: the first instant after the life of each buffer.
        """
        if ahead is None or not ahead.marked:
            return cls(0, np.zeros(numbers + 1, dtype=np.int64), *(_ints(()) for _ in range(3)))
        streams, found = {stream: number for number, stream in enumerate(ahead.work)}, []
        for stream, marked in ahead.marked.items():
            given = np.searchsorted(ahead.work[stream], upper[marked])
            until = np.concatenate([_ints([-1]), ahead.work[stream]])[given]
            found.append((marked, np.full(len(marked), streams[stream]), until))
        buffer, numbered, until = (np.concatenate(each) for each in zip(*found, strict=True))
        order = np.argsort(buffer, kind="stable")
        bounds = np.concatenate([_ints([0]), np.cumsum(np.bincount(buffer, minlength=numbers))])
        return cls(len(streams), bounds, numbered[order], until[order], ahead.done)


class CompiledReplay:
    """A ``fast_replay.Replaying`` that gives what ``memory.replay.replay`` gives."""

    def __init__(self, *, compiles: bool = True) -> None:
        """Load the allocator; ``compiles``: compile it where no file holds it. Raises what ``Native`` raises."""
        self._serve = Native(SOURCE, compiles=compiles)

    def __call__(
        self,
        requests: Requested,
        *,
        iterations: int,
        capacity_bytes: int,
        costs: AllocationCosts,
        ahead: RunAhead | None,
        beginning: Beginning | None,
    ) -> Replay:
        """Return what ``memory.replay.replay`` returns with the default settings and without a reserve."""
        asked = _Operations.of(requests, beginning, iterations)
        waits, each = _Waits.of(ahead, _ints(requests.upper), len(asked.sizes)), len(asked.instants)
        queues = np.empty((2, waits.streams, iterations * len(waits.stream)), dtype=np.int64)
        ends, peaks = np.zeros((ENDS, waits.streams), np.int64), np.zeros((2, iterations * each), np.int64)
        asks = int((asked.kind <= OF_BUFFER).sum())
        # A request makes two rows at most: a segment, and the part that is cut from it. Rows are used again, so most of
        # this memory is never touched.
        blocks, pools = np.empty((2 * asks + 1, FIELDS), np.int64), np.empty((2, 2 * asks + 1), np.int64)
        calls, stops = np.empty((3 * asks + 1, 2), np.int64), np.empty((asks + 1, 3), np.int64)
        counts, totals = np.zeros(2, np.int64), np.zeros(TOTALS, np.int64)
        failed = self._serve.bound(
            *(asked.kind, asked.number, asked.place, np.tile(asked.instants, iterations), asked.sizes, capacity_bytes),
            *(waits.bounds, waits.stream, waits.until, waits.done),
            *(queues, ends, peaks),
            *(blocks, pools, counts, totals, calls, stops, np.empty(len(asked.sizes), np.int64)),
        )()
        begun = int(asked.iteration[failed]) + 1 if failed != NONE else iterations
        steps = [Iteration(asked.instants, *peaks[:, number * each : (number + 1) * each]) for number in range(begun)]
        if failed != NONE and asked.place[failed] != NONE:  # the instant of the failed request has no peak
            done = int(asked.place[failed]) % each
            steps[-1] = Iteration(
                asked.instants[:done], steps[-1].allocated_bytes[:done], steps[-1].reserved_bytes[:done]
            )
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


def _ints(values: Sequence[int] | Ints) -> Ints:
    return np.asarray(values, dtype=np.int64)


def _states(beginning: Beginning | None) -> tuple[Sequence[int], ...]:
    if beginning is None:
        return (), (), (), ()
    return beginning.temporary, beginning.before, beginning.behind, beginning.later


def _failed(asked: _Operations, at: int, totals: Ints, requests: Requested) -> ReplayOutOfMemory:
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
