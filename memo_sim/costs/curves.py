"""Interpolation of measured curves: values by log x, constant beyond the ends.

It is pure Python on purpose: pricing asks for single numbers, and a bisection is then faster than an array call.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import log

from memo_sim.contract.hardware import Curve


def between(x: Sequence[float], y: Sequence[float], at: float) -> float:
    """Return y at ``at`` by linear interpolation (x increasing); beyond the ends, the value at the end."""
    if at <= x[0]:
        return y[0]
    if at >= x[-1]:
        return y[-1]
    i = bisect_right(x, at)
    share = (at - x[i - 1]) / (x[i] - x[i - 1])
    return y[i - 1] + share * (y[i] - y[i - 1])


class LogCurve:
    """Interpolates y in log x, for a ``Curve`` or any list of points.

    >>> LogCurve([1.0, 100.0], [10.0, 30.0])(10.0)
    20.0
    """

    __slots__ = ("_logs", "_values", "first", "last")

    def __init__(self, x: Sequence[float], y: Sequence[float]) -> None:
        self.first = x[0]
        self.last = x[-1]
        self._logs = [log(value) for value in x]
        self._values = list(y)

    @classmethod
    def of(cls, curve: Curve) -> LogCurve:
        """Return the interpolation of a profile's curve."""
        return cls(curve.x, curve.y)

    def __call__(self, x: float) -> float:
        """Return y at ``x``; ``x`` must be positive."""
        return between(self._logs, self._values, log(x))

    def covers(self, x: float) -> bool:
        """Whether ``x`` lies in the measured range."""
        return self.first <= x <= self.last

    def is_above(self, other: LogCurve, times: float) -> bool:
        """Return whether y is at least ``times`` the other's y at every x.

        Both are linear between their points, so their points decide.
        """
        logs = {*self._logs, *other._logs}
        return all(
            between(self._logs, self._values, at) >= times * between(other._logs, other._values, at) for at in logs
        )

    def highest(self) -> float:
        """Return the largest y."""
        return max(self._values)
