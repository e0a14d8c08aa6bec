"""Stages played together: closed forms of the step, matched instructions, memory of every stage, repeated windows."""

from __future__ import annotations

import itertools
from functools import partial

import msgspec
import numpy as np
import pytest

from memo_sim.answers.what_if import what_if
from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.cluster import Cluster
from memo_sim.contract.errors import MemoError
from memo_sim.contract.knobs import Schedule
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.contract.units import GIB, format_bytes
from memo_sim.engine.memory import memory_of
from memo_sim.engine.repetition import SETTLED, played_again, played_at_first
from memo_sim.engine.simulate import Simulation, simulate
from memo_sim.planning.question import Pins, Question
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.rendezvous import all_rendezvous
from memo_sim.program.ir.instruction import Lane
from memo_sim.program.ir.work import Attention, Gemm, PointToPoint, Work
from memo_sim.program.layout.schedule import Kind, passes_of
from memo_sim.program.lower import lower, program_sha256
from memo_sim.program.pipeline import order_cache
from tests.pairs import covering
from tests.refusals import refused
from tests.sim.engine.critical_path import critical_path
from tests.sim.pass_orders import before
from tests.sim.toy_machine import FLOPS, TOY_CLUSTER, ToyPrices, alone, contended, decide, run_layout, toy_hardware

VOCAB = 96
SCHEDULES = [
    Layout(pp=2),
    Layout(pp=4),
    Layout(pp=4, overlap_p2p=False),
    Layout(pp=4, schedule="gpipe"),
    Layout(pp=2, schedule="interleaved", virtual_stages=2),
    Layout(pp=4, schedule="interleaved", virtual_stages=2),
]


class LayersAlone:
    """Prices only products and attention of layers, and p2p transfers if asked to; all stages are equal."""

    def __init__(self, p2p_s: float = 0.0) -> None:
        self.outside_of: dict[Work, frozenset[str]] = {}
        self.p2p_s = p2p_s

    def seconds(self, work: Work) -> float:
        if isinstance(work, PointToPoint):
            return self.p2p_s
        if isinstance(work, Gemm) and VOCAB in (work.m, work.n, work.k):
            return 0.0
        return work.flops / FLOPS if isinstance(work, Gemm | Attention) else 0.0


run = partial(run_layout, prices=LayersAlone())


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("overlapped", [False, True])
def test_weight_gradients_fill_the_bubble(stages: int, overlapped: bool) -> None:
    """ZB-H1 leaves (p - 1)(F + B - 2W) of 1F1B's bubble; F, B and W are the times of a stage's layers."""
    whole = run(Layout(), 1)
    weights = whole.stages[0].per_instruction(lambda i: float(i.op == "linear.wgrad"))
    step, w = whole.prediction.step_s / stages, float(np.sum(whole.seconds * weights)) / stages
    assert 0 < w < step / 3
    layout = Layout(pp=stages, schedule="zero-bubble", overlap_p2p=overlapped)
    for micro_batches in (stages, 2 * stages, 40):
        found = run(layout, micro_batches).prediction.step_s
        assert found == pytest.approx(micro_batches * step + (stages - 1) * (step - 2 * w), rel=1e-9)


@pytest.mark.parametrize("layout", SCHEDULES, ids=str)
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_the_step_is_the_schedules_closed_form(layout: Layout, groups: int) -> None:
    stages, chunks, micro_batches = layout.pp, layout.virtual_stages, groups * layout.pp
    whole = run(Layout(), 1).prediction.step_s
    step = run(layout, micro_batches).prediction.step_s
    assert step == pytest.approx((micro_batches + (stages - 1) / chunks) * whole / stages, rel=1e-9)


def test_p2p_of_1f1b_cannot_hide_when_stages_are_in_step() -> None:
    """One transfer per micro-batch is exposed, and one to fill the pipeline: the next forward needs the gradient back.

    With overlap, two transfers of every second micro-batch are exposed instead, and none of the others.
    """
    free, micro_batches = run(Layout(pp=2), 16).prediction.step_s, 16
    seconds = free / 100
    for overlapped, exposed in ((False, micro_batches + 1), (True, micro_batches)):
        layout = Layout(pp=2, overlap_p2p=overlapped)
        step = run(layout, micro_batches, prices=LayersAlone(seconds)).prediction.step_s
        assert step == pytest.approx(free + exposed * seconds, rel=1e-9)


