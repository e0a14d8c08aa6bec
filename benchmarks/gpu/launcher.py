"""Starts measuring processes one after the other, watches them, and makes a row for every case, however it ends.

The launcher kills a process whose time is over. It also kills one when the host's memory is about to run out. Pinned
memory counts against the container's limit; without this, the kernel would select the process to kill.
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
"""Host memory that has to stay free: the smaller of these bytes and this share of the host's memory."""
SHOWN_CHARACTERS = 600


class Budget:
    """A time limit for the run, counted from the moment this object is made."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """The remaining seconds; never negative."""
        return max(0.0, self._end - time.monotonic())


class Launcher:
    """Runs cases in measuring processes, and makes the rows of cases that got no answer."""

    def __init__(self, folder: Path, budget: Budget, command: Sequence[str] = CHILD) -> None:
        self.folder = folder
        self.command = command
        self.budget = budget
        self._number = 0
        self.lower_bound_bytes = min(LEAST_HOST_BYTES, int(LEAST_HOST_SHARE * host_memory_bytes()))
        """Free host bytes below which a process is killed."""
        self.device, self.versions = "", dict[str, str]()
        """The machine's device name and library versions, for rows that no process could fill in."""

    def run(self, cases: list[Case]) -> list[Row]:
        """Return a row for every case, in order; after a failed case, the rest continues in a new process."""
        rows: list[Row] = []
        while len(rows) < len(cases):
            rows += self._run_once(cases[len(rows) :])
        return rows

    def one(self, case: Case) -> Row:
        """Run one case in its own process and return its row."""
        return self.run([case])[0]

    def _run_once(self, cases: list[Case]) -> list[Row]:
        """Run one process and return at least one row: those it wrote, and one for the case during which it ended."""
        self._number += 1
        cases_file, rows_file, log = (self.folder / f"{self._number:03}.{end}" for end in ("json", "rows", "log"))
        cases_file.write_bytes(msgspec.json.encode(cases))
        rows_file.unlink(missing_ok=True)
        command = [*self.command, str(cases_file), str(rows_file)]
        # Expandable segments suit long sequences best, so every system gets them; calibration times plain allocation.
        settings = {} if cases[0].kind == "calibrate" else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        environment = settings | dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
            try:
                ended = self._watch(process)
            finally:
                _end(process)
        rows = _read(rows_file)
        if len(rows) < len(cases) and not (rows and process.returncode in (0, SPOILED)):
            rows.append(self._unanswered(cases[len(rows)], process.returncode, ended, log))
        return rows

    def _watch(self, process: subprocess.Popen[bytes]) -> str:
        """Wait for a process; return why it has to be killed early ("time" or "memory"), or "" if it ended itself."""
        while process.poll() is None:
            if not self.budget.left_s:
                return "time"
            if host_available_bytes() < self.lower_bound_bytes:
                return "memory"
            time.sleep(POLL_S)
        return ""

    def _unanswered(self, case: Case, status: int, ended: str, log: Path) -> Row:
        if ended == "time":
            row = row_of(case, "not run", "stopped because the time budget is spent")
        elif ended == "memory":
            row = row_of(case, "oom", "stopped because the host's memory was about to run out")
        elif status == -signal.SIGKILL:
            row = row_of(case, "oom", "killed from outside, as the kernel does if the host runs out of memory")
        else:
            tail = log.read_text(errors="replace").strip()[-SHOWN_CHARACTERS:]
            row = row_of(case, "error", f"the process ended with status {status}: {tail}")
        return msgspec.structs.replace(row, device=self.device, versions=self.versions)


def _read(path: Path) -> list[Row]:
    if not path.is_file():
        return []
    # A killed process may have written an incomplete last line.
    whole = path.read_bytes().rpartition(b"\n")[0]
    return [msgspec.json.decode(line, type=Row) for line in whole.splitlines() if line]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it started, and wait for it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
