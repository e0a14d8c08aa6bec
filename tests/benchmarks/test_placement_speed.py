"""Measures time and gap of placement by each solver; the gap is the peak's excess over the largest live sum.

Run with ``pytest -m benchmark -s tests/benchmarks/test_placement_speed.py``; MEMO_PLACEMENT_LIMIT_S limits the stress
problems. It prints the tables of ``reports/placement_2026-11-21.md``.
"""

from __future__ import annotations

import csv
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from memo_sim.contract.catalog import list_models
from memo_sim.contract.requests import Requests
from memo_sim.memory.bilevel import plan_bilevel
from memo_sim.memory.canonical import solve_canonical
from memo_sim.memory.greedy import solve_greedy
from memo_sim.memory.place import place
from memo_sim.memory.problem import Clock, Problem, problem_of
from memo_sim.memory.reduction import solve_decomposed
from memo_sim.program.arena.check_placement import check_placement
from tests.benchmarks.test_mip_speed import LENGTHS, POLICIES, cases, requests_for

pytestmark = [pytest.mark.benchmark, pytest.mark.slow, pytest.mark.timeout(3600)]

SHARED = Path(__file__).parents[3] / "shared" / "reference" / "minimalloc"
CAPACITY = 1 << 20
KIB = 1 << 10
STRESS_LIMIT_S = float(os.environ.get("MEMO_PLACEMENT_LIMIT_S", "60"))
LEVEL_1_LIMIT_S = 1.0
FLAT_LIMIT_S = 5.0
SOLVERS = ("greedy", "canonical", "portfolio", *(["cp-sat"] if find_spec("ortools") else []))
SEEDS = {150: 3, 300: 2, 500: 1}
"""Number of generated problems of each kind, by number of buffers; most that fail use the whole time limit."""

KINDS = tuple(f"{cuts}{slack}" for slack in ("", ", shaved", ", dropped") for cuts in ("guillotine", "pinwheel"))

Row = tuple[float, float]
"""(seconds, gap)."""


def requests_from(problem: Problem) -> Requests:
    return Requests(
        ids=[f"b{i}" for i in range(problem.count)],
        lower=problem.lower.tolist(),
        upper=problem.upper.tolist(),
        size_bytes=(problem.size * problem.unit_bytes).tolist(),
        alignment_bytes=problem.unit_bytes,
    )


def run(problem: Problem, requests: Requests, solver: str, limit_s: float) -> tuple[Row, int]:
    """Solve and check a problem; return (time, gap) and the peak in bytes."""
    clock = Clock(limit_s)
    if solver == "canonical":  # without first fit as a start
        offsets = solve_decomposed(problem, clock, None, solve_canonical)
        seconds = clock.elapsed_s
        if offsets is None:
            return (seconds, float("inf")), 0
        peak = problem.peak(offsets) * problem.unit_bytes
    else:
        placement = place(requests, solver=solver, time_limit_s=limit_s)
        seconds, peak = clock.elapsed_s, placement.arena_bytes
        assert check_placement(placement, requests) == []
    return (seconds, peak / (problem.lower_bound * problem.unit_bytes) - 1), peak


def cell(row: Row) -> str:
    return f"{row[0]:7.2f} s {'none':>7}" if row[1] == float("inf") else f"{row[0]:7.2f} s {row[1]:7.2%}"


def heading(first: str, solvers: tuple[str, ...] = SOLVERS) -> str:
    return f"\n{first:38}  " + "  ".join(f"{solver:>17}" for solver in solvers)


def worst(rows: list[Row]) -> Row:
    return max(r[0] for r in rows), max(r[1] for r in rows)


def test_per_layer_problems_are_proven_within_a_second() -> None:
    rows: dict[str, dict[str, list[Row]]] = {}
    for case in cases():
        requests = requests_from(case.problem)
        for solver in SOLVERS:
            row, _ = run(case.problem, requests, solver, 10.0)
            rows.setdefault(case.kind, {}).setdefault(solver, []).append(row)
    print(heading(f"slowest and widest of {len(cases())} per-layer"))
    for kind, columns in sorted(rows.items()):
        name = f"{kind}, {len(columns['greedy'])} distinct"
        print(f"{name:38}  " + "  ".join(cell(worst(columns[solver])) for solver in SOLVERS))
    seconds, gap = worst([row for columns in rows.values() for row in columns["portfolio"]])
    assert gap == 0
    assert seconds < LEVEL_1_LIMIT_S


