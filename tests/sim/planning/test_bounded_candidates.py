"""Bounds of a candidate whose alpha is open are below those of each of its alphas, in time and in both memories."""

from __future__ import annotations

from math import inf

import msgspec
import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.knobs import Schedule
from memo_sim.contract.plan import Layout
from memo_sim.engine.simulate import simulate
from memo_sim.planning.alpha_search import Grid
from memo_sim.planning.bounded_candidates import Bounded, CandidateBounds, NextBound
from memo_sim.planning.lower_bounds import LowerBound
from memo_sim.planning.presets import FULL_RECOMPUTE, PARTIAL_SWAP, TOKENWISE
from memo_sim.planning.question import Pins, Question, with_memory
from memo_sim.planning.space import Space, candidates

ROOM, MIB = 2**50, 2**20


def test_the_fastest_range_of_alphas_does_not_give_the_bytes_of_all() -> None:
    """Alphas that swap less need less host memory; they are slower here, but may be on the front."""
    cluster, hardware = with_memory(*load_cluster("h100-1x8"), device_bytes=ROOM, host_bytes=ROOM)
    model = msgspec.structs.replace(load_model("llama3-8b"), layers=8)
    pins = Pins(pp=2, dp=4, tp=1, cp=1)
    question = Question(model, cluster, hardware, 8192, global_batch=32, system="memo", pins=pins)
    bounds = CandidateBounds(question, front=True)
    (one,) = (each for each in candidates(question)[0] if each.policy == TOKENWISE and _is_plain(each.base.layout))
    found = bounds.tightened(Bounded(one, bounds.of_plans.memory(one.base), 0, "wide"), inf).bound
    grid = Grid.of(one.base)
    alone = [bounds.of_plans.of(grid.at(step)) for step in range(0, grid.steps + 1, 8)]
    assert found is not None
    fastest, smallest = min(alone, key=lambda b: b.step_s), min(alone, key=lambda b: b.host_bytes_per_node)
    assert smallest.host_bytes_per_node < fastest.host_bytes_per_node
    for each in alone:
        assert found.step_s <= each.step_s
        assert found.device_bytes <= each.device_bytes
        assert found.host_bytes_per_node <= each.host_bytes_per_node


