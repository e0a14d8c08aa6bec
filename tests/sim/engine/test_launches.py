"""Launches of an eager framework's host: free while it runs ahead; they set the pace when kernels are shorter."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from memo_sim.contract.catalog import load_cluster
from memo_sim.contract.hardware import Hardware, Quantity, Source
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.engine.launches import launch_waits
from memo_sim.engine.simulate import Simulation, simulate
from memo_sim.memory.eager_framework import KERNELS
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.operators.framework_kernels import launches
from tests.sim.small_programs import decide

CLUSTER, A100 = load_cluster("a100-1x8")
LAUNCH_S = 30e-6


def with_host(seconds: float | None) -> Hardware:
    quantity = None if seconds is None else Quantity(value=seconds, source="test")
    sources = {**A100.sources, "test": Source(kind="assumed", text="a test's")}
    return msgspec.structs.replace(A100, host_launch_s=quantity, host_pass_s=None, sources=sources)


def eager(**more: object) -> Decisions:
    return decide(policy=("full", 0.0), memory_policy="eager", loss_chunk_tokens=0, **more)


def played(launch_s: float | None, decisions: Decisions) -> Simulation:
    return simulate(decisions, with_host(launch_s), CLUSTER)


def waits(decisions: Decisions, each_s: float, launch_s: float = LAUNCH_S) -> tuple[Simulation, np.ndarray]:
    """Return the simulation and the launch waits when every instruction takes ``each_s`` alone."""
    simulation = played(None, decisions)
    seconds = np.full(len(simulation.columns.lane), each_s)
    found = launch_waits(simulation.program, simulation.columns, seconds, decisions, with_host(launch_s))
    return simulation, found


def test_with_kernels_of_no_time_the_host_sets_the_pace() -> None:
    simulation, found = waits(eager(), 0.0)
    assert found.sum() == pytest.approx(KERNELS * LAUNCH_S * len(found), rel=1e-12)
    assert np.allclose(found, KERNELS * LAUNCH_S)
    assert (simulation.columns.lane == Lane.COMPUTE).all()


def test_a_framework_launches_the_kernels_of_its_row_wise_library() -> None:
    counts = {}
    for rowwise in ("eager", "compiled"):
        decisions = eager(global_batch=1)
        kernels = msgspec.structs.replace(decisions.kernels, rowwise=rowwise)
        simulation, found = waits(msgspec.structs.replace(decisions, kernels=kernels), 0.0)
        instructions = [i for _, i in simulation.program.walk()]
        assert found == pytest.approx([LAUNCH_S * launches(i.work, rowwise) for i in instructions])
        counts[rowwise] = found.sum()
    assert counts["eager"] > counts["compiled"]


def test_cuda_graphs_launch_nothing() -> None:
    _, found = waits(eager(cuda_graphs=True), 0.0)
    assert not found.any()


def test_fused_kernels_take_the_host_as_long_as_the_time_was_fitted_for() -> None:
    decisions = eager(global_batch=1)
    kernels = msgspec.structs.replace(decisions.kernels, rowwise="fused")
    assert (waits(msgspec.structs.replace(decisions, kernels=kernels), 0.0)[1] == waits(decisions, 0.0)[1]).all()


def test_with_long_kernels_a_window_waits_only_for_its_first_launch() -> None:
    _, found = waits(eager(), 2 * KERNELS * LAUNCH_S)
    held = found[found > 0]
    # The host waits for the device five times: zeroing, two micro-batches, the gradient norm, the update.
    assert len(held) == 5
    assert np.allclose(held, KERNELS * LAUNCH_S)


def test_a_host_that_ran_ahead_hides_short_kernels_behind_long_ones() -> None:
    decisions = eager(global_batch=1)
    simulation = played(None, decisions)
    seconds = np.full(len(simulation.columns.lane), 1e-6)
    window = [n for n, name in enumerate(simulation.program.ids()) if name.startswith("m0/")]
    seconds[window[0]] = 1.0
    found = launch_waits(simulation.program, simulation.columns, seconds, decisions, with_host(LAUNCH_S))
    assert found[window[0]] == pytest.approx(KERNELS * LAUNCH_S)
    assert not found[window[1:]].any()


def test_the_step_is_no_shorter_than_the_host_and_no_longer_than_both_together() -> None:
    decisions = eager(seq_tokens=512)
    alone, slow = (played(s, decisions).prediction for s in (None, LAUNCH_S))
    count = played(None, decisions).program.instruction_count
    host_s = KERNELS * LAUNCH_S * count
    assert alone.step_s < host_s < slow.step_s < alone.step_s + host_s
    (stall,) = (s for s in slow.stalls if s.waits_for == "launch")
    assert stall.seconds == pytest.approx(slow.step_s - alone.step_s, rel=1e-6)
    assert all(s.waits_for != "launch" for s in alone.stalls)


def test_the_chunks_of_a_product_are_launched_in_one_call() -> None:
    """With tp chunks, a product has tp - 1 more kernels; copy and sum take the place of collectives as one kernel."""
    tp, counts = 4, {}
    for overlap in ("none", "chunked"):
        layout = Layout(tp=tp, sequence_parallel=True, tp_overlap=overlap)
        simulation, found = waits(decide(layout=layout, memory_policy="eager", global_batch=1), 0.0)
        counts[overlap] = round(found.sum() / LAUNCH_S)
    overlapped = 6 * simulation.decisions.model.layers
    assert counts["chunked"] - counts["none"] == overlapped * (tp - 1)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(tp=2, sequence_parallel=True), Layout(pp=5)])
def test_a_launch_counts_as_a_wait_on_every_lane(layout: Layout) -> None:
    decisions = eager(layout=layout, global_batch=8, seq_tokens=512)
    alone, slow = (played(s, decisions).prediction for s in (None, LAUNCH_S))
    # A launch wait beside a collective is played at the slowed rate; that small part counts as work.
    assert 1 - 1e-9 < slow.lanes["compute"] / alone.lanes["compute"] < 1.05
    waited = {s.waits_for: s.seconds for s in slow.stalls if s.lane == "compute"}
    assert slow.lanes["compute"] + sum(waited.values()) == pytest.approx(slow.step_s, rel=1e-9)
    assert waited["launch"] > 0.5 * slow.step_s
    # Compute's wait for a collective includes the collective's time, but not its launch.
    before = {s.waits_for: s.seconds for s in alone.stalls if s.lane == "compute"}
    exchanges = {"all_reduce", "all_gather", "reduce_scatter"} & set(waited)
    assert bool(exchanges) == (layout.devices > 1)
    assert all(waited[name] < 1.5 * before[name] for name in exchanges)


def test_every_pass_begins_later_by_the_hosts_time_between_passes() -> None:
    simulation, without = waits(eager(), 0.0)
    pass_s = 2e-3
    host = msgspec.structs.replace(with_host(LAUNCH_S), host_pass_s=Quantity(value=pass_s, source="test"))
    program, columns = simulation.program, simulation.columns
    found = launch_waits(program, columns, np.zeros(len(without)), simulation.decisions, host)
    later = np.flatnonzero(found - without > 1e-9)
    ids = program.ids()
    # Two micro-batches, each with a forward and a backward.
    assert [ids[n].split("/")[0] for n in later] == ["m0", "m0", "m1", "m1"]
    assert found[later] - without[later] == pytest.approx(np.full(4, pass_s))


def test_repeated_micro_batches_wait_as_played_ones_do() -> None:
    decisions = eager(global_batch=8, layout=Layout(tp=2), seq_tokens=512)
    host = with_host(LAUNCH_S)
    repeated = simulate(decisions, host, CLUSTER).prediction
    whole = simulate(decisions, host, CLUSTER, micro_batches_played=8).prediction
    assert repeated.step_s == pytest.approx(whole.step_s, rel=1e-9)


@pytest.mark.parametrize("policy", ["planned", "caching"])
def test_an_executor_that_replays_a_plan_has_no_such_host(policy: str) -> None:
    decisions = decide(policy=("full", 0.0), memory_policy=policy, seq_tokens=512)
    known, unknown = (played(s, decisions).prediction.step_s for s in (LAUNCH_S, None))
    assert known == unknown