def test_overlapped_p2p_hides_when_a_stage_has_slack() -> None:
    """GPipe's forwards need nothing back from the next stage, so only the first transfer of a row is exposed."""
    for overlapped, exposed in ((True, 2), (False, 2 * 16)):
        layout = Layout(pp=2, schedule="gpipe", overlap_p2p=overlapped)
        free = run(layout, 16).prediction.step_s
        seconds = free / 1000
        assert run(layout, 16, prices=LayersAlone(seconds)).prediction.step_s == pytest.approx(
            free + exposed * seconds, rel=1e-9
        )


REPEATED_SCHEDULES = [
    *SCHEDULES,
    Layout(pp=4, schedule="zero-bubble"),
    Layout(pp=2, dp=2, zero=3),
    Layout(pp=2, schedule="interleaved", virtual_stages=2, dp=2, zero=2),
]
PERIODIC = [
    Layout(pp=4),
    Layout(pp=2, subsequences=4),
    Layout(pp=4, schedule="zero-bubble"),
    *[Layout(pp=p, schedule="interleaved", virtual_stages=v) for p in (2, 3, 8) for v in (2, 3, 5)],
    Layout(pp=4, schedule="interleaved", virtual_stages=3, subsequences=3),
]
REPEATED = [("none", 0.0), ("none", 1.0), ("full", 0.0), ("full", 1.0), ("tokenwise", 0.5)]


@pytest.mark.parametrize(("policy", "layout"), covering(REPEATED, REPEATED_SCHEDULES, every=2), ids=str)
def test_a_repeated_window_equals_full_play(policy: tuple[str, float], layout: Layout) -> None:
    """All work is priced, and lanes slow each other.

    A pipeline that is not steady says so. Its error is the drift between stages (1e-4 when they oscillate).
    """
    prices = ToyPrices(copy_s_per_byte=1 / 2e9)
    short = run(layout, 48, policy, prices=prices, rates=contended)
    full = run(layout, 48, policy, prices=prices, rates=contended, played=48)
    a, b = short.prediction, full.prediction
    added = [stage.repetition.added_s(stage.playback) for stage in short.stages]
    drift = (max(added) - min(added)) / b.step_s
    assert drift < 2e-3
    assert a.step_s == pytest.approx(b.step_s, rel=1e-9 if short.steady else max(1e-4, 2 * drift))
    if layout.schedule != "gpipe":
        assert short.program.micro_batches <= 12 * layout.pp + 8
    assert (a.peak_device_bytes, a.peak_by_class) == (b.peak_device_bytes, b.peak_by_class)
    assert a.peak_host_bytes_per_node == b.peak_host_bytes_per_node
    assert short.instruction_count == full.instruction_count == full.instructions_played
    for one, other in zip(short.stages, full.stages, strict=True):
        assert (one.moved_bytes, one.sent_bytes) == (other.moved_bytes, other.sent_bytes)
        assert one.compute_s == pytest.approx(other.compute_s, rel=1e-12)


@pytest.mark.parametrize("layout", SCHEDULES, ids=str)
def test_equal_stages_are_seen_to_be_steady(layout: Layout) -> None:
    short, full = run(layout, 40), run(layout, 40, played=40)
    assert short.steady
    assert short.program.micro_batches < 40 or layout.schedule == "gpipe"
    assert short.prediction.step_s == pytest.approx(full.prediction.step_s, rel=1e-12)
    # Stages are equal, so which one sets the pace is chance; their collectives differ, but take no time here.
    assert _busy(short) == pytest.approx(_busy(full), rel=1e-9)


def test_of_many_micro_batches_a_pipelines_filling_and_two_periods_are_played() -> None:
    """The period shows with p + 5 micro-batches for 1F1B, 2p + 5 for ZB-H1, 4p interleaved and 3p of over two chunks.

    A few more fill windows.
    """
    whole = run(Layout(), 1).prediction.step_s
    one = run(Layout(pp=8), 512)
    assert (one.steady, one.program.micro_batches) == (True, 16)
    assert one.prediction.step_s == pytest.approx((512 + 7) * whole / 8, rel=1e-9)
    zero = run(Layout(pp=8, schedule="zero-bubble"), 512)
    assert (zero.steady, zero.program.micro_batches) == (True, 24)
    interleaved = run(Layout(pp=4, schedule="interleaved", virtual_stages=2), 512)
    assert (interleaved.steady, interleaved.program.micro_batches) == (True, 16)
    assert interleaved.prediction.step_s == pytest.approx((512 + 3 / 2) * whole / 4, rel=1e-9)
    deep = run(Layout(pp=4, schedule="interleaved", virtual_stages=3), 512, layers=12)
    assert (deep.steady, deep.program.micro_batches) == (True, 12)
    whole = run(Layout(), 1, layers=12).prediction.step_s
    assert deep.prediction.step_s == pytest.approx((512 + 3 / 3) * whole / 4, rel=1e-9)


