"""Chooses between a function and its compiled twin: numba's where it is installed and pays, else the plain one.

Importing numba and reading a compiled function from its cache takes about a third of a second; compiling it the first
time takes about two. So a process begins with the plain function. Numba is imported once that has done ``first`` units
of work, and at once for a call of ``long`` units. Both functions compute the same numbers to the last bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, TypeVar

Twin = TypeVar("Twin", bound=Callable[..., object])


class Compiled(Generic[Twin]):
    """A plain function until its compiled twin pays."""

    def __init__(self, plain: Twin, load: Callable[[], Twin], *, first: int, long: int) -> None:
        """``load`` imports the compiled twin; it raises whatever its import raises."""
        self._plain = self._chosen = plain
        self._load = load
        self._left, self._long = first, long
        self._decided = False
        """Whether numba was tried, or another process decides."""

    @property
    def compiled(self) -> bool:
        """Whether the compiled twin is used by now."""
        return self._chosen is not self._plain

    def beside(self, compiled: bool) -> None:
        """Follow another process: import numba if it uses the twin there, where it is in the cache; else do not."""
        if compiled and not self.compiled:
            self._import()
        self._decided = True

    def of(self, work: int) -> Twin:
        """Return the function for a call of so many units of work, which are counted."""
        self._left -= work
        if not self._decided and (self._left <= 0 or work >= self._long):
            self._import()
        return self._chosen

    def _import(self) -> None:
        self._decided = True
        try:
            self._chosen = self._load()
        except Exception as error:  # numba also fails when its cache cannot be read or written
            reason = f"{type(error).__name__}: {error}"
            logger = logging.getLogger(__name__)
            logger.debug("%s is not compiled, because numba does not work: %s", self._plain.__qualname__, reason)
