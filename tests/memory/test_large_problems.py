"""Problems of very many buffers: the time limit holds, and what there is no time for is placed all the same."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from memo_sim.answers.plan_memory import plan_memory
from memo_sim.contract.errors import BadInput
from memo_sim.contract.placement import Placement
from memo_sim.contract.requests import Requests
from memo_sim.memory import greedy, reduction
from memo_sim.memory.canonical import MOST_SEARCHED, solve_canonical
from memo_sim.memory.greedy import CERTAIN, first_fit, in_size_classes, order_of, solve_greedy
from memo_sim.memory.place import place, placement_of
from memo_sim.memory.problem import Clock, Problem, Solver, problem_of
from memo_sim.memory.read_requests import read_requests
from memo_sim.memory.reduction import put_back
from memo_sim.memory.replay import replay
from memo_sim.program.arena import check_placement as checker
from memo_sim.views.placement_table import placement_report
from tests.refusals import refused


def requests_of(count: int, longest: int, seed: int = 0) -> Requests:
    random = np.random.default_rng(seed)
    lower = random.integers(0, count, count)
    upper = lower + random.integers(1, longest, count)
    size = random.integers(0, 10**6, count)
    names = [f"b{number}" for number in range(count)]
    return Requests(ids=names, lower=lower.tolist(), upper=upper.tolist(), size_bytes=size.tolist(), alignment_bytes=64)


def placed(requests: Requests, problem: Problem, offsets: np.ndarray) -> Placement:
    return placement_of(requests, problem, offsets, solver="test", elapsed_s=0.0)


def test_size_classes_place_everything_in_little_more_than_its_size() -> None:
    requests = requests_of(3000, 300)
    problem = problem_of(requests)
    offsets = in_size_classes(problem)
    assert checker.check_placement(placed(requests, problem, offsets), requests) == []
    assert problem.peak(offsets) < 2 * problem.lower_bound
    for size in range(1, 5000):
        assert size <= greedy._size_class(size) <= size * 9 / 8


def test_the_clock_cuts_first_fit_short() -> None:
    problem = problem_of(requests_of(CERTAIN + 1, 300))
    assert first_fit(problem, order_of(problem, "area"), Clock(0)) is None
    offsets = solve_greedy(problem, Clock(0), None)
    assert offsets is not None
    assert np.array_equal(offsets, in_size_classes(problem))
    few = problem.part(np.arange(CERTAIN))
    within, whole = solve_greedy(few, Clock(0), None), first_fit(few, order_of(few, "area"))
    assert within is not None
    assert whole is not None
    assert np.array_equal(within, whole)


def test_buffers_that_are_put_back_too_late_lie_above_the_others() -> None:
    requests = requests_of(400, 50)
    problem = problem_of(requests)
    offsets = np.zeros(problem.count, dtype=np.int64)
    kept, aside = np.arange(300), np.arange(300, 400)
    offsets[kept] = in_size_classes(problem.part(kept))
    put_back(problem, kept, aside, offsets, clock=Clock(0))
    assert checker.check_placement(placed(requests, problem, offsets), requests) == []


def test_time_is_reserved_for_buffers_that_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that uses all of its time leaves enough to put small buffers into the gaps between the large ones."""
    monkeypatch.setattr(reduction, "FINISH_SHARE", 0.0)
    monkeypatch.setattr(reduction, "FINISH_S", 0.0)
    monkeypatch.setattr(reduction, "RESERVE", 4.0)
    large, small = problem_of(requests_of(60, 50)), problem_of(requests_of(3000, 50, seed=1))
    problem = Problem(
        lower=np.concatenate([large.lower * 50, small.lower]),
        upper=np.concatenate([large.upper * 50, small.upper]),
        size=np.concatenate([large.size * 1000, small.size]),
    )
    reduced = reduction.reduced(problem)
    assert reduced.parts
    assert sum(len(back.aside) for back in reduced.returns) > 2000

    def slow(core: Problem, clock: Clock, incumbent: np.ndarray | None) -> np.ndarray | None:
        time.sleep(clock.left_s)
        return solve_greedy(core, Clock(60), incumbent)

    def peak(limit_s: float, solver: Solver) -> int:
        found = reduction.solve_decomposed(problem, Clock(limit_s), None, solver)
        assert found is not None
        return problem.peak(found)

    free = peak(60, solve_greedy)
    assert peak(1.0, slow) > free  # too few buffers to reserve time for
    monkeypatch.setattr(reduction, "MANY_ASIDE", 2000)
    assert peak(1.0, slow) == free


@pytest.mark.parametrize("solver", ["portfolio", "mip"])
def test_the_time_limit_is_kept(solver: str) -> None:
    """Without the clock the first order alone takes several times as long."""
    requests = requests_of(12_000, 4000)
    began = time.process_time()
    found = place(requests, solver=solver, time_limit_s=0.1)
    assert time.process_time() - began < 4
    assert found.arena_bytes >= found.lower_bound_bytes


