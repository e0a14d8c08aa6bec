"""Collectives of different groups run beside each other and share links; those of one group run one after another."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memo_sim.contract.catalog import load_cluster, load_model
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.costs.contention import Demands, NodeRates
from memo_sim.costs.pricing import Pricer
from memo_sim.engine.player import play
from memo_sim.engine.simulate import Simulation, simulate
from memo_sim.program.analysis.columns import Columns, expand
from memo_sim.program.analysis.edges import Edges, derive_edges
from memo_sim.program.ir.instruction import COLLECTIVE_LANES, Lane
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Collective, Work
from memo_sim.program.lower import lower
from memo_sim.program.verify.program import check_program
from memo_sim.program.verify.stages import check_deadlock
from tests.sim.small_programs import GPT
from tests.sim.small_programs import decide as small
from tests.sim.toy_machine import TOY_CLUSTER, ToyPrices, alone, decide, toy_hardware

CLUSTER, HARDWARE = load_cluster("a800-8x8")
ULYSSES = Layout(ulysses=4, dp=16, zero=3)
LAYOUTS = [
    ULYSSES,
    Layout(tp=2, sequence_parallel=True, ulysses=4, dp=8, zero=3),
    Layout(tp=4, sequence_parallel=True, cp=2, dp=4, pp=2, zero=1),
    Layout(cp=16, ulysses=4, zero=2),
    Layout(metp=8, dp=8, zero=1),
]


def decided(layout: Layout = ULYSSES) -> Decisions:
    model = msgspec.structs.replace(load_model("gpt-65b"), layers=4)
    return Decisions(model=model, layout=layout, seq_tokens=1 << 14, global_batch=2 * layout.dp, recompute="full")


def demands(layout: Layout) -> Demands:
    return Pricer(HARDWARE, CLUSTER, layout).demands


def rates(where: Demands) -> NodeRates:
    return NodeRates(HARDWARE, CLUSTER, demands=where)


def side_by_side(lanes: list[Lane], seconds: list[float], where: Demands) -> list[float]:
    """Return when calls end that begin together, one on each lane, and do not wait for each other."""
    none = np.zeros(0, dtype=np.int64)
    calls = Columns(**dict.fromkeys(Columns.__dataclass_fields__, none) | {"lane": np.array(lanes, dtype=np.int64)})
    return play(calls, Edges(none, none), np.array(seconds), rates(where).rates).end_s.tolist()


def spans(simulation: Simulation, lane: Lane) -> tuple[np.ndarray, np.ndarray]:
    mine = simulation.columns.lane == lane
    return simulation.playback.start_s[mine], simulation.playback.end_s[mine]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_lane_is_serial_and_nothing_precedes_what_it_needs(layout: Layout) -> None:
    simulation = simulate(decided(layout), HARDWARE, CLUSTER)
    for stage in simulation.stages:
        playback, lane = stage.playback, stage.columns.lane
        for each in np.unique(lane):
            mine = np.flatnonzero(lane == each)
            assert (playback.start_s[mine[1:]] >= playback.end_s[mine[:-1]]).all(), Lane(each)
        assert (playback.start_s[playback.edges.consumer] >= playback.end_s[playback.edges.producer]).all()


def test_gathers_run_beside_the_all_to_alls_of_layers() -> None:
    simulation = simulate(decided(), HARDWARE, CLUSTER)
    starts, ends = spans(simulation, Lane.ULYSSES)
    gathers = zip(*spans(simulation, Lane.REPLICA), strict=True)
    beside = [((starts < end) & (ends > start)).any() for start, end in gathers]
    assert sum(beside) > len(beside) / 3


class Gathers(ToyPrices):
    """Toy prices in which a gather of parameters takes ``seconds``; other collectives take 10 us and their bytes."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def seconds(self, work: Work) -> float:
        gathers = isinstance(work, Collective) and (work.kind, work.group) == ("all_gather", "grads")
        return self._seconds if gathers else super().seconds(work)