@pytest.mark.parametrize("layout", PERIODIC, ids=str)
def test_no_pass_waits_for_one_that_is_more_than_p_backwards_earlier(layout: Layout) -> None:
    """Counted in each stage's backwards; so the last p of a window show whether what follows is steady."""
    stages = [passes_of(layout, stage, 4 * layout.pp) for stage in range(layout.pp)]
    place = {}
    for stage, passes in enumerate(stages):
        backwards = itertools.accumulate((each.kind is Kind.BACKWARD for each in passes), initial=0)
        place |= {(stage, each): number for each, number in zip(passes, backwards, strict=False)}
    needs = [((stage, each), before(stage, layout.pp, layout.virtual_stages, each)) for stage, each in place]
    earlier = [place[one] - place[other] for one, other in needs if other and other[0] != one[0]]
    assert max(earlier) == (layout.pp if layout.schedule == "interleaved" else 1)


@pytest.mark.parametrize(
    "stages", [2, 4, pytest.param(8, marks=pytest.mark.slow), pytest.param(12, marks=pytest.mark.slow)]
)
def test_three_periods_that_look_steady_are(stages: int) -> None:
    """Only the last backwards of a window are compared, and the step is that of the whole play."""
    prices, cluster = ToyPrices(copy_s_per_byte=1 / 2e9), msgspec.structs.replace(TOY_CLUSTER, devices_per_node=16)
    asked = list(itertools.product(REPEATED, (3, 4, 5), (alone, contended)))
    steady = 0
    for policy, chunks, rates in asked:
        layout = Layout(pp=stages, schedule="interleaved", virtual_stages=chunks)
        decisions = decide(policy, layout=layout, layers=chunks * stages, global_batch=14 * stages)
        short, whole = (
            simulate(decisions, toy_hardware(), cluster, pricer=prices, rates=rates, micro_batches_played=n * stages)
            for n in (3, 14)
        )
        assert short.prediction.peak_by_class == whole.prediction.peak_by_class
        if short.steady:
            steady += 1
            assert short.prediction.step_s == pytest.approx(whole.prediction.step_s, rel=1e-10)
    assert steady > len(asked) / 3


@pytest.mark.parametrize("layout", SCHEDULES, ids=str)
def test_lanes_are_serial_and_meetings_are_one(layout: Layout) -> None:
    prices = ToyPrices(copy_s_per_byte=1 / 2e9)
    simulation = run(layout, 2 * layout.pp, ("tokenwise", 0.5), prices=prices, rates=contended)
    for stage in simulation.stages:
        playback = stage.playback
        for lane in np.unique(stage.columns.lane):
            mine = stage.columns.lane == lane
            assert (playback.start_s[mine][1:] >= playback.end_s[mine][:-1]).all()
        edges = playback.edges
        assert (playback.start_s[edges.consumer] >= playback.end_s[edges.producer]).all()
    met = all_rendezvous([stage.program for stage in simulation.stages])
    handed = 2 * 2 * layout.pp * (layout.pp * layout.virtual_stages - 1)
    assert len([each for each in met if _lane(simulation, each[0]) in (Lane.SEND, Lane.RECV)]) == handed
    for rendezvous in met:
        starts = {float(simulation.stages[r].playback.start_s[i]) for r, i in rendezvous}
        ends = [float(simulation.stages[r].playback.end_s[i]) for r, i in rendezvous]
        assert len(starts) == 1
        assert ends == pytest.approx([ends[0]] * len(ends), rel=1e-12)


def _busy(simulation: Simulation) -> dict[str, float]:
    return {lane: seconds for lane, seconds in simulation.prediction.lanes.items() if seconds}


def _lane(simulation: Simulation, each: tuple[int, int]) -> Lane:
    return Lane(int(simulation.stages[each[0]].columns.lane[each[1]]))