def orders_tried(requests: Requests, enough_bytes: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], Placement]:
    """Place ``requests`` by greedy; return the orders that first fit was tried in, and the placement."""
    tried: list[str] = []

    def recorded(problem: Problem, name: str) -> np.ndarray:
        tried.append(name)
        return order_of(problem, name)

    monkeypatch.setattr(greedy, "order_of", recorded)
    return tried, place(requests, solver="greedy", enough_bytes=enough_bytes)


def test_an_arena_that_is_enough_is_not_improved(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_of(400, 150)
    tried, best = orders_tried(requests, 0, monkeypatch)
    assert tried == list(greedy.ORDERS)
    assert best.arena_bytes > best.lower_bound_bytes
    with monkeypatch.context() as whole:
        whole.setattr(reduction, "reduced", None)  # neither reduced nor placed in another order
        enough = place(requests, solver="greedy", enough_bytes=2 * best.arena_bytes)
    assert best.arena_bytes < enough.arena_bytes <= 2 * best.arena_bytes
    assert enough.lower_bound_bytes == best.lower_bound_bytes
    tried, exact = orders_tried(requests, best.arena_bytes - 1, monkeypatch)
    assert tried == list(greedy.ORDERS)
    assert exact.arena_bytes == best.arena_bytes


def test_the_fullest_instants_of_many_buffers_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greedy, "MANY", 100)
    tried, _ = orders_tried(requests_of(400, 150), 0, monkeypatch)
    assert tried[0] == "breadth"
    assert sorted(tried) == sorted(greedy.ORDERS)


@pytest.mark.parametrize("longest", [3, 40, 900])
@pytest.mark.parametrize("seed", range(4))
def test_a_list_of_free_ranges_gives_the_first_fit_of_births(longest: int, seed: int) -> None:
    """A third of the buffers has one of few sizes, and some have none, so that gaps are filled exactly."""
    problem = problem_of(requests_of(900, longest, seed))
    problem = replace(problem, size=np.where(problem.size % 3 == 0, problem.size % 7 * 100, problem.size))
    order = order_of(problem, "birth")
    listed, compared = greedy.by_birth(problem, order), first_fit(problem, order)
    assert listed is not None
    assert compared is not None
    assert np.array_equal(listed, compared)
    assert greedy.by_birth(problem, order, Clock(0)) is None


def test_too_many_buffers_are_not_searched() -> None:
    problem = problem_of(requests_of(MOST_SEARCHED * 2, 2))
    assert solve_canonical(problem, Clock(60), None) is None


@pytest.mark.parametrize("chunk", [2, 512])
def test_all_checks_of_addresses_agree(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "CHUNK", chunk)
    random = np.random.default_rng(1)
    found = 0
    for seed in range(60):
        requests = requests_of(60, 20, seed)
        problem = problem_of(requests)
        offsets = in_size_classes(problem)
        if seed % 2:
            offsets[random.integers(0, 60)] = random.integers(0, problem.peak(offsets))
        placement = placed(requests, problem, offsets)
        pairs, neighbours = checker._pairs_that_overlap(placement), checker._neighbours_that_overlap(placement)
        assert bool(pairs) == bool(neighbours)
        assert checker._take_turns(placement, most=10**6) is not bool(pairs)
        assert named(neighbours) <= named(pairs)
        found += bool(pairs)
    assert found > 10
    assert not checker._take_turns(placed(requests, problem, in_size_classes(problem)), most=60)  # in more pieces
    monkeypatch.setattr(checker, "MOST_PAIRS", 0)
    assert checker._overlaps(placement) == neighbours


def named(faults: list[str]) -> set[frozenset[str]]:
    """Return the pairs of buffers that faults name."""
    return {frozenset(fault.partition(" share")[0].split(" and ")) for fault in faults}


def test_a_replay_that_takes_too_long_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_of(50, 10)
    assert replay(requests, most_s=0).out_of_time
    assert not replay(requests).out_of_time
    columns = {"ids": requests.ids, "lower": requests.lower, "upper": requests.upper, "size_bytes": requests.size_bytes}
    (tmp_path / "r.json").write_text(json.dumps({"schema": "memo.requests/1", **columns}))
    monkeypatch.setattr("memo_sim.answers.plan_memory.LEAST_REPLAY_S", 0.0)
    plan = plan_memory(str(tmp_path / "r.json"), time_limit_s=1e-9)
    assert not plan.report.caching_replayed
    assert plan.report.reserved_caching_bytes is None
    assert "not replayed in time" in placement_report(plan.report)


def test_a_thousand_alignments_without_a_common_factor_are_refused(tmp_path: Path) -> None:
    primes = [n for n in range(2, 8000) if all(n % p for p in range(2, math.isqrt(n) + 1))]
    rows = [f"b{p},0,1,{p},{p}" for p in primes]
    (tmp_path / "p.csv").write_text("\n".join(["id,lower,upper,size,alignment", *rows]))
    with refused(BadInput, where="line 17, column alignment", got="53", wanted="powers of two"):
        read_requests(str(tmp_path / "p.csv"))