def test_an_all_to_all_does_not_wait_behind_a_gather() -> None:
    """A gather that fits beside a layer costs nothing but the first one, though all-to-alls come during it."""
    decisions = decide(("full", 0.0), layout=Layout(ulysses=2, dp=2, zero=3), layers=6)
    free = simulate(decisions, toy_hardware(), TOY_CLUSTER, pricer=Gathers(0.0), rates=alone)
    short = free.playback.span_s / 100
    gathered = simulate(decisions, toy_hardware(), TOY_CLUSTER, pricer=Gathers(short), rates=alone)
    waited = {s.waits_for: s.seconds for s in gathered.prediction.stalls if s.lane == "compute"}
    before = {s.waits_for: s.seconds for s in free.prediction.stalls if s.lane == "compute"}
    assert waited["all_to_all"] == pytest.approx(before["all_to_all"], rel=1e-9)
    # Two gathers before the embedding and the first layer, and nothing else.
    assert gathered.playback.span_s - free.playback.span_s < 2.001 * short


NODE = {"node out": 1.0, "node in": 1.0}


def test_equal_demands_get_half_a_link_each() -> None:
    """Both run at 1/2 until the shorter one ends at 2 s; the longer one then has 2 s left."""
    ends = side_by_side([Lane.ULYSSES, Lane.REPLICA], [1.0, 3.0], {Lane.ULYSSES: NODE, Lane.REPLICA: NODE})
    assert ends == pytest.approx([2.0, 4.0], rel=1e-12)


def test_a_gather_over_nodes_takes_its_share_of_the_link_inside_a_node() -> None:
    share = 0.4
    over = {"node out": share, "node in": share, "network out": 1.0, "network in": 1.0}
    ends = side_by_side([Lane.ULYSSES, Lane.REPLICA], [1.0, 3.0], {Lane.ULYSSES: NODE, Lane.REPLICA: over})
    assert ends == pytest.approx([1.4, 1.4 + 2.0], rel=1e-12)


def test_three_on_one_link_end_as_fluids_do() -> None:
    where = {Lane.TP: NODE, Lane.ULYSSES: NODE, Lane.REPLICA: NODE}
    ends = side_by_side([Lane.TP, Lane.ULYSSES, Lane.REPLICA], [1.0, 2.0, 3.0], where)
    assert ends == pytest.approx([3.0, 5.0, 6.0], rel=1e-12)


def test_another_link_does_not_slow() -> None:
    network = {"network out": 1.0, "network in": 1.0}
    where = {Lane.TP: NODE, Lane.REPLICA: network, Lane.SEND: {"network out": 1.0}, Lane.RECV: {"network in": 1.0}}
    assert side_by_side([Lane.TP, Lane.REPLICA], [1.0, 3.0], where) == pytest.approx([1.0, 3.0], rel=1e-12)
    assert side_by_side([Lane.SEND, Lane.RECV], [1.0, 3.0], where) == pytest.approx([1.0, 3.0], rel=1e-12)
    assert side_by_side([Lane.SEND, Lane.REPLICA], [1.0, 3.0], where) == pytest.approx([2.0, 4.0], rel=1e-12)


def test_compute_is_slowed_once_by_any_number_of_collectives() -> None:
    found = rates(demands(ULYSSES)).rates
    one, two = 1 << Lane.COMPUTE | 1 << Lane.ULYSSES, 1 << Lane.COMPUTE | 1 << Lane.ULYSSES | 1 << Lane.REPLICA
    assert found(one)[Lane.COMPUTE] == found(two)[Lane.COMPUTE] < 1.0


