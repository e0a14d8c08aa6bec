"""Defines the placement problem in numbers, with the lower bound and the clock that all solvers use.

Each buffer is a rectangle that can move only up and down: buffer i occupies [lower_i, upper_i) in time and size_i
addresses. A solver finds offsets without overlap such that the highest end, the peak, is as low as possible. No peak is
below the largest sum of live sizes, so a peak equal to it is optimal.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from memo_sim.contract.requests import Requests
from memo_sim.program.analysis.columns import distinct

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Problem:
    """Lives [lower, upper) in instants and sizes in units of ``unit_bytes`` (the sizes' greatest common divisor)."""

    lower: Ints
    upper: Ints
    size: Ints
    unit_bytes: int = 1
    enough: int = 0
    """A lower peak than this (in units) gains nothing, because other parts of the whole problem need as much."""

    @property
    def count(self) -> int:
        """The number of buffers."""
        return len(self.size)

    @cached_property
    def lower_bound(self) -> int:
        """The largest sum of live sizes, in units, or ``enough`` if that is larger: no placement needs less."""
        return int(self.live.max(initial=self.enough))

    @cached_property
    def instants(self) -> Ints:
        """The instants at which buffers are born, in order: live sums grow only there."""
        return distinct(self.lower)

    @cached_property
    def live(self) -> Ints:
        """Live units at each of ``instants``."""
        born = np.searchsorted(self.instants, self.lower)
        dead = np.searchsorted(self.instants, self.upper)
        change = np.zeros(len(self.instants) + 1, dtype=np.int64)
        np.add.at(change, born, self.size)
        np.subtract.at(change, dead, self.size)
        live: Ints = np.cumsum(change)[:-1]
        return live

    def peak(self, offsets: Ints) -> int:
        """Return the highest end of a placement, in units."""
        return int((offsets + self.size).max(initial=0))

    def part(self, chosen: Ints) -> Problem:
        """Return the problem of the chosen buffers."""
        return Problem(self.lower[chosen], self.upper[chosen], self.size[chosen], self.unit_bytes, self.enough)


def problem_of(requests: Requests) -> Problem:
    """Return the problem of ``requests``; sizes are rounded up to the alignment, and empty buffers are included."""
    unit = requests.alignment_bytes
    sizes = -(-np.array(requests.size_bytes, dtype=np.int64) // unit) * unit
    scale = int(np.gcd.reduce(sizes, initial=0)) or unit
    return Problem(
        lower=np.array(requests.lower, dtype=np.int64),
        upper=np.array(requests.upper, dtype=np.int64),
        size=sizes // scale,
        unit_bytes=scale,
    )


class Clock:
    """A time limit that every solver observes."""

    def __init__(self, limit_s: float) -> None:
        self.began = time.monotonic()
        self.limit_s = limit_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock was made."""
        return time.monotonic() - self.began

    @property
    def left_s(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self.limit_s - self.elapsed_s)


class Solver(Protocol):
    """A function that places buffers.

    Returns offsets in units, or None when it finds nothing better than ``incumbent`` (known offsets, or None) in time.
    It stops as soon as its peak is ``problem.lower_bound``. The caller must check the result.
    """

    def __call__(self, problem: Problem, clock: Clock, incumbent: Ints | None) -> Ints | None:
        """Place the buffers of ``problem`` before ``clock`` runs out."""
