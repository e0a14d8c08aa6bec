"""The seconds that a calibration may take, counted from the start of the process, and the share of each part.

    |start-up|together|copies|memory|operators ............|profile|
                 .25     .35            quick after .6       .95    1

A part that begins late is cut: it repeats less and leaves out points, which the profile names. What a profile cannot do
without is measured in any case, so a budget of some seconds is exceeded. Behind the operators, time is reserved for the
profile and for the end of the processes, which takes longer where their start did: under torchrun, on a busy machine.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

TOGETHER_END, COPIES_END, QUICK_FROM, OPERATORS_END = 0.25, 0.35, 0.6, 0.95
"""Shares of the budget after which: ranks measure less together, copies are cut, the ends of tables are repeated less,
and every operator has to end."""

ENDING = 0.2
"""How long the profile and the end of the processes take, as a share of their start: 0.6 s after a start of 3.8 s."""


class Budget:
    """``seconds`` from now on, less those that have passed already."""

    def __init__(self, seconds: float, spent_s: float = 0.0) -> None:
        self._begun = time.perf_counter() - spent_s
        self._seconds, self._spent_s = seconds, spent_s

    def until(self, share: float) -> float:
        """Return when a share of the budget has passed, by ``time.perf_counter``."""
        return self._begun + share * self._seconds

    def operators_until(self) -> float:
        """Return when the last operator has to end, by ``time.perf_counter``."""
        return min(self.until(OPERATORS_END), self.until(1.0) - ENDING * self._spent_s)

    def over(self, share: float) -> bool:
        """Return whether a share of the budget has passed."""
        return time.perf_counter() > self.until(share)


def launched_s() -> float:
    """Return the seconds since this process, or torchrun that launched it, started; 0 where the system does not say."""
    return process_age_s(Path(f"/proc/{os.getppid() if 'TORCHELASTIC_RUN_ID' in os.environ else os.getpid()}/stat"))


def process_age_s(stat: Path) -> float:
    """Return the seconds since the process of a ``/proc/PID/stat`` started; 0 where the system does not say."""
    try:
        # The name of the command may contain spaces; the numbers begin behind its bracket.
        ticks = int(stat.read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
