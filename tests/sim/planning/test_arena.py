"""A plan's arena: placed buffers, their effect on the prediction, and steps that are too long to place whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memo_sim.answers.what_if import Outputs, plan_of, what_if, write_files
from memo_sim.contract import codec
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.placement import Placement
from memo_sim.contract.plan import Decisions, Plan
from memo_sim.contract.requests import Requests
from memo_sim.contract.trace import Trace
from memo_sim.engine.simulate import simulate
from memo_sim.memory.place import place
from memo_sim.planning import arena as arenas
from memo_sim.planning.arena import arena_of
from memo_sim.planning.question import Pins, Question
from memo_sim.planning.search import play, search
from memo_sim.program.arena.check_placement import check_placement
from memo_sim.program.arena.first_fit import arena_bytes, offsets_of
from memo_sim.program.arena.folded import unfolded
from memo_sim.program.arena.requests import arena_requests
from memo_sim.program.ir.program import Program
from memo_sim.program.lower import lower


def question(**changes: object) -> Question:
    cluster, hardware = load_cluster("a800-1x1")
    fields: dict[str, object] = {"model": load_model("llama-tiny"), "cluster": cluster, "hardware": hardware}
    fields |= {"seq_tokens": 4096, "pins": Pins(alpha=0.5)}
    return Question(**(fields | changes))  # type: ignore[arg-type]


def test_the_predicted_peak_is_the_arenas() -> None:
    asked = question()
    answer = what_if(asked)
    assert answer.best is not None
    assert answer.arena is not None
    placement = answer.arena.placement
    assert check_placement(placement, arena_requests(answer.best.full_program, answer.best.decisions)) == []
    assert answer.result.best is not None
    assert answer.result.best.peak_device_bytes == placement.arena_bytes >= answer.best.memory.device.bytes
    assert any("Planned arena" in line and "exactly the lower bound" in line for line in answer.result.why)
    plan, pinned = plan_of(answer.best, answer.arena, asked, created="", command="")
    assert pinned == placement
    assert plan.prediction is not None
    assert plan.prediction.peak_device_bytes == placement.arena_bytes


def executed(stages: Sequence[Program], decisions: Decisions, placed: Placement) -> list[int]:
    """Return the arena of every stage when the plan pins ``placed``; first fit places the other stages' buffers."""
    asked = [arena_requests(stage, decisions) for stage in stages]
    found = [arena_bytes(requests, offsets_of(requests)) for requests in asked]
    at = [stage.sha256 for stage in stages].index(placed.program_sha256)
    assert check_placement(placed, asked[at]) == []
    found[at] = placed.arena_bytes
    return found


@pytest.mark.parametrize(
    ("layout", "batch"),
    [({"pp": 2, "alpha": 0.5}, 3), ({"pp": 2, "alpha": 0.0, "subsequences": 4, "multiplexed": True}, 1)],
    ids=["1f1b", "multiplexed"],
)
def test_no_stages_arena_is_larger_than_the_plan_says(layout: dict[str, Any], batch: int) -> None:
    cluster, hardware = load_cluster("a800-1x2")
    asked = question(cluster=cluster, hardware=hardware, pins=Pins(**layout), global_batch=batch)
    answer = what_if(asked)
    assert answer.best is not None
    plan, placement = plan_of(answer.best, answer.arena, asked, created="", command="")
    assert placement is not None
    assert plan.prediction is not None
    stages = lower(plan.decisions)
    assert plan.prediction.peak_device_bytes == max(executed(stages, plan.decisions, placement))


def test_the_stage_that_first_fit_serves_worst_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """First fit needs more on the stage with fewer live bytes, so that stage is placed by the solver instead."""
    cluster, hardware = load_cluster("a800-1x2")
    asked = question(cluster=cluster, hardware=hardware, pins=Pins(alpha=0.5, pp=2), global_batch=3)
    simulation = play(asked, search(asked).ranked[0].decisions)
    programs = simulation.full_programs
    fullest = simulation.full_program
    worst = next(program for program in programs if program is not fullest)
    real = arenas.arena_bytes

    def wasteful(requests: Requests, offsets: list[int]) -> int:
        return real(requests, offsets) + 2**30 * (requests.program_sha256 == worst.sha256)

    monkeypatch.setattr(arenas, "arena_bytes", wasteful)
    arena = arena_of(simulation)
    assert arena.placement.program_sha256 == worst.sha256
    assert arena.prediction.peak_device_bytes == max(executed(programs, simulation.decisions, arena.placement))


