"""A cache of limited size that drops what has not been used for the longest time.

A search lowers thousands of small programs and uses few of them again, most of these soon. All of them would need
gigabytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """Values by key whose sizes add up to at most ``most``, and in any case the one that was used last."""

    def __init__(self, most: int, size: Callable[[Value], int] = lambda _: 1) -> None:
        """``size``: the size of a value; without it, ``most`` is a number of values."""
        self._most, self._size = most, size
        self._kept: OrderedDict[Key, Value] = OrderedDict()
        self._sum = 0

    def of(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return the value of ``key``, which ``make`` makes where it is not kept."""
        if key not in self._kept:
            self._kept[key] = made = make()
            self._sum += self._size(made)
        self._kept.move_to_end(key)
        while self._sum > self._most and len(self._kept) > 1:
            self._sum -= self._size(self._kept.popitem(last=False)[1])
        return self._kept[key]
