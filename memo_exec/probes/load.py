"""Detects other load on the machine during calibration, from the system load and from the spread of repeats.

A profile that was measured on a busy machine is wrong, and its numbers do not show that. So the provenance records the
load before the first probe (later the probes themselves cause load) and the median spread of all timings. If either is
too large, calibration warns.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from memo_exec.interpreter.lanes import available_cores
from memo_exec.machine.machine import Machine
from memo_exec.probes.timing import Sample
from memo_sim.contract.units import format_percent

COPIES = 1
"""Threads that copy, in addition to those that compute."""

SPARE_CORES = 0.5
"""Load of an idle system."""

MOST_SPREAD = 0.1
"""Largest accepted median spread of the repeats: a quiet machine has 0.03 to 0.06, a busy one several times that."""


@dataclass(frozen=True)
class Load:
    """The system's load average of the last minute, in runnable threads, and the number of cores."""

    threads: float
    cores: int

    @classmethod
    def now(cls) -> Load:
        """Return the current load."""
        return cls(os.getloadavg()[0], max(os.cpu_count() or 1, available_cores()))

    def text(self) -> str:
        """Return the load as text."""
        return f"{self.threads:.1f} on {self.cores} cores"


def disturbances(before: Load, machine: Machine, samples: Sequence[Sample]) -> list[str]:
    """Return the signs that the machine was busy during calibration, as sentences; empty on a quiet machine."""
    found = []
    wanted = machine.compute_threads + COPIES
    if before.threads > max(0, before.cores - wanted) + SPARE_CORES:
        found.append(f"the load was {before.text()} before calibration, which itself needs {wanted} threads")
    if (spread := middle_spread(samples)) > MOST_SPREAD:
        found.append(f"the median spread of repeats is {format_percent(spread, 0)}; on a quiet machine it is about 5 %")
    return found


def middle_spread(samples: Sequence[Sample]) -> float:
    """Return the median of the samples' spreads (``timing.py`` defines a spread)."""
    return median(sample.spread for sample in samples)
