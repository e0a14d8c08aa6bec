"""Waits are attributed to p2p transfers and other stages, not to a collective that had to wait for these."""

from __future__ import annotations

from functools import partial

import pytest

from memo_sim.contract.plan import Layout
from memo_sim.engine.simulate import Simulation
from memo_sim.program.ir.work import Collective, HostUpdate, PointToPoint, Work
from tests.sim.engine.test_pipeline_engine import LayersAlone
from tests.sim.toy_machine import run_layout

P2P_S, COLLECTIVE_S, UPDATE_S = 1e-5, 1e-6, 1e-3


class WithExchanges(LayersAlone):
    """Prices products, attention, p2p transfers, collectives and the host's updates."""

    def seconds(self, work: Work) -> float:
        if isinstance(work, Collective):
            return COLLECTIVE_S
        if isinstance(work, HostUpdate):
            return UPDATE_S
        return P2P_S if isinstance(work, PointToPoint) else super().seconds(work)


run = partial(run_layout, prices=WithExchanges())


def waits(simulation: Simulation) -> dict[str, float]:
    return {s.waits_for: s.seconds for s in simulation.prediction.stalls if s.lane == "compute"}


@pytest.mark.parametrize("micro_batches", [4, 40])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=4),
        Layout(pp=4, overlap_p2p=False),
        Layout(pp=2, tp=2, sequence_parallel=True),
        Layout(pp=2, tp=2, sequence_parallel=True, schedule="gpipe"),
        Layout(pp=2, schedule="interleaved", virtual_stages=2),
        Layout(pp=2, cp=2, zero=1),
    ],
    ids=str,
)
def test_busy_and_waiting_make_the_step(layout: Layout, micro_batches: int) -> None:
    simulation = run(layout, micro_batches)
    prediction = simulation.prediction
    assert simulation.steady
    assert prediction.lanes["compute"] + sum(waits(simulation).values()) == pytest.approx(prediction.step_s, rel=1e-9)


def test_a_wait_for_a_stage_is_a_bubble_even_if_a_gather_ends_it() -> None:
    """With 1F1B on two equal stages, each stage waits (F + B) of a micro-batch, whatever a layer gathers first."""
    found = run(Layout(pp=2, tp=2, sequence_parallel=True), 4)
    number = found.stages.index(found.pace)
    waited = waits(found)
    assert waited[f"pipeline bubble (stage {1 - number})"] > 0.8 * found.pace.compute_s / 4
    assert f"pipeline bubble (stage {number})" not in waited
    gathers = found.pace.per_instruction(lambda i: float(isinstance(i.work, Collective)))
    assert waited["all_gather"] + waited["reduce_scatter"] < COLLECTIVE_S * float((gathers * found.pace.weights).sum())


def test_a_wait_for_a_p2p_transfer_is_called_receive() -> None:
    """Without overlap, a stage waits for each receive, and the transfer is not counted as the sender's bubble."""
    found = run(Layout(pp=2, overlap_p2p=False), 8)
    assert 0 < waits(found)["recv"] <= 8 * P2P_S * (1 + 1e-9)


def test_a_plan_of_one_stage_has_no_bubble() -> None:
    assert not any("bubble" in name for name in waits(run(Layout(tp=2, sequence_parallel=True), 4, ("tokenwise", 0.5))))


def test_a_wait_for_the_hosts_update_names_the_host() -> None:
    waited = waits(run(Layout(), 2, states="host"))
    assert waited["adamw.decay on the host"] > UPDATE_S
    assert "adamw.decay" not in waited
