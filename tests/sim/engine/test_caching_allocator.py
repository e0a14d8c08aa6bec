"""Plans with PyTorch's caching allocator: its reserved bytes decide whether they fit, and its stops cost time."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from memo_sim.contract.hardware import Hardware, Quantity
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.contract.units import GIB
from memo_sim.engine import memory as engine_memory
from memo_sim.engine.caching_allocator import CachingMemory
from memo_sim.engine.simulate import ALLOCATOR, Simulation, simulate
from memo_sim.memory.device_allocator import DeviceCall
from memo_sim.memory.replay import DeviceStop, Iteration, Replay, replay
from memo_sim.program.arena.requests import requests_of
from memo_sim.program.ir.instruction import Lane
from tests.sim.toy_machine import SOURCES, TOY_CLUSTER, ToyPrices, alone, decide, small_decisions, toy_hardware

RESERVE = 500_000_000


def run(decisions: Decisions, hardware: Hardware | None = None) -> Simulation:
    return simulate(decisions, hardware or toy_hardware(), TOY_CLUSTER, pricer=ToyPrices(), rates=alone)


def caching(decisions: Decisions) -> Decisions:
    return msgspec.structs.replace(decisions, memory_policy="caching", replay_allocator=False)


def in_arena(decisions: Decisions) -> Decisions:
    """Put library workspaces into the arena, so that live bytes are the bytes that the allocator serves."""
    return msgspec.structs.replace(decisions, replay_allocator=True)


@settings(max_examples=20, deadline=None)
@given(decisions=small_decisions())
def test_reserved_memory_is_the_replays_and_time_that_of_the_planned_step(decisions: Decisions) -> None:
    planned, cached = run(in_arena(decisions)), run(caching(decisions))
    prediction = cached.prediction
    assert (planned.prediction.reserved_bytes, planned.prediction.allocation_retries) == (None, 0)
    assert prediction.peak_device_bytes == planned.prediction.peak_device_bytes
    assert prediction.reserved_bytes is not None
    assert prediction.reserved_bytes >= prediction.peak_device_bytes
    if decisions.micro_batches == cached.program.micro_batches:
        assert prediction.reserved_bytes == replay(requests_of(cached.program)).reserved_peak_bytes
    # 80 GiB are enough: with a warm cache, the allocator never asks the device.
    assert prediction.allocation_retries == 0
    assert prediction.step_s == planned.prediction.step_s
    assert prediction.stalls == planned.prediction.stalls


def test_a_plan_fits_when_its_reserved_bytes_fit() -> None:
    decisions = caching(decide(("none", 0.0), layers=6))
    reserved = run(decisions).prediction.reserved_bytes
    assert reserved is not None
    assert run(decisions, toy_hardware(reserved + RESERVE)).prediction.status == "ok"


def test_live_bytes_that_fit_can_be_too_much_for_the_allocator() -> None:
    decisions = in_arena(decide(("none", 0.0), layers=6))
    live = run(decisions).prediction.peak_device_bytes
    hardware = toy_hardware(live + RESERVE)
    assert run(decisions, hardware).prediction.status == "ok"
    simulation = run(caching(decisions), hardware)
    prediction, fault = simulation.prediction, simulation.memory.fault
    assert (prediction.status, prediction.step_s) == ("gpu_oom", None)
    assert fault is not None
    assert fault.live["allocated"] <= live
    assert sum(fault.live.values()) - fault.shortfall_bytes == live + RESERVE
    assert prediction.shortfall_bytes == fault.shortfall_bytes > 0
    assert prediction.reserved_bytes is None
    assert fault.id == simulation.program.ids()[fault.instruction]
    assert f"runs out at {fault.id}" in prediction.reason
    assert "reserved but unallocated" in prediction.reason


def test_live_bytes_that_do_not_fit_are_reported_by_class() -> None:
    decisions = caching(decide(("none", 0.0)))
    prediction = run(decisions, toy_hardware(RESERVE + 1)).prediction
    assert prediction.status == "gpu_oom"
    assert "state" in prediction.reason


def stopped(*stops: tuple[int, float, bool]) -> Replay:
    """Return a replay whose steady step stops at (instant, seconds, retried)."""
    calls = (DeviceCall("free", GIB), DeviceCall("malloc", GIB))
    made = [DeviceStop(instant=i, buffer="b", calls=calls, seconds=s, retried_allocation=r) for i, s, r in stops]
    return Replay(
        iterations=[Iteration(), Iteration(stops=made)],
        live_peak_bytes=GIB,
        allocated_peak_bytes=GIB,
        reserved_peak_bytes=GIB,
        segments_allocated=1,
        segments_freed=1,
        allocation_retries=1,
        out_of_memory=None,
    )


def test_a_stop_belongs_to_the_kernel_that_follows() -> None:
    lane = np.array([Lane.COMPUTE, Lane.TP, Lane.COMPUTE, Lane.COMPUTE, Lane.D2H])
    found = CachingMemory(stopped((0, 0.5, True), (1, 0.25, True), (2, 2.0, False), (4, 8.0, True)), lane)
    # Instruction 1 is a collective, so kernel 2 waits. After the last kernel, the last kernel waits.
    assert found.stall_s.tolist() == [0.5, 0, 2.25, 8.0, 0]
    assert found.retried_allocation.tolist() == [1, 0, 1, 1, 0]


def test_stops_lengthen_the_step_as_often_as_their_micro_batch_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    decisions = decide(("none", 0.0), layout=Layout(), global_batch=6)
    plain = run(decisions)
    assert plain.program.micro_batches == 3
    instance = plain.columns.instance
    micro_batch = np.array([i.micro_batch for i in plain.program.instances])[instance]
    kernels = plain.columns.lane == Lane.COMPUTE
    first, repeated = (int(np.flatnonzero(kernels & (micro_batch == m))[3]) for m in (0, 1))

    def found(*_: object, **__: object) -> CachingMemory:
        return CachingMemory(stopped((first, 0.5, True), (repeated, 0.25, True)), plain.columns.lane)

    monkeypatch.setattr(engine_memory, "caching_memory", found)
    prediction = run(caching(decisions)).prediction
    # Of six micro-batches, the second stands for four. Without collectives and copies, compute alone sets the pace.
    assert prediction.step_s == pytest.approx((plain.prediction.step_s or 0) + 0.5 + 4 * 0.25)
    assert prediction.allocation_retries == 1 + 4
    (stall,) = [s for s in prediction.stalls if s.waits_for == ALLOCATOR]
    assert (stall.lane, stall.seconds, stall.count) == ("compute", 1.5, 5)
    assert prediction.lanes["compute"] == pytest.approx(plain.prediction.lanes["compute"])


def test_the_profile_has_the_cost_of_a_device_call() -> None:
    decisions = caching(decide(("none", 0.0)))
    costly = msgspec.structs.replace(
        toy_hardware(),
        device_malloc_s=Quantity(value=2.0, source=next(iter(SOURCES))),
        device_malloc_s_per_gib=Quantity(value=3.0, source=next(iter(SOURCES))),
    )
    made = run(decisions, costly).memory.caching
    assert made is not None
    warming = made.replay.iterations[0].stops
    assert warming
    for stop in warming:
        assert stop.seconds == pytest.approx(sum(2.0 + 3.0 * call.bytes / GIB for call in stop.calls))
    # The steady step asks the device for nothing, so the costs of calls do not matter.
    assert run(decisions, costly).prediction.step_s == run(decisions).prediction.step_s


def test_an_eager_framework_needs_more_memory_and_frees_it_later() -> None:
    layout = Layout(tp=2, sequence_parallel=True)
    decisions = decide(("full", 0.0), layout=layout, layers=24)
    eager = msgspec.structs.replace(decisions, memory_policy="eager")
    roomy, cached = run(eager).prediction, run(caching(decisions)).prediction
    assert roomy.peak_device_bytes > cached.peak_device_bytes
    assert roomy.reserved_bytes is not None
    assert cached.reserved_bytes is not None
    # The layers in flight hold gathered and scattered tensors, so the difference exceeds the loss's fp32 tensors.
    assert roomy.reserved_bytes - cached.reserved_bytes > roomy.peak_device_bytes - cached.peak_device_bytes
    assert roomy.allocation_retries == 0
    tight = toy_hardware(roomy.reserved_bytes - 2**21 + RESERVE)
    found = run(eager, tight).prediction
    assert (found.status, run(caching(decisions), tight).prediction.allocation_retries) == ("ok", 0)
    assert found.allocation_retries > 0
