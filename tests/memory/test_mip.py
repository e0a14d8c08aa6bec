"""The MIP gives true optima in both forms, by both solvers, and impossible answers are called faults."""

from __future__ import annotations

import dataclasses
import itertools

import mip
import numpy as np
import pytest

from memo_sim.memory import mip_model
from memo_sim.memory.greedy import first_fit, solve_greedy
from memo_sim.memory.mip_model import mip_outcome, solve_mip
from memo_sim.memory.mip_outcome import Backend, Form, MipOutcome, contradiction
from memo_sim.memory.problem import Clock, Ints, Problem
from memo_sim.memory.reduction import place_by_cores, sections
from tests.memory.cores import cores_of

GIB_IN_BYTES = 1 << 30


def problem_with(rows: list[tuple[int, int, int]]) -> Problem:
    lower, upper, size = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    return Problem(lower, upper, size)


def random_problem(seed: int, count: int, largest: int = 9) -> Problem:
    draw = np.random.default_rng(seed)
    lower = draw.integers(0, 8, count)
    return Problem(lower, lower + draw.integers(1, 5, count), draw.integers(1, largest + 1, count))


def overlaps(problem: Problem, offsets: Ints) -> bool:
    """Whether two buffers share an address while both live, pair by pair."""
    rows = list(
        zip(
            problem.lower.tolist(), problem.upper.tolist(), offsets.tolist(), (offsets + problem.size).tolist(),
            strict=True,
        )
    )  # fmt: skip
    return any(a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3] for a, b in itertools.combinations(rows, 2))


def least_peak(problem: Problem) -> int:
    """Return the optimum by trying every address of every buffer under a rising ceiling."""
    rows = sorted(zip(problem.lower.tolist(), problem.upper.tolist(), problem.size.tolist(), strict=True))

    def fits(ceiling: int, placed: list[tuple[int, int, int, int]]) -> bool:
        if len(placed) == len(rows):
            return True
        lower, upper, size = rows[len(placed)]
        beside = [(bottom, top) for a, b, bottom, top in placed if a < upper and lower < b]
        return any(
            all(top <= address or address + size <= bottom for bottom, top in beside)
            and fits(ceiling, [*placed, (lower, upper, address, address + size)])
            for address in range(ceiling - size + 1)
        )

    return next(ceiling for ceiling in itertools.count(problem.lower_bound) if fits(ceiling, []))


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("form", ["paper", "strengthened"])
@pytest.mark.parametrize("backend", ["cbc", "highs"])
def test_every_form_finds_and_proves_the_optimum(backend: Backend, form: Form, cold: bool) -> None:
    for seed in range(6):
        problem = random_problem(seed, 6)
        outcome = mip_outcome(problem, Clock(60), None, backend=backend, form=form, cold=cold)
        assert outcome.fault == ""
        assert outcome.proved
        assert outcome.offsets is not None
        assert not overlaps(problem, outcome.offsets)
        assert problem.peak(outcome.offsets) == outcome.bound == least_peak(problem)


ABOVE_THE_BOUND = [(0, 1, 2), (0, 2, 2), (1, 3, 1), (1, 4, 1), (2, 3, 1), (2, 4, 1), (3, 5, 2), (4, 5, 2)]
"""Never more than 4 units live at once, and no placement makes do with 4."""


@pytest.mark.parametrize("backend", ["cbc", "highs"])
def test_an_optimum_above_the_largest_live_sum_is_proven(backend: Backend) -> None:
    problem = problem_with(ABOVE_THE_BOUND)
    assert least_peak(problem) == 5
    assert problem.lower_bound == 4
    for cold in (True, False):
        outcome = mip_outcome(problem, Clock(60), None, backend=backend, form="strengthened", cold=cold)
        assert outcome.proved
        assert outcome.offsets is not None
        assert problem.peak(outcome.offsets) == outcome.bound == 5


@pytest.mark.parametrize("backend", ["cbc", "highs"])
@pytest.mark.parametrize("form", ["paper", "strengthened"])
def test_the_case_that_highs_gets_wrong_in_bytes(backend: Backend, form: Form) -> None:
    """Three buffers of GiB, whose "optimal" is 8 GiB in bytes: right once sizes are in their common unit."""
    problem = problem_with([(0, 2, 3), (1, 3, 2), (2, 4, 3)])
    outcome = mip_outcome(problem, Clock(60), None, backend=backend, form=form, cold=True)
    assert outcome.offsets is not None
    assert problem.peak(outcome.offsets) == 5
    in_bytes = Problem(problem.lower, problem.upper, problem.size * GIB_IN_BYTES)
    outcome = mip_outcome(in_bytes, Clock(60), None, backend=backend, form="strengthened", cold=True)
    assert outcome.offsets is not None
    assert in_bytes.peak(outcome.offsets) == 5 * GIB_IN_BYTES


