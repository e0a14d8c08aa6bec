"""From decisions to a prediction: repeating equals playing everything, and figures follow their definitions."""

from __future__ import annotations

import gc
import itertools
import weakref

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from memo_sim.contract.errors import Infeasible
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.engine.event_loop import Rates
from memo_sim.engine.player import play
from memo_sim.engine.simulate import Simulation, simulate
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.work import Attention, Gemm, Rowwise, Work
from memo_sim.program.lower import lower
from tests.refusals import refused
from tests.sim.engine.critical_path import chain, critical_path
from tests.sim.toy_machine import (
    LAYOUTS,
    POLICIES,
    TOY_CLUSTER,
    ToyPrices,
    alone,
    contended,
    decide,
    small_decisions,
    toy_hardware,
)


def run(
    decisions: Decisions, *, prices: ToyPrices | None = None, rates: Rates = contended, played: int | None = None
) -> Simulation:
    return simulate(
        decisions,
        toy_hardware(),
        TOY_CLUSTER,
        pricer=prices or ToyPrices(),
        rates=rates,
        micro_batches_played=played,
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_repeated_micro_batches_equal_full_play(policy: tuple[str, float], layout: Layout) -> None:
    decisions = decide(policy, layout=layout, layers=4, global_batch=6 * layout.dp, states="host")
    # With copies slower than compute, the copy lanes stay busy throughout the step.
    slow = ToyPrices(copy_s_per_byte=1 / 1e9)
    short, full = run(decisions, prices=slow), run(decisions, prices=slow, played=6)
    assert (short.program.micro_batches, full.program.micro_batches) == (3, 6)
    a, b = short.prediction, full.prediction
    assert a.step_s == pytest.approx(b.step_s, rel=1e-9)
    assert a.lanes == pytest.approx(b.lanes, rel=1e-9)
    assert (a.moved_bytes, a.peak_device_bytes, a.peak_by_class) == (
        b.moved_bytes,
        b.peak_device_bytes,
        b.peak_by_class,
    )
    assert a.peak_host_bytes_per_node == b.peak_host_bytes_per_node
    assert short.compute_s_without_recompute == pytest.approx(full.compute_s_without_recompute, rel=1e-9)
    waited = [{(s.lane, s.waits_for): (s.seconds, s.count) for s in p.stalls} for p in (a, b)]
    for key in waited[0].keys() | waited[1].keys():
        (seconds, count), (others, other_count) = (w.get(key, (0.0, 0)) for w in waited)
        assert seconds == pytest.approx(others, rel=1e-6, abs=1e-9 * a.step_s), key
        # A wait shorter than rounding may be counted on one side only.
        assert count == other_count or seconds < 1e-9 * a.step_s, key


class OneKindOutside(ToyPrices):
    """Prices whose work of one kind was never measured."""

    def __init__(self, kind: type[Work], **others: float) -> None:
        super().__init__(**others)
        self.kind = kind

    def seconds(self, work: Work) -> float:
        if isinstance(work, self.kind):
            self.outside_of[work] = frozenset({"curve"})
        return super().seconds(work)


def test_a_curve_outside_its_range_is_named_when_it_carries_more_than_a_twentieth_of_the_step() -> None:
    decisions = decide(("none", 0.5), global_batch=6)
    for kind in (Attention, Gemm, Rowwise):
        simulation = run(decisions, prices=OneKindOutside(kind), rates=alone)
        step_s = simulation.prediction.step_s
        assert step_s is not None
        stage = simulation.pace
        mine = stage.per_instruction(lambda i, kind=kind: float(isinstance(i.work, kind)))  # type: ignore[misc]
        share = float(np.sum(stage.seconds * stage.weights * mine)) / step_s
        assert simulation.outside_shares == ({"curve": pytest.approx(share)} if share > 0.05 else {})
        assert simulation.prediction.outside_calibration == list(simulation.outside_shares)
    # The same work in a step that copies fill.
    hidden = run(decisions, prices=OneKindOutside(Attention, copy_s_per_byte=1e-8), rates=alone)
    assert not hidden.outside_shares


def test_fewer_micro_batches_than_show_a_period_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\b2\b"):
        run(decide(("none", 0.0), global_batch=4), played=2)


@given(decisions=small_decisions())
@settings(max_examples=25, deadline=None)
def test_bytes_copied_to_the_host_are_copied_back(decisions: Decisions) -> None:
    moved = run(decisions).prediction.moved_bytes
    if decisions.states == "host":
        # Gradients are copied to the host in fp32, parameters are copied back in bf16.
        without = run(msgspec.structs.replace(decisions, states="fp32")).prediction.moved_bytes
        assert moved.d2h - without.d2h == 2 * (moved.h2d - without.h2d) > 0
        moved = without
    assert moved.d2h == moved.h2d
    swaps = decisions.recompute == "tokenwise" or decisions.swapped_tokens > 0
    assert (moved.d2h > 0) == (swaps and decisions.model.layers > 2)


def test_the_figures_are_their_definitions() -> None:
    decisions = decide(("tokenwise", 0.5), layout=LAYOUTS[-1], layers=5, global_batch=4)
    simulation = run(decisions)
    p, model, layout = simulation.prediction, decisions.model, decisions.layout
    matrices = model.layers * (4 * 64 * 64 + 2 * 64 * 128) + 96 * 64
    flops = 4 * (6 * decisions.seq_tokens * matrices + 6 * model.layers * 64 * decisions.seq_tokens**2)
    assert p.mfu == pytest.approx(flops / (p.step_s * 8 * 300e12))
    assert p.tgs == pytest.approx(4 * decisions.seq_tokens / (p.step_s * layout.devices))
    assert p.status == "ok"
    assert p.hardware == "toy"
    assert p.step_s == simulation.playback.span_s
    assert set(p.lanes) == {"compute", "d2h", "h2d", "tp", "p2p", "replica"}
    assert all(0 < seconds <= p.step_s for seconds in p.lanes.values())
    assert [s.seconds for s in p.stalls] == sorted((s.seconds for s in p.stalls), reverse=True)
    compute = sum(s.seconds for s in p.stalls if s.lane == "compute")
    assert p.lanes["compute"] + compute == pytest.approx(p.step_s)


def test_twice_the_prices_are_twice_the_step() -> None:
    decisions = decide(("tokenwise", 0.5), layout=LAYOUTS[-1], layers=5)
    once, twice = run(decisions).prediction, run(decisions, prices=ToyPrices(2.0)).prediction
    assert twice.step_s == pytest.approx(2 * once.step_s, rel=1e-9)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_free_copies_leave_the_sum_of_compute(policy: tuple[str, float]) -> None:
    simulation = run(decide(policy, layers=6), prices=ToyPrices(copy_s_per_byte=0.0), rates=alone)
    compute = simulation.seconds[simulation.columns.lane == Lane.COMPUTE].sum()
    assert simulation.prediction.step_s == pytest.approx(compute, rel=1e-12)


def test_only_the_critical_path_lengthens_the_step() -> None:
    simulation = run(decide(("tokenwise", 0.75), layout=LAYOUTS[3], layers=6), rates=alone)
    playback, seconds = simulation.playback, simulation.seconds
    path, ids = chain(playback), simulation.program.ids()
    assert critical_path(simulation) == [(0, i) for i in path]
    assert playback.start_s[path[0]] == 0
    assert playback.end_s[path[-1]] == playback.span_s
    for before, after in itertools.pairwise(path):
        assert playback.end_s[before] == playback.start_s[after]
    extra = 0.1 * playback.span_s
    off = sorted(set(range(len(ids))) - set(path))
    assert {simulation.columns.lane[i] for i in off} >= {Lane.D2H, Lane.H2D}
    for i in path[:: len(path) // 20]:
        slowed = seconds.copy()
        slowed[i] += extra
        assert play(playback.columns, playback.edges, slowed, alone).span_s == pytest.approx(playback.span_s + extra)
    moved = 0
    for i in off[:: len(off) // 20]:
        slowed = seconds.copy()
        slowed[i] += extra
        again = play(playback.columns, playback.edges, slowed, alone)
        assert again.span_s <= playback.span_s + extra * (1 + 1e-12)
        moved += i in chain(again)
    assert moved > 0  # a large enough delay moves an instruction onto the critical path


def test_the_trace_has_one_span_an_instruction_with_its_id() -> None:
    decisions = decide(("tokenwise", 0.5), layout=Layout(tp=2), layers=4, global_batch=5)
    simulation = run(decisions)
    trace = simulation.trace()
    (program,) = lower(decisions)
    assert trace.spans.ids == program.ids()
    assert trace.spans.ops == [i.op for _, i in program.walk()]
    assert trace.spans.lanes == [i.lane.label for _, i in program.walk()]
    assert trace.program_sha256 == program.sha256 == simulation.full_program.sha256
    assert (trace.micro_batches_played, trace.micro_batches, trace.world_size) == (5, 5, 2)
    assert trace.step_s == pytest.approx(simulation.prediction.step_s, rel=1e-9)
    assert max(trace.spans.end_s) == trace.step_s
    starts = dict(zip(trace.spans.ids, trace.spans.start_s, strict=True))
    ends = dict(zip(trace.spans.ids, trace.spans.end_s, strict=True))
    assert trace.waits
    for wait in trace.waits:
        assert wait.start_s + wait.seconds == pytest.approx(starts[wait.instruction])
        assert ends[wait.waits_for] == starts[wait.instruction]
    decoded = msgspec.json.decode(msgspec.json.encode(trace), type=type(trace))
    assert decoded == trace


def test_forward_of_a_middle_layer_leaves_waits_for_copies_out() -> None:
    def forward_s(policy: tuple[str, float], copy_s_per_byte: float) -> float:
        prices = ToyPrices(copy_s_per_byte=copy_s_per_byte)
        return run(decide(policy, layers=6), prices=prices, rates=alone).layer_forward_s

    keep = forward_s(("none", 0.0), 0.0)
    assert keep > 0
    assert forward_s(("none", 1.0), 1e-8) == pytest.approx(keep)
    simulation = run(decide(("none", 0.0), layers=6), rates=alone)
    layer = np.array([name.startswith("m0/s0/l3/fwd") for name in simulation.program.ids()])
    assert keep == pytest.approx(simulation.seconds[layer].sum())
    with_waits = run(decide(("none", 0.0), layout=Layout(tp=2), layers=6), rates=alone)
    mine = np.array([name.startswith("m0/s0/l3/fwd") for name in with_waits.program.ids()])
    compute = mine & (with_waits.columns.lane == Lane.COMPUTE)
    assert with_waits.layer_forward_s > with_waits.seconds[compute].sum()


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2)], ids=["one stage", "two stages"])
def test_a_played_plan_is_freed_at_once(layout: Layout) -> None:
    """Not only when Python's collector runs: a search plays plans of hundreds of MB."""
    gc.collect()
    gc.disable()
    try:
        simulation = run(decide(("full", 0.0), layout=layout, layers=2))
        parts = [weakref.ref(each) for stage in simulation.stages for each in (stage, stage.columns, stage.playback)]
        assert simulation.prediction.step_s
        del simulation
        assert [part() for part in parts] == [None] * len(parts)
    finally:
        gc.enable()


