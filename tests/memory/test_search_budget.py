"""Placements with a node limit: the same for any clock, and at the lower bound where first fit is not."""

from __future__ import annotations

import msgspec
import pytest

from memo_sim.contract.catalog import load_model
from memo_sim.contract.placement import Placement
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.contract.requests import Requests
from memo_sim.memory import problem
from memo_sim.memory.place import place
from memo_sim.planning.arena import MOST_NODES
from memo_sim.program.arena.requests import requests_of
from memo_sim.program.lower import lower


@pytest.fixture(scope="module")
def requests() -> Requests:
    decisions = Decisions(
        model=load_model("gpt-7b"),
        seq_tokens=1 << 20,
        layout=Layout(tp=8, sequence_parallel=True, zero=1),
        recompute="full",
        loss_chunk_tokens=4096,
    )
    return requests_of(lower(decisions, micro_batches=1)[0])


def timeless(placement: Placement) -> Placement:
    return msgspec.structs.replace(placement, elapsed_s=0.0)


def test_the_node_limit_of_arenas_reaches_the_lower_bound_where_first_fit_does_not(requests: Requests) -> None:
    greedy = place(requests, solver="greedy")
    searched = place(requests, time_limit_s=600, most_nodes=MOST_NODES)
    assert greedy.arena_bytes > searched.arena_bytes == searched.lower_bound_bytes
    assert searched.solver.endswith("canonical")


@pytest.mark.parametrize("most_nodes", [1, 1000, MOST_NODES])
def test_equal_requests_give_equal_placements_on_any_clock(
    requests: Requests, most_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = place(requests, time_limit_s=1e6, most_nodes=most_nodes)
    ticks = iter(range(10**9))
    monkeypatch.setattr(problem.time, "monotonic", lambda: float(next(ticks)))  # each call takes a second
    slow = place(requests, time_limit_s=1e6, most_nodes=most_nodes)
    assert timeless(slow) == timeless(quick)
    assert slow.elapsed_s > quick.elapsed_s
