"""The loops of a search give what SimPy's gives, to the last bit; without numba, Python plays without SimPy."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from memo_sim.contract import codec
from memo_sim.contract.errors import MemoError
from memo_sim.contract.plan import Layout, Plan
from memo_sim.engine import compiled_loop, event_loop, native
from memo_sim.engine.event_loop import Clock, Groups, UsedRates
from memo_sim.engine.fast_loop import FastLoop
from memo_sim.engine.player import Loop, Part, play_stages
from memo_sim.engine.segments import Segments
from memo_sim.engine.simulate import Simulation, simulate
from memo_sim.program.analysis.columns import expand
from memo_sim.program.analysis.edges import Edges, derive_edges
from memo_sim.program.analysis.rendezvous import all_rendezvous
from memo_sim.program.ir.program import Program
from memo_sim.program.lower import lower
from tests.refusals import refused
from tests.replay.test_recorded_programs import recorded
from tests.sim.small_programs import GPT, decide
from tests.sim.toy_machine import TOY_CLUSTER, ToyPrices, alone, contended, toy_hardware

MOST_INSTRUCTIONS = 200_000
"""Longer recorded programs are left out; they repeat the templates of shorter ones."""

PIPELINED = decide(GPT, Layout(pp=2, tp=2, schedule="zero-bubble"), global_batch=4)


@pytest.fixture(scope="module")
def compiled() -> compiled_loop.CompiledLoop:
    pytest.importorskip("numba")
    return compiled_loop.CompiledLoop()


def in_order(points: np.ndarray) -> np.ndarray:
    return points[np.lexsort((points[:, 1], points[:, 0]))]


def held_equal(loop: Loop) -> Loop:
    """Return a loop that plays in SimPy, after it has held the other loop's result against SimPy's."""

    def both(segments: Segments, work: np.ndarray, rates_of: UsedRates, groups: Groups) -> Clock:
        theirs, ours = event_loop.run(segments, work, rates_of, groups), loop(segments, work, rates_of, groups)
        for name in ("start", "end", "heads"):
            assert np.array_equal(getattr(theirs, name), getattr(ours, name)), name
        assert np.array_equal(in_order(theirs.points), in_order(ours.points))
        return theirs

    return both


def hold_programs(programs: Sequence[Program], loop: Loop, rates: event_loop.Rates, seed: int) -> None:
    parts = []
    for stage, program in enumerate(programs):
        columns = expand(program)
        seconds = np.random.default_rng([seed, stage]).exponential(1e-3, len(columns.lane))
        seconds[seconds < 1e-4] = 0.0  # work that takes no time ends when it starts
        parts.append(Part(columns, derive_edges(columns), partial(np.copy, seconds)))
    play_stages(parts, rates, all_rendezvous(programs), loop=held_equal(loop))


@pytest.fixture(scope="module", params=["compiled", "compiled-with-simpy", "without-simpy"])
def fast(request: pytest.FixtureRequest) -> Loop:
    """Return a loop that is faster than SimPy's in Python."""
    if request.param == "without-simpy":
        return event_loop.run_without_simpy
    loop: compiled_loop.CompiledLoop = request.getfixturevalue("compiled")
    return loop if request.param == "compiled" else loop.with_simpy


