"""The exact search: compared with trying every address, for each rule, order and technique; and deep problems."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memo_sim.memory import skyline
from memo_sim.memory.canonical import search, solve_canonical
from memo_sim.memory.problem import Clock, Ints, Problem
from memo_sim.memory.reduction import compressed
from memo_sim.memory.skyline import RULES, Skyline

NODES = 1_000_000
"""More nodes than any of the small problems needs."""

SWITCHES: tuple[dict[str, Any], ...] = (
    {},
    {"walls": False},
    {"jumps": False},
    {"memory": False},
    {"walls": False, "jumps": False, "memory": False},
)


@st.composite
def problems(draw: st.DrawFn, most: int = 7) -> Problem:
    count = draw(st.integers(1, most))
    born = np.array([draw(st.integers(0, 5)) for _ in range(count)])
    life = np.array([draw(st.integers(1, 4)) for _ in range(count)])
    size = np.array([draw(st.integers(1, 9)) for _ in range(count)])
    return compressed(Problem(born, born + life, size))


def fits(problem: Problem, capacity: int) -> bool:
    """Return whether a placement exists, by trying every address for every buffer, oldest first."""
    lives = sorted(zip(problem.lower.tolist(), problem.upper.tolist(), problem.size.tolist(), strict=True))
    taken = [0] * max(upper for _, upper, _ in lives)

    def place(number: int) -> bool:
        if number == len(lives):
            return True
        lower, upper, size = lives[number]
        for at in range(capacity - size + 1):
            bits = ((1 << size) - 1) << at
            if not any(taken[t] & bits for t in range(lower, upper)):
                for t in range(lower, upper):
                    taken[t] |= bits
                if place(number + 1):
                    return True
                for t in range(lower, upper):
                    taken[t] &= ~bits
        return False

    return place(0)


def least_peak(problem: Problem) -> int:
    return next(c for c in range(problem.lower_bound, int(problem.size.sum()) + 1) if fits(problem, c))


def assert_valid(problem: Problem, offsets: Ints, capacity: int) -> None:
    assert int((offsets + problem.size).max()) <= capacity
    assert int(offsets.min()) >= 0
    for i in range(problem.count):
        for j in range(i):
            together = problem.lower[i] < problem.upper[j] and problem.lower[j] < problem.upper[i]
            above = offsets[i] >= offsets[j] + problem.size[j]
            assert not together or above or offsets[j] >= offsets[i] + problem.size[i], (i, j)


def assert_exact(problem: Problem, best: int, order: Ints) -> None:
    for name, rule in RULES.items():
        for switches in SWITCHES:
            below = Skyline(problem, best - 1, order, rule, **switches)
            assert below.search(NODES, Clock(300)) is False, (name, switches)
            there = Skyline(problem, best, order, rule, **switches)
            assert there.search(NODES, Clock(300)) is True, (name, switches)
            offsets = np.empty(problem.count, dtype=np.int64)
            offsets[order] = there.offset
            assert_valid(problem, offsets, best)


@settings(deadline=None, max_examples=60)
@given(problems(), st.randoms(use_true_random=False))
def test_every_rule_and_technique_finds_the_optimum_and_proves_it(problem: Problem, random: object) -> None:
    order = np.arange(problem.count)
    random.shuffle(order)  # type: ignore[attr-defined]
    assert_exact(problem, least_peak(problem), order)


@cache
def gapped() -> list[tuple[Problem, int]]:
    """Return problems whose optimum is above the lower bound: a proof needs a search.

    Eight random buffers, and one more wherever the live sum is below its maximum: about one in thirty has a gap.
    """
    found = []
    for seed in range(100):
        random = np.random.default_rng(seed)
        born = random.integers(0, 5, 8)
        dead = np.minimum(6, born + random.integers(2, 4, 8))
        size = random.integers(1, 6, 8)
        live = np.array([size[(born <= t) & (dead > t)].sum() for t in range(6)])
        low = np.flatnonzero(live < live.max())
        filled = Problem(np.append(born, low), np.append(dead, low + 1), np.append(size, live.max() - live[low]))
        best = least_peak(filled)
        if best > filled.lower_bound:
            found.append((compressed(filled), best))
    return found


def test_proofs_where_the_lower_bound_cannot_be_reached() -> None:
    some = gapped()
    assert len(some) >= 3, "too few problems of this kind to mean anything"
    for problem, best in some:
        for order in (np.argsort(-problem.size), np.argsort(problem.lower), np.argsort(problem.size)):
            assert_exact(problem, best, order)
        offsets, proven = search(problem, Clock(300), None)
        assert offsets is not None
        assert (problem.peak(offsets), proven) == (best, True)


@settings(deadline=None, max_examples=30)
@given(problems(), st.sampled_from(sorted(RULES)))
def test_the_search_over_capacities_ends_with_a_proof(problem: Problem, rule: str) -> None:
    best = least_peak(problem)
    offsets, proven = search(problem, Clock(300), None, rules=(rule,))
    assert offsets is not None
    assert_valid(problem, offsets, best)
    assert proven or best == problem.lower_bound
    assert solve_canonical(problem, Clock(300), offsets) is None


@settings(deadline=None, max_examples=30)
@given(problems(), st.integers(1, 30))
def test_a_node_limit_makes_the_search_repeatable(problem: Problem, most: int) -> None:
    first, second = (search(problem, Clock(300), None, most_nodes=most) for _ in range(2))
    assert first[1] == second[1]
    assert (first[0] is None) == (second[0] is None)
    assert first[0] is None or second[0] is None or first[0].tolist() == second[0].tolist()


def test_too_few_nodes_decide_nothing() -> None:
    problem, best = gapped()[0]
    sky = Skyline(problem, best - 1, np.arange(problem.count), RULES["few"])
    assert sky.search(2, Clock(300)) is None
    assert sky.nodes == 3
    assert search(problem, Clock(300), None, most_nodes=2)[1] is False


def staircase(count: int) -> Problem:
    """Return buffers that each overlap their two neighbours in time: the search is as deep as their number."""
    born = np.arange(count)
    return compressed(Problem(born, born + 2, np.where(born % 2, 3, 2)))


def test_forced_raises_cost_no_nodes() -> None:
    """A long buffer rests on the largest of many short ones: the sections of all others can only be raised."""
    count = 60
    born = np.append(np.arange(count), 0)
    problem = compressed(Problem(born, np.append(born[:-1] + 1, count), np.append(np.arange(count) + 1, 1000)))
    order = np.argsort(problem.size)  # the short ones first
    sky = Skyline(problem, count + 1000, order, RULES["low_first"])
    assert sky.search(NODES, Clock(300)) is True
    assert sky.nodes <= problem.count
    assert sky.offset[-1] == count


def test_a_search_may_be_deep() -> None:
    problem = staircase(2_500)
    sky = Skyline(problem, 5, np.arange(problem.count), RULES["low_few"])
    assert sky.search(100_000, Clock(300)) is True
    ends = {int(at) + int(size) for at, size in zip(sky.offset, problem.size, strict=True)}
    assert max(ends) == 5


def test_a_search_that_is_too_deep_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skyline, "MOST_FRAMES", 300)
    problem = staircase(2_500)
    assert Skyline(problem, 5, np.arange(problem.count), RULES["low_few"]).search(100_000, Clock(300)) is None


def test_empty_buffers_may_have_any_offset() -> None:
    nothing = Problem(np.array([0, 1]), np.array([2, 3]), np.array([0, 0]))
    offsets, proven = search(nothing, Clock(300), None)
    assert offsets is not None
    assert (offsets.tolist(), proven) == ([0, 0], True)