def test_the_critical_path_goes_from_stage_to_stage_without_a_gap() -> None:
    simulation = run(Layout(pp=4), 8, prices=ToyPrices(), rates=alone)
    spans = {
        f"{stage.program.stage}: {name}": (float(start), float(end))
        for stage in simulation.stages
        for name, start, end in zip(stage.program.ids(), stage.playback.start_s, stage.playback.end_s, strict=True)
    }
    ids = [stage.program.ids() for stage in simulation.stages]
    path = [f"{simulation.stages[stage].program.stage}: {ids[stage][at]}" for stage, at in critical_path(simulation)]
    assert spans[path[0]][0] == 0.0
    assert spans[path[-1]][1] == pytest.approx(simulation.prediction.step_s, rel=1e-12)
    for a, b in itertools.pairwise(path):
        assert spans[b][0] == pytest.approx(spans[a][1], rel=1e-12)
    assert {name.partition(":")[0] for name in path} == {f"stage{n}" for n in range(4)}


def test_the_worst_stage_decides_whether_memory_is_enough_and_is_named() -> None:
    simulation = run(Layout(pp=4), 8, prices=ToyPrices())
    needs = [stage.memory.device_total_bytes for stage in simulation.stages]
    assert simulation.prediction.peak_device_bytes == max(stage.memory.device.bytes for stage in simulation.stages)
    assert needs.index(max(needs)) == 0  # the first stage has the most micro-batches in flight
    decisions, cluster = simulation.decisions, TOY_CLUSTER
    enough = simulate(decisions, toy_hardware(max(needs)), cluster, pricer=ToyPrices(), rates=alone)
    short = simulate(decisions, toy_hardware(max(needs) - 1), cluster, pricer=ToyPrices(), rates=alone)
    assert (enough.prediction.status, short.prediction.status) == ("ok", "gpu_oom")
    needed = format_bytes(max(needs))
    assert short.prediction.reason.startswith("stage0: device memory runs out, worst at m")
    assert f": {needed} (" in short.prediction.reason
    assert short.prediction.reason.endswith(f" of {format_bytes(max(needs) - 1)}, so 1 B are missing")
    assert short.prediction.shortfall_bytes == 1
    assert short.prediction.step_s is None


