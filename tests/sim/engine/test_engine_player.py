"""The player keeps lanes serial and in order, waits for every conflict, and starts nothing later than necessary."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memo_sim.contract.errors import MemoError
from memo_sim.contract.plan import Decisions, Layout
from memo_sim.engine import event_loop, player, segments
from memo_sim.engine.event_loop import Clock, Groups, Rates, UsedRates
from memo_sim.engine.playback import Floats, Playback
from memo_sim.engine.player import Part, play, play_stages
from memo_sim.engine.segments import Segments
from memo_sim.program.analysis import edges
from memo_sim.program.analysis.columns import Columns, expand
from memo_sim.program.analysis.edges import Edges, derive_edges
from memo_sim.program.ir.instruction import Lane, Mode
from memo_sim.program.lower import lower
from tests.refusals import refused
from tests.sim.toy_machine import alone, contended, decide, small_decisions


def conflicts(columns: Columns) -> list[tuple[int, int]]:
    """Return conflicting pairs on different lanes: both touch the same rows, one writes. Quadratic on purpose."""
    by_buffer: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
    rows = zip(
        columns.operand_buffer.tolist(),
        columns.operand_instruction.tolist(),
        columns.operand_first.tolist(),
        columns.operand_end.tolist(),
        columns.operand_mode.tolist(),
        strict=True,
    )
    for buffer, i, first, end, mode in rows:
        by_buffer[buffer].append((i, first, end, mode))
    lane = columns.lane.tolist()
    found = set()
    for accesses in by_buffer.values():
        for i, first, end, mode in accesses:
            for j, other_first, other_end, other_mode in accesses:
                overlap = first < other_end and other_first < end
                if i < j and lane[i] != lane[j] and overlap and (mode | other_mode) & Mode.WRITE:
                    found.add((i, j))
    return sorted(found)


def played(decisions: Decisions, rates: Rates, seed: int = 0) -> tuple[Playback, np.ndarray]:
    columns = expand(lower(decisions)[0])
    seconds = np.random.default_rng(seed).exponential(1e-3, len(columns.lane))
    seconds[seconds < 1e-4] = 0.0  # work that takes no time must be handled too
    return play(columns, derive_edges(columns), seconds, rates), seconds


@given(decisions=small_decisions(), seed=st.integers(0, 99), rates=st.sampled_from([alone, contended]))
@settings(max_examples=60, deadline=None)
def test_lanes_are_serial_and_conflicts_are_ordered(decisions: Decisions, seed: int, rates: Rates) -> None:
    playback, _ = played(decisions, rates, seed)
    start, end, lane = playback.start_s, playback.end_s, playback.columns.lane
    assert (start <= end).all()
    for each in Lane:
        mine = np.flatnonzero(lane == each)
        assert (start[mine[1:]] >= end[mine[:-1]]).all(), each
    for i, j in conflicts(playback.columns):
        assert end[i] <= start[j], (i, j)


@given(decisions=small_decisions(), seed=st.integers(0, 99), rates=st.sampled_from([alone, contended]))
@settings(max_examples=60, deadline=None)
def test_nothing_starts_later_than_necessary(decisions: Decisions, seed: int, rates: Rates) -> None:
    playback, _ = played(decisions, rates, seed)
    ready = np.where(playback.previous >= 0, playback.end_s[playback.previous], 0.0)
    np.maximum.at(ready, playback.edges.consumer, playback.end_s[playback.edges.producer])
    assert (playback.start_s == ready).all()


@given(decisions=small_decisions(), seed=st.integers(0, 99), rates=st.sampled_from([alone, contended]))
@settings(max_examples=20, deadline=None)
def test_blocks_change_nothing(decisions: Decisions, seed: int, rates: Rates) -> None:
    """Long programs are looked at in blocks, and lanes in one of two ways; both give the same to the last bit."""
    whole, _ = played(decisions, rates, seed)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(player, "AT_ONCE", 7)
        patched.setattr(edges, "AT_ONCE", 5)
        patched.setattr(segments, "FEW", 0)
        parts, _ = played(decisions, rates, seed)
    assert np.array_equal(whole.edges.producer, parts.edges.producer)
    assert np.array_equal(whole.edges.consumer, parts.edges.consumer)
    assert np.array_equal(whole.start_s, parts.start_s)
    assert np.array_equal(whole.end_s, parts.end_s)


@given(decisions=small_decisions(), seed=st.integers(0, 99), rates=st.sampled_from([alone, contended]))
@settings(max_examples=20, deadline=None)
def test_a_wait_is_for_the_producer_that_ends_last(decisions: Decisions, seed: int, rates: Rates) -> None:
    playback, _ = played(decisions, rates, seed)
    end, waits = playback.end_s, playback.waits
    incoming = defaultdict(list)
    for p, c in zip(playback.edges.producer.tolist(), playback.edges.consumer.tolist(), strict=True):
        incoming[c].append(p)
    lane = playback.columns.lane.tolist()
    last: dict[int, int] = {}
    found = []
    for i, each in enumerate(lane):
        before = last.get(each, -1)
        assert playback.previous[i] == before
        last[each] = i
        ready = float(end[before]) if before >= 0 else 0.0
        binding = max(incoming[i], key=lambda p: (end[p], p), default=None)
        if binding is not None and end[binding] > ready:
            found.append((i, binding, ready, float(playback.start_s[i]) - ready))
    columns = (waits.instruction, waits.waits_for, waits.start_s, waits.seconds)
    assert found == list(zip(*(column.tolist() for column in columns), strict=True))


def slowed_by_compute(busy: int) -> tuple[float, ...]:
    """Compute slows every other lane; collectives and copies slow none."""
    return tuple(0.5 if lane is not Lane.COMPUTE and busy >> Lane.COMPUTE & 1 else 1.0 for lane in Lane)


@given(decisions=small_decisions(), seed=st.integers(0, 99), rates=st.sampled_from([contended, slowed_by_compute]))
@settings(max_examples=50, deadline=None)
def test_rates_follow_the_busy_lanes(decisions: Decisions, seed: int, rates: Rates) -> None:
    """The integral of a lane's rate over an instruction's span is the instruction's work."""
    playback, seconds = played(decisions, rates, seed)
    start, end, lane = playback.start_s, playback.end_s, playback.columns.lane
    instants = np.unique(np.concatenate((start, end)))
    middle = (instants[:-1] + instants[1:]) / 2
    busy = np.zeros(len(middle), dtype=np.int64)
    for each in Lane:
        mine = lane == each
        running = np.searchsorted(np.sort(start[mine]), middle) > np.searchsorted(np.sort(end[mine]), middle)
        busy |= running.astype(np.int64) << int(each)
    rate = np.array([rates(int(b)) for b in busy])
    done = np.vstack((np.zeros(len(Lane)), np.cumsum(rate * np.diff(instants)[:, None], axis=0)))
    first, last = np.searchsorted(instants, start), np.searchsorted(instants, end)
    np.testing.assert_allclose(done[last, lane] - done[first, lane], seconds, rtol=1e-9, atol=1e-12)


