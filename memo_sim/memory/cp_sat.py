"""Solves the placement problem by constraint programming, with OR-tools' CP-SAT (an optional package).

Buffers are rectangles that do not overlap (NoOverlap2D). At every instant their sizes stay within the peak
(Cumulative), so the search knows the sums of live sizes. CP-SAT gets only cores, see ``reduction``.

It runs in a separate process: OR-tools and python-mip both bring builds of Cbc and HiGHS under the same names, and the
one that a process loads second does not find its symbols.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.util import find_spec
from typing import Any

import msgspec
import numpy as np

from memo_sim.contract.errors import MemoError
from memo_sim.memory.problem import Clock, Ints, Problem
from memo_sim.memory.reduction import place_by_cores

WORKERS = 2
"""Threads of the search."""

GRACE_SHARE, GRACE_S = 0.05, 0.5
"""Of the time that is left, or seconds: for the larger of both, the process may end after its time limit."""


class _Task(msgspec.Struct, frozen=True, kw_only=True):
    """The input of the process: a problem's columns, and known offsets as a hint (empty: none)."""

    lower: list[int]
    upper: list[int]
    size: list[int]
    enough: int
    until_s: float
    """When the search ends, in seconds of the system's clock: the start of the process takes a part of its time."""
    hint: list[int]


def solve_cp_sat(problem: Problem, clock: Clock, incumbent: Ints | None) -> Ints | None:
    """Return offsets in units, or None when nothing better than ``incumbent`` was found before ``clock`` ran out.

    Raises:
        ModuleNotFoundError: when ortools is not installed.
        MemoError: when the process fails.
    """
    if find_spec("ortools") is None:
        raise ModuleNotFoundError("No module named 'ortools'", name="ortools")
    task = _Task(
        lower=problem.lower.tolist(),
        upper=problem.upper.tolist(),
        size=problem.size.tolist(),
        enough=problem.enough,
        until_s=time.time() + clock.left_s,
        hint=[] if incumbent is None else incumbent.tolist(),
    )
    try:
        process = subprocess.run(
            [sys.executable, "-m", "memo_sim.memory.cp_sat"],
            input=msgspec.json.encode(task),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            timeout=clock.left_s + max(GRACE_SHARE * clock.left_s, GRACE_S),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    if process.returncode:
        raise MemoError("CP-SAT's process failed (a bug)", where="cp-sat", got=process.stderr.decode()[-1000:])
    found = msgspec.json.decode(process.stdout, type=list[int] | None)
    if found is None:
        return None
    offsets = np.array(found, dtype=np.int64)
    return None if incumbent is not None and problem.peak(offsets) >= problem.peak(incumbent) else offsets


def _answer(task: _Task) -> list[int] | None:
    clock = Clock(max(0.0, task.until_s - time.time()))
    problem = Problem(
        lower=np.array(task.lower, dtype=np.int64),
        upper=np.array(task.upper, dtype=np.int64),
        size=np.array(task.size, dtype=np.int64),
        enough=task.enough,
    )
    hint = np.array(task.hint, dtype=np.int64)

    def core(part: Problem, buffers: Ints) -> Ints | None:
        return _solve_core(part, clock, hint[buffers] if hint.size else None)

    offsets = place_by_cores(problem, core)
    return None if offsets is None else [int(offset) for offset in offsets]


def _solve_core(part: Problem, clock: Clock, hint: Ints | None) -> Ints | None:
    from ortools.sat.python import cp_model

    if clock.left_s == 0:
        return None
    model, addresses = _model(part)
    if hint is not None:
        # The hint's offsets belong to the whole problem and its units, so only their order is used.
        height = 0
        for buffer in np.argsort(hint, kind="stable").tolist():
            model.add_hint(addresses[buffer], height)
            height += int(part.size[buffer])
    solver: Any = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = clock.left_s
    solver.parameters.num_workers = WORKERS
    status = solver.solve(model)
    if status == cp_model.UNKNOWN:
        return None
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        name = solver.status_name(status)
        raise MemoError("CP-SAT finds no solution for a problem that has one (a bug)", where="cp-sat", got=name)
    return np.array([solver.value(address) for address in addresses], dtype=np.int64)


def _model(part: Problem) -> tuple[Any, list[Any]]:
    """Return the model and its address variables."""
    from ortools.sat.python import cp_model

    model: Any = cp_model.CpModel()
    capacity = max(int(part.size.sum()), part.lower_bound)
    peak = model.new_int_var(part.lower_bound, capacity, "peak")
    addresses, lives, ranges = [], [], []
    sizes = part.size.tolist()
    rows = zip(part.lower.tolist(), part.upper.tolist(), sizes, strict=True)
    for number, (lower, upper, size) in enumerate(rows):
        address = model.new_int_var(0, capacity - size, f"address{number}")
        model.add(address + size <= peak)
        addresses.append(address)
        lives.append(model.new_fixed_size_interval_var(lower, upper - lower, f"life{number}"))
        ranges.append(model.new_fixed_size_interval_var(address, size, f"range{number}"))
    model.add_no_overlap_2d(lives, ranges)
    model.add_cumulative(lives, sizes, peak)
    model.minimize(peak)
    return model, addresses


if __name__ == "__main__":
    answer = _answer(msgspec.json.decode(sys.stdin.buffer.read(), type=_Task))
    sys.stdout.buffer.write(msgspec.json.encode(answer))
