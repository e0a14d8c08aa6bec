"""A plan's arena: placed buffers, what they make of the prediction, and steps too long to place whole."""

from __future__ import annotations

import msgspec
import pytest

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.placement import Placement
from memo_sim.contract.requests import Requests
from memo_sim.memory.place import place
from memo_sim.planning import arena as arenas
from memo_sim.planning.arena import arena_of
from memo_sim.planning.question import Pins, Question
from memo_sim.planning.search import play, search
from memo_sim.program.check_placement import check_placement, largest_live_sum
from memo_sim.program.lower import lower
from memo_sim.program.requests import arena_requests
from memo_sim.what_if import plan_of, what_if


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
    assert any("Planned arena" in line and "the least there can be" in line for line in answer.result.why)
    plan, pinned = plan_of(answer.best, answer.arena, asked, created="", command="")
    assert pinned == placement
    assert plan.prediction is not None
    assert plan.prediction.peak_device_bytes == placement.arena_bytes


def test_stages_are_planned_by_the_one_that_needs_most() -> None:
    cluster, hardware = load_cluster("a800-1x2")
    asked = question(cluster=cluster, hardware=hardware, pins=Pins(alpha=0.5, pp=2), global_batch=3)
    answer = what_if(asked)
    assert answer.best is not None
    plan, placement = plan_of(answer.best, answer.arena, asked, created="", command="")
    stages = lower(plan.decisions)
    assert placement is not None
    (placed,) = [stage for stage in stages if stage.sha256 == placement.program_sha256]
    assert check_placement(placement, arena_requests(placed, plan.decisions)) == []
    most = [largest_live_sum(arena_requests(stage, plan.decisions)) for stage in stages]
    assert max(most) == placement.lower_bound_bytes


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


def test_a_plan_whose_arena_does_not_fit_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers are moved up beyond the device: the live bytes fit, the arena does not."""

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