@pytest.mark.parametrize("every", [100, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_both_loops_give_the_same_for_every_recorded_program(every: int, fast: Loop) -> None:
    for number, entry in enumerate(recorded(every)):
        document = {"schema": "memo.plan/1", "decisions": entry["decisions"]}
        decisions = codec.decode(msgspec.json.encode(document), Plan, where="recorded").decisions
        programs = lower(decisions, micro_batches=entry.get("micro_batches"), cp_rank=entry.get("cp_rank"))
        if sum(program.instruction_count for program in programs) <= MOST_INSTRUCTIONS:
            hold_programs(programs, fast, contended if number % 2 else alone, seed=number)


def test_more_room_for_points_is_found_at_any_time(compiled: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_loop, "ROOM", 0)
    found, called = list[int](), native.Bound.__call__

    def noted(bound: native.Bound) -> int:
        found.append(called(bound))
        return found[-1]

    monkeypatch.setattr(native.Bound, "__call__", noted)
    for plan in (PIPELINED, decide(GPT, Layout(tp=2, cp=2), global_batch=4)):
        found.clear()
        hold_programs(lower(plan), compiled, contended, seed=1)
        assert found.count(compiled_loop.FULL) > 3


def test_both_loops_stop_at_the_same_cycle(fast: Loop) -> None:
    columns = expand(lower(PIPELINED)[0])
    edges = derive_edges(columns)
    turned = Edges(edges.consumer[-1:], edges.producer[-1:])
    both = Edges(np.r_[edges.producer, turned.producer], np.r_[edges.consumer, turned.consumer])
    part = Part(columns, both, lambda: np.ones(len(columns.lane)))
    messages = []
    for loop in (event_loop.run, fast):
        with refused(MemoError, what="wait for each other") as error:
            play_stages([part], alone, loop=loop)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_what_a_search_played_is_shown_as_simpy_plays_it(fast: Loop) -> None:
    def simulated(loop: Loop) -> Simulation:
        return simulate(PIPELINED, toy_hardware(), TOY_CLUSTER, pricer=ToyPrices(), rates=contended, loop=loop)

    found, shown = simulated(fast), simulated(event_loop.run)
    assert found.prediction == shown.prediction
    assert found.shown() is found
    assert all(playback.by_simpy for playback in shown.playbacks)
    assert found.trace() == shown.trace()


def test_a_loop_that_differs_is_not_shown() -> None:
    def late(*asked: Any) -> Clock:
        clock = event_loop.run(*asked)
        return Clock(clock.start, clock.end * (1 + 1e-15), clock.heads, clock.points, by_simpy=False)

    made = [
        simulate(PIPELINED, toy_hardware(), TOY_CLUSTER, pricer=ToyPrices(), rates=contended, loop=each)
        for each in (late, event_loop.run)
    ]
    assert made[0].prediction.step_s != made[1].prediction.step_s
    assert made[0].shown() is not made[0]
    assert made[0].shown().prediction == made[1].prediction


def plays(loop: FastLoop, times: int) -> list[bool]:
    """Return whether the compiled loop was loaded after each of several plays of six segments."""
    found = []
    for _ in range(times):
        hold_programs(lower(decide(GPT)), loop, alone, seed=1)
        found.append(loop.compiled)
    return found


@pytest.fixture(scope="module")
def segments() -> int:
    """The segments of one play by ``plays``."""
    found = []

    def counted(*asked: Any) -> Clock:
        found.append(len(asked[1]))
        return event_loop.run(*asked)

    hold_programs(lower(decide(GPT)), counted, alone, seed=1)
    return found[0]


def test_the_loop_is_loaded_soon_where_it_is_compiled_already(compiled: Loop, segments: int) -> None:
    assert plays(FastLoop(soon=2 * segments), 3) == [False, True, True]
    assert plays(FastLoop(), 1) == [False]


def test_else_it_is_compiled_when_enough_was_played(
    compiled: Loop, segments: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_folders", lambda _: [tmp_path])
    assert plays(FastLoop(soon=1, first=3 * segments), 4) == [False, False, True, True]
    assert plays(FastLoop(soon=1), 1) == [True]


def test_a_process_that_helps_another_one_loads_the_loop_but_does_not_compile_it(
    compiled: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def helping(**loads: int) -> FastLoop:
        loop = FastLoop(**loads)
        loop.beside(compiled=False)
        return loop

    assert plays(helping(soon=1), 1) == [True]
    monkeypatch.setattr(native, "_folders", lambda _: [tmp_path])
    loop = helping(soon=1, first=1)
    assert plays(loop, 2) == [False, False]
    loop.beside(compiled=True)
    assert loop.compiled


def test_the_loop_is_loaded_for_a_single_long_play(compiled: Loop, segments: int) -> None:
    assert plays(FastLoop(first=segments), 1) == [True]
    assert plays(FastLoop(first=segments + 1), 1) == [False]


def test_without_numba_python_plays_and_a_debug_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with caplog.at_level(logging.DEBUG, logger="memo_sim"):
        assert plays(FastLoop(first=1), 2) == [False, False]
    assert len(caplog.messages) == 1
    assert "numba" in caplog.messages[0]


def test_where_no_folder_for_the_cache_can_be_written_python_plays(compiled: Loop) -> None:
    code = (
        "import logging; logging.basicConfig(level='DEBUG')\n"
        "from memo_sim.engine import native\n"
        "native._folders = lambda source: [native.Path('/proc/none')]\n"  # as where none can be written
        "from memo_sim.engine.fast_loop import FastLoop\n"
        "loop = FastLoop()\nloop.beside(compiled=True)\nprint(loop.compiled)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"], done.stderr
    assert "PythonLoop is not compiled, because numba does not work" in done.stderr
