"""Measures the placement of steps of many micro-batches: by their period, and every buffer beside all others.

Run with ``pytest -m benchmark -s tests/benchmarks/test_repeated_steps.py``. It prints the first table of
``reports/placement_2026-11-23.md``. Both ways run in one process, one after the other, and seconds are of CPU.
"""

from __future__ import annotations

import time

import pytest

from memo_sim.contract import codec
from memo_sim.contract.catalog import load_model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.memory.greedy import solve_greedy
from memo_sim.memory.place import place
from memo_sim.memory.problem import Clock, problem_of
from memo_sim.memory.reduction import solve_decomposed
from memo_sim.program.arena.check_placement import check_placement
from memo_sim.program.arena.folded import folded
from memo_sim.program.arena.requests import arena_requests
from memo_sim.program.lower import lower

pytestmark = [pytest.mark.benchmark, pytest.mark.slow, pytest.mark.timeout(3600)]

STEPS = {
    "one stage": (Layout(dp=8, zero=1), 64),
    "1f1b, pp 4": (Layout(pp=4, dp=2, zero=1), 128),
    "interleaved, pp 2": (Layout(pp=2, dp=4, zero=1, schedule="interleaved", virtual_stages=2), 32),
}
"""By name: layout and micro-batches of gpt-7b at 8K tokens, everything kept."""


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_placed_by_its_period(name: str) -> None:
    """The arena is no larger than that of first fit over the whole step, and the checker passes it."""
    layout, micro_batches = STEPS[name]
    decisions = Decisions(
        model=load_model("gpt-7b"),
        layout=layout,
        seq_tokens=8192,
        global_batch=layout.dp * micro_batches,
        loss_chunk_tokens=4096,
    )
    requests = arena_requests(lower(decisions)[0], decisions)
    began = time.process_time()
    placement = place(requests, solver="greedy", time_limit_s=600)
    by_period_s = time.process_time() - began
    began = time.process_time()
    assert check_placement(placement, requests) == []
    check_s = time.process_time() - began
    problem = problem_of(requests)
    began = time.process_time()
    each = solve_decomposed(problem, Clock(600), None, solve_greedy)
    one_by_one_s = time.process_time() - began
    assert each is not None
    peak, bound = problem.peak(each) * problem.unit_bytes, placement.lower_bound_bytes
    whole, short = (len(codec.encode(each)) / 1e6 for each in (placement, folded(placement)))
    print(
        f"\n{name}, {micro_batches} micro-batches, {problem.count} buffers: "
        f"{by_period_s - check_s:.2f} s and check {check_s:.2f} s, gap {placement.arena_bytes / bound - 1:.2%}; "
        f"one by one {one_by_one_s:.2f} s, gap {peak / bound - 1:.2%}; "
        f"{one_by_one_s / (by_period_s - check_s):.1f} times; file {whole:.1f} MB, folded {short:.2f} MB"
    )
    assert placement.arena_bytes <= peak
