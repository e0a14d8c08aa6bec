"""Pipeline schedules: every pass runs once, in a feasible order, with the closed forms of makespan and memory."""

from __future__ import annotations

from collections import Counter

import pytest

from memo_sim.contract.knobs import Schedule
from memo_sim.contract.plan import Layout
from memo_sim.program.layout.schedule import Kind, Pass, passes_of
from tests.sim.pass_orders import B, F, W, in_flight, makespan

SCHEDULES: list[tuple[Schedule, int]] = [
    *[("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1)],
    *[("interleaved", 2), ("interleaved", 4)],
]
STAGES = [2, 3, 4, 8]


def orders(schedule: Schedule, stages: int, micro_batches: int, chunks: int) -> list[list[Pass]]:
    layout = Layout(pp=stages, schedule=schedule, virtual_stages=chunks)
    return [passes_of(layout, stage, micro_batches) for stage in range(stages)]


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_every_pass_is_played_once(schedule: Schedule, chunks: int, stages: int) -> None:
    kinds = list(Kind) if schedule == "zero-bubble" else [Kind.FORWARD, Kind.BACKWARD]
    for micro_batches in (stages, 2 * stages, 3 * stages):
        wanted = {Pass(k, m, c): 1 for k in kinds for m in range(micro_batches) for c in range(chunks)}
        for mine in orders(schedule, stages, micro_batches, chunks):
            assert Counter(mine) == wanted


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_makespans_are_the_closed_forms(schedule: Schedule, chunks: int, stages: int) -> None:
    """The makespan is m(F + B) plus the bubble.

    The bubble is (p - 1)(F + B), divided by the chunks of the interleaved schedule. Under zero-bubble W passes fill
    2 (p - 1) W of it.
    """
    split = schedule == "zero-bubble"
    seconds = {Kind.FORWARD: F / chunks, Kind.BACKWARD: (B - W if split else B) / chunks, Kind.WEIGHTS: W}
    bubble = (stages - 1) * (F + B - 2 * W if split else (F + B) / chunks)
    for micro_batches in (stages, 2 * stages, 4 * stages):
        order = orders(schedule, stages, micro_batches, chunks)
        assert makespan(order, chunks, seconds) == pytest.approx(micro_batches * (F + B) + bubble, rel=1e-12)


@pytest.mark.parametrize("stages", STAGES)
def test_fewer_micro_batches_than_stages_are_played_too(stages: int) -> None:
    seconds = {Kind.FORWARD: F, Kind.BACKWARD: B, Kind.WEIGHTS: W}
    for schedule in ("gpipe", "1f1b"):
        for micro_batches in range(1, stages):
            length = makespan(orders(schedule, stages, micro_batches, 1), 1, seconds)
            assert length == pytest.approx((micro_batches + stages - 1) * (F + B), rel=1e-12)


@pytest.mark.parametrize("stages", STAGES)
def test_micro_batches_in_flight(stages: int) -> None:
    for micro_batches in (1, stages - 1, stages, 3 * stages):
        for stage in range(stages):
            gpipe = passes_of(Layout(pp=stages, schedule="gpipe"), stage, micro_batches)
            one = passes_of(Layout(pp=stages), stage, micro_batches)
            zero = passes_of(Layout(pp=stages, schedule="zero-bubble"), stage, micro_batches)
            assert in_flight(gpipe, Kind.BACKWARD) == micro_batches
            assert in_flight(one, Kind.BACKWARD) == min(micro_batches, stages - stage)
            assert in_flight(zero, Kind.BACKWARD) == min(micro_batches, stages - stage)
            # For deferred weight gradients ZB-H1 holds at most as many micro-batches as the first stage of 1F1B.
            assert in_flight(zero, Kind.WEIGHTS) <= min(micro_batches, stages)


def test_one_stage_runs_one_micro_batch_after_the_other_under_any_schedule() -> None:
    wanted = [Pass(kind, m) for m in range(3) for kind in (Kind.FORWARD, Kind.BACKWARD)]
    for schedule in ("gpipe", "1f1b", "zero-bubble"):
        assert passes_of(Layout(schedule=schedule), 0, 3) == wanted
