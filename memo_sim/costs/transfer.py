"""Prices a copy between device and pinned host memory that runs alone: ``max(launch floor, bytes / rate(bytes))``.

``NodeRates`` says how much other copies slow it, on this device or on its neighbours.
"""

from __future__ import annotations

from memo_sim.contract.hardware import CopyRates
from memo_sim.costs.curves import LogCurve


class CopyTimes:
    """Prices the copies of one direction."""

    def __init__(self, name: str, rates: CopyRates, least_s: float) -> None:
        self._name = name
        self._alone = LogCurve.of(rates.alone)
        self._least_s = least_s

    def seconds(self, size_bytes: int, outside: set[str]) -> float:
        """Return the seconds of a copy when nothing else moves."""
        if size_bytes <= 0:
            return 0.0
        streaming = size_bytes / self._alone(size_bytes)
        if streaming > self._least_s and not self._alone.covers(size_bytes):
            outside.add(self._name)
        return max(self._least_s, streaming)
