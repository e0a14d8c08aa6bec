"""Cores of one problem share the time, and equal cores are solved once."""

from __future__ import annotations

import numpy as np
import pytest

from memo_sim.memory.greedy import solve_greedy
from memo_sim.memory.problem import Clock, Ints, Problem
from memo_sim.memory.reduction import solve_decomposed
from tests.memory.cores import cores_of


def chains(*counts: int) -> Problem:
    """Return chains, one after the other: each buffer of a chain overlaps its two neighbours in time."""
    numbers = [np.arange(count) for count in counts]
    born = np.concatenate([i + 100 * chain for chain, i in enumerate(numbers)])
    return Problem(born, born + 2, np.concatenate([5 + 3 * (i % 2) + i % 3 for i in numbers]))


class Recorder:
    """Solves like greedy, and records each core's count and time limit."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def __call__(self, problem: Problem, clock: Clock, incumbent: Ints | None) -> Ints | None:
        self.seen.append((problem.count, clock.limit_s))
        return solve_greedy(problem, clock, incumbent)


def test_the_smallest_core_is_solved_first_with_its_share_of_the_time() -> None:
    problem = chains(20, 12)
    assert [core.count for core in cores_of(problem)] == [20, 12]
    solver = Recorder()
    assert solve_decomposed(problem, Clock(1e6), None, solver) is not None
    assert [count for count, _ in solver.seen] == [12, 20]
    assert [limit for _, limit in solver.seen] == pytest.approx([1e6 * 12 / 32, 1e6], rel=1e-4)


def test_equal_cores_are_solved_once_and_each_is_placed() -> None:
    problem = chains(12, 20, 12)
    solver = Recorder()
    offsets = solve_decomposed(problem, Clock(1e6), None, solver)
    assert offsets is not None
    assert [count for count, _ in solver.seen] == [12, 20]
    assert offsets[:12].tolist() == offsets[32:].tolist()
    lower, upper, end = problem.lower, problem.upper, offsets + problem.size
    for i in range(problem.count):
        beside = (lower < upper[i]) & (upper > lower[i]) & (np.arange(problem.count) != i)
        assert not np.any(beside & (offsets < end[i]) & (end > offsets[i]))