def test_flat_whole_models_are_proven_within_five_seconds() -> None:
    print(heading("flat whole model") + "  bi-level price")
    rows = []
    for model in (m for m in list_models() if not m.endswith("tiny")):
        for policy, recompute, share in POLICIES:
            for tokens in (LENGTHS[0], LENGTHS[-1]):
                requests = requests_for(model, recompute, share, tokens)
                problem = problem_of(requests)
                found = {solver: run(problem, requests, solver, 10.0)[0] for solver in SOLVERS}
                bilevel = plan_bilevel(requests, Clock(STRESS_LIMIT_S), solve_greedy)
                assert bilevel is not None
                name = f"{model}, {policy}, {tokens // KIB}k, {problem.count}"
                print(f"{name:38}  " + "  ".join(cell(found[s]) for s in SOLVERS) + f"  {bilevel.price:14.2%}")
                rows.append(found["portfolio"])
    seconds, gap = worst(rows)
    assert gap == 0
    assert seconds < FLAT_LIMIT_S


def table(path: Path) -> Problem:
    with path.open() as file:
        columns = np.array([[int(row[c]) for c in ("lower", "upper", "size")] for row in csv.DictReader(file)])
    unit = int(np.gcd.reduce(columns[:, 2]))
    return Problem(columns[:, 0], columns[:, 1], columns[:, 2] // unit, unit)


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/reference/minimalloc is not beside this checkout")
def test_minimalloc_and_somas() -> None:
    print(heading("minimalloc and somas"))
    failures = []
    for path in sorted(SHARED.glob("*.csv")):
        problem = table(path)
        found = {s: run(problem, requests_from(problem), s, STRESS_LIMIT_S) for s in SOLVERS}
        name = f"{path.stem}, {problem.count}"
        print(f"{name:38}  " + "  ".join(cell(found[s][0]) for s in SOLVERS), flush=True)
        enough = CAPACITY if path.name.endswith(".1048576.csv") else problem.lower_bound * problem.unit_bytes
        if found["portfolio"][1] > enough:
            failures.append(f"{path.name}: {found['portfolio'][1]} above {enough}")
    assert not failures, failures


@cache
def cut_problem(count: int, seed: int, kind: str) -> Problem:
    """Cut 1 MiB x 200 instants into about ``count`` buffers, so that a placement within 1 MiB exists.

    A guillotine cut goes through a whole piece. A pinwheel divides a piece into five that no guillotine cuts can make.
    With "shaved", buffers lose about 6 % of their size; with "dropped", 6 % of the buffers are removed.
    """
    random = np.random.default_rng(seed)
    pieces = [(0, 200, 0, CAPACITY // KIB)]
    while len(pieces) < count:
        areas = np.array([(b - a) * (d - c) - 1 for a, b, c, d in pieces], dtype=float)
        a, b, c, d = pieces.pop(int(random.choice(len(pieces), p=areas / areas.sum())))
        if kind.startswith("pinwheel") and b - a > 2 and d - c > 2 and random.random() < 0.5:
            x, y = sorted(int(v) for v in random.choice(np.arange(a + 1, b), 2, replace=False))
            u, v = sorted(int(v) for v in random.choice(np.arange(c + 1, d), 2, replace=False))
            pieces += [(a, x, c, v), (a, y, v, d), (y, b, u, d), (x, b, c, u), (x, y, u, v)]
        elif b - a > 1 and (d - c == 1 or random.random() < 5 * (b - a) / (5 * (b - a) + d - c)):
            x = int(random.integers(a + 1, b))
            pieces += [(a, x, c, d), (x, b, c, d)]
        else:
            y = int(random.integers(c + 1, d))
            pieces += [(a, b, c, y), (a, b, y, d)]
    rows = np.array(pieces, dtype=np.int64)
    random.shuffle(rows)
    assert int(((rows[:, 1] - rows[:, 0]) * (rows[:, 3] - rows[:, 2])).sum()) == 200 * CAPACITY // KIB
    size = rows[:, 3] - rows[:, 2]
    if kind.endswith("shaved"):
        size = np.maximum(1, size - (size * 0.06 + random.random(len(size))).astype(np.int64))
    kept = random.random(len(size)) >= 0.06 if kind.endswith("dropped") else np.ones(len(size), dtype=bool)
    return Problem(rows[kept, 0], rows[kept, 1], size[kept], KIB)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", sorted(SEEDS))
def test_generated_problems_of_that_kind(count: int, kind: str) -> None:
    """Count the placements within 1 MiB; only the smallest problems must reach it, larger ones often do not."""
    solvers = ("greedy", "portfolio")  # the portfolio spends its time on the canonical search
    print(heading(f"{kind}, {count}", solvers))
    reached = []
    for seed in range(SEEDS[count]):
        problem = cut_problem(count, seed, kind)
        found = {s: run(problem, requests_from(problem), s, STRESS_LIMIT_S) for s in solvers}
        print(f"{f'seed {seed}':38}  " + "  ".join(cell(found[s][0]) for s in solvers), flush=True)
        reached.append(found["portfolio"][1] <= CAPACITY)
    print(f"within 1,048,576: {sum(reached)} of {len(reached)}")
    assert all(reached) or count > 150
