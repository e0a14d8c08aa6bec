"""First-fit allocation in one range of memory: each request gets the lowest hole that is large enough.

The executor uses it for buffers that no plan has placed. A planner uses it to find how much memory those need.
"""

from __future__ import annotations

from bisect import bisect_left

from memo_sim.contract.requests import Requests

ALIGNMENT_BYTES = 64
"""Alignment of every allocated range."""


class FirstFit:
    """The free ranges below ``top``, sorted by offset; all numbers are bytes.

    With ``piece``, no range crosses a multiple of it, unless the range is larger than a piece.
    """

    def __init__(self, piece: int | None = None) -> None:
        self._piece = piece
        self.top = 0
        """End of the range in use: the most that was ever needed, including holes."""
        self.free: list[tuple[int, int]] = []

    def take(self, size: int, limit: int | None = None) -> int | None:
        """Return the lowest offset with ``size`` free bytes; without such a hole, extend ``top``.

        None when ``top`` would exceed ``limit``.
        """
        size = _aligned(size)
        for i, (first, length) in enumerate(self.free):
            offset = self._fitting(first, size)
            if offset + size <= first + length:
                rests = [(first, offset - first), (offset + size, first + length - offset - size)]
                self.free[i : i + 1] = [rest for rest in rests if rest[1]]
                return offset
        grows = bool(self.free) and sum(self.free[-1]) == self.top
        first = self.free[-1][0] if grows else self.top
        offset = self._fitting(first, size)
        if limit is not None and offset + size > limit:
            return None
        if grows:
            self.free.pop()
        if offset > first:
            self.free.append((first, offset - first))
        self.top = offset + size
        return offset

    def _fitting(self, first: int, size: int) -> int:
        """Return the lowest offset from ``first`` on at which ``size`` bytes cross no multiple of the piece."""
        piece = self._piece
        if piece is None or first % piece + size <= piece:
            return first
        return first if size > piece else -(-first // piece) * piece

    def give(self, offset: int, size: int) -> None:
        """Free a range, and merge it with its free neighbours."""
        free, end = self.free, offset + _aligned(size)
        at = after = bisect_left(free, (offset, 0))
        if after < len(free) and free[after][0] == end:
            end, after = sum(free[after]), after + 1
        if at and sum(free[at - 1]) == offset:
            at -= 1
            offset = free[at][0]
        free[at:after] = [(offset, end - offset)]


def offsets_of(requests: Requests) -> list[int]:
    """Return an offset for every buffer; buffers are placed in the order of their births.

    Buffers that die at the instant of a birth are freed first.
    """
    unit, space = requests.alignment_bytes, FirstFit()
    sizes = [-(-size // unit) * unit for size in requests.size_bytes]
    offsets = [0] * len(sizes)
    order = sorted(range(len(sizes)), key=lambda i: (requests.lower[i], -requests.upper[i]))
    deaths = sorted(range(len(sizes)), key=lambda i: requests.upper[i])
    dead = 0
    for i in order:
        while requests.upper[deaths[dead]] <= requests.lower[i]:
            space.give(offsets[deaths[dead]], sizes[deaths[dead]])
            dead += 1
        offset = space.take(sizes[i])
        assert offset is not None  # take() returns None only when there is a limit
        offsets[i] = offset
    return offsets


def arena_bytes(requests: Requests, offsets: list[int]) -> int:
    """Return the size of an arena that holds every buffer at its offset."""
    unit = requests.alignment_bytes
    ends = (offset + size for offset, size in zip(offsets, requests.size_bytes, strict=True))
    return max((-(-end // unit) * unit for end in ends), default=0)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