@pytest.mark.parametrize("per_node", [2, 4, 8])
def test_a_nodes_host_memory_serves_all_its_stages(per_node: int) -> None:
    layout = Layout(pp=4, tp=2, sequence_parallel=True)
    decisions = decide(("none", 1.0), layout=layout, layers=8, global_batch=8)
    cluster = nodes_of(per_node)
    simulation = simulate(decisions, toy_hardware(), cluster, pricer=ToyPrices(), rates=alone)
    each = [stage.memory.host.bytes for stage in simulation.stages]
    nodes = [range(n, n + per_node) for n in range(0, 8, per_node)]
    wanted = max(sum(each[rank // 2] for rank in node) for node in nodes)
    assert simulation.prediction.peak_host_bytes_per_node == wanted > 0
    room = toy_hardware(host_bytes=wanted - 1)
    refused = simulate(decisions, room, cluster, pricer=ToyPrices(), rates=alone).prediction
    assert refused.status == "host_oom"
    assert refused.reason.startswith("stage0: a node's host memory runs out, worst at m")


def nodes_of(per_node: int) -> Cluster:
    """Return eight toy devices, ``per_node`` on each node, with a shipped cluster's network between nodes."""
    network = load_cluster("a800-8x8")[0]
    return Cluster(
        name="toy",
        hardware="toy",
        nodes=8 // per_node,
        devices_per_node=per_node,
        network=network.network,
        sources=network.sources,
    )


def test_traces_are_of_every_stage_and_pin_all_programs() -> None:
    simulation = run(Layout(pp=2, tp=2), 12, prices=ToyPrices())
    programs = lower(simulation.decisions)
    traces = simulation.traces()
    assert [t.rank for t in traces] == [0, 2]
    assert [t.spans.ids for t in traces] == [p.ids() for p in programs]
    assert {t.program_sha256 for t in traces} == {program_sha256(programs)}
    assert {t.world_size for t in traces} == {4}
    assert max(max(t.spans.end_s) for t in traces) == pytest.approx(simulation.prediction.step_s, rel=1e-9)


def test_a_stage_that_misses_its_counterpart_is_a_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memo_sim.program.pipeline.stage_p2p.StageP2P.ahead", 0)
    monkeypatch.setattr("memo_sim.program.pipeline.stage_program.cached_order", lambda _, __, place: place())
    with refused(MemoError, got="waits for") as error:
        run(Layout(pp=4, schedule="interleaved", virtual_stages=2), 8)
    assert error.value.exit_code == 1


def test_the_answer_describes_the_stages() -> None:
    cluster, hardware = load_cluster("a800-1x8")
    pins = Pins(tp=4, pp=2, recompute="none", alpha=0.0)
    question = Question(load_model("gpt-tiny"), cluster, hardware, 1024, system="any", pins=pins, global_batch=4)
    answer = what_if(question)
    assert answer.best is not None
    layout = answer.best.decisions.layout
    assert (layout.tp, layout.pp, layout.dp, layout.schedule) == (4, 2, 1, "1f1b")
    (line,) = [line for line in answer.result.why if " pipeline stages run " in line]
    sent = format_bytes(max(stage.sent_bytes for stage in answer.best.stages))
    assert line.startswith(
        f"2 pipeline stages run 4 micro-batches with the 1f1b schedule; a rank sends at most {sent} per step"
    )


def test_a_device_needs_less_for_more_stages() -> None:
    peaks = [run(Layout(pp=pp, dp=8 // pp), 8, prices=ToyPrices()).prediction.peak_device_bytes for pp in (1, 2, 4)]
    assert peaks == sorted(peaks, reverse=True)
    assert all(peak < 80 * GIB for peak in peaks)


def test_decisions_are_what_is_played() -> None:
    simulation = run(Layout(pp=4), 32)
    assert isinstance(simulation.decisions, Decisions)
    assert simulation.full_program in simulation.full_programs
    assert simulation.full_programs[0].micro_batches == 32
    assert simulation.program.micro_batches < 32


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
def test_micro_batches_of_one_period_reserve_as_much_as_the_whole_step(schedule: Schedule) -> None:
    """The host synchronises at every p2p transfer, so the allocator serves the same blocks in every period."""
    cluster, hardware = load_cluster("a100-1x8")
    model = msgspec.structs.replace(load_model("gpt-7b"), layers=8)
    chunks = 2 if schedule == "interleaved" else 1
    layout = Layout(tp=2, sequence_parallel=True, pp=4, schedule=schedule, virtual_stages=chunks)
    decisions = Decisions(model=model, layout=layout, seq_tokens=4096, global_batch=32, memory_policy="eager")
    few, whole = (lower(decisions, micro_batches=n) for n in (played_at_first(layout, 32, replayed=True), 32))
    reserved = [
        [memory_of(p, expand(p), decisions, hardware, cluster).caching.replay.reserved_peak_bytes for p in (one, all_)]
        for one, all_ in zip(few, whole, strict=True)
    ]
    assert few[0].micro_batches < 32
    assert all(one == all_ for one, all_ in reserved)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
@pytest.mark.parametrize("pp", [2, 4, 8, 16, 64])
def test_a_second_try_plays_more_micro_batches_than_the_first(schedule: Schedule, pp: int) -> None:
    layout = Layout(pp=pp, schedule=schedule, virtual_stages=2 if schedule == "interleaved" else 1)
    planned, replayed = (played_at_first(layout, 4096, replayed=each) for each in (False, True))
    assert planned <= replayed < played_again(layout, 4096) < 4096
    if schedule != "interleaved" and pp >= 8:
        assert 0 < replayed - planned <= SETTLED


def test_a_played_pipeline_keeps_neither_instances_nor_lives_of_buffers() -> None:
    """They are most of a deep pipeline's memory, and only few answers ask for them."""
    order_cache.forget()  # other tests look at the instances that it holds
    simulation = run(Layout(pp=4, schedule="interleaved", virtual_stages=2), 512)
    stage = simulation.stages[1]
    assert stage.playback.span_s > 0
    assert "_every" not in vars(stage.program.instances)
    assert "_lives" not in vars(stage.memory)
    assert len(stage.memory.device_lives.birth) == len(stage.memory.device_lives.bytes) > 0
    assert stage.program.instances[-1].template == stage.program.template_of[-1]
    assert "_every" in vars(stage.program.instances)
    assert "_lives" in vars(stage.memory)
