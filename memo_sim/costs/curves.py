"""Curves ready to be asked often: values by log x, constant beyond the ends.

Pure Python on purpose: a what-if asks for single numbers, and a bisection beats an array call there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import log

from memo_sim.contract.hardware import Curve


def between(x: Sequence[float], y: Sequence[float], at: float) -> float:
    """Return y at ``at`` on the straight lines between the points (x increasing), constant beyond the ends."""
    if at <= x[0]:
        return y[0]
    if at >= x[-1]:
        return y[-1]
    i = bisect_right(x, at)
    share = (at - x[i - 1]) / (x[i] - x[i - 1])
    return y[i - 1] + share * (y[i] - y[i - 1])


class LogCurve:
    """y by log x: the values of a ``Curve``, or of any points.

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
        """Return the curve of a profile."""
        return cls(curve.x, curve.y)

    def __call__(self, x: float) -> float:
        """Return y at ``x``, a positive number."""
        return between(self._logs, self._values, log(x))

    def covers(self, x: float) -> bool:
        """Whether ``x`` lies in the range that was calibrated."""
        return self.first <= x <= self.last