@given(layout=st.sampled_from(LAYOUTS), busy=st.integers(0, 2 ** len(Lane) - 1))
def test_no_link_carries_more_than_it_can(layout: Layout, busy: int) -> None:
    where = demands(layout)
    found = rates(where).rates(busy)
    carried: dict[str, float] = {}
    for lane, links in where.items():
        for link, demand in links.items() if busy & (1 << lane) else ():
            assert 0 < demand <= 1 + 1e-12
            carried[link] = carried.get(link, 0.0) + demand * found[lane]
    assert all(each <= 1 + 1e-12 for each in carried.values())


@pytest.mark.parametrize("layout", [each for each in LAYOUTS if each.pp == 1], ids=str)
def test_every_call_moves_all_its_bytes(layout: Layout) -> None:
    """The integral of a lane's rate over a call's span is the call's time alone, so no byte is lost or added."""
    simulation = simulate(decided(layout), HARDWARE, CLUSTER)
    start, end, lane = simulation.playback.start_s, simulation.playback.end_s, simulation.columns.lane
    local = min(CLUSTER.devices_per_node, layout.devices)
    rate_of = NodeRates(HARDWARE, CLUSTER, local, demands=demands(layout)).rates
    instants = np.unique(np.concatenate((start, end)))
    middle = (instants[:-1] + instants[1:]) / 2
    busy = np.zeros(len(middle), dtype=np.int64)
    for each in np.unique(lane):
        mine = lane == each
        running = np.searchsorted(np.sort(start[mine]), middle) > np.searchsorted(np.sort(end[mine]), middle)
        busy |= running.astype(np.int64) << int(each)
    rate = np.array([rate_of(int(b)) for b in busy])
    done = np.vstack((np.zeros(len(Lane)), np.cumsum(rate * np.diff(instants)[:, None], axis=0)))
    first, last = np.searchsorted(instants, start), np.searchsorted(instants, end)
    moved = done[last, lane] - done[first, lane]
    calls = np.isin(lane, list(COLLECTIVE_LANES.values()))
    np.testing.assert_allclose(moved[calls], simulation.seconds[calls], rtol=1e-6, atol=1e-9)


def on_lanes(program: Program, lanes: dict[Lane, Lane]) -> Program:
    """Return the program with the instructions of some lanes on other lanes."""
    templates = tuple(
        replace(
            t, instructions=tuple(msgspec.structs.replace(i, lane=lanes.get(i.lane, i.lane)) for i in t.instructions)
        )
        for t in program.templates
    )
    return replace(program, templates=templates)


def test_a_call_on_another_groups_lane_is_a_fault() -> None:
    (program,) = lower(small(GPT, Layout(ulysses=2, dp=2, zero=3)))
    assert check_program(program, expand(program)) == []
    for wrong in ({Lane.REPLICA: Lane.ULYSSES}, {Lane.ULYSSES: Lane.COMPUTE}, {Lane.COMPUTE: Lane.TP}):
        moved = on_lanes(program, wrong)
        assert any(" on lane " in fault for fault in check_program(moved, expand(moved)))


def test_order_between_communicators_is_free_and_inside_one_is_not() -> None:
    """One rank gathers before its all-to-all, the other one after it: a deadlock only where both share a lane."""
    (program,) = lower(small(GPT, Layout(ulysses=2, dp=2, zero=3), global_batch=2))
    number = [n for n, t in enumerate(program.templates) if t.name == "layer.gather"]
    at = [n for n, i in enumerate(program.instances) if i.template == number[0] and i.layer == 1]
    instances = list(program.instances)
    instances.insert(at[0] + 1, instances.pop(at[0]))  # after layer 0's forward, which has the all-to-alls
    other = replace(program, instances=tuple(instances))
    assert not found_stuck([program, other])
    shared = {Lane.REPLICA: Lane.ULYSSES}
    assert found_stuck([on_lanes(program, shared), on_lanes(other, shared)])


def found_stuck(programs: list[Program]) -> list[str]:
    columns = [expand(each) for each in programs]
    return check_deadlock(programs, columns, [derive_edges(each) for each in columns], ("ulysses", "grads"))