def test_highs_in_bytes_is_caught() -> None:
    """The paper's form in bytes: whatever HiGHS says, more than a known placement needs is a fault or not proven."""
    problem = problem_with([(0, 2, 3 * GIB_IN_BYTES), (1, 3, 2 * GIB_IN_BYTES), (2, 4, 3 * GIB_IN_BYTES)])
    known = 5 * GIB_IN_BYTES
    outcome = mip_outcome(problem, Clock(60), None, backend="highs", form="paper", cold=True, known=known)
    assert outcome.offsets is not None
    right = problem.peak(outcome.offsets) == known
    assert right or outcome.fault or not outcome.proved


@pytest.mark.parametrize("form", ["paper", "strengthened"])
def test_large_numbers_are_scaled_to_what_highs_can_tell_apart(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of up to 2^30 units, cold: the least is found. Without the scale HiGHS calls others optimal in some cases.

    No placement that another one undercuts is proven, whatever HiGHS says.
    """

    def outcomes() -> list[tuple[bool, MipOutcome]]:
        found = []
        for seed in range(6):
            draw = np.random.default_rng(seed)
            lower = draw.integers(0, 6, 6)
            problem = Problem(lower, lower + draw.integers(1, 5, 6), draw.integers(1 << 27, 1 << 30, 6))
            orders = itertools.permutations(range(problem.count))
            least = min(problem.peak(first_fit(problem, np.array(order))) for order in orders)
            outcome = mip_outcome(problem, Clock(60), None, backend="highs", form=form, cold=True)
            assert outcome.offsets is not None
            is_least = problem.peak(outcome.offsets) == least
            assert is_least or not outcome.proved
            found.append((is_least, outcome))
        return found

    assert all(is_least for is_least, _ in outcomes())
    monkeypatch.setattr(mip_model, "LARGEST", 1 << 60)
    wrong = [outcome for is_least, outcome in outcomes() if outcome.said_optimal and not is_least]
    assert wrong or form == "strengthened"  # it does happen: the test sees what it is about


def test_an_incumbent_with_gaps_starts_the_solver_without_them() -> None:
    """Buffers that lie above other parts' ones, and in other units than the core's, come down before they are used."""
    problem = problem_with([(row[0], row[1], 3 * row[2]) for row in ABOVE_THE_BOUND])
    stacked = 100 + np.cumsum(problem.size) - problem.size
    better = solve_mip(problem, Clock(60), stacked)
    assert better is not None
    assert not overlaps(problem, better)
    assert problem.peak(better) == 15


def test_impossible_answers_are_faults() -> None:
    problem = problem_with([(0, 2, 3), (1, 3, 2)])
    outcome = MipOutcome(np.array([0, 0]), bound=3, said_optimal=True, proved=True, elapsed_s=0.0)
    assert "5" in contradiction(problem, outcome, None)  # the largest live sum
    outcome = MipOutcome(np.array([0, 4]), bound=6, said_optimal=True, proved=True, elapsed_s=0.0)
    assert "5" in contradiction(problem, outcome, 5)  # what a placement needs
    assert contradiction(problem, dataclasses.replace(outcome, bound=5), 5) == ""


def test_addresses_come_from_the_order_alone() -> None:
    problem = problem_with([(0, 2, 3), (1, 3, 2), (2, 4, 3)])
    assert mip_model._lowest(problem, [(0, 1), (1, 2)]).tolist() == [0, 3, 5]  # type: ignore[union-attr]
    assert mip_model._lowest(problem, [(0, 1), (2, 1)]).tolist() == [0, 3, 0]  # type: ignore[union-attr]
    assert mip_model._lowest(problem, [(0, 1), (1, 0)]) is None


def test_only_what_is_better_than_the_incumbent_is_returned() -> None:
    problem = random_problem(3, 6)
    best = solve_mip(problem, Clock(60), None)
    assert best is not None
    assert solve_mip(problem, Clock(60), best) is None
    stacked = np.cumsum(problem.size) - problem.size
    better = solve_mip(problem, Clock(60), stacked)
    assert better is not None
    assert problem.peak(better) == problem.peak(best) < problem.peak(stacked)


@pytest.mark.parametrize("backend", ["cbc", "highs"])
def test_the_time_limit_is_kept(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each solve gets the time that is left when it begins, and ends unproven: the whole search would take hours."""
    monkeypatch.setattr(mip_model, "_too_large", lambda problem, clock: False)
    limits: list[float] = []
    optimize = mip.Model.optimize

    def recorded(model: mip.Model, max_seconds: float) -> mip.OptimizationStatus:
        limits.append(max_seconds)
        return optimize(model, max_seconds=min(max_seconds, 0.1))

    monkeypatch.setattr(mip.Model, "optimize", recorded)
    draw = np.random.default_rng(0)
    lower = draw.integers(0, 60, 90)
    problem = Problem(lower, lower + draw.integers(1, 40, 90), draw.integers(1, 1000, 90))
    for cold in (True, False):
        limits.clear()
        outcome = mip_outcome(problem, Clock(1e6), None, backend=backend, form="strengthened", cold=cold)
        assert not outcome.fault
        assert not outcome.proved
        assert limits
        assert all(0 < limit < 1e6 for limit in limits)
        assert max(limits) > 5e5  # only a solve that starts another one gets half of what is left


def test_what_cannot_be_stated_in_time_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*given: object) -> None:
        raise AssertionError("a model is stated")

    monkeypatch.setattr(mip_model, "_Model", started)
    draw = np.random.default_rng(0)
    lower = draw.integers(0, 2000, 3000)
    problem = Problem(lower, lower + draw.integers(1, 1500, 3000), draw.integers(500, 1000, 3000))
    clock = Clock(5.0)
    assert solve_mip(problem, clock, None) is None
    # Nor is it with an incumbent, which is then all there is.
    assert solve_mip(problem, clock, solve_greedy(problem, Clock(60), None)) is None


