"""The stages of each call of ten minutes on a GPU machine, and the command that plays them.

    python -m benchmarks.gpu --call 1            all stages of the first call, on a GPU
    python -m benchmarks.gpu --call 1 --quick    the same stages on tiny shapes, on any machine: a dry run

Each stage is a process with a time limit of its own, so one that hangs costs only its time. After every stage the
results so far are packed into one file, ``call-1.tar.gz``: what came of each stage, tables, rows, profile and logs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from benchmarks.gpu.checks import pytest_settings
from benchmarks.gpu.launcher import ROOT, Budget
from benchmarks.gpu.results import VARIABLE

CALL_S = 590.0
"""Seconds of one call; the machine takes ten minutes at most, and packing takes a few seconds."""
ENDING_S = 6.0
"""Seconds that a stage of ``benchmarks.gpu`` has after its own budget, to write its report."""
SHOWN_LINES = 6
PACKED = ("machine.json", "rows.json", "report.md", "report.png", "profile.json", "pytest.log", "logs")
"""What the packed file holds of the results folder, beside the summary; plans and their traces stay out."""

Status = Literal["ok", "failed", "cut off", "not run"]


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a call: arguments of Python, and those of its dry run."""

    name: str
    limit_s: float
    command: tuple[str, ...]
    quick: tuple[str, ...]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a stage."""

    name: str
    command: str
    status: Status
    seconds: float = 0.0
    returned: int | None = None
    """The exit status of the process; None if it did not end by itself."""
    last_lines: list[str] = []


def _tests(name: str, limit_s: float, *files: str) -> Stage:
    command = ("-m", "pytest", "-W", "default", "-m", "gpu", "-p", "no:cacheprovider", *files)
    return Stage(name=name, limit_s=limit_s, command=command, quick=(*command, "--collect-only", "-q"))


def _benchmark(name: str, limit_s: float, *options: str, quick: tuple[str, ...]) -> Stage:
    command = ("-m", "benchmarks.gpu", *options, "--budget-s", f"{limit_s - ENDING_S:.0f}")
    return Stage(name=name, limit_s=limit_s, command=command, quick=("-m", "benchmarks.gpu", "--quick", *quick))


CALLS: dict[int, tuple[Stage, ...]] = {
    1: (
        Stage(
            name="machine",
            limit_s=30.0,
            command=("-m", "benchmarks.gpu.facts", "--pin-gib", "32"),
            quick=("-m", "benchmarks.gpu.facts", "--pin-gib", "0.01"),
        ),
        _tests("conformance", 90.0, "tests/gpu/test_attention_conformance.py"),
        _tests("kernels", 90.0, "tests/gpu/test_interpreter_cuda.py", "tests/gpu/test_kernels_cuda.py"),
        _benchmark("checks", 80.0, "--only", "checks", "--without-tests", quick=("--only", "checks")),
        _benchmark(
            "rivals",
            200.0,
            *("--only", "rivals", "--profile", "h200-1x1", "--lengths", "128k"),
            quick=("--only", "calibrate", "--only", "rivals"),
        ),
        Stage(
            name="full swap, debug",
            limit_s=90.0,
            command=("-m", "benchmarks.gpu.debug_swap"),
            quick=("-m", "benchmarks.gpu.debug_swap", "--quick"),
        ),
    ),
    2: (
        _benchmark("calibrate", 190.0, "--only", "calibrate", quick=("--only", "calibrate")),
        _benchmark("suite", 190.0, "--only", "suite", "--lengths", "128k,32k", quick=("--only", "suite")),
        _benchmark("rivals", 200.0, "--only", "rivals", "--lengths", "32k,512k", quick=("--only", "rivals")),
    ),
}
"""Stages by call, in the order in which they are played; the first ones are those on which the later ones rely."""


def play_call(
    number: int,
    folder: Path,
    tell: Callable[[str], None],
    *,
    quick: bool,
    calls: dict[int, tuple[Stage, ...]] = CALLS,
    budget_s: float = CALL_S,
) -> int:
    """Play the stages of a call; return 0 if all succeeded, else 1.

    ``folder`` gets the results, a log of each stage, a summary and the packed file.
    """
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    budget, outcomes = Budget(budget_s), list[Outcome]()
    for stage in calls[number]:
        outcomes.append(_play(stage, folder, budget, quick=quick))
        tell(f"{stage.name}: {outcomes[-1].status} after {outcomes[-1].seconds:.0f} s")
        packed = _pack(number, folder, outcomes)
    tell(f"results: {packed}")
    return int(any(outcome.status != "ok" for outcome in outcomes))


def _play(stage: Stage, folder: Path, budget: Budget, *, quick: bool) -> Outcome:
    arguments = stage.quick if quick else stage.command
    command = [sys.executable, *arguments, *(pytest_settings() if "pytest" in arguments else [])]
    shown = " ".join(["python", *arguments])
    if not (limit_s := min(stage.limit_s, budget.left_s)):
        return Outcome(name=stage.name, command=shown, status="not run")
    log = folder / "logs" / f"{'-'.join(stage.name.replace(',', '').split())}.log"
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    environment = os.environ | {VARIABLE: str(folder.resolve()), "PYTHONPATH": os.pathsep.join(paths)}
    begin = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            returned: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            returned = None
        finally:
            _end(process)
    lines = log.read_text(errors="replace").strip().splitlines()[-SHOWN_LINES:]
    seconds = time.monotonic() - begin
    status: Status = "cut off" if returned is None else "failed" if returned else "ok"
    if status == "ok" and "pytest" in arguments and not quick and " passed" not in "".join(lines[-1:]):
        status = "failed"  # every test was skipped, as on a machine without a GPU
    return Outcome(name=stage.name, command=shown, status=status, seconds=seconds, returned=returned, last_lines=lines)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what a stage has left running, its children included, and wait for it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _pack(number: int, folder: Path, outcomes: list[Outcome]) -> Path:
    """Write the summary, and one file with it and the results so far."""
    summary = folder / f"call-{number}.json"
    summary.write_bytes(msgspec.json.format(msgspec.json.encode(outcomes), indent=1) + b"\n")
    packed = folder / f"call-{number}.tar.gz"
    fresh = packed.with_suffix(".new")
    with tarfile.open(fresh, "w:gz") as archive:
        for path in _packed(folder, summary):
            archive.add(path, f"call-{number}/{path.relative_to(folder)}")
    fresh.replace(packed)
    return packed


def _packed(folder: Path, summary: Path) -> Iterator[Path]:
    yield summary
    yield from (folder / name for name in PACKED if (folder / name).exists())
