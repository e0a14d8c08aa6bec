"""CP-SAT finds the largest live sum where that is the optimum, in its own process, within its time."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.util import find_spec

import msgspec
import numpy as np
import pytest

from memo_sim.contract.errors import MemoError
from memo_sim.memory import cp_sat
from memo_sim.memory.cp_sat import solve_cp_sat
from memo_sim.memory.mip_model import solve_mip
from memo_sim.memory.problem import Clock, Problem
from tests.refusals import refused


def needs_ortools() -> None:
    """Skip without the package; it must not be imported here, as other tests load CBC into this process."""
    if find_spec("ortools") is None:
        pytest.skip("needs ortools")


def random_problem(seed: int, count: int) -> Problem:
    draw = np.random.default_rng(seed)
    lower = draw.integers(0, 20, count)
    return Problem(lower, lower + draw.integers(1, 9, count), draw.integers(1, 50, count))


def test_it_agrees_with_the_mip_beside_which_it_runs() -> None:
    """CBC and HiGHS are loaded first: in one process OR-tools would not load any more."""
    needs_ortools()
    for seed in range(3):
        problem = random_problem(seed, 25)
        by_mip = solve_mip(problem, Clock(60), None, backend="cbc")
        by_cp = solve_cp_sat(problem, Clock(60), None)
        assert by_mip is not None
        assert by_cp is not None
        beside = (problem.lower[:, None] < problem.upper) & (problem.lower < problem.upper[:, None])
        ends = by_cp + problem.size
        shares = (by_cp[:, None] < ends) & (by_cp < ends[:, None])
        assert not np.any(np.triu(beside & shares, 1))
        assert problem.peak(by_cp) == problem.peak(by_mip)
        assert solve_cp_sat(problem, Clock(60), by_cp) is None


def test_the_time_limit_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process gets the remaining time, and is ended a little later if it continues."""
    monkeypatch.setattr(cp_sat, "find_spec", lambda name: object())

    def endless(command: list[str], *, input: bytes, timeout: float, **more: object) -> None:
        left_s = msgspec.json.decode(input)["until_s"] - time.time()
        assert 0 < left_s <= 1000.0
        assert timeout <= 1.06 * left_s
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(cp_sat.subprocess, "run", endless)
    assert solve_cp_sat(random_problem(0, 400), Clock(1000.0), None) is None


def test_a_search_that_is_cut_off_comes_back() -> None:
    """With what it found, or with nothing where its process had to be ended."""
    needs_ortools()
    problem = random_problem(0, 400)
    found = solve_cp_sat(problem, Clock(3.0), None)
    assert found is None or problem.peak(found) >= problem.lower_bound


def test_without_ortools_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cp_sat, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError) as caught:
        solve_cp_sat(random_problem(0, 5), Clock(5), None)
    assert caught.value.name == "ortools"


def test_a_process_that_fails_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cp_sat, "find_spec", lambda name: object())
    monkeypatch.setattr(sys, "executable", "false")
    with refused(MemoError, where="cp-sat") as error:
        solve_cp_sat(random_problem(0, 5), Clock(20), None)
    assert error.value.exit_code == 1