@given(decisions=small_decisions(), seed=st.integers(0, 99), rates=st.sampled_from([alone, contended]))
@settings(max_examples=20, deadline=None)
def test_everything_twice_as_slow_takes_twice_as_long(decisions: Decisions, seed: int, rates: Rates) -> None:
    playback, seconds = played(decisions, rates, seed)
    slow = play(playback.columns, playback.edges, 2 * seconds, rates)
    assert slow.span_s == pytest.approx(2 * playback.span_s, rel=1e-12)


@pytest.mark.parametrize("policy", [("none", 0.0), ("full", 0.0), ("tokenwise", 0.5), ("none", 1.0)])
def test_without_stalls_the_step_is_the_sum_of_compute(policy: tuple[str, float]) -> None:
    playback, seconds = played(decide(policy, layers=5), alone)
    compute = playback.columns.lane == Lane.COMPUTE
    seconds = np.where(compute, seconds, 0.0)
    free = play(playback.columns, playback.edges, seconds, alone)
    assert free.span_s == pytest.approx(seconds.sum(), rel=1e-12)
    stalls = free.waits.seconds[compute[free.waits.instruction]]
    assert stalls.sum() == 0


def test_waits_fill_the_gaps_of_every_lane() -> None:
    playback, _ = played(decide(("tokenwise", 0.5), layers=6), contended)
    for lane in Lane:
        mine = np.flatnonzero(playback.columns.lane == lane)
        if len(mine):
            waited = playback.waits.seconds[np.isin(playback.waits.instruction, mine)].sum()
            assert playback.busy_s[lane] + waited == pytest.approx(playback.end_s[mine[-1]], rel=1e-9)


def test_instructions_that_wait_for_each_other_are_named() -> None:
    columns = expand(lower(decide(("tokenwise", 0.5)))[0])
    offload = int(np.flatnonzero(columns.lane == Lane.D2H)[0])
    edges = derive_edges(columns)
    circle = Edges(producer=np.append(edges.producer, offload), consumer=np.append(edges.consumer, 0))
    with refused(MemoError, got=f"#0 waits for #{offload}") as caught:
        play(columns, circle, np.ones(len(columns.lane)), alone, name="#{}".format)
    assert caught.value.exit_code == 1


def test_a_program_without_instructions_takes_no_time() -> None:
    columns = expand(lower(decide(("none", 0.0)))[0])
    none = np.zeros(0, dtype=np.int64)
    empty = Columns(*[none for _ in columns.__dataclass_fields__])
    assert play(empty, Edges(none, none), np.zeros(0), alone).span_s == 0


@pytest.mark.parametrize(("rates", "everyone"), [(alone, False), (slowed_by_compute, True)])
def test_what_compute_waits_for_is_an_event_only_where_it_changes_a_rate(rates: Rates, everyone: bool) -> None:
    """In a forward, compute and TP take over from each other, while nothing or a copy goes on beside them."""
    columns = expand(lower(decide(("none", 1.0 if everyone else 0.0), layout=Layout(tp=2, sequence_parallel=True)))[0])
    edges = derive_edges(columns)
    ends = []

    def counting(segments: Segments, work: Floats, rates_of: UsedRates, groups: Groups) -> Clock:
        playing, instant = event_loop.events(segments, work, rates_of, groups), 0.0
        try:
            wait_s = next(playing)
            while True:
                instant += wait_s
                ends.append(instant)
                wait_s = playing.send(instant)
        except StopIteration as ended:
            clock: Clock = ended.value
            return clock

    seconds = np.where(columns.lane == Lane.D2H, 1e3, 1.0)  # copies never end while the forward runs
    (playback,) = play_stages([Part(columns, edges, lambda: seconds)], rates, loop=counting)
    collectives = np.flatnonzero(columns.lane == Lane.TP)[1:5]  # the first one makes a set of busy lanes known
    assert np.isin(playback.end_s[collectives], ends).tolist() == 4 * [everyone]
