"""Checks a placement independently of its solver: enumerates every way in which it can be wrong, pair by pair.

The check is simple on purpose, and shares no code with the solvers. It cuts addresses into pieces at every start and
end of a buffer, and looks in each piece whether a buffer is born before the one before it is dead. Where that is so, or
where buffers have too many pieces, it compares every pair of buffers that live at the same time; where these are too
many, it walks through time and compares each birth with its neighbours in address. The executor runs it before it uses
a placement.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from itertools import pairwise

import msgspec
import numpy as np

from memo_sim.contract.placement import Placement
from memo_sim.contract.requests import Requests

MOST_FAULTS = 20
MOST_PAIRS = 10**8
"""Pairs of living buffers that are compared one by one: about a second."""
PAIRS_AT_ONCE = 2**20
PIECES_AT_ONCE = 2**16
CHUNK = 512
"""Most neighbours in one of the sorted lists of living buffers."""
MOST_COUNTED = 2**62
"""Largest allowed address or instant, so that the sum of two fits into 64 bits."""


def check_placement(placement: Placement, requests: Requests) -> list[str]:
    """Return the faults of ``placement`` for ``requests``, at most twenty of each kind.

    Faults are:

    - a buffer that is missing, unknown, or placed twice;
    - a life, size, class or alignment that differs from the request (classes may be missing);
    - an offset that is negative, not aligned, or outside the arena;
    - two buffers that share an address while both are alive;
    - another program;
    - a lower bound that is not the one of the requests;
    - an arena size that is not the highest end of a buffer, rounded up to the alignment;
    - numbers that are too large to compare.
    """
    faults: list[str] = []
    if placement.program_sha256 != requests.program_sha256:
        faults.append(
            f"the placement belongs to program {placement.program_sha256[:12] or 'none'}, "
            f"the requests belong to program {requests.program_sha256[:12] or 'none'}"
        )
    if placement.alignment_bytes != requests.alignment_bytes:
        faults.append(f"alignment is {placement.alignment_bytes} bytes, {requests.alignment_bytes} were requested")
    faults += _same_buffers(placement, requests)[:MOST_FAULTS]
    faults += _same_classes(placement, requests)[:MOST_FAULTS]
    faults += _inside(placement)
    faults += _uncountable(placement)[:MOST_FAULTS] or _overlaps(placement)
    bound = largest_live_sum(requests)
    if placement.lower_bound_bytes != bound:
        faults.append(f"the lower bound is given as {placement.lower_bound_bytes} bytes, but it is {bound}")
    return faults


def _same_buffers(placement: Placement, requests: Requests) -> list[str]:
    columns = "ids", "lower", "upper", "size_bytes"
    if all(getattr(placement, name) == getattr(requests, name) for name in columns) and (
        len(set(placement.ids)) == len(placement.ids)
    ):
        return []
    wanted = {
        name: (lower, upper, size)
        for name, lower, upper, size in zip(
            requests.ids, requests.lower, requests.upper, requests.size_bytes, strict=True
        )
    }
    faults = []
    seen: set[str] = set()
    rows = zip(placement.ids, placement.lower, placement.upper, placement.size_bytes, strict=True)
    for name, lower, upper, size in rows:
        if name in seen:
            faults.append(f"{name} is placed twice")
        seen.add(name)
        if name not in wanted:
            faults.append(f"{name} was never requested")
        elif (lower, upper) != wanted[name][:2]:
            faults.append(
                f"{name} lives in [{lower}, {upper}), but [{wanted[name][0]}, {wanted[name][1]}) was requested"
            )
        elif size != wanted[name][2]:
            faults.append(f"{name} has {size} bytes, but {wanted[name][2]} were requested")
    faults += [f"{name} is not placed" for name in wanted if name not in seen]
    return faults


def _same_classes(placement: Placement, requests: Requests) -> list[str]:
    if not (placement.classes and requests.classes) or (
        placement.ids == requests.ids and placement.classes == requests.classes
    ):
        return []
    wanted = dict(zip(requests.ids, requests.classes, strict=True))
    return [
        f"{name} has class {kind or 'none'}, but {wanted[name] or 'none'} was requested"
        for name, kind in zip(placement.ids, placement.classes, strict=True)
        if name in wanted and kind != wanted[name]
    ]


def _uncountable(placement: Placement) -> list[str]:
    rows = zip(placement.ids, placement.upper, placement.offset_bytes, placement.size_bytes, strict=True)
    return [
        f"{name} dies at {upper} and ends at {offset + size}: numbers above {MOST_COUNTED} cannot be compared"
        for name, upper, offset, size in rows
        if max(upper, offset + size) > MOST_COUNTED
    ]


def _inside(placement: Placement) -> list[str]:
    faults = []
    highest = 0
    for name, offset, size in zip(placement.ids, placement.offset_bytes, placement.size_bytes, strict=True):
        if offset < 0:
            faults.append(f"{name} starts at {offset}")
        if offset % placement.alignment_bytes:
            faults.append(f"{name} starts at {offset}, which is not a multiple of {placement.alignment_bytes}")
        if offset + size > placement.arena_bytes:
            faults.append(f"{name} ends at {offset + size}, beyond the arena's {placement.arena_bytes} bytes")
        highest = max(highest, -(-(offset + size) // placement.alignment_bytes) * placement.alignment_bytes)
    faults = faults[:MOST_FAULTS]
    if highest != placement.arena_bytes:
        faults.append(f"the arena has {placement.arena_bytes} bytes, but the highest buffer ends at {highest}")
    return faults


def _overlaps(placement: Placement) -> list[str]:
    """Return the pairs of slots that share addresses while both live; of very many living slots the first found."""
    lower, upper = np.array(placement.lower, dtype=np.int64), np.array(placement.upper, dtype=np.int64)
    lasting = (lower == lower.min(initial=0)) & (upper == upper.max(initial=0))
    if faults := _lasting_that_overlap(placement, lasting):
        return faults
    lower, upper = np.sort(lower[~lasting]), upper[~lasting]
    pairs = int((np.searchsorted(lower, upper) - np.searchsorted(lower, lower)).sum())
    rest = _chosen(placement, np.flatnonzero(~lasting)) if lasting.any() else placement
    if _take_turns(rest, most=min(pairs, MOST_PAIRS)):
        return []
    return _pairs_that_overlap(rest) if pairs <= MOST_PAIRS else _neighbours_that_overlap(rest)


def _take_turns(placement: Placement, *, most: int) -> bool:
    """Return whether slots in every piece of addresses live one after the other; False for more than ``most`` pieces.

    Pieces end where any slot starts or ends. Two slots that share an address share a piece. If two slots of a piece
    overlap in time, so do two that are born one after the other.
    """
    lower, upper, start, size = (
        np.array(column, dtype=np.int64)
        for column in (placement.lower, placement.upper, placement.offset_bytes, placement.size_bytes)
    )
    order = np.argsort(lower, kind="stable")
    lower, upper, start, end = (each[order] for each in (lower, upper, start, start + size))
    cuts = np.unique(np.concatenate([start, end]), return_counts=True)[0]  # without counts it imports numpy.ma: 20 ms
    first = np.searchsorted(cuts, start)
    count = np.searchsorted(cuts, end) - first
    if int(count.sum()) > most:
        return False
    # Numbers that sort by piece, and in each piece by birth.
    slots = np.repeat(np.arange(len(order), dtype=np.int32), count)
    number = np.repeat(first - (np.cumsum(count) - count), count)
    number += np.arange(len(number), dtype=np.int32)
    number *= len(order)
    number += slots
    del slots
    number.sort()
    for begin in range(0, len(number), PIECES_AT_ONCE):
        piece, slot = np.divmod(number[begin : begin + PIECES_AT_ONCE + 1], len(order))
        if ((piece[1:] == piece[:-1]) & (lower[slot[1:]] < upper[slot[:-1]])).any():
            return False
    return True


def _chosen(placement: Placement, rows: np.ndarray) -> Placement:
    """Return the placement of some slots alone; its bytes, bound and hashes stay those of all slots."""
    columns = ("ids", "lower", "upper", "size_bytes", "offset_bytes")
    numbers = rows.tolist()
    return msgspec.structs.replace(
        placement, classes=[], **{name: [getattr(placement, name)[n] for n in numbers] for name in columns}
    )


def _lasting_that_overlap(placement: Placement, lasting: np.ndarray) -> list[str]:
    """Return slots that share addresses with one that lives all the time, such as a parameter.

    Such slots are ranges of addresses, sorted by their starts here. If two of them overlap, two neighbours do; if not,
    another slot that overlaps any of them overlaps the last range that starts at or below its start, or the next one.
    """
    start, size = (np.array(each, dtype=np.int64) for each in (placement.offset_bytes, placement.size_bytes))
    ranges = np.flatnonzero(lasting & (size > 0))
    ranges = ranges[np.argsort(start[ranges], kind="stable")]
    if not ranges.size:
        return []
    end = start + size
    pairs = [(one, two) for one, two in pairwise(ranges) if end[one] > start[two]]
    others = np.flatnonzero(~lasting & (size > 0))
    if not pairs:
        above = np.searchsorted(start[ranges], start[others], side="right")
        for number in (above - 1, above):
            exists = (number >= 0) & (number < len(ranges))
            near, other = ranges[number[exists]], others[exists]
            shared = (start[near] < end[other]) & (start[other] < end[near])
            pairs += list(zip(near[shared], other[shared], strict=True))
    return [_shared(placement, int(one), int(two)) for one, two in pairs[:MOST_FAULTS]]


def _shared(placement: Placement, one: int, two: int) -> str:
    names, starts = placement.ids, placement.offset_bytes
    return f"{names[one]} and {names[two]} share addresses from {max(starts[one], starts[two])} while both live"


def _neighbours_that_overlap(placement: Placement) -> list[str]:
    """Compare every slot at its birth with the living ones below and above it; one that overlaps is not kept."""
    rows = (placement.lower, placement.upper, placement.offset_bytes, placement.size_bytes)
    events = sorted(
        event
        for i, (lower, upper, _, size) in enumerate(zip(*rows, strict=True))
        if size
        for event in ((lower, True, i), (upper, False, i))
    )
    living, kept = _Living(), set[int]()
    faults: list[str] = []
    for _, born, i in events:
        start, end = placement.offset_bytes[i], placement.offset_bytes[i] + placement.size_bytes[i]
        if not born:
            if i in kept:
                living.remove(start, end, i)
            continue
        other = living.overlapping(start, end)
        if other is None:
            living.add(start, end, i)
            kept.add(i)
            continue
        faults.append(_shared(placement, other, i))
        if len(faults) == MOST_FAULTS:
            break
    return faults


class _Living:
    """Ranges of addresses that do not overlap, as (start, end, slot) in sorted lists of bounded length."""

    def __init__(self) -> None:
        self._lists: list[list[tuple[int, int, int]]] = [[]]
        self._firsts: list[int] = [-1]  # no address is lower

    def _list_of(self, start: int) -> int:
        return bisect_right(self._firsts, start) - 1

    def overlapping(self, start: int, end: int) -> int | None:
        """Return a slot that shares addresses with [start, end)."""
        at = self._list_of(start)
        near = self._lists[at]
        place = bisect_right(near, (start, end, -1))
        above = near[place] if place < len(near) else next((each[0] for each in self._lists[at + 1 :] if each), None)
        below = near[place - 1] if place else next((each[-1] for each in reversed(self._lists[:at]) if each), None)
        if above is not None and above[0] < end:
            return above[2]
        return below[2] if below is not None and below[1] > start else None

    def add(self, start: int, end: int, slot: int) -> None:
        """Add a range that overlaps no other."""
        at = self._list_of(start)
        near = self._lists[at]
        insort(near, (start, end, slot))
        if len(near) > CHUNK:
            half = len(near) // 2
            self._lists[at : at + 1] = [near[:half], near[half:]]
            self._firsts.insert(at + 1, near[half][0])

    def remove(self, start: int, end: int, slot: int) -> None:
        """Remove a range that was added."""
        near = self._lists[self._list_of(start)]
        near.pop(bisect_left(near, (start, end, slot)))


def _pairs_that_overlap(placement: Placement) -> list[str]:
    """Compare every slot with all slots that are born during its life."""
    order = np.argsort(np.array(placement.lower, dtype=np.int64), kind="stable")
    lower, upper, start, size = (
        np.array(column, dtype=np.int64)[order]
        for column in (placement.lower, placement.upper, placement.offset_bytes, placement.size_bytes)
    )
    end = start + size
    first = np.arange(len(order)) + 1
    later = np.searchsorted(lower, upper) - first  # slots after these are born after the slot's death
    before = np.append(0, np.cumsum(later))
    faults: list[str] = []
    begin = 0
    while begin < len(order):
        stop = max(begin + 1, int(np.searchsorted(before, before[begin] + PAIRS_AT_ONCE, side="right")) - 1)
        one = np.repeat(np.arange(begin, stop), later[begin:stop])
        two = np.arange(len(one)) - np.repeat(before[begin:stop] - before[begin], later[begin:stop]) + one + 1
        shared = (start[two] < end[one]) & (start[one] < end[two]) & (size[one] > 0) & (size[two] > 0)
        for i in np.flatnonzero(shared & (upper[two] > lower[one])).tolist():
            faults.append(_shared(placement, int(order[one[i]]), int(order[two[i]])))
            if len(faults) == MOST_FAULTS:
                return faults
        begin = stop
    return faults


def largest_live_sum(requests: Requests) -> int:
    """Return the largest sum of bytes alive at one instant, with sizes rounded up to the alignment."""
    unit = requests.alignment_bytes
    changes: dict[int, int] = {}
    for lower, upper, size in zip(requests.lower, requests.upper, requests.size_bytes, strict=True):
        rounded = -(-size // unit) * unit
        changes[lower] = changes.get(lower, 0) + rounded
        changes[upper] = changes.get(upper, 0) - rounded
    live = most = 0
    for _, change in sorted(changes.items()):
        live += change
        most = max(most, live)
    return most