@pytest.mark.parametrize(
    ("layout", "host_gib"),
    [
        (Layout(ulysses=4, dp=2, zero=3), 2**20),
        (Layout(ulysses=4, dp=2, zero=1), 100),
        pytest.param(Layout(tp=2, sequence_parallel=True, cp=4), 2**20, marks=pytest.mark.slow),
        pytest.param(Layout(cp=8, zero=1), 60, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_halved_ranges_of_alpha_are_close_below_the_fastest(layout: Layout, host_gib: int) -> None:
    cluster, hardware = with_memory(*load_cluster("h100-1x8"), device_bytes=ROOM, host_bytes=host_gib << 30)
    model = msgspec.structs.replace(load_model("llama3-8b"), layers=12)
    question = Question(model, cluster, hardware, 1 << 15, global_batch=2 * layout.dp, system="every-layout")
    bounds = CandidateBounds(question, front=False)
    (one,) = (c for c in Space(question).of(layout) if c.policy == TOKENWISE and not c.policy.attention_chunks)
    grid = Grid.of(one.base)
    played = [simulate(grid.at(step), hardware, cluster).prediction for step in range(grid.steps)]
    best_s = min(each.step_s for each in played if each.step_s is not None)
    at, found = Bounded(one, bounds.of_plans.memory(one.base, any_alpha=True), 0, "halved"), list[float]()
    while at.next_bound:
        at = bounds.tightened(at, inf)
        assert at.bound is not None
        found.append(at.bound.step_s)
    assert 0.9 * best_s < found[-1] <= best_s
    assert found == sorted(found)
    assert at.bound is not None
    assert at.bound.device_bytes <= min(each.peak_device_bytes for each in played)
    enough = bounds.tightened(Bounded(one, LowerBound(0.0, 0, 0), 0, "halved"), 0.5 * best_s)
    assert enough.bound is not None
    assert 0.5 * best_s <= enough.bound.step_s < found[-1]  # no range is halved where the bound is enough
    assert not enough.next_bound


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
def test_the_fullest_stage_shows_that_no_alpha_fits(schedule: Schedule) -> None:
    """The first and the last stage have fewer layers than those between, so bounds of equal stages are too low."""
    cluster, hardware = with_memory(*load_cluster("h100-1x8"), device_bytes=ROOM, host_bytes=ROOM)
    chunks = 2 if schedule == "interleaved" else 1
    model = msgspec.structs.replace(load_model("llama-tiny"), layers=6 * chunks)
    pins = Pins(pp=4, dp=2, tp=1, cp=1, schedule=schedule, virtual_stages=chunks, zero=1)
    question = Question(model, cluster, hardware, 4096, global_batch=16, system="every-layout", pins=pins)
    bounds = CandidateBounds(question, front=False)
    higher = 0
    for one in candidates(question)[0]:
        grid = Grid.of(one.base)
        plans = [one.base] if one.policy.alpha is not None else [grid.at(step) for step in (1, grid.steps - 1)]
        peak_bytes = min(simulate(plan, hardware, cluster).prediction.peak_device_bytes for plan in plans)
        few = bounds.tightened(Bounded(one, bounds.of_plans.memory(one.base, any_alpha=True), 0, "layers"), inf)
        found = bounds.tightened(msgspec.structs.replace(few, next_bound="memory"), inf)
        assert few.bound is not None
        assert found.bound is not None
        assert few.bound.device_bytes <= found.bound.device_bytes <= peak_bytes
        higher += found.bound.device_bytes > few.bound.device_bytes
    assert higher


@pytest.mark.parametrize(("device_mib", "host_mib"), [(250, 60), (250, 20), (100, 60), (100, 10_000)])
@pytest.mark.parametrize("next_bound", ["beside", "layers", "wide", "memory"])
def test_a_partial_swap_that_never_fits_is_short_of_what_its_nearest_alpha_is(
    device_mib: int, host_mib: int, next_bound: NextBound
) -> None:
    """Where few tokens are swapped the device is too small, and where many are, the host."""
    known = load_cluster("h100-1x2")
    cluster, hardware = with_memory(*known, device_bytes=device_mib * MIB, host_bytes=host_mib * MIB)
    hardware = msgspec.structs.replace(hardware, reserve_bytes={})
    model, pins = msgspec.structs.replace(load_model("llama-tiny"), layers=8), Pins(tp=1, pp=2, dp=1)
    question = Question(model, cluster, hardware, 16384, global_batch=4, system="every-layout", pins=pins)
    bounds = CandidateBounds(question, front=False)
    (one,) = (each for each in candidates(question)[0] if each.policy == PARTIAL_SWAP)
    grid = Grid.of(one.base)
    plans = [simulate(grid.at(step), hardware, cluster).prediction for step in range(1, grid.steps, 3)]
    nearest = min(plan.missing_bytes for plan in plans)
    assert all(plan.status != "ok" for plan in plans)
    found = bounds.tightened(Bounded(one, LowerBound(0.0, 0, 0), 0, next_bound), inf)
    assert MIB < found.shortfall_bytes <= nearest


def _is_plain(layout: Layout) -> bool:
    return layout.zero == 1 and layout.schedule == "1f1b" and not layout.sequence_parallel


@pytest.mark.parametrize(("device_gib", "follows"), [(2, "memory"), (2**20, "passes")])
def test_bounds_of_time_are_left_out_where_memory_is_short(device_gib: int, follows: NextBound) -> None:
    cluster, hardware = with_memory(*load_cluster("a800-1x8"), device_bytes=device_gib << 30, host_bytes=ROOM)
    model = msgspec.structs.replace(load_model("gpt-7b"), layers=8)
    pins = Pins(pp=2, tp=4, cp=1, dp=1)
    question = Question(model, cluster, hardware, 1 << 16, global_batch=8, system="every-layout", pins=pins)
    bounds = CandidateBounds(question, front=False)
    one = next(c for c in candidates(question)[0] if c.policy == FULL_RECOMPUTE)
    found = bounds.tightened(Bounded(one, LowerBound(0.0, 0, 0), 0, "layers"), inf)
    assert found.bound is not None
    assert (found.shortfall_bytes > 0, found.bound.step_s > 0) == (follows == "memory", follows != "memory")
    assert found.next_bound == follows
