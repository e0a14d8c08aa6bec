"""Seconds of a copy between device and pinned host memory alone on its link: max(launch floor, bytes / rate(bytes)).

What other copies take away, of this device or of its neighbours, is the engine's business through ``NodeRates``.
"""

from __future__ import annotations

from memo_sim.contract.hardware import CopyRates
from memo_sim.costs.curves import LogCurve


class CopyTimes:
    """One direction's copies."""

    def __init__(self, name: str, rates: CopyRates, least_s: float) -> None:
        self._name = name
        self._alone = LogCurve.of(rates.alone)
        self._least_s = least_s

    def seconds(self, size_bytes: int, outside: set[str]) -> float:
        """Return how long the copy takes when nothing else moves."""
        if size_bytes <= 0:
            return 0.0
        streaming = size_bytes / self._alone(size_bytes)
        if streaming > self._least_s and not self._alone.covers(size_bytes):
            outside.add(self._name)
        return max(self._least_s, streaming)
