"""Placement from requests to a checked document, flat and bi-level."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memo_sim.contract.catalog import load_model
from memo_sim.contract.errors import BadInput, UsageError
from memo_sim.contract.plan import Decisions
from memo_sim.contract.requests import Requests
from memo_sim.memory.bilevel import plan_bilevel
from memo_sim.memory.greedy import solve_greedy
from memo_sim.memory.place import place
from memo_sim.memory.portfolio import SOLVERS
from memo_sim.memory.problem import Clock, problem_of
from memo_sim.program.arena.check_placement import check_placement
from memo_sim.program.arena.requests import requests_of
from memo_sim.program.lower import lower
from tests.refusals import refused


@st.composite
def random_requests(draw: st.DrawFn, most: int = 12) -> Requests:
    count = draw(st.integers(1, most))
    born = [draw(st.integers(0, 8)) for _ in range(count)]
    return Requests(
        ids=[f"b{i}" for i in range(count)],
        lower=born,
        upper=[b + draw(st.integers(1, 6)) for b in born],
        size_bytes=[draw(st.integers(0, 9)) for _ in range(count)],
        alignment_bytes=draw(st.sampled_from([1, 2, 4])),
    )


@settings(deadline=None, max_examples=60)
@given(random_requests())
def test_every_placement_passes_the_checker(requests: Requests) -> None:
    placement = place(requests, solver="greedy")
    assert check_placement(placement, requests) == []
    assert placement.arena_bytes >= placement.lower_bound_bytes


@settings(deadline=None, max_examples=25)
@given(random_requests(most=5))
def test_a_proven_placement_is_what_trying_every_order_finds(requests: Requests) -> None:
    """Lowest-fit over all orders holds an optimum; the portfolio must reach it."""
    problem = problem_of(requests)
    best = None
    for order in permutations(range(problem.count)):
        offsets: dict[int, int] = {}
        for i in order:
            others = [
                (offsets[j], offsets[j] + int(problem.size[j]))
                for j in offsets
                if problem.lower[i] < problem.upper[j] and problem.lower[j] < problem.upper[i]
            ]
            at = 0
            for start, end in sorted(others):
                if start < at + int(problem.size[i]) and at < end:
                    at = end
            offsets[i] = at
        peak = max(offsets[i] + int(problem.size[i]) for i in offsets)
        best = peak if best is None else min(best, peak)
    assert best is not None
    placement = place(requests, time_limit_s=30)
    assert placement.arena_bytes == best * problem.unit_bytes


@pytest.mark.parametrize("model", ["gpt-7b", "llama3-8b"])
@pytest.mark.parametrize(("recompute", "swapped"), [("none", 0), ("none", 65536), ("tokenwise", 32768), ("full", 0)])
def test_whole_models_reach_the_lower_bound(model: str, recompute: Any, swapped: int) -> None:
    decisions = Decisions(
        model=load_model(model),
        seq_tokens=65536,
        recompute=recompute,
        swapped_tokens=swapped,
        loss_chunk_tokens=4096,
    )
    requests = requests_of(lower(decisions)[0])
    placement = place(requests)
    assert placement.arena_bytes == placement.lower_bound_bytes
    bilevel = plan_bilevel(requests, Clock(30), solve_greedy)
    assert bilevel is not None
    problem = problem_of(requests)
    assert bilevel.peak >= problem.lower_bound == bilevel.flat_bound
    flat = msgspec.structs.replace(
        placement,
        arena_bytes=bilevel.peak * problem.unit_bytes,
        offset_bytes=(bilevel.offsets * problem.unit_bytes).tolist(),
    )
    assert check_placement(flat, requests) == []


@pytest.mark.parametrize("solver", ["portfolio", "greedy"])
def test_solvers_that_place_all_at_once_run_only_when_they_are_named(
    solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unwanted() -> Any:
        raise AssertionError("it was not named")

    monkeypatch.setitem(SOLVERS, "mip", unwanted)
    monkeypatch.setitem(SOLVERS, "cp-sat", unwanted)
    # Greedy cannot reach the bound of these: the portfolio goes on to its last technique.
    lives = [(0, 2), (1, 4), (3, 6), (5, 8), (0, 5), (2, 7), (4, 9), (6, 9)]
    for shift in range(20):
        sizes = [(3 * number * number + 7 * shift * (number + 1)) % 11 + 1 for number in range(len(lives))]
        requests = Requests(
            ids=[str(number) for number in range(len(lives))],
            lower=[low for low, _ in lives],
            upper=[up for _, up in lives],
            size_bytes=sizes,
        )
        place(requests, solver=solver, time_limit_s=0.2)


def test_bilevel_needs_phases_and_a_solver_a_name_and_time() -> None:
    requests = Requests(ids=["a"], lower=[0], upper=[1], size_bytes=[4])
    with refused(BadInput, what="phases"):
        place(requests, solver="bilevel-mip")
    with refused(UsageError, got="greddy", wanted="bilevel-mip", hint="'greedy'"):
        place(requests, solver="greddy")
    with refused(UsageError, got="0"):
        place(requests, time_limit_s=0)
