"""Ranges of one stretch of memory, dealt and taken back: each take gets the lowest hole that is large enough."""

from __future__ import annotations

ALIGNMENT_BYTES = 64
"""Of every range's first byte."""


class FirstFit:
    """Free ranges below ``top``, sorted by offset; all numbers are bytes."""

    def __init__(self) -> None:
        self.top = 0
        """End of the stretch: the most that was ever needed, holes included."""
        self.free: list[tuple[int, int]] = []

    def take(self, size: int, limit: int | None = None) -> int | None:
        """Return the lowest offset with ``size`` free bytes, growing the stretch when there is none.

        None when it would have to grow beyond ``limit``.
        """
        size = _aligned(size)
        for i, (offset, length) in enumerate(self.free):
            if length >= size:
                self.free[i : i + 1] = [(offset + size, length - size)] if length > size else []
                return offset
        grows = bool(self.free) and sum(self.free[-1]) == self.top
        offset = self.free[-1][0] if grows else self.top
        if limit is not None and offset + size > limit:
            return None
        if grows:
            self.free.pop()
        self.top = offset + size
        return offset

    def give(self, offset: int, size: int) -> None:
        """Return a range, merged with its neighbours."""
        self.free.append((offset, _aligned(size)))
        self.free.sort()
        merged: list[tuple[int, int]] = []
        for start, length in self.free:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self.free = merged


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
