"""Chooses between a function and its compiled twin: numba's where it is installed and pays, else the plain one.

To load a twin that another process has compiled takes 0.04 s and 46 MiB, to compile it two seconds. So a process begins
with the plain function. It loads a twin before the call with which its work reaches ``soon`` units, if a file holds the
twin's code. Else it compiles the twin before the call that reaches ``first`` units, and keeps the code for others. Both
functions compute the same numbers to the last bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from memo_sim.engine.native import NotKept

Twin = TypeVar("Twin", bound=Callable[..., object])
Loaded_co = TypeVar("Loaded_co", bound=Callable[..., object], covariant=True)


class Loading(Protocol[Loaded_co]):
    """Loads a compiled twin."""

    def __call__(self, *, compiles: bool) -> Loaded_co:
        """Return the twin; raises ``NotKept`` where it would have to be compiled and that is not wanted."""


class Compiled(Generic[Twin]):
    """A plain function until its compiled twin pays."""

    def __init__(self, plain: Twin, load: Loading[Twin], *, soon: int, first: int) -> None:
        """``load`` may raise anything; then the plain function stays."""
        self._plain = self._chosen = plain
        self._load = load
        self._soon, self._first = soon, first
        self._done = 0
        self._looked = False
        """Whether a file was looked for that holds the twin's code."""
        self._decided = False
        """Whether the twin was loaded or does not work."""
        self._compiles = True
        """Whether this process decides when to compile."""

    @property
    def compiled(self) -> bool:
        """Whether the compiled twin is used by now."""
        return self._chosen is not self._plain

    def beside(self, compiled: bool) -> None:
        """Follow another process: use the twin if it does, and compile it no sooner."""
        if compiled and not self.compiled:
            self._take(compiles=True)
        self._compiles = False

    def of(self, work: int) -> Twin:
        """Return the function for a call of so many units of work, which are counted."""
        self._done += work
        if not self._decided:
            if self._compiles and self._done >= self._first:
                self._take(compiles=True)
            elif self._done >= self._soon and not self._looked:
                self._looked = True
                self._take(compiles=False)
        return self._chosen

    def _take(self, *, compiles: bool) -> None:
        self._decided = True
        try:
            self._chosen = self._load(compiles=compiles)
        except NotKept:
            self._decided = False
        except Exception as error:  # numba also fails when its code cannot be kept
            reason = f"{type(error).__name__}: {error}"
            logger = logging.getLogger(__name__)
            name = getattr(self._plain, "__qualname__", type(self._plain).__qualname__)
            logger.debug("%s is not compiled, because numba does not work: %s", name, reason)
