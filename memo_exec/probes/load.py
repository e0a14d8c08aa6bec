"""Whether the machine was its prober's own while it was measured: what else it ran, and how far repeats differ.

A profile of a busy machine is wrong, and nothing in its numbers shows it. So the load before the first probe
(afterwards it is the probes' own) and the middle spread of all timings go into its provenance, and what is too much is
said.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from memo_exec.interpreter.lanes import available_cores
from memo_exec.machine.machine import Machine
from memo_exec.probes.timing import Sample

COPIES = 1
"""Threads that copy beside compute's."""

SPARE_CORES = 0.5
"""Load that a system at rest has."""

MOST_SPREAD = 0.1
"""Of the middle operator's repeats: 0.03 to 0.06 on a quiet machine, several times that on a busy one."""


@dataclass(frozen=True)
class Load:
    """Load of the last minute as the system averages it, in runnable threads; the cores that bear it."""

    threads: float
    cores: int

    @classmethod
    def now(cls) -> Load:
        """Return the load before anything is measured."""
        return cls(os.getloadavg()[0], max(os.cpu_count() or 1, available_cores()))

    def text(self) -> str:
        """Return the load in words."""
        return f"{self.threads:.1f} on {self.cores} cores"


def disturbances(before: Load, machine: Machine, samples: Sequence[Sample]) -> list[str]:
    """Return what says that a profile was measured on a busy machine; nothing on a quiet one."""
    found = []
    wanted = machine.compute_threads + COPIES
    if before.threads > max(0, before.cores - wanted) + SPARE_CORES:
        found.append(f"the load was {before.text()} before it began, and {wanted} threads measure")
    if (spread := middle_spread(samples)) > MOST_SPREAD:
        found.append(f"repeats of the middle operator differ by {spread:.0%}, on a quiet machine by some 5%")
    return found


def middle_spread(samples: Sequence[Sample]) -> float:
    """Return the median of the spreads (``timing.py``)."""
    return median(sample.spread for sample in samples)
