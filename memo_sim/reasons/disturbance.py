"""How much longer recorded work took because of what ran beside it, by a profile's own figures.

The engine slows lanes that are busy at once (``costs/contention.py``). A recorded span saw the same, so a prediction of
it as if it had run alone would blame the rate for what is contention, and a corrected profile would count it twice:

    compute      | product            |
    d2h              | copy      |
    h2d                  | copy      |     while both copies run, each has the rate ``duplex``

    stretch = seconds of the span / (sum over its parts of seconds x rate in this part, 1 when alone)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from memo_sim.contract.cluster import Cluster
from memo_sim.contract.hardware import Hardware
from memo_sim.costs.contention import NodeRates
from memo_sim.program.ir.instruction import Lane


class Disturbance:
    """What ran at every instant of a recording. Collectives are assumed to have their links alone."""

    def __init__(
        self, spans: Iterable[tuple[Lane, float, float]], hardware: Hardware, cluster: Cluster, local_devices: int
    ) -> None:
        """``spans``: lane, start and end of all recorded work; any collective is on ``Lane.TP``.

        ``local_devices`` is how many devices of a node do the same at the same time.
        """
        rates = NodeRates(hardware, cluster, local_devices)
        changes = sorted(change for lane, a, b in spans if b > a for change in ((a, lane, 1), (b, lane, -1)))
        running = dict.fromkeys(Lane, 0)
        self._times: list[float] = []
        self._sums: dict[Lane, list[float]] = {lane: [] for lane in (Lane.COMPUTE, Lane.D2H, Lane.H2D)}
        self._rates: list[tuple[float, ...]] = []
        for time, lane, change in changes:
            running[lane] += change
            busy = sum(1 << each for each, count in running.items() if count)
            if self._times and self._times[-1] == time:
                self._rates[-1] = rates.rates(busy)
                continue
            for each, sums in self._sums.items():
                before = (time - self._times[-1]) * self._rates[-1][each] if self._times else 0.0
                sums.append((sums[-1] if sums else 0.0) + before)
            self._times.append(time)
            self._rates.append(rates.rates(busy))

    def stretch(self, lane: Lane, start: float, end: float) -> float:
        """Return how many times as long a span took as it would have alone, at least 1."""
        if lane not in self._sums or end <= start or not self._times:
            return 1.0
        alone = self._until(lane, end) - self._until(lane, start)
        return max(1.0, (end - start) / alone) if alone > 0 else 1.0

    def _until(self, lane: Lane, time: float) -> float:
        """Return the work done on a lane, in seconds alone, if it had run from the first instant to ``time``."""
        at = bisect_right(self._times, time) - 1
        return self._sums[lane][at] + (time - self._times[at]) * self._rates[at][lane]
