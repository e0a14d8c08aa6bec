"""Steps that repeat: their period is found, and one period's addresses hold for the whole step."""

from __future__ import annotations

import numpy as np
import pytest

from memo_sim.contract.plan import Layout
from memo_sim.contract.requests import Requests
from memo_sim.memory import repeated
from memo_sim.memory.greedy import ORDERS, fitted, order_of, solve_greedy
from memo_sim.memory.place import place
from memo_sim.memory.problem import Clock, Ints, Problem, problem_of
from memo_sim.memory.reduction import solve_decomposed
from memo_sim.memory.repeated import period_of, short_step, solve_by_periods
from memo_sim.program.arena.check_placement import check_placement
from memo_sim.program.arena.periods import Period, find_period
from memo_sim.program.arena.requests import arena_requests
from memo_sim.program.lower import lower
from tests.sim.small_programs import LLAMA, decide


def repeated_lives(seed: int, *, longest: float, periods: int = 12) -> Requests:
    """Return random buffers that come again each period, before them a few that last or die early, behind them more."""
    random = np.random.default_rng(seed)
    births, instants = int(random.integers(5, 12)), int(random.integers(20, 40))
    low = np.sort(random.integers(0, instants, births))
    low[0] = 0
    life = random.integers(1, max(2, int(longest * instants)), births)
    if longest <= 1:
        life = np.minimum(life, instants - low)
    size = random.integers(1, 9, births)
    rows = [(10 + low[i] + n * instants, life[i], size[i]) for n in range(periods) for i in range(births)]
    end = 10 + periods * instants
    rows += [(int(random.integers(0, 10)), int(random.integers(end, end + 9)), 3) for _ in range(4)]
    rows += [(int(random.integers(0, 10)), int(random.integers(1, 10)), 2) for _ in range(4)]
    rows += [(end + int(random.integers(0, 9)), int(random.integers(1, 9)), 4) for _ in range(6)]
    rows.sort()
    lower, lives, sizes = (list(map(int, column)) for column in zip(*rows, strict=True))
    upper = [a + b for a, b in zip(lower, lives, strict=True)]
    return Requests(ids=[f"b{n}" for n in range(len(rows))], lower=lower, upper=upper, size_bytes=sizes)


@pytest.fixture(autouse=True)
def any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "LEAST_BUFFERS", 0)


@pytest.mark.parametrize("longest", [0.9, 2.5])
def test_a_step_that_repeats_is_placed_by_its_periods(longest: float) -> None:
    """The checker of ``place`` passes the whole; lives in one period go by the short step, longer ones do not."""
    found = separate = 0
    for seed in range(20):
        requests = repeated_lives(seed, longest=longest)
        problem = problem_of(requests)
        period = period_of(problem)
        if period is None:
            continue
        found += 1
        separate += short_step(problem, period) is not None
        placement = place(requests, solver="greedy")
        assert check_placement(placement, requests) == []
    assert found > 15
    assert (separate > 10) if longest < 1 else (separate < 10)


def test_a_period_is_exact() -> None:
    for seed in range(40):
        problem = problem_of(repeated_lives(seed, longest=1.5))
        period = find_period(problem.lower, problem.upper, problem.size)
        assert period is not None
        rows = period.buffers
        for column in (problem.lower, problem.upper):
            assert (np.diff(column[rows], axis=0) == period.instants).all()
        assert (np.diff(problem.size[rows], axis=0) == 0).all()
        assert sorted(period.order.tolist()) == list(range(problem.count))


def test_what_does_not_repeat_has_no_period() -> None:
    random = np.random.default_rng(0)
    lower = np.sort(random.integers(0, 5000, 3000))
    problem = Problem(lower, lower + random.integers(1, 99, 3000), random.integers(1, 10**6, 3000))
    assert period_of(problem) is None
    few = problem_of(repeated_lives(0, longest=0.9, periods=3))
    assert period_of(few) is None


def test_a_state_that_comes_again_is_not_placed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 periods a few are placed; placing all of them gives the same addresses."""
    problem = problem_of(repeated_lives(3, longest=1.8, periods=40))
    period = period_of(problem)
    assert period is not None
    calls: list[Ints] = []

    def counted(problem: Problem, order: Ints, offsets: Ints, *, beside: Ints) -> int:
        calls.append(order)
        return fitted(problem, order, offsets, beside=beside)

    def by_periods() -> list[list[int]]:
        found = [repeated._FirstFit(problem, period, order_of(problem, name)) for name in ORDERS]
        return [one.offsets.tolist() for one in found if one.go_on(Clock(60))]

    monkeypatch.setattr(repeated, "fitted", counted)
    quick = by_periods()
    few = len(calls)
    monkeypatch.setattr(repeated, "_state", lambda *a: str(len(calls)).encode())
    slow = by_periods()
    assert few < (len(calls) - few) / 2
    assert quick == slow


def test_orders_that_are_not_tried_would_not_be_better() -> None:
    """The same addresses as where every order is tried, and the best ones start again from nothing."""

    def every_order(problem: Problem, period: Period) -> Ints:
        tried = list[tuple[int, int]]()
        for n, name in enumerate(ORDERS):
            one = repeated._FirstFit(problem, period, order_of(problem, name))
            assert one.go_on(Clock(60), periods=repeated.TRIED)
            tried.append((problem.peak(one.offsets), n))
        best, most = None, None
        for peak, n in sorted(tried):
            if most is not None and (peak >= most or most == problem.lower_bound):
                break
            one = repeated._FirstFit(problem, period, order_of(problem, ORDERS[n]))
            if one.go_on(Clock(60), below=most):
                best, most = one.offsets, problem.peak(one.offsets)
        assert best is not None
        return best

    for seed in range(12):
        problem = problem_of(repeated_lives(seed, longest=2.5))
        period = period_of(problem)
        if period is not None:
            found = solve_by_periods(problem, period, Clock(60))
            assert found is not None
            assert found.tolist() == every_order(problem, period).tolist()


def test_no_time_leaves_the_other_solvers() -> None:
    requests = repeated_lives(1, longest=2.5)
    problem = problem_of(requests)
    period = period_of(problem)
    assert period is not None
    assert solve_by_periods(problem, period, Clock(0)) is None
    assert check_placement(place(requests, time_limit_s=1e-9), requests) == []


LAYOUTS = [
    (Layout(), 12),
    (Layout(pp=2), 12),
    (Layout(pp=2, schedule="interleaved", virtual_stages=2), 24),
    (Layout(pp=2, schedule="zero-bubble"), 16),
]


@pytest.mark.parametrize(("layout", "batch"), LAYOUTS, ids=lambda each: getattr(each, "schedule", None))
def test_programs_get_no_larger_arena(layout: Layout, batch: int) -> None:
    for program in lower(decide(LLAMA, layout, ("none", 0.0), global_batch=batch)):
        requests = arena_requests(program, decide(LLAMA, layout, ("none", 0.0), global_batch=batch))
        problem = problem_of(requests)
        period = period_of(problem)
        assert period is not None
        assert (short_step(problem, period) is not None) == (layout.pp == 1)
        whole = solve_decomposed(problem, Clock(60), None, solve_greedy)
        assert whole is not None
        placement = place(requests, solver="greedy")
        assert placement.arena_bytes <= problem.peak(whole) * problem.unit_bytes
