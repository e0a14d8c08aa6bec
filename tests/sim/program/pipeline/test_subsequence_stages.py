"""Subsequences in pipeline stages: schedules with the closed forms of makespan, and the engine's step in SPPO's limit.

F is the forward time of one subsequence on one stage, B its backward time, and W the part of B for weight gradients.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from memo_sim.contract.knobs import Schedule
from memo_sim.contract.plan import Layout
from memo_sim.engine.simulate import Simulation
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.work import Gemm, Work
from memo_sim.program.layout.schedule import Kind, Pass, passes_of
from tests.sim.pass_orders import B, F, W, in_flight, makespan
from tests.sim.toy_machine import ToyPrices, contended, run_layout

VOCAB = 96
SCHEDULES: list[tuple[Schedule, int]] = [("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2)]


def orders(schedule: Schedule, stages: int, micro_batches: int, subsequences: int, chunks: int = 1) -> list[list[Pass]]:
    layout = Layout(pp=stages, schedule=schedule, virtual_stages=chunks, subsequences=subsequences)
    return [passes_of(layout, stage, micro_batches) for stage in range(stages)]


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_every_subsequence_runs_once_and_keys_come_before_queries(schedule: Schedule, chunks: int, stages: int) -> None:
    for micro_batches, count in ((1, 4), (2, 4), (4, 3)):
        kinds = list(Kind) if schedule == "zero-bubble" else [Kind.FORWARD, Kind.BACKWARD]
        units = [(m, s, c) for m in range(micro_batches) for s in range(count) for c in range(chunks)]
        for mine in orders(schedule, stages, micro_batches, count, chunks):
            assert Counter(mine) == {Pass(k, m, c, s): 1 for k in kinds for m, s, c in units}
            at = {each: number for number, each in enumerate(mine)}
            for m, s, c in units:
                if s:
                    assert at[Pass(Kind.FORWARD, m, c, s - 1)] < at[Pass(Kind.FORWARD, m, c, s)]
                    assert at[Pass(Kind.BACKWARD, m, c, s)] < at[Pass(Kind.BACKWARD, m, c, s - 1)]


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_makespans_are_those_of_as_many_micro_batches(schedule: Schedule, chunks: int, stages: int) -> None:
    """The makespan is m N (F + B) plus the schedule's bubble.

    W passes of ZB-H1 fill (p - 1) 2 W of the bubble. With one micro-batch they fill only the drain, (p - 1) W.
    """
    split = schedule == "zero-bubble"
    seconds = {Kind.FORWARD: F / chunks, Kind.BACKWARD: (B - W if split else B) / chunks, Kind.WEIGHTS: W}
    for micro_batches in (1, stages, 2 * stages):
        for count in (stages, 2 * stages):
            order = orders(schedule, stages, micro_batches, count, chunks)
            filled = W * (1 if micro_batches == 1 else 2) if split else 0.0
            bubble = (stages - 1) * ((F + B) / chunks - filled)
            wanted = micro_batches * count * (F + B) + bubble
            assert makespan(order, chunks, seconds) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("count", [2, 8])
def test_seq1f1b_keeps_one_micro_batch_plus_the_later_stages_and_terapipe_all(stages: int, count: int) -> None:
    for micro_batches in (1, 2, 5):
        for stage in range(stages):
            one, gpipe = (
                passes_of(Layout(pp=stages, schedule=s, subsequences=count), stage, micro_batches)
                for s in ("1f1b", "gpipe")
            )
            assert in_flight(one, Kind.BACKWARD) == min(micro_batches * count, count + stages - 1 - stage)
            assert in_flight(gpipe, Kind.BACKWARD) == micro_batches * count


class EqualParts:
    """Prices of SPPO's limit: every product of a layer takes a second, whatever its rows; all else is free.

    So F(N) is N times the forward of one subsequence.
    """

    def __init__(self) -> None:
        self.outside_of: dict[Work, frozenset[str]] = {}

    def seconds(self, work: Work) -> float:
        return float(isinstance(work, Gemm) and VOCAB not in (work.m, work.n, work.k))


run = partial(run_layout, prices=EqualParts())


@pytest.mark.parametrize("partition", ["length", "flops"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "count"), [(2, 1), (2, 4), (4, 2), (4, 3), (8, 4)])
def test_the_step_is_sppos_closed_form(stages: int, count: int, schedule: Schedule, partition: str) -> None:
    """T = (p - 1 + N) / N x F(N), of which (p - 1) F(N) / N is bubble: with one micro-batch, under any schedule."""
    layout = Layout(pp=stages, schedule=schedule, subsequences=count, partition=partition)
    simulation = run(layout, 1)
    # A layer has four products in forward, and backward has two for each of them.
    work = count * 12.0 * 8 / stages
    step = simulation.prediction.step_s
    assert step == pytest.approx((stages - 1 + count) / count * work, rel=1e-9)
    for stage in simulation.stages:
        assert stage.compute_s == pytest.approx(work, rel=1e-9)
        assert step - stage.compute_s == pytest.approx((stages - 1) * work / count, rel=1e-9)


@pytest.mark.parametrize(("stages", "chunks", "count"), [(2, 2, 4), (4, 2, 4), (2, 4, 2)])
def test_interleaved_stages_divide_the_bubble_by_their_chunks(stages: int, chunks: int, count: int) -> None:
    layout = Layout(pp=stages, schedule="interleaved", virtual_stages=chunks, subsequences=count)
    one = 12.0 * 8 / stages
    for micro_batches in (1, 3):
        step = run(layout, micro_batches).prediction.step_s
        assert step == pytest.approx((micro_batches * count + (stages - 1) / chunks) * one, rel=1e-9)


def test_deferred_weight_gradients_fill_the_drain() -> None:
    layout = Layout(pp=4, schedule="zero-bubble", subsequences=4)
    one, weights = 12.0 * 2, 4.0 * 2
    assert run(layout, 1).prediction.step_s == pytest.approx(4 * one + 3 * (one - weights), rel=1e-9)
    assert run(layout, 4).prediction.step_s == pytest.approx(16 * one + 3 * (one - 2 * weights), rel=1e-9)


REPEATED = [
    (Layout(subsequences=3), ("none", 1.0)),
    (Layout(subsequences=3, pp=2), ("full", 1.0)),
    (Layout(subsequences=2, pp=2, schedule="interleaved", virtual_stages=2), ("none", 0.0)),
    (Layout(subsequences=2, pp=2, schedule="zero-bubble"), ("none", 0.0)),
]


@pytest.mark.parametrize(("layout", "policy"), REPEATED, ids=str)
def test_repeated_micro_batches_equal_played_ones(layout: Layout, policy: tuple[str, float]) -> None:
    """Everything is priced, and lanes slow each other: a repeated step equals one that is played in full."""
    prices = ToyPrices(copy_s_per_byte=1 / 2e9)
    short, full = (
        run(layout, 16, policy, prices=prices, rates=contended, played=played, layers=4) for played in (None, 16)
    )
    assert short.program.micro_batches < 16 == full.program.micro_batches
    a, b = short.prediction, full.prediction
    assert short.steady
    assert a.step_s == pytest.approx(b.step_s, rel=1e-9)
    assert (a.moved_bytes, a.peak_device_bytes) == (b.moved_bytes, b.peak_device_bytes)
    assert a.peak_host_bytes_per_node == b.peak_host_bytes_per_node


def test_p2p_transfers_have_the_subsequences_rows() -> None:
    whole, parts = (run(Layout(pp=2, subsequences=count), 2) for count in (1, 4))
    assert [stage.sent_bytes for stage in whole.stages] == [stage.sent_bytes for stage in parts.stages]
    sends = [i for i in parts.stages[0].program.instances if i.place.startswith("m0/") and _sends(parts, i.template)]
    assert [i.subsequence for i in sends] == [0, 1, 2, 3]


def _sends(simulation: Simulation, template: int) -> bool:
    return any(i.lane is Lane.SEND for i in simulation.stages[0].program.templates[template].instructions)