def test_a_step_of_many_micro_batches_takes_the_same_arena_and_writes_no_placement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = question(global_batch=6)
    simulation = play(asked, search(asked).ranked[0].decisions)
    whole = arena_of(simulation)
    monkeypatch.setattr(arenas, "MOST_INSTRUCTIONS", 1)
    played = arena_of(simulation)
    assert whole.whole
    assert not played.whole
    assert len(played.placement.ids) < len(whole.placement.ids)
    assert played.prediction.peak_device_bytes == whole.prediction.peak_device_bytes
    plan, placement = plan_of(simulation, played, asked, created="", command="")
    assert (placement, plan.placement_sha256) == (None, "")


@pytest.mark.parametrize("free", [0.5, 0.001])
def test_a_large_arena_that_fits_may_be_near_the_bound(free: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The capacity is ``free`` times the live bytes beyond what the live bytes and the reserve need."""
    monkeypatch.setattr(arenas, "MANY", 1)
    asked: list[int] = []

    def recorded(requests: Requests, *, enough_bytes: int, **options: Any) -> Placement:
        asked.append(enough_bytes)
        return place(requests, enough_bytes=enough_bytes, **options)

    monkeypatch.setattr(arenas, "place", recorded)
    cluster, hardware = load_cluster("a800-1x2")
    several = question(cluster=cluster, hardware=hardware, pins=Pins(pp=2, alpha=0.5), global_batch=3)
    best = search(several).best
    assert best is not None
    simulation = simulate(best.decisions, hardware, cluster)
    memory = simulation.fullest.memory
    capacity = int(memory.device.bytes * (1 + free)) + memory.reserve_bytes
    simulation.fullest.memory = dataclasses.replace(memory, device_capacity_bytes=capacity)
    arena_of(simulation)
    assert asked[0] == min(int(arenas.NEAR * memory.device.bytes), capacity - memory.reserve_bytes)


def test_a_plan_whose_arena_does_not_fit_is_not_feasible(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers are moved beyond the end of the device: live bytes fit, but the arena does not."""

    def wasteful(requests: Requests, **options: float) -> Placement:
        placed = place(requests, **options)  # type: ignore[arg-type]
        hole = 80 * 2**30
        offsets = [offset + hole for offset in placed.offset_bytes]
        return msgspec.structs.replace(placed, offset_bytes=offsets, arena_bytes=placed.arena_bytes + hole)

    monkeypatch.setattr(arenas, "place", wasteful)
    answer = what_if(question())
    assert answer.best is None
    assert answer.result.best is None
    (only,) = answer.result.plans
    assert (only.status, only.step_s, only.mfu) == ("gpu_oom", None, None)
    assert only.shortfall_bytes > 0
    assert "planned arena" in only.reason


def test_files_of_many_micro_batches_have_the_played_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace has three of twelve micro-batches, the placement has the rows of one of them."""
    asked = question(global_batch=12)
    answer = what_if(asked)
    assert answer.arena is not None
    monkeypatch.setattr("memo_sim.answers.what_if.MOST_WRITTEN_SPANS", 0)
    write_files(answer, asked, Outputs(plan=tmp_path / "plan.json"), created="", command="")
    trace = codec.read(tmp_path / "plan.trace.json", Trace)
    assert (trace.micro_batches_played, trace.micro_batches) == (3, 12)
    written = codec.read(tmp_path / "plan.placement.json", Placement)
    assert codec.sha256_of(written) == codec.read(tmp_path / "plan.json", Plan).placement_sha256
    assert len(written.ids) < len(answer.arena.placement.ids) / 2
    assert unfolded(written) == answer.arena.placement
