"""Checks a placement without trusting what made it: every way it can be wrong is enumerated, pair by pair.

Quadratic and plain on purpose. Nothing is shared with the solvers; the executor runs it before it obeys a placement.
"""

from __future__ import annotations

import numpy as np

from memo_sim.contract.placement import Placement
from memo_sim.contract.requests import Requests

MOST_FAULTS = 20
MOST_COUNTED = 2**62
"""Addresses and instants stay below it, so that no sum of two leaves 64 bits."""


def check_placement(placement: Placement, requests: Requests) -> list[str]:
    """Return the faults of ``placement`` for ``requests``, the first twenty of each kind.

    Wrong are: a buffer that is missing, unknown or placed twice; another life, size, class or alignment than was
    requested (classes may be left out); an offset that is negative, not aligned or leaves the arena; two buffers that
    share an address while both live; another program; a lower bound that is not the requests'; an arena of another size
    than its highest end, rounded up to the alignment; numbers too large to be compared.
    """
    faults: list[str] = []
    if placement.program_sha256 != requests.program_sha256:
        faults.append(
            f"the placement is of program {placement.program_sha256[:12] or 'none'}, "
            f"the requests are of {requests.program_sha256[:12] or 'none'}"
        )
    if placement.alignment_bytes != requests.alignment_bytes:
        faults.append(f"alignment is {placement.alignment_bytes} bytes, requested were {requests.alignment_bytes}")
    faults += _same_buffers(placement, requests)[:MOST_FAULTS]
    faults += _same_classes(placement, requests)[:MOST_FAULTS]
    faults += _inside(placement)
    faults += _uncountable(placement)[:MOST_FAULTS] or _overlaps(placement)
    bound = largest_live_sum(requests)
    if placement.lower_bound_bytes != bound:
        faults.append(f"the lower bound is said to be {placement.lower_bound_bytes} bytes and is {bound}")
    return faults


def _same_buffers(placement: Placement, requests: Requests) -> list[str]:
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
            faults.append(f"{name} lives in [{lower}, {upper}), requested was [{wanted[name][0]}, {wanted[name][1]})")
        elif size != wanted[name][2]:
            faults.append(f"{name} has {size} bytes, requested were {wanted[name][2]}")
    faults += [f"{name} is not placed" for name in wanted if name not in seen]
    return faults


def _same_classes(placement: Placement, requests: Requests) -> list[str]:
    if not (placement.classes and requests.classes):
        return []
    wanted = dict(zip(requests.ids, requests.classes, strict=True))
    return [
        f"{name} is of class {kind or 'none'}, requested was {wanted[name] or 'none'}"
        for name, kind in zip(placement.ids, placement.classes, strict=True)
        if name in wanted and kind != wanted[name]
    ]


def _uncountable(placement: Placement) -> list[str]:
    rows = zip(placement.ids, placement.upper, placement.offset_bytes, placement.size_bytes, strict=True)
    return [
        f"{name} dies at {upper} and ends at {offset + size}: beyond {MOST_COUNTED} nothing is compared"
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
            faults.append(f"{name} starts at {offset}, which is no multiple of {placement.alignment_bytes}")
        if offset + size > placement.arena_bytes:
            faults.append(f"{name} ends at {offset + size}, behind the arena's {placement.arena_bytes} bytes")
        highest = max(highest, -(-(offset + size) // placement.alignment_bytes) * placement.alignment_bytes)
    faults = faults[:MOST_FAULTS]
    if highest != placement.arena_bytes:
        faults.append(f"the arena has {placement.arena_bytes} bytes, the highest buffer ends at {highest}")
    return faults


def _overlaps(placement: Placement) -> list[str]:
    """Compare every slot with all that are born during its life."""
    order = sorted(range(len(placement.ids)), key=lambda i: placement.lower[i])
    lower, upper, start, size = (
        np.array(column, dtype=np.int64)[order]
        for column in (placement.lower, placement.upper, placement.offset_bytes, placement.size_bytes)
    )
    end = start + size
    faults = []
    for i in range(len(order)):
        later = slice(i + 1, int(np.searchsorted(lower, upper[i])))  # nobody behind it is born before i is dead
        shared = (upper[later] > lower[i]) & (start[later] < end[i]) & (start[i] < end[later]) & (size[later] > 0)
        for j in (np.flatnonzero(shared) + i + 1).tolist() if size[i] else ():
            one, two = placement.ids[order[i]], placement.ids[order[j]]
            faults.append(f"{one} and {two} share addresses from {max(start[i], start[j])} while both live")
            if len(faults) == MOST_FAULTS:
                return faults
    return faults


def largest_live_sum(requests: Requests) -> int:
    """Return the most bytes that live at one instant, sizes rounded up to the alignment."""
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
