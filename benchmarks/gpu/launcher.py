"""Starts measuring processes, one after the other, watches them, and turns however they end into rows.

A process is ended when its time is over, or when the host's memory is about to run out: pinned memory counts against
the container, whose kernel would else choose whom to end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.gpu.case import Case
from benchmarks.gpu.child import SPOILED
from benchmarks.gpu.row import Row, row_of
from memo_exec.machine.machine import host_available_bytes, host_memory_bytes

ROOT = Path(__file__).parents[2]
CHILD = (sys.executable, "-m", "benchmarks.gpu.child")
POLL_S = 0.1
LEAST_HOST_BYTES = 3 * 2**30
LEAST_HOST_SHARE = 0.03
"""The host's memory that has to stay free: the smaller of the two."""
SHOWN_CHARACTERS = 600


class Budget:
    """Seconds that are left of what the run may take."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Return the seconds left, never below zero."""
        return max(0.0, self._end - time.monotonic())


class Launcher:
    """Runs cases; rows of cases that never answered are made here."""

    def __init__(self, folder: Path, budget: Budget, command: Sequence[str] = CHILD) -> None:
        self.folder = folder
        self.command = command
        self.budget = budget
        self._number = 0
        self.lower_bound_bytes = min(LEAST_HOST_BYTES, int(LEAST_HOST_SHARE * host_memory_bytes()))
        """Of host memory: below, a process is ended."""
        self.device, self.versions = "", dict[str, str]()
        """Of the machine, for rows that no process could fill in."""

    def run(self, cases: list[Case]) -> list[Row]:
        """Return a row for every case, in order; what memory spoiled goes on in a fresh process."""
        rows: list[Row] = []
        while len(rows) < len(cases):
            rows += self._run_once(cases[len(rows) :])
        return rows

    def one(self, case: Case) -> Row:
        """Return the row of one case in a process of its own."""
        return self.run([case])[0]

    def _run_once(self, cases: list[Case]) -> list[Row]:
        """Return at least one row: those that a process wrote, and one for the case it ended in."""
        self._number += 1
        asked, told, log = (self.folder / f"{self._number:03}.{end}" for end in ("json", "rows", "log"))
        asked.write_bytes(msgspec.json.encode(cases))
        told.unlink(missing_ok=True)
        command = [*self.command, str(asked), str(told)]
        # Segments that grow suit long sequences best: every system gets them. A calibration times plain allocation.
        settings = {} if cases[0].kind == "calibrate" else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        environment = settings | dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
            try:
                ended = self._watch(process)
            finally:
                _end(process)
        rows = _read(told)
        if len(rows) < len(cases) and not (rows and process.returncode in (0, SPOILED)):
            rows.append(self._unanswered(cases[len(rows)], process.returncode, ended, log))
        return rows

    def _watch(self, process: subprocess.Popen[bytes]) -> str:
        """Wait for a process and return why it was ended early, "" when it was not."""
        while process.poll() is None:
            if not self.budget.left_s:
                return "time"
            if host_available_bytes() < self.lower_bound_bytes:
                return "memory"
            time.sleep(POLL_S)
        return ""

    def _unanswered(self, case: Case, status: int, ended: str, log: Path) -> Row:
        if ended == "time":
            row = row_of(case, "not run", "cut off: the time budget is spent")
        elif ended == "memory":
            row = row_of(case, "oom", "ended when the host's memory was about to run out")
        elif status == -signal.SIGKILL:
            row = row_of(case, "oom", "killed, as the kernel does when the host's memory runs out")
        else:
            tail = log.read_text(errors="replace").strip()[-SHOWN_CHARACTERS:]
            row = row_of(case, "error", f"the process ended with status {status}: {tail}")
        return msgspec.structs.replace(row, device=self.device, versions=self.versions)


def _read(path: Path) -> list[Row]:
    if not path.is_file():
        return []
    # A process that was killed may have left half a line.
    whole = path.read_bytes().rpartition(b"\n")[0]
    return [msgspec.json.decode(line, type=Row) for line in whole.splitlines() if line]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and all it started, and wait for it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
