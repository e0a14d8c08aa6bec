"""Records the memory requests of a step below torch, and places them in an arena."""

from __future__ import annotations

import ctypes

import numpy as np

from memo_sim.contract.placement import Placement
from memo_sim.contract.requests import ARENA_ALIGNMENT_BYTES, Requests
from memo_sim.program.arena.check_placement import check_placement


class Recorder:
    """Records the memory requests of one stream between ``start`` and ``stop``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def start(self, stream: int = 0) -> None:
        """Clear the record, and start to record the requests of ``stream`` (a stream handle)."""
        self._library.memo_record(1, stream)

    def stop(self) -> Requests:
        """Stop recording, and return the requests since ``start``."""
        self._library.memo_record(0, None)
        count = self._library.memo_event_count()
        flat = (ctypes.c_int64 * (2 * count))()
        count = self._library.memo_events(flat, count)
        return requests_of_events(list(zip(flat[: 2 * count : 2], flat[1 : 2 * count : 2], strict=True)))


def requests_of_events(events: list[tuple[int, int]]) -> Requests:
    """Convert recorded events to requests; each event is one instant.

    An event is (request, size in bytes), or (request, -1) when the request is freed. A request that is never freed
    lasts to the end.

    Raises:
        ValueError: if an event frees a request that was never made.
    """
    lower: dict[int, int] = {}
    upper: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for instant, (request, size) in enumerate(events):
        if size >= 0:
            lower[request], sizes[request] = instant, size
        elif request in lower:
            upper[request] = instant
        else:
            raise ValueError(f"request {request} is freed but was never made")
    return Requests(
        name="recorded",
        ids=[str(request) for request in lower],
        lower=list(lower.values()),
        upper=[upper.get(request, len(events)) for request in lower],
        size_bytes=list(sizes.values()),
        alignment_bytes=ARENA_ALIGNMENT_BYTES,
    )


def place_recorded(requests: Requests) -> Placement:
    """Place recorded requests by first fit, the largest first, and check the placement.

    The planner's solvers are not available on machines that only run plans. For training steps of transformers, this
    order reaches the largest live sum, which is the lower bound, or comes within a few percent of it.

    Raises:
        ValueError: if the placement is invalid, which would be a bug.
    """
    unit = requests.alignment_bytes
    size = -(-np.array(requests.size_bytes, dtype=np.int64) // unit) * unit
    lower, upper = (np.array(column, dtype=np.int64) for column in (requests.lower, requests.upper))
    offset = np.full(len(size), -1, dtype=np.int64)
    for row in np.lexsort((lower, -size)).tolist():
        others = np.flatnonzero((offset >= 0) & (lower < upper[row]) & (upper > lower[row]))
        top = 0
        for other in others[np.argsort(offset[others])].tolist():
            if offset[other] - top >= size[row]:
                break
            top = max(top, int(offset[other] + size[other]))
        offset[row] = top
    placement = Placement(
        name=requests.name,
        arena_bytes=int((offset + size).max(initial=0)),
        lower_bound_bytes=_largest_live_sum(lower, upper, size),
        alignment_bytes=unit,
        solver="first fit",
        ids=requests.ids,
        lower=requests.lower,
        upper=requests.upper,
        size_bytes=requests.size_bytes,
        offset_bytes=offset.tolist(),
    )
    if faults := check_placement(placement, requests):
        raise ValueError("; ".join(faults))
    return placement


def _largest_live_sum(lower: np.ndarray, upper: np.ndarray, size: np.ndarray) -> int:
    change = np.zeros(int(upper.max(initial=0)) + 1, dtype=np.int64)
    np.add.at(change, lower, size)
    np.add.at(change, upper, -size)
    return int(np.cumsum(change).max(initial=0))