@pytest.mark.parametrize("cold", [True, False])
def test_stating_a_model_ends_with_the_time(monkeypatch: pytest.MonkeyPatch, cold: bool) -> None:
    monkeypatch.setattr(mip_model, "_too_large", lambda problem, clock: False)
    draw = np.random.default_rng(0)
    lower = draw.integers(0, 200, 400)
    problem = Problem(lower, lower + draw.integers(1, 150, 400), draw.integers(500, 1000, 400))
    ticks = itertools.count()
    monkeypatch.setattr("memo_sim.memory.problem.time.monotonic", lambda: float(next(ticks)))  # a second at every look
    outcome = mip_outcome(problem, Clock(100.0), None, backend="highs", form="strengthened", cold=cold)
    assert outcome.offsets is None
    assert not outcome.proved
    assert next(ticks) < 500  # the whole model has tens of thousands of rows


def test_sections_are_the_largest_sets_that_live_at_one_instant() -> None:
    problem = problem_with([(0, 3, 1), (1, 4, 1), (2, 3, 1), (3, 5, 1), (6, 7, 1)])
    assert [s.tolist() for s in sections(problem)] == [[0, 1, 2], [1, 3], [4]]


@pytest.mark.parametrize("bounded", [True, False])
def test_the_reduction_keeps_the_optimum(bounded: bool) -> None:
    def exact(part: Problem, _: Ints) -> Ints:
        found = solve_mip(part, Clock(60), None, backend="highs")
        assert found is not None
        return found

    cores = 0
    for seed in range(40):
        problem = random_problem(seed, 7, largest=5 if seed % 2 else 12)
        offsets = place_by_cores(problem, exact, bounded=bounded)
        assert offsets is not None
        assert not overlaps(problem, offsets)
        assert problem.peak(offsets) == least_peak(problem)
        cores += len(cores_of(problem, bounded=bounded))
    assert cores > 0


def test_nested_lives_leave_nothing_to_solve() -> None:
    problem = problem_with([(0, 9, 5), (1, 5, 3), (2, 4, 7), (5, 9, 4), (6, 8, 1), (6, 8, 0)])
    assert cores_of(problem, bounded=False) == []
    offsets = solve_mip(problem, Clock(60), solve_greedy(problem, Clock(60), None), cold=True)
    assert offsets is None


def test_lives_may_nest_thousands_deep() -> None:
    depth = 3000
    lower = np.arange(depth)
    problem = Problem(lower, 2 * depth - lower, np.full(depth, 2))
    offsets = place_by_cores(problem, lambda part, buffers: None, bounded=False)
    assert offsets is not None
    assert offsets.tolist() == list(range(0, 2 * depth, 2))


@pytest.mark.parametrize("backend", ["cbc", "highs"])
def test_a_solver_that_is_cut_off_at_once_knows_nothing(backend: Backend) -> None:
    problem = Problem(np.arange(60), np.arange(60) + 30, 7 + 5 * np.arange(60))
    outcome = mip_model._Model(problem, backend, int(problem.size.sum()), Clock(60)).solve(Clock(1e-3))
    assert not outcome.proved
    assert outcome.bound <= problem.lower_bound
    assert contradiction(problem, outcome, known=int(problem.size.sum())) == ""