def test_a_stage_says_when_it_cannot_be_played_any_more() -> None:
    stage = run(decide(("full", 0.0), layers=2)).stages[0]
    with pytest.raises(ReferenceError, match="keep the simulation"):
        _ = stage.playback


def test_a_layout_larger_than_the_cluster_is_refused() -> None:
    with refused(Infeasible, where="layout", got="16 devices", wanted="8"):
        run(decide(("none", 0.0), layout=Layout(dp=16)))


def test_a_dtype_without_a_peak_is_refused() -> None:
    with refused(Infeasible, what="fp32", where="decisions.dtype", wanted="bf16"):
        run(decide(("none", 0.0), dtype="fp32"))


def test_a_trace_of_very_many_micro_batches_holds_the_played_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = run(decide(("tokenwise", 0.5), global_batch=8))
    whole = simulation.trace()
    assert (whole.micro_batches_played, whole.micro_batches) == (8, 8)
    (asked,) = simulation.traces(most_spans=len(whole.spans.ids) - 1)
    monkeypatch.setattr("memo_sim.engine.simulate.MOST_SPANS", len(whole.spans.ids) - 1)
    short = simulation.trace()
    assert asked == short
    assert (short.micro_batches_played, short.micro_batches) == (3, 8)
    assert set(short.spans.ids) < set(whole.spans.ids)
    assert short.program_sha256 == whole.program_sha256
    assert short.step_s == pytest.approx(whole.step_s, rel=1e-9)
